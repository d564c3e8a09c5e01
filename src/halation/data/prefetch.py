"""Data order, and prefetching of batches in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from halation.data.dataset_protocol import (
    CaptionedImage,
    ImageBatch,
    ImageDataset,
    concat_batches,
    load_images,
    stack_images,
    unstack_images,
)
from halation.data.process_pool import ProcessPool

_NUM_CACHED_EPOCHS = 2  # batches in flight may span the end of an epoch
_UINT64_RANGE = 2**64
_STREAM_STRIDE = 2**40  # more epochs than any run has


class ShuffledOrder:
    """A shuffled order, the same for any number of ranks and any batch size.

    Position p in [0, inf) is image `permutation(seed, p // num)[p % num]`.
    """

    def __init__(self, seed: int, num_images: int) -> None:
        if num_images < 1:
            raise ValueError(f"an order needs at least one image, not {num_images}")
        self.seed = seed
        self.num_images = num_images
        self._permutations: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def epoch(self, position: int) -> int:
        """Return the number of complete passes over the images before this position."""
        _check_not_negative(position)
        return position // self.num_images

    def index_at(self, position: int) -> int:
        """The image at one position."""
        return int(self._permutation(self.epoch(position))[position % self.num_images])

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the images at positions start..stop-1 as int64; the range may span many epochs."""
        _check_not_negative(start)
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, offset = divmod(start, self.num_images)
            length = min(stop - start, self.num_images - offset)
            pieces.append(self._permutation(epoch)[offset : offset + length])
            start += length
        return np.concatenate(pieces)

    def indices_at(self, positions: np.ndarray) -> np.ndarray:
        """The images at any positions, as int64 of the same shape."""
        positions = np.asarray(positions, np.int64)
        epochs, offsets = np.divmod(positions, self.num_images)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            _check_not_negative(int(epoch))
            mask = epochs == epoch
            found[mask] = self._permutation(int(epoch))[offsets[mask]]
        return found

    def _permutation(self, epoch: int) -> np.ndarray:
        with self._lock:
            if epoch not in self._permutations:
                while len(self._permutations) >= _NUM_CACHED_EPOCHS:
                    self._permutations.pop(next(iter(self._permutations)))
                self._permutations[epoch] = permutation(self.seed, epoch, self.num_images)
            return self._permutations[epoch]

    def __reduce__(self) -> tuple[Any, ...]:
        return ShuffledOrder, (self.seed, self.num_images)


