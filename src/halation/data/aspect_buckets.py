"""Aspect buckets: a few shapes of about equal area, so that images are cropped little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halation.data.dataset_protocol import ImageDataset
from halation.errors import InputError, format_count

ImageShape = tuple[int, int]
"""Height and width."""
MAX_ASPECT_RATIO = 2.0


class BucketAssignment(NamedTuple):
    """The assignment of train images to shapes."""

    bucket_indices: np.ndarray
    """The bucket of each image, an index into `shapes`."""
    shapes: tuple[ImageShape, ...]


def buckets_of(source: ImageDataset) -> BucketAssignment | None:
    """Return the buckets of a source, or None if all its images have one shape."""
    of: np.ndarray | None = getattr(source, "bucket_of", None)
    return None if of is None else BucketAssignment(of, source.shapes)  # type: ignore[attr-defined]


def bucket_shapes(height: int, width: int, multiple: int) -> tuple[ImageShape, ...]:
    """Return shapes of at most this area from 1:2 to 2:1, tall first.

    Sides are multiples of `multiple`; no shape fits inside another.
    """
    area = height * width
    sides = range(multiple, math.isqrt(int(MAX_ASPECT_RATIO * area)) + 1, multiple)
    pairs = [(side, area // side // multiple * multiple) for side in sides]
    shapes = {shape for one, other in pairs if other for shape in ((one, other), (other, one))}
    found = {(high, wide) for high, wide in shapes if max(high, wide) <= MAX_ASPECT_RATIO * min(high, wide)}
    if height % multiple == 0 and width % multiple == 0:
        found.add((height, width))
    if not found:
        raise InputError(
            f"aspect buckets of the area {height} x {width} with sides that are multiples of {multiple}",
            f"an area of at least {multiple} x {multiple}",
            "give a larger --image_size, or leave --aspect_buckets out",
        )
    maximal = [
        (high, wide)
        for high, wide in found
        if not any((high, wide) != other and high <= other[0] and wide <= other[1] for other in found)
    ]
    return tuple(sorted(maximal, key=lambda shape: shape[1] / shape[0]))


def describe_buckets(source: ImageDataset, multiple: int) -> list[str]:
    """Return log lines: the shapes and their numbers of images and, if there is only one, why."""
    buckets = buckets_of(source)
    if buckets is None:
        return []
    counts = np.bincount(buckets.bucket_indices, minlength=len(buckets.shapes)).tolist()
    descriptions = [f"{high} x {wide}: {num}" for (high, wide), num in zip(buckets.shapes, counts, strict=True) if num]
    lines = [f"{format_count(len(descriptions), 'bucket')} (height x width: images): {', '.join(descriptions)}"]
    possible_shapes = bucket_shapes(source.height, source.width, multiple)
    if len(possible_shapes) == 1:
        lines.append(
            f"--aspect_buckets has no effect: with sides that are multiples of {multiple} this area allows only one "
            "shape; a larger --image_size allows more"
        )
    elif len(descriptions) == 1:
        lines.append(
            f"--aspect_buckets has no effect: of {len(possible_shapes)} shapes, one is the nearest for all images"
        )
    return lines


def nearest_shape_indices(sizes: np.ndarray, shapes: Sequence[ImageShape]) -> np.ndarray:
    """Return for each (height, width) the shape with the nearest aspect ratio, on a log scale."""
    ratios = np.log(np.array([wide / high for high, wide in shapes]))
    if not len(sizes):
        return np.empty(0, np.int64)
    sizes = np.asarray(sizes, np.float64)
    own = np.log(sizes[:, 1] / sizes[:, 0])
    # Rounded, so that the last bit of a logarithm does not decide between two equally near shapes.
    return np.stack([np.round(np.abs(own - ratio), 9) for ratio in ratios]).argmin(0)
