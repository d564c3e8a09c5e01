"""Galleries in this process or as a command, and the errors of the browser."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.client
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from halation.gallery.run_catalog import make_run_id
from support.commands import HALATION, started, until

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

    from halation.gallery.event_stream import ChangeFeed

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)")
IMAGES = """
() => [...document.querySelectorAll("main img")].filter((image) => image.complete && image.naturalWidth > 0).length
"""
THIS_MACHINE = (None, "", "127.0.0.1", "localhost")  # data:, blob: and file: have no host
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  const place = `${event.sourceFile}:${event.lineNumber}`;
  window.reportViolation(`${event.effectiveDirective} forbids ${event.blockedURI || "inline"} (${place})`);
});
"""
PAYLOADS = (
    "<script>window.hacked=1</script>",
    "<SCRIPT>window.hacked=1</SCRIPT>",
    "<script src=//evil.example/x.js></script>",
    "<script src='data:text/javascript,window.hacked=1'></script>",
    "<script type=module>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "</ScRiPt ><ScRiPt >window.hacked=1</ScRiPt >",
    "<scr<script>ipt>window.hacked=1</scr</script>ipt>",
    "<script\x0b>window.hacked=1</script>",
    "<script/x>window.hacked=1</script>",
    "<!--<script>--><script>window.hacked=1</script>",
    "--><script>window.hacked=1</script><!--",
    "]]><script>window.hacked=1</script><![CDATA[",
    "</title><script>window.hacked=1</script>",
    "</textarea><script>window.hacked=1</script>",
    "</style><script>window.hacked=1</script>",
    "</noscript><script>window.hacked=1</script>",
    "</template><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<img src=x onerror='window.hacked=1'//>",
    '"><img src=x onerror=window.hacked=1>',
    "'><img src=x onerror=window.hacked=1>",
    "`><img src=x onerror=window.hacked=1>",
    "<img/src/onerror=window.hacked=1>",
    '<img src="x` `<script>window.hacked=1</script>"` `>',
    "<image src=x onerror=window.hacked=1>",
    "<svg onload=window.hacked=1>",
    "<svg/onload=window.hacked=1>",
    "<svg><script>window.hacked=1</script></svg>",
    "<svg><animate onbegin=window.hacked=1 attributeName=x dur=1s>",
    "<svg><a xlink:href='javascript:window.hacked=1'><text y=9>a</text></a></svg>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.hacked=1>",
    "<math href='javascript:window.hacked=1'>a</math>",
    "<body onload=window.hacked=1>",
    "<iframe src='javascript:window.hacked=1'></iframe>",
    "<iframe srcdoc='<script>parent.window.hacked=1</script>'></iframe>",
    "<object data='javascript:window.hacked=1'></object>",
    "<embed src='javascript:window.hacked=1'>",
    "<video><source onerror=window.hacked=1></video>",
    "<audio src=x onerror=window.hacked=1>",
    "<details open ontoggle=window.hacked=1>",
    "<input autofocus onfocus=window.hacked=1>",
    "<select autofocus onfocus=window.hacked=1>",
    "<marquee onstart=window.hacked=1>",
    "<style>@import 'javascript:window.hacked=1';</style>",
    "<div style='animation:x' onanimationstart=window.hacked=1>",
    "<link rel=stylesheet href='javascript:window.hacked=1'>",
    "<base href='javascript:window.hacked=1//'>",
    "<meta http-equiv=refresh content='0;url=javascript:window.hacked=1'>",
    "<form action='javascript:window.hacked=1'><button>a</button></form>",
    "<a href='javascript:window.hacked=1'>a</a>",
    "javascript:window.hacked=1",
    "data:text/html,<script>window.hacked=1</script>",
    '" autofocus onfocus="window.hacked=1',
    "' onmouseover='window.hacked=1",
    "${window.hacked=1}",
    "{{constructor.constructor('window.hacked=1')()}}",
    '\\"};window.hacked=1;//',
    "\u2028window.hacked=1//\u2029\u202e<script>",
    '{"__proto__": {"hacked": 1}}',
)
"""Texts that run as script in a page that takes them for markup, an attribute, an address, a template or JSON."""