class BucketOrder:
    """A shuffled order in which each global batch contains images of one bucket.

    Global batch s has positions [s * global_batch, (s + 1) * global_batch). Each bucket has an endless series of
    permutations of its images, from which its batches are taken in order, so the numbers of uses of two images of a
    bucket differ by at most one. The number of batches of a bucket is proportional to its images; the order of buckets
    is shuffled within each epoch.
    """

    def __init__(self, seed: int, bucket_of: np.ndarray, global_batch: int) -> None:
        bucket_of = np.asarray(bucket_of, np.int64)
        if len(bucket_of) < 1:
            raise ValueError(f"an order needs at least one image, not {len(bucket_of)}")
        if global_batch < 1 or bucket_of.min() < 0:
            raise ValueError(
                f"batches of {global_batch} and buckets from {bucket_of.min()}; expected from 1 and from 0"
            )
        self.seed = seed
        self.num_images = len(bucket_of)
        self.global_batch = global_batch
        self._bucket_of = bucket_of
        counts = np.bincount(bucket_of)
        self._counts = counts
        self._members = np.split(np.argsort(bucket_of, kind="stable"), np.cumsum(counts)[:-1])
        # Buckets take turns, spread as evenly as possible: the bucket of each turn, and how many turns it had before.
        # In one cycle, with as many turns as images, a bucket has as many turns as images; then the cycle repeats.
        buckets = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(buckets)) - np.repeat(np.cumsum(counts) - counts, counts)
        spread = np.argsort((numbers + 0.5) / counts[buckets], kind="stable")
        self._bucket_cycle = buckets[spread], numbers[spread]
        self._num_batches = -(-self.num_images // global_batch)
        self._schedules: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._permutations: dict[int, dict[int, np.ndarray]] = {}
        self._lock = threading.Lock()

    def epoch(self, position: int) -> int:
        """Return the number of passes before this position; buckets may differ by a batch."""
        _check_not_negative(position)
        return position // self.num_images

    def index_at(self, position: int) -> int:
        """The image at one position."""
        return int(self.indices_at(np.array([position]))[0])

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The images at positions start..stop-1 as int64."""
        _check_not_negative(start)
        return self.indices_at(np.arange(start, stop))

    def bucket_at(self, batch: int) -> int:
        """Return the bucket of a global batch."""
        _check_not_negative(batch)
        epoch, turn = divmod(batch, self._num_batches)
        return int(self._get_schedule(epoch)[0][turn])

    def indices_at(self, positions: np.ndarray) -> np.ndarray:
        """The images at any positions, as int64 of the same shape."""
        positions = np.asarray(positions, np.int64)
        batches, offsets = np.divmod(positions, self.global_batch)
        found = np.empty_like(positions)
        for batch in np.unique(batches):
            _check_not_negative(int(batch))
            epoch, turn = divmod(int(batch), self._num_batches)
            buckets, numbers = self._get_schedule(epoch)
            bucket, number = int(buckets[turn]), int(numbers[turn])
            mask = batches == batch
            found[mask] = self._bucket_images(bucket, number * self.global_batch + offsets[mask])
        return found

    def _bucket_images(self, bucket: int, positions: np.ndarray) -> np.ndarray:
        """Return the images at these positions of a bucket's endless series."""
        epochs, offsets = np.divmod(positions, int(self._counts[bucket]))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            found[mask] = self._permutation(bucket, epoch)[offsets[mask]]
        return self._members[bucket][found]

    def _permutation(self, bucket: int, epoch: int) -> np.ndarray:
        with self._lock:
            permutations = self._permutations.setdefault(bucket, {})
            if epoch not in permutations:
                while len(permutations) >= _NUM_CACHED_EPOCHS:
                    permutations.pop(next(iter(permutations)))
                # One stream per bucket; the one below shuffles the batches.
                permutations[epoch] = permutation(
                    self.seed, epoch + (bucket + 1) * _STREAM_STRIDE, int(self._counts[bucket])
                )
            return permutations[epoch]

    def _get_schedule(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each batch of an epoch its bucket and its number within that bucket."""
        with self._lock:
            if epoch not in self._schedules:
                while len(self._schedules) >= _NUM_CACHED_EPOCHS:
                    self._schedules.pop(next(iter(self._schedules)))
                self._schedules[epoch] = self._make_schedule(epoch)
            return self._schedules[epoch]

    def _make_schedule(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rounds, turns = np.divmod(epoch * self._num_batches + np.arange(self._num_batches), self.num_images)
        buckets = self._bucket_cycle[0][turns]
        numbers = self._bucket_cycle[1][turns] + rounds * self._counts[buckets]
        shuffled = buckets[permutation(self.seed, epoch, self._num_batches)]
        # The batches of a bucket keep their order: only the sequence of buckets is shuffled.
        in_order = np.empty_like(numbers)
        in_order[np.argsort(shuffled, kind="stable")] = numbers[np.argsort(buckets, kind="stable")]
        return shuffled, in_order

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketOrder, (self.seed, self._bucket_of, self.global_batch)


def permutation(seed: int, epoch: int, num: int) -> np.ndarray:
    """Return the permutation of one epoch as int64.

    It sorts raw Philox words instead of using Generator.permutation: numpy guarantees the words for all versions but
    not the permutation, and a run that resumes after an upgrade must keep its order.
    """
    words = np.random.Philox(key=np.array([seed % _UINT64_RANGE, epoch % _UINT64_RANGE], np.uint64)).random_raw(num)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _check_not_negative(position: int) -> None:
    if position < 0:
        raise ValueError(f"positions start at 0, not {position}")


Batch = dict[str, Any]


class BatchPrefetcher:
    """Iterates over batches, one for each given (step, positions).

    A batch is a dict with the keys "step", "positions", "indices", "pixels", "captions", "labels" and "originals";
    `indices` are the images that the order has at those positions.

    `num_threads` threads fetch up to `depth` batches ahead, in order. `positions` is read ahead of delivery, so the
    position to save is that of the last batch delivered, not of the iterator. With `num_workers` that many processes
    load the images. `memory_bytes` is the size of a cache of decoded images; the first ones stay, because eviction does
    not help in an order without repetition. `transform` runs in the prefetching thread.
    """

    def __init__(
        self,
        source: ImageDataset,
        order: ShuffledOrder | BucketOrder,
        positions: Iterable[tuple[int, Sequence[int] | np.ndarray]],
        *,
        num_threads: int = 2,
        depth: int = 4,
        num_workers: int = 0,
        memory_bytes: int = 0,
        transform: Callable[[Batch], Batch] | None = None,
    ) -> None:
        if num_threads < 1 or depth < 1:
            raise ValueError(f"num_threads and depth are at least 1, not {num_threads} and {depth}")
        self._order = order
        self._positions = iter(positions)
        self._depth = depth
        self._transform = transform
        self._fetcher = _ImageFetcher(source, num_workers, memory_bytes)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
        self._pending: deque[Future[Batch]] = deque()
        self._is_closed = False
        self._is_exhausted = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._is_closed:
            raise StopIteration
        self._fill_queue()
        if not self._pending:
            self.close()
            raise StopIteration
        try:
            batch = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        self._fill_queue()
        return batch

    def _fill_queue(self) -> None:
        while not self._is_exhausted and len(self._pending) < self._depth:
            try:
                step, positions = next(self._positions)
            except StopIteration:
                self._is_exhausted = True
                return
            self._pending.append(self._threads.submit(self._make_batch, step, np.asarray(positions, np.int64)))

    def _make_batch(self, step: int, positions: np.ndarray) -> Batch:
        indices = self._order.indices_at(positions)
        batch = {"step": step, "positions": positions, "indices": indices, **self._fetcher.fetch(indices)._asdict()}
        return batch if self._transform is None else self._transform(batch)

    def close(self) -> None:
        """Stop the threads and processes. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._fetcher.close()

    def __enter__(self) -> BatchPrefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ImageFetcher:
    """Fetches images by index from the memory cache, worker processes, or the source."""

    def __init__(self, source: ImageDataset, num_workers: int, memory_bytes: int) -> None:
        self._source = source
        self._read: Callable[[np.ndarray], ImageBatch] | None = getattr(source, "read", None)
        self._pool = (
            ProcessPool(partial(load_images, source), num_workers) if num_workers and self._read is None else None
        )
        self._free_bytes = memory_bytes
        self._cached: dict[int, CaptionedImage] = {}
        self._lock = threading.Lock()

    def fetch(self, indices: np.ndarray) -> ImageBatch:
        if self._read is not None:
            return self._read(indices)
        wanted = [int(index) for index in indices]
        missing = [index for index in dict.fromkeys(wanted) if index not in self._cached]
        if len(missing) == len(wanted):
            batch = self._load_images(wanted)
            self._cache_images(wanted, batch)
            return batch
        fresh: dict[int, CaptionedImage] = {}
        if missing:
            batch = self._load_images(missing)
            self._cache_images(missing, batch)
            fresh = dict(zip(missing, unstack_images(batch), strict=True))
        return stack_images([fresh[index] if index in fresh else self._cached[index] for index in wanted])

    def _load_images(self, indices: list[int]) -> ImageBatch:
        if self._pool is None:
            return load_images(self._source, "train", indices)
        length = -(-len(indices) // self._pool.num_workers)
        futures = [self._pool.submit("train", indices[at : at + length]) for at in range(0, len(indices), length)]
        return concat_batches([piece.result() for piece in futures])

    def _cache_images(self, indices: list[int], batch: ImageBatch) -> None:
        for index, image in zip(indices, unstack_images(batch), strict=True):
            with self._lock:
                if self._free_bytes < image.pixels.nbytes or index in self._cached:
                    continue
                self._free_bytes -= image.pixels.nbytes
                # A copy: a view would keep the whole batch alive, and a transform may write into it.
                self._cached[index] = replace(image, pixels=image.pixels.copy())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
