"""The real command, `halation gallery`, on real folders, and the addresses it answers at."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halation.gallery.run_catalog import make_run_id
from support.commands import HALATION, started, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)")
IMAGES = """() => [...document.querySelectorAll("main img")].filter((image) => image.complete && image.naturalWidth > 0).length"""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A gallery that runs."""

    address: str
    token: str

    @property
    def link(self) -> str:
        return f"{self.address}/?token={self.token}"

    def enter(self, page: Page) -> None:
        """As a person does: by the link."""
        page.goto(self.link)
        page.locator("main[data-view]").wait_for()

    def show(self, page: Page, run: Path, rest: str = "") -> None:
        """Open the link, then the page of a run."""
        self.enter(page)
        page.goto(f"{self.address}/#/run/{make_run_id(run)}{rest}")
        page.wait_for_function(f"() => location.hash.includes('{make_run_id(run)}')")

    def images(self, page: Page, at_least: int = 1) -> None:
        """Wait until thumbnails are there, decoded."""
        page.wait_for_function(f"() => ({IMAGES})() >= {at_least}")


@contextlib.contextmanager
def opened(*folders: Path, scratch: Path, flags: tuple[str, ...] = ()) -> Iterator[Opened]:
    words = [HALATION, "gallery", *map(str, folders), *flags]
    with started(words, scratch / "gallery.log", environment={"HALATION_CACHE": str(scratch / "cache")}) as command:
        until(lambda: LINK.search(command.said()) is not None, command=command)
        found = LINK.search(command.said())
        assert found is not None
        yield Opened(address=found[1], token=found[2])
        command.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(10)
        assert command.process.returncode == 130, command.said()
