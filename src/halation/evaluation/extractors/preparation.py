"""What decode processes do to a picture before an extractor sees it: numpy and Pillow alone, so that they need no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from halation.evaluation.extractors import resize
from halation.evaluation.extractors.resize import Rule, resized

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
VERSION = 1
"""Counts changes of ShortestEdgeCrop that change a byte; those of resize rules are counted where they are."""
LARGEST_INTERMEDIATE = 1 << 24
"""Pixels of a resized picture that is cropped afterwards; only aspect ratios beyond 1:300 make more of CLIP's 224."""
_WIDEST_FILTER = 3.0
"""Lanczos looks so many pixels to either side."""


class Preparation(Protocol):
    """(height, width, 3) bytes of any size to one shape per extractor; picklable."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of every result."""

    def __call__(self, picture: Bytes) -> Floats | Bytes:
        """What the extractor's batch is stacked from."""


@dataclass(frozen=True, kw_only=True)
class SquareResize:
    """The whole picture to a square by a resize rule: float32 between 0 and 255."""

    size: int
    rule: Rule

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, 3

    def __call__(self, picture: Bytes) -> Floats:
        return resized(picture, self.size, self.rule)


@dataclass(frozen=True, kw_only=True)
class ShortestEdgeCrop:
    """As CLIP's image processor: the shorter side (or both) to a size by Pillow, the middle cut out, bytes."""

    shortest_edge: int | None
    """The shorter side keeps the aspect ratio; None where `exact` is given."""
    exact: tuple[int, int] | None
    """Height and width without regard to the aspect ratio."""
    crop: tuple[int, int] | None
    """Height and width of the middle."""
    resample: int
    """Pillow's number of the filter."""

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width = self.crop or self.exact or (0, 0)
        return height, width, 3

    def __call__(self, picture: Bytes) -> Bytes:
        height, width = self._resized_shape(picture.shape[0], picture.shape[1])
        if self.crop is not None and height * width > LARGEST_INTERMEDIATE:
            return _middle(self._middle_resized(picture, height, width, self.crop), *self.crop)
        image = Image.fromarray(picture).resize((width, height), Image.Resampling(self.resample))
        pixels: Bytes = np.asarray(image)
        return pixels if self.crop is None else _middle(pixels, *self.crop)

    def _middle_resized(self, picture: Bytes, height: int, width: int, crop: tuple[int, int]) -> Bytes:
        """Of the whole at height x width only what the crop keeps: a long thin picture would take gigabytes."""
        rows = _Window.of(picture.shape[0], height, crop[0])
        columns = _Window.of(picture.shape[1], width, crop[1])
        part = np.ascontiguousarray(picture[rows.first : rows.end, columns.first : columns.end])
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


def described(preparation: SquareResize | ShortestEdgeCrop) -> dict[str, Any]:
    """JSON that differs wherever the results may: what it does, by its settings, and the version of who does it."""
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(preparation).items()}
    version = resize.VERSION if isinstance(preparation, SquareResize) else VERSION
    return {"kind": type(preparation).__name__, "version": version, **settings}


class _Window(NamedTuple):
    """Along one side: the source's pixels that the middle of the resized picture is made of."""

    first: int
    end: int
    low: float
    """Where the middle begins, counted from `first`: Pillow keeps it in float32, too coarse to count from a far edge."""
    high: float
    num: int
    """Pixels of the result."""

    @classmethod
    def of(cls, length: int, resized: int, kept: int) -> _Window:
        start, num = max(0, (resized - kept) // 2), min(kept, resized)
        scale = length / resized
        low, high = start * scale, min((start + num) * scale, length)
        margin = _WIDEST_FILTER * max(1.0, scale) + 1
        first, end = max(0, int(low - margin)), min(length, int(high + margin) + 1)
        return cls(first, end, low - first, min(high - first, end - first), num)


def _middle(pixels: Bytes, height: int, width: int) -> Bytes:
    """The middle of a picture; where it is smaller than that, black around it."""
    num_rows, num_columns = pixels.shape[:2]
    top, left = (num_rows - height) // 2, (num_columns - width) // 2
    if top >= 0 and left >= 0:
        return np.ascontiguousarray(pixels[top : top + height, left : left + width])
    before_row, before_column = max(0, -top), max(0, -left)
    kept = pixels[max(0, top) : max(0, top) + height, max(0, left) : max(0, left) + width]
    whole = np.zeros((height, width, 3), np.uint8)
    whole[before_row : before_row + kept.shape[0], before_column : before_column + kept.shape[1]] = kept
    return whole