@dataclass(frozen=True, kw_only=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        def refuse(word: str) -> None:
            raise ValueError(f"{word} is not JSON")

        assert self.headers["content-type"] == "application/json"
        body = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return json.loads(body, parse_constant=refuse)


@dataclass(frozen=True, kw_only=True)
class GalleryClient:
    """An HTTP client with the token of a gallery."""

    port: int
    token: str
    changes: ChangeFeed

    @functools.cached_property
    def cookie(self) -> str:
        entered = self.ask(f"/?token={self.token}", cookie="")
        assert entered.status == 303
        return entered.headers["set-cookie"].partition(";")[0]

    def ask(self, path: str, *, method: str = "GET", cookie: str | None = None, **headers: str) -> Response:
        """Send one request. `path` is sent as it is; a browser would normalize it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
            said = {"cookie": self.cookie if cookie is None else cookie, **headers}
            for name, value in said.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            response = connection.getresponse()
            body = response.read()
            return Response(status=response.status, headers={k.lower(): v for k, v in response.getheaders()}, body=body)

    def ids(self) -> dict[str, str]:
        return {run["name"]: run["id"] for run in self.ask("/api/runs").json["runs"]}

    @contextlib.contextmanager
    def listening(self, **headers: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            said = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", "/api/events", headers={"cookie": self.cookie, **said})
            with connection.getresponse() as response:
                yield response


@contextlib.contextmanager
def serving(
    *folders: Path, cache: Path, allow_control: bool = False, look_every_s: float = 0.05, heartbeat_s: float = 15.0
) -> Iterator[GalleryClient]:
    """Serve folders on a free port in a thread of this process."""
    from halation.gallery.access_control import AllowedHosts, new_token
    from halation.gallery.command import build_catalog
    from halation.gallery.evaluation_reports import ScoreIndex
    from halation.gallery.event_stream import ChangeFeed
    from halation.gallery.server import GalleryContext, GalleryServer, build_app, open_listener
    from halation.gallery.thumbnails import ThumbnailCache
    from halation.runs import control_requests

    catalog = build_catalog(folders)
    scores = ScoreIndex(catalog)
    changes = ChangeFeed(catalog, refresh_extra=scores.refresh, poll_every_s=look_every_s, heartbeat_s=heartbeat_s)
    gallery = GalleryContext(
        catalog=catalog,
        change_feed=changes,
        roots=tuple(folder.name for folder in folders),
        version="0.0.0",
        get_thumbnail=ThumbnailCache(cache).get,
        get_scores=scores.build_response,
        find_score_image=scores.image,
        send_control=control_requests.send_request if allow_control else None,
    )
    token = new_token()
    with open_listener("127.0.0.1", 0) as listener:
        server = GalleryServer(build_app(gallery, token=token, allowed_hosts=AllowedHosts("127.0.0.1")), changes)
        changes.start()
        assert changes.first_poll_done.wait(30)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            yield GalleryClient(port=listener.getsockname()[1], token=token, changes=changes)
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


@dataclass(frozen=True, kw_only=True)
class RunningGallery:
    """A `halation gallery` process."""

    address: str
    token: str

    @property
    def link(self) -> str:
        return f"{self.address}/?token={self.token}"

    def enter(self, page: Page) -> None:
        """Open the link with the token."""
        page.goto(self.link)
        page.locator("main[data-view]").wait_for()

    def show(self, page: Page, run: Path, rest: str = "") -> None:
        """Open the link, then the page of a run."""
        self.enter(page)
        page.goto(f"{self.address}/#/run/{make_run_id(run)}{rest}")
        page.wait_for_function(f"() => location.hash.includes('{make_run_id(run)}')")

    def images(self, page: Page, at_least: int = 1) -> None:
        """Wait for decoded thumbnails."""
        page.wait_for_function(f"() => ({IMAGES})() >= {at_least}")


@contextlib.contextmanager
def run_gallery(*folders: Path, scratch: Path, flags: tuple[str, ...] = ()) -> Iterator[RunningGallery]:
    """Run `halation gallery` on folders; Ctrl+C must end it with exit code 130."""
    words = [HALATION, "gallery", *map(str, folders), *flags]
    with started(words, scratch / "gallery.log", environment={"HALATION_CACHE": str(scratch / "cache")}) as command:
        until(lambda: LINK.search(command.said()) is not None, command=command)
        found = LINK.search(command.said())
        assert found is not None
        yield RunningGallery(address=found[1], token=found[2])
        command.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(10)
        assert command.process.returncode == 130, command.said()


class BrowserErrors:
    """Errors of the console and of scripts, violations of the content policy, requests to other hosts.

    A test that provokes an error calls `expect`, and fails if the error does not come.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._expected: list[str] = []

    def expect(self, pattern: str) -> None:
        """Errors that match this regular expression are allowed, and one must come before the test ends."""
        self._expected.append(pattern)

    def listen(self, context: BrowserContext) -> None:
        context.on("console", lambda message: self._add(f"console: {message.text}", message.type == "error"))
        context.on("weberror", lambda raised: self._add(f"uncaught: {raised.error}"))
        context.on(
            "request", lambda sent: self._add(f"asked for {sent.url}", urlsplit(sent.url).hostname not in THIS_MACHINE)
        )
        context.expose_binding("reportViolation", lambda _source, what: self._add(f"content policy: {what}"))
        context.add_init_script(REPORT_VIOLATIONS)

    def check(self) -> None:
        """Fail for an unexpected error, and for an expected one that never came."""
        unexpected = [found for found in self.found if not any(re.search(each, found) for each in self._expected)]
        missing = [each for each in self._expected if not any(re.search(each, found) for found in self.found)]
        assert not unexpected, "errors in the browser:\n" + "\n".join(unexpected)
        assert not missing, f"expected errors that never came: {missing}; those that came: {self.found}"

    def _add(self, text: str, counts: bool = True) -> None:
        if counts:
            self.found.append(text)
