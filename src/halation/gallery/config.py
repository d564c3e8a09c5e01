"""Settings of `halation gallery`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from halation.config import free_setting


@dataclass(frozen=True, kw_only=True)
class GalleryConfig:
    """Look at runs in a browser while they work: samples by step, images that were generated, losses and scores.

    It reads and never writes below these folders (but for --allow_control). Ctrl+C ends it; the runs do not notice.
    """

    dirs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = dataclasses.field(
        default=(Path("."),), metadata={"change": "free"}
    )
    """Runs, or folders with runs somewhere below them; by default the folder one is in."""
    port: int = free_setting(8642)
    """Port to listen on; where it is taken, the next free one."""
    host: str = free_setting("127.0.0.1")
    """Address to listen on. Any other than this machine's own lets others on the network reach the page; they still
    need the link's token."""
    open: bool = free_setting(False)
    """Open the page in this machine's browser."""
    allow_control: bool = free_setting(False)
    """Let the page ask a running training to sample, save or stop."""
    export: Path | None = free_setting(None)
    """Write the run in each DIR into one page (.html), to mail or to keep, instead of serving."""
    export_images: int = free_setting(400, low=0)
    """At most so many thumbnails in an export, spread evenly."""
