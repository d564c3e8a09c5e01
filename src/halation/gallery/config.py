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
    """Show runs in a browser while they work: samples, generated images, losses and scores.

    The gallery never writes to these folders (except with --allow_control). Ctrl+C ends it without affecting the runs.
    """

    dirs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = dataclasses.field(
        default=(Path("."),), metadata={"change": "free"}
    )
    """Run folders, or folders with runs anywhere below them; by default the current directory."""
    port: int = free_setting(8642)
    """Port to listen on; if it is in use, the next free one."""
    host: str = free_setting("127.0.0.1")
    """Address to listen on. Addresses other than loopback make the page reachable from the network; it still needs the
    token in the link."""
    open: bool = free_setting(False)
    """Open the page in the browser of this machine."""
    allow_control: bool = free_setting(False)
    """Let the page request samples, a checkpoint or a stop from a running training."""
    export: Path | None = free_setting(None)
    """Write the run in each DIR into one HTML file, to share or archive, instead of serving."""
    export_images: int = free_setting(400, low=0)
    """Maximum number of thumbnails in an export, spread evenly."""
