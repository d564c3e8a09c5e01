"""From the value of --data to a dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from halation.data.aspect_buckets import bucket_shapes
from halation.data.dataset_protocol import ImageDataset
from halation.data.image_folder import ImageFolder
from halation.data.streets import Streets
from halation.data.streets.dataset import NUM_TRAIN, NUM_VALIDATION
from halation.errors import InputError

log = logging.getLogger(__name__)


def open_dataset(
    data: str, height: int, width: int, validation_images: int, *, max_images: int = 0, bucket_multiple: int = 0
) -> ImageDataset:
    """`streets`, a folder of images or a CSV file; the first `max_images` of the train part where that is not 0.

    `bucket_multiple` sorts a folder's train images into shapes whose sides are multiples of it, and 0 does not. Streets
    are square, so they need no buckets; few of them come with few validation ones, or those would be most of a cache.
    """
    if max_images < 0:
        raise InputError(f"--max_images {max_images}", "a number of images, or 0 for all", "give another number")
    if data == "streets":
        if not max_images:
            return Streets(height, width)
        return Streets(height, width, min(max_images, NUM_TRAIN), min(validation_images, NUM_VALIDATION))
    return ImageFolder(
        Path(data),
        height,
        width,
        validation_images=validation_images,
        max_images=max_images,
        buckets=bucket_shapes(height, width, bucket_multiple) if bucket_multiple else (),
    )


def check_dataset(
    source: ImageDataset, cache_folder: Path, on_progress: Callable[[int, int], None] | None = None, quiet: bool = False
) -> None:
    """Decode a folder once, so that a broken image is named now and not in the middle of the night."""
    if isinstance(source, ImageFolder):
        source.check(cache_folder, on_progress=on_progress, quiet=quiet)
