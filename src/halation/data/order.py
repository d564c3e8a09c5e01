"""The order in which pictures are seen: a pure function of seed and position that knows no ranks and no batches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_NUM_EPOCHS_KEPT = 2  # batches that are being fetched may straddle the end of an epoch
_WORD = 2**64


class Order:
    """Position p in [0, inf) is picture `permutation(seed, p // num)[p % num]`, whoever asks and however batched."""

    def __init__(self, seed: int, num: int) -> None:
        if num < 1:
            raise ValueError(f"an order needs at least one picture, not {num}")
        self.seed = seed
        self.num = num
        self._kept: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def epoch(self, position: int) -> int:
        """Number of whole passes over the pictures before this position."""
        _check(position)
        return position // self.num

    def index(self, position: int) -> int:
        """The picture at one position."""
        return int(self._permutation(self.epoch(position))[position % self.num])

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The pictures at positions start..stop-1 as int64; the range may span any number of epochs."""
        _check(start)
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, offset = divmod(start, self.num)
            length = min(stop - start, self.num - offset)
            pieces.append(self._permutation(epoch)[offset : offset + length])
            start += length
        return np.concatenate(pieces)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The pictures at any positions, as int64 of the same shape."""
        positions = np.asarray(positions, np.int64)
        epochs, offsets = np.divmod(positions, self.num)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            _check(int(epoch))
            chosen = epochs == epoch
            found[chosen] = self._permutation(int(epoch))[offsets[chosen]]
        return found

    def _permutation(self, epoch: int) -> np.ndarray:
        with self._lock:
            if epoch not in self._kept:
                while len(self._kept) >= _NUM_EPOCHS_KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[epoch] = permutation(self.seed, epoch, self.num)
            return self._kept[epoch]

    def __reduce__(self) -> tuple[Any, ...]:
        return Order, (self.seed, self.num)


def permutation(seed: int, epoch: int, num: int) -> np.ndarray:
    """The shuffle of one epoch as int64.

    Sorted raw Philox words, and not Generator.permutation: numpy promises the words for all its versions, the shuffle
    only until it finds a better one, and a run resumed after an upgrade must go on in the same order.
    """
    words = np.random.Philox(key=np.array([seed % _WORD, epoch % _WORD], np.uint64)).random_raw(num)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _check(position: int) -> None:
    if position < 0:
        raise ValueError(f"positions start at 0, not {position}")
