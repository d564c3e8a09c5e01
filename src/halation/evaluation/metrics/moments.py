"""Mean and covariance of features in float64, with the same bits on any number of ranks.

Features are summed in blocks of a fixed size by index, and blocks are merged in order. The result therefore depends
only on the features, which may come as one array or as a stream of arrays of any sizes. Moments of separate parts can
be merged too; the result then equals that of the whole up to rounding, but is not bit-identical.
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
    """Run torch on one thread.

    The number of threads, which depends on the number of ranks, would change the last bits of sums.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Number of rows, their mean, and the sum of outer products of deviations from the mean."""

    num: int
    mean: FloatArray
    scatter: FloatArray

    @property
    def covariance(self) -> FloatArray:
        """The unbiased covariance, as in all implementations of FID."""
        if self.num < 2:
            raise ValueError(f"a covariance of {self.num} rows")
        return self.scatter / (self.num - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gaussian:
    """Statistics saved by another tool.

    The number of rows is unknown, so that they can be compared but not merged.
    """

    mean: FloatArray
    covariance: FloatArray


def moments(features: Features | Iterable[Features]) -> Moments:
    """Return the moments of the rows of one array, or of several arrays in order.

    Raises for NaN and infinity, because a distance to them may still be a finite number.
    """
    parts = [features] if isinstance(features, np.ndarray) else features
    total: Moments | None = None
    for block in _iter_blocks(parts):
        mean = block.mean(axis=0)
        block -= mean
        part = Moments(num=len(block), mean=mean, scatter=block.T @ block)
        total = part if total is None else _merge(total, part)
    if total is None:
        raise ValueError("features without rows")
    return total


def _iter_blocks(parts: Iterable[Features]) -> Iterator[FloatArray]:
    """Yield the rows of all parts in blocks of one size; only the last block may be shorter."""
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
    """Return the features; raise unless they are rows of finite numbers."""
    if features.ndim != 2 or not features.shape[1]:
        raise ValueError(f"features of shape {features.shape}, expected (rows, dimensions)")
    if not np.isfinite(features).all():
        raise ValueError("features that are not finite")
    return features


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Merge the moments of parts, in this order (Chan, Golub and LeVeque 1979)."""
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
