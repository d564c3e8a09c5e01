"""The browser fixtures open local pages, collect errors and reach no other host."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from support.gallery import BrowserErrors

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    policy: ClassVar[str] = "default-src 'none'; script-src 'self'"

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", self.policy)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_page_of_this_machine_opens_at_its_size_and_runs_its_script(site: tuple[str, Path], page: Page) -> None:
    url, folder = site
    (folder / "index.html").write_text("<title>ground</title><p>before</p><script src='a.js'></script>")
    (folder / "a.js").write_text("document.querySelector('p').textContent = `${innerWidth}x${innerHeight}`")
    page.goto(url)
    assert page.title() == "ground"
    assert page.inner_text("p") == "1280x800"


def test_what_the_browser_complains_of_is_heard(
    site: tuple[str, Path], page: Page, browser_errors: BrowserErrors
) -> None:
    url, folder = site
    (folder / "index.html").write_text("<script>inline</script><script src='a.js'></script>")
    (folder / "a.js").write_text("console.error('said aloud'); fetch('http://1.1.1.1/far').catch(() => 0); nowhere()")
    page.goto(url)
    page.evaluate("fetch('http://1.1.1.1/near').catch(() => 0)")
    with pytest.raises(AssertionError, match="said aloud"):
        browser_errors.check()
    browser_errors.expect("^console: said aloud")
    browser_errors.expect("^uncaught: nowhere is not defined")
    browser_errors.expect("^content policy: script-src-elem forbids inline")
    browser_errors.expect("^content policy: connect-src forbids http://1.1.1.1")
    browser_errors.expect("^console: .*Content Security Policy")


def test_an_expected_complaint_that_never_comes_fails(browser_errors: BrowserErrors) -> None:
    browser_errors.check()
    browser_errors.expect("a word")
    with pytest.raises(AssertionError, match="never came"):
        browser_errors.check()


def test_other_machines_are_not_reached(page: Page, browser_errors: BrowserErrors) -> None:
    page.set_content("<img src='http://1.1.1.1/far.png'>")
    page.wait_for_function("document.images[0].complete")
    assert page.evaluate("document.images[0].naturalWidth") == 0
    browser_errors.expect("^asked for http://1.1.1.1/far.png")
    browser_errors.expect("ERR_NAME_NOT_RESOLVED")
