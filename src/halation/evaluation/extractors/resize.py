"""Resizes images for feature extractors by the rules of reference implementations.

The rules change a Frechet distance by whole points, so that a report always includes the rule:

- `clean`: Pillow's antialiased bicubic on each channel in float, clipped but not rounded, as clean-fid;
- `tf`: TensorFlow 1's bilinear, without antialiasing and with the corners of the first pixels aligned, as
  torch-fidelity;
- `torch`: `F.interpolate(mode="bilinear", align_corners=False)`, without antialiasing, as pytorch-fid.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

ResizeRule = Literal["clean", "tf", "torch"]
RESIZE_VERSION = 1
"""Incremented when a change affects any result; part of the key of features."""
RESIZE_RULES: tuple[ResizeRule, ...] = get_args(ResizeRule)
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
CROP_VERSION = 1
"""Incremented when a change affects any result of ShortestEdgeCrop."""
LARGEST_INTERMEDIATE = 1 << 24
"""Pixel limit of a resized image before cropping; at CLIP's 224, only aspect ratios beyond 1:300 exceed it."""
_MAX_FILTER_RADIUS = 3.0
"""Filter radius of Lanczos in pixels."""


def resize_to_square(image: npt.NDArray[np.uint8], size: int, rule: ResizeRule) -> Floats:
    """Resize (height, width, 3) bytes to (size, size, 3) floats in 0..255, not rounded."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise ValueError(f"expected a non-empty (height, width, 3) uint8 image, got {image.shape} {image.dtype}")
    if rule == "clean":
        result = np.empty((size, size, 3), np.float32)
        for channel in range(3):
            plane = Image.fromarray(image[:, :, channel].astype(np.float32))
            # Some bicubic weights are negative, so that edges overshoot the value range.
            np.clip(np.asarray(plane.resize((size, size), Image.Resampling.BICUBIC)), 0, 255, out=result[:, :, channel])
        return result
    if rule == "tf":
        return _bilinear(
            image, _corner_aligned_positions(image.shape[0], size), _corner_aligned_positions(image.shape[1], size)
        )
    if rule == "torch":
        return _bilinear(
            image, _center_aligned_positions(image.shape[0], size), _center_aligned_positions(image.shape[1], size)
        )
    raise ValueError(f"unknown resize rule {rule!r}, expected one of {', '.join(RESIZE_RULES)}")


# Source position of each output position, in float32 because the reference implementations round here too.


def _corner_aligned_positions(length: int, size: int) -> Floats:
    return np.arange(size, dtype=np.float32) * np.float32(length / size)


def _center_aligned_positions(length: int, size: int) -> Floats:
    # torch uses a fused multiply-add with one rounding. In float64 the product is exact, so the result is rounded once.
    scale = np.float64(np.float32(length) / np.float32(size))
    return np.maximum(scale * (np.arange(size) + 0.5) - 0.5, 0).astype(np.float32)


def _bilinear(image: npt.NDArray[np.uint8], vertical: Floats, horizontal: Floats) -> Floats:
    """Interpolate horizontally, then vertically, as both reference implementations do.

    Another order of the float32 sums would change the bits.
    """
    top, bottom, down = _neighbours(vertical, image.shape[0])
    left, right, across = _neighbours(horizontal, image.shape[1])
    rows, places = np.unique(np.concatenate([top, bottom]), return_inverse=True)
    source = image[rows]
    stretched = _lerp(source[:, left], source[:, right], across[None, :, None])
    return _lerp(stretched[places[: len(top)]], stretched[places[len(top) :]], down[:, None, None])


def _neighbours(positions: Floats, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    first = np.minimum(positions.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), positions - first.astype(np.float32)


def _lerp(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic], weight: Floats) -> Floats:
    start = one.astype(np.float32)
    step = other.astype(np.float32)
    step -= start
    step *= weight
    step += start
    return step


class ImageTransform(Protocol):
    """Transforms (height, width, 3) bytes to the input shape of an extractor; picklable."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of every result."""

    def __call__(self, image: Bytes) -> Floats | Bytes:
        """Transform one image; the results are stacked to a batch."""


