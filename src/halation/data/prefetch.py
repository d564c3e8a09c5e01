"""Background prefetch: positions in, batches of images out, in order, ahead of the device."""

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
from halation.data.shuffle import BucketOrder, ShuffledOrder

Batch = dict[str, Any]


class BatchPrefetcher:
    """Iterates over batches, one for each (step, positions) given.

    A batch is a dict with the keys "step", "positions", "indices", "pixels", "captions", "labels" and "originals";
    `indices` are the images that the order has at those positions.

    `num_threads` threads fetch up to `depth` batches ahead, in the order given. `positions` is read ahead of what is
    delivered, so a saved position is that of the last batch delivered, not of the iterator. With `num_workers` the
    images are made in that many processes. `memory_bytes` keeps decoded images up to that size; an order without
    repetition gains nothing from eviction, so the first ones stay. `transform` runs in the prefetching thread.
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
        """End the threads and processes; nothing is left behind. May be called twice."""
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
    """Images by index from memory where they are kept, from processes, or from the source itself."""

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
                # A copy: a row of the batch would keep all of it alive, and a transform may write into it.
                self._cached[index] = replace(image, pixels=image.pixels.copy())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
