"""A real Chromium that reaches this machine alone; its errors fail the test.

Fixtures: `page` (a new 1280x800 page), `new_page(**options of a context)` for more pages, `browser_errors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from support.gallery import BrowserErrors

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
NO_CHROMIUM = f"no Chromium: none of {', '.join(NAMES)} is on the PATH; `make browser` installs it or says how"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Not by routes: a context that routes has no cache, and pays for every request. Addresses in digits are mapped too.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Browser tests come last: playwright leaves an event loop running in this thread until the session ends."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_CHROMIUM in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"SKIPPED {len(skipped)} browser tests: {NO_CHROMIUM}", yellow=True)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(NO_CHROMIUM)
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; `make test` installs it")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def browser_errors() -> BrowserErrors:
    return BrowserErrors()


@pytest.fixture
def new_page(browser: Browser, browser_errors: BrowserErrors) -> Iterator[Callable[..., Page]]:
    """`new_page(**options)`: a page in a context of its own; options as of playwright's `browser.new_context`."""
    contexts: list[BrowserContext] = []

    def make(**options: object) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        browser_errors.listen(context)
        return context.new_page()

    yield make
    for context in contexts:
        for page in context.pages:
            page.evaluate("() => 0")  # answered after what was complained of before
        context.close()
    browser_errors.check()


@pytest.fixture
def page(new_page: Callable[..., Page]) -> Page:
    return new_page()
