"""The order in which pictures are seen: a pure function of seed and position that knows no ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_NUM_EPOCHS_KEPT = 2  # batches that are being fetched may straddle the end of an epoch
_WORD = 2**64
_STREAM = 2**40  # more epochs than any run has


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


class BucketOrder:
    """An order whose every global batch, positions [s * global_batch, (s + 1) * global_batch), lies in one bucket.

    Each bucket's pictures come as an endless series of permutations, which its batches cut up one after the other, so no
    picture of a bucket is ever ahead of another by more than one. How many batches a bucket has had follows its share of
    the pictures; within an epoch's worth of batches, which bucket comes when is shuffled.
    """

    def __init__(self, seed: int, bucket_of: np.ndarray, global_batch: int) -> None:
        bucket_of = np.asarray(bucket_of, np.int64)
        if len(bucket_of) < 1:
            raise ValueError(f"an order needs at least one picture, not {len(bucket_of)}")
        if global_batch < 1 or bucket_of.min() < 0:
            raise ValueError(
                f"batches of {global_batch} and buckets from {bucket_of.min()}; expected from 1 and from 0"
            )
        self.seed = seed
        self.num = len(bucket_of)
        self.global_batch = global_batch
        self._bucket_of = bucket_of
        counts = np.bincount(bucket_of)
        self._counts = counts
        self._members = np.split(np.argsort(bucket_of, kind="stable"), np.cumsum(counts)[:-1])
        self._turns = _turns(counts)
        self._num_batches = -(-self.num // global_batch)
        self._schedules: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._kept: dict[int, dict[int, np.ndarray]] = {}
        self._lock = threading.Lock()

    def epoch(self, position: int) -> int:
        """Number of passes before this position: as many pictures as there are, some buckets a batch ahead of others."""
        _check(position)
        return position // self.num

    def index(self, position: int) -> int:
        """The picture at one position."""
        return int(self.at(np.array([position]))[0])

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The pictures at positions start..stop-1 as int64."""
        _check(start)
        return self.at(np.arange(start, stop))

    def bucket(self, batch: int) -> int:
        """The bucket of a global batch."""
        _check(batch)
        epoch, turn = divmod(batch, self._num_batches)
        return int(self._schedule(epoch)[0][turn])

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The pictures at any positions, as int64 of the same shape."""
        positions = np.asarray(positions, np.int64)
        batches, offsets = np.divmod(positions, self.global_batch)
        found = np.empty_like(positions)
        for batch in np.unique(batches):
            _check(int(batch))
            epoch, turn = divmod(int(batch), self._num_batches)
            buckets, numbers = self._schedule(epoch)
            bucket, number = int(buckets[turn]), int(numbers[turn])
            chosen = batches == batch
            found[chosen] = self._series(bucket, number * self.global_batch + offsets[chosen])
        return found

    def _series(self, bucket: int, places: np.ndarray) -> np.ndarray:
        """The pictures at these places of a bucket's endless series."""
        epochs, offsets = np.divmod(places, int(self._counts[bucket]))
        found = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = self._permutation(bucket, epoch)[offsets[chosen]]
        return self._members[bucket][found]

    def _permutation(self, bucket: int, epoch: int) -> np.ndarray:
        with self._lock:
            kept = self._kept.setdefault(bucket, {})
            if epoch not in kept:
                while len(kept) >= _NUM_EPOCHS_KEPT:
                    kept.pop(next(iter(kept)))
                # One stream for each bucket; that below them all shuffles the batches.
                kept[epoch] = permutation(self.seed, epoch + (bucket + 1) * _STREAM, int(self._counts[bucket]))
            return kept[epoch]

    def _schedule(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """For each batch of an epoch its bucket, and how many batches that bucket has had before."""
        with self._lock:
            if epoch not in self._schedules:
                while len(self._schedules) >= _NUM_EPOCHS_KEPT:
                    self._schedules.pop(next(iter(self._schedules)))
                self._schedules[epoch] = self._scheduled(epoch)
            return self._schedules[epoch]

    def _scheduled(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rounds, turns = np.divmod(epoch * self._num_batches + np.arange(self._num_batches), self.num)
        buckets = self._turns[0][turns]
        numbers = self._turns[1][turns] + rounds * self._counts[buckets]
        shuffled = buckets[permutation(self.seed, epoch, self._num_batches)]
        # A bucket's batches keep their own order: only which bucket is next was shuffled.
        in_order = np.empty_like(numbers)
        in_order[np.argsort(shuffled, kind="stable")] = numbers[np.argsort(buckets, kind="stable")]
        return shuffled, in_order

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketOrder, (self.seed, self._bucket_of, self.global_batch)


def _turns(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whose batch is next, spread as evenly as whole batches allow: (bucket, how many it has had before) of each turn.

    As many turns as there are pictures give every bucket as many as it has; from there on it repeats.
    """
    buckets = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(buckets)) - np.repeat(np.cumsum(counts) - counts, counts)
    spread = np.argsort((numbers + 0.5) / counts[buckets], kind="stable")
    return buckets[spread], numbers[spread]


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
