"""What a browser complains of while a test drives it: errors of the console and of scripts, the content policy, other hosts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

HERE = (None, "", "127.0.0.1", "localhost")  # data:, blob: and file: have no host
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  window.reportViolation(`${event.effectiveDirective} forbids ${event.blockedURI || "inline"} (${event.sourceFile}:${event.lineNumber})`);
});
"""


class Complaints:
    """What the browser complained of; a test that provokes a complaint says so, and is then held to it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._expected: list[str] = []

    def expect(self, pattern: str) -> None:
        """Complaints that match this regular expression are welcome, and one must come before the test ends."""
        self._expected.append(pattern)

    def listen(self, context: BrowserContext) -> None:
        context.on("console", lambda said: self._add(f"console: {said.text}", said.type == "error"))
        context.on("weberror", lambda raised: self._add(f"uncaught: {raised.error}"))
        context.on("request", lambda sent: self._add(f"asked for {sent.url}", urlsplit(sent.url).hostname not in HERE))
        context.expose_binding("reportViolation", lambda _source, what: self._add(f"content policy: {what}"))
        context.add_init_script(REPORT_VIOLATIONS)

    def settle(self) -> None:
        """Fail for a complaint nobody expected, and for an expected one that never came."""
        unexpected = [found for found in self.found if not any(re.search(each, found) for each in self._expected)]
        missing = [each for each in self._expected if not any(re.search(each, found) for found in self.found)]
        assert not unexpected, "the browser complained:\n" + "\n".join(unexpected)
        assert not missing, f"expected complaints that never came: {missing}; those that came: {self.found}"

    def _add(self, text: str, counts: bool = True) -> None:
        if counts:
            self.found.append(text)
