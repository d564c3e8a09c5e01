"""From the words a person gives to a source of pictures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from halation.data.aspect_buckets import bucket_shapes
from halation.data.dataset import Pictures
from halation.data.image_folder import ImageFolder
from halation.data.streets import Streets
from halation.data.streets.dataset import NUM_HELDOUT, NUM_TRAIN
from halation.errors import InputError

log = logging.getLogger(__name__)


def open_pictures(
    data: str, height: int, width: int, heldout_pictures: int, *, max_pictures: int = 0, bucket_multiple: int = 0
) -> Pictures:
    """`streets`, a folder of pictures or a CSV file; the first `max_pictures` of the train part where that is not 0.

    `bucket_multiple` sorts a folder's train pictures into shapes whose sides are multiples of it, and 0 does not. Streets are
    square, so they need no buckets; few of them come with few held-out ones, or those would be most of a cache.
    """
    if max_pictures < 0:
        raise InputError(f"--max_pictures {max_pictures}", "a number of pictures, or 0 for all", "give another number")
    if data == "streets":
        if not max_pictures:
            return Streets(height, width)
        return Streets(height, width, min(max_pictures, NUM_TRAIN), min(heldout_pictures, NUM_HELDOUT))
    return ImageFolder(
        Path(data),
        height,
        width,
        heldout_pictures=heldout_pictures,
        max_pictures=max_pictures,
        buckets=bucket_shapes(height, width, bucket_multiple) if bucket_multiple else (),
    )


def check_pictures(
    source: Pictures, memory: Path, on_progress: Callable[[int, int], None] | None = None, quiet: bool = False
) -> None:
    """Decode a folder once, so that a broken picture is named now and not in the middle of the night."""
    if isinstance(source, ImageFolder):
        source.check(memory, on_progress=on_progress, quiet=quiet)
