"""From the words a person gives to a source of pictures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from halation.data.base import Pictures
from halation.data.buckets import bucket_shapes
from halation.data.folders import has_file_column, is_table
from halation.data.images import ImageFolder
from halation.data.prompt_list import Prompts
from halation.data.streets import NUM_HELDOUT, NUM_TRAIN, Streets
from halation.errors import InputError
from halation.prompts import FORMATS

log = logging.getLogger(__name__)


def open_pictures(
    data: str, height: int, width: int, heldout_pictures: int, *, max_pictures: int = 0, bucket_multiple: int = 0
) -> Pictures:
    """`streets`, a folder of pictures or a CSV file; the first `max_pictures` of the train part where that is not 0.

    `bucket_multiple` sorts a folder's train pictures into shapes whose sides are multiples of it, and 0 does not. Streets are
    square, so they need no buckets; few of them come with few held-out ones, or those would be most of a cache.
    """
    _check_number(max_pictures)
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


def holds_prompts(data: str) -> bool:
    """Whether these words name a file of prompts, and not pictures: by its ending, and a CSV file by having no column of pictures."""
    path = Path(data)
    if data == "streets" or path.is_dir():
        return False
    if is_table(path):
        return not path.is_file() or not has_file_column(path)
    ending = path.suffix.lower().removeprefix(".")
    if ending in FORMATS:
        return True
    if path.is_file():
        raise InputError(
            f"{data} is a file that ends with {path.suffix!r}",
            f"prompts in a file that ends with {', '.join(f'.{name}' for name in FORMATS)}, or a folder of pictures",
            "name the file after what is in it",
        )
    return False


def open_prompts(data: str, height: int, width: int, *, trajectories: int = 0, max_pictures: int = 0) -> Prompts:
    """A file of prompts; the first `max_pictures` of them where that is not 0, in at least `trajectories` items."""
    _check_number(max_pictures)
    if trajectories < 0:
        raise InputError(f"--trajectories {trajectories}", "a number of ways, or 0 for one a prompt", "give another")
    return Prompts(data, height, width, num_items=trajectories, max_prompts=max_pictures)


def _check_number(max_pictures: int) -> None:
    if max_pictures < 0:
        raise InputError(f"--max_pictures {max_pictures}", "a number of pictures, or 0 for all", "give another number")


def check_pictures(
    source: Pictures, memory: Path, on_progress: Callable[[int, int], None] | None = None, quiet: bool = False
) -> None:
    """Decode a folder once, so that a broken picture is named now and not in the middle of the night."""
    if isinstance(source, ImageFolder):
        source.check(memory, on_progress=on_progress, quiet=quiet)
