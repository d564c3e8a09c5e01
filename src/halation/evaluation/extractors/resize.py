"""Pictures to the square size a feature extractor wants, by the rule of a reference implementation; numpy and Pillow, no torch.

The rules differ enough to move a Frechet distance by whole points, so a result always names the one it was made with:

- `clean`: Pillow's antialiased bicubic on each channel in float, clipped and not rounded, as clean-fid;
- `tf`: TensorFlow 1's bilinear, without antialiasing and with the first pixels' corners aligned, as torch-fidelity;
- `torch`: `F.interpolate(mode="bilinear", align_corners=False)`, without antialiasing, as pytorch-fid.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

Rule = Literal["clean", "tf", "torch"]
VERSION = 1
"""Counts changes that change a float; part of what features are known by."""
RULES: tuple[Rule, ...] = get_args(Rule)
Floats = npt.NDArray[np.float32]


def resized(picture: npt.NDArray[np.uint8], size: int, rule: Rule) -> Floats:
    """(size, size, 3) between 0 and 255, not rounded, from (height, width, 3) bytes."""
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8 or 0 in picture.shape:
        raise ValueError(
            f"a picture is (height, width, 3) uint8 and not empty, this is {picture.shape} {picture.dtype}"
        )
    if rule == "clean":
        return _bicubic(picture, size)
    if rule == "tf":
        return _bilinear(picture, _corners(picture.shape[0], size), _corners(picture.shape[1], size))
    if rule == "torch":
        return _bilinear(picture, _centres(picture.shape[0], size), _centres(picture.shape[1], size))
    raise ValueError(f"the resize rules are {', '.join(RULES)}, not {rule!r}")


def _bicubic(picture: npt.NDArray[np.uint8], size: int) -> Floats:
    whole = np.empty((size, size, 3), np.float32)
    for channel in range(3):
        plane = Image.fromarray(picture[:, :, channel].astype(np.float32))
        # Bicubic weights are negative in places, so that edges overshoot what a picture can hold.
        np.clip(np.asarray(plane.resize((size, size), Image.Resampling.BICUBIC)), 0, 255, out=whole[:, :, channel])
    return whole


# Positions in the source for each position of the result, in float32 because the references round there too.


def _corners(length: int, size: int) -> Floats:
    return np.arange(size, dtype=np.float32) * np.float32(length / size)


def _centres(length: int, size: int) -> Floats:
    # torch multiplies and subtracts with one rounding; in float64 the product is exact, and the result is rounded once.
    scale = np.float64(np.float32(length) / np.float32(size))
    return np.maximum(scale * (np.arange(size) + 0.5) - 0.5, 0).astype(np.float32)


def _bilinear(picture: npt.NDArray[np.uint8], vertical: Floats, horizontal: Floats) -> Floats:
    """Across first, then down, as both references do: float32 sums in another order have other bits."""
    top, bottom, down = _neighbours(vertical, picture.shape[0])
    left, right, across = _neighbours(horizontal, picture.shape[1])
    rows, places = np.unique(np.concatenate([top, bottom]), return_inverse=True)
    source = picture[rows]
    stretched = _between(source[:, left], source[:, right], across[None, :, None])
    return _between(stretched[places[: len(top)]], stretched[places[len(top) :]], down[:, None, None])


def _neighbours(positions: Floats, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    first = np.minimum(positions.astype(np.int64), length - 1)
    return first, np.minimum(first + 1, length - 1), positions - first.astype(np.float32)


def _between(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic], share: Floats) -> Floats:
    start = one.astype(np.float32)
    step = other.astype(np.float32)
    step -= start
    step *= share
    step += start
    return step
