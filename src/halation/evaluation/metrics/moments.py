"""Mean and covariance of features in float64, with the same bits on any number of ranks.

Features are summed in blocks of a fixed size by index, and blocks are merged in order, so the result is a function of
the features alone: they may come as one array or as a stream of arrays of any sizes. Parts that were summed apart can
be merged too; that agrees with the whole to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch

Features = npt.NDArray[np.floating]
FloatArray = npt.NDArray[np.float64]
BLOCK_SIZE = 1024


@contextmanager
def single_thread() -> Iterator[None]:
    """The number of threads changes the last bits of torch's sums, and it depends on the number of ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """How many rows, their mean, and the sum of the outer products of their deviations from it."""

    num: int
    mean: FloatArray
    scatter: FloatArray

    @property
    def covariance(self) -> FloatArray:
        """Unbiased, as every implementation of FID takes it."""
        if self.num < 2:
            raise ValueError(f"a covariance of {self.num} rows")
        return self.scatter / (self.num - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gaussian:
    """Statistics that another tool saved: their number of rows is unknown, so they can be compared and not merged."""

    mean: FloatArray
    covariance: FloatArray


def moments(features: Features | Iterable[Features]) -> Moments:
    """Of rows in their order, from one array or from several that follow each other.

    NaN and infinity are refused here, because a distance to them may well be a number.
    """
    parts = [features] if isinstance(features, np.ndarray) else features
    total: Moments | None = None
    for block in _iter_blocks(parts):
        mean = block.mean(axis=0)
        block -= mean
        part = Moments(num=len(block), mean=mean, scatter=block.T @ block)
        total = part if total is None else _merge(total, part)
    if total is None:
        raise ValueError("features of no rows")
    return total


def _iter_blocks(parts: Iterable[Features]) -> Iterator[FloatArray]:
    """Rows of all parts in blocks of one size, the last one shorter: a block knows nothing of where one part ended."""
    block = np.empty((0, 0))
    num = 0
    for part in parts:
        values = check_features(part)
        while len(values):
            if not num:
                block = np.empty((BLOCK_SIZE, values.shape[1]))
            if values.shape[1] != block.shape[1]:
                raise ValueError(f"features of {block.shape[1]} and {values.shape[1]} dimensions in one set")
            taken = values[: BLOCK_SIZE - num]
            block[num : num + len(taken)] = taken
            num, values = num + len(taken), values[len(taken) :]
            if num == BLOCK_SIZE:
                yield block
                num = 0
    if num:
        yield block[:num]


def check_features(features: Features) -> Features:
    """The same features, known to be rows of finite numbers."""
    if features.ndim != 2 or not features.shape[1]:
        raise ValueError(f"features of shape {features.shape}, expected (rows, dimensions)")
    if not np.isfinite(features).all():
        raise ValueError("features that are not finite")
    return features


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """The moments of all rows of the parts, in this order (Chan, Golub and LeVeque 1979)."""
    return reduce(_merge, parts)


def _merge(one: Moments, other: Moments) -> Moments:
    if one.mean.shape != other.mean.shape:
        raise ValueError(f"moments of {len(one.mean)} and of {len(other.mean)} dimensions cannot be merged")
    num = one.num + other.num
    shift = other.mean - one.mean
    scatter = np.outer(shift, shift * (one.num * other.num / num))
    scatter += one.scatter
    scatter += other.scatter
    return Moments(num=num, mean=one.mean + shift * (other.num / num), scatter=scatter)