@dataclass(frozen=True, kw_only=True)
class SquareResize:
    """Resizes the whole image to a square by a resize rule; float32 between 0 and 255."""

    size: int
    rule: ResizeRule

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, 3

    def __call__(self, image: Bytes) -> Floats:
        return resize_to_square(image, self.size, self.rule)


@dataclass(frozen=True, kw_only=True)
class ShortestEdgeCrop:
    """Resizes with Pillow and center-crops, like CLIP's image processor; returns bytes.

    Either the shorter side or both sides are given.
    """

    shortest_edge: int | None
    """Length of the shorter side, which keeps the aspect ratio; None if `exact` is given."""
    exact: tuple[int, int] | None
    """Height and width, ignoring the aspect ratio."""
    crop: tuple[int, int] | None
    """Height and width of the center crop."""
    resample: int
    """Pillow's number of the resampling filter."""

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width = self.crop or self.exact or (0, 0)
        return height, width, 3

    def __call__(self, image: Bytes) -> Bytes:
        height, width = self._resized_shape(image.shape[0], image.shape[1])
        if self.crop is not None and height * width > LARGEST_INTERMEDIATE:
            return _center_crop(self._resize_center(image, height, width, self.crop), *self.crop)
        scaled = Image.fromarray(image).resize((width, height), Image.Resampling(self.resample))
        pixels: Bytes = np.asarray(scaled)
        return pixels if self.crop is None else _center_crop(pixels, *self.crop)

    def _resize_center(self, image: Bytes, height: int, width: int, crop: tuple[int, int]) -> Bytes:
        """Resize only the part that the crop keeps; a long thin image would take gigabytes."""
        rows = _CropWindow.compute(image.shape[0], height, crop[0])
        columns = _CropWindow.compute(image.shape[1], width, crop[1])
        part = np.ascontiguousarray(image[rows.first : rows.end, columns.first : columns.end])
        return np.asarray(
            Image.fromarray(part).resize(
                (columns.num, rows.num),
                Image.Resampling(self.resample),
                box=(columns.low, rows.low, columns.high, rows.high),
            )
        )

    def _resized_shape(self, height: int, width: int) -> tuple[int, int]:
        if self.shortest_edge is None:
            assert self.exact is not None
            return self.exact
        longer = int(self.shortest_edge * max(height, width) / min(height, width))
        return (longer, self.shortest_edge) if width <= height else (self.shortest_edge, longer)


def describe_transform(transform: SquareResize | ShortestEdgeCrop) -> dict[str, Any]:
    """Return JSON with kind, settings and code version; it differs if results may differ."""
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(transform).items()}
    version = RESIZE_VERSION if isinstance(transform, SquareResize) else CROP_VERSION
    return {"kind": type(transform).__name__, "version": version, **settings}


class _CropWindow(NamedTuple):
    """The source pixels, along one side, that the center crop of the resized image depends on."""

    first: int
    end: int
    low: float
    """Start of the crop relative to `first`: Pillow's float32 is too coarse for large absolute positions."""
    high: float
    num: int
    """Number of pixels of the result."""

    @classmethod
    def compute(cls, length: int, resized_length: int, crop_size: int) -> _CropWindow:
        start, num = max(0, (resized_length - crop_size) // 2), min(crop_size, resized_length)
        scale = length / resized_length
        low, high = start * scale, min((start + num) * scale, length)
        margin = _MAX_FILTER_RADIUS * max(1.0, scale) + 1
        first, end = max(0, int(low - margin)), min(length, int(high + margin) + 1)
        return cls(first, end, low - first, min(high - first, end - first), num)


def _center_crop(pixels: Bytes, height: int, width: int) -> Bytes:
    """Return the center of an image, padded with black if the image is smaller."""
    num_rows, num_columns = pixels.shape[:2]
    top, left = (num_rows - height) // 2, (num_columns - width) // 2
    if top >= 0 and left >= 0:
        return np.ascontiguousarray(pixels[top : top + height, left : left + width])
    before_row, before_column = max(0, -top), max(0, -left)
    kept = pixels[max(0, top) : max(0, top) + height, max(0, left) : max(0, left) + width]
    whole = np.zeros((height, width, 3), np.uint8)
    whole[before_row : before_row + kept.shape[0], before_column : before_column + kept.shape[1]] = kept
    return whole
