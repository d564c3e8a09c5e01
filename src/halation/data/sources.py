"""From the words a person gives to a source of pictures, cached where asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from halation.data.base import Pictures
from halation.data.images import ImageFolder
from halation.data.streets import Streets

log = logging.getLogger(__name__)


def open_pictures(data: str, height: int, width: int, heldout_pictures: int) -> Pictures:
    """`streets`, or a folder of pictures."""
    if data == "streets":
        return Streets(height, width)
    return ImageFolder(Path(data), height, width, heldout_pictures=heldout_pictures)


def check_pictures(
    source: Pictures, memory: Path, on_progress: Callable[[int, int], None] | None = None, quiet: bool = False
) -> None:
    """Decode a folder once, so that a broken picture is named now and not in the middle of the night."""
    if isinstance(source, ImageFolder):
        source.check(memory, on_progress=on_progress, quiet=quiet)
