"""Background prefetch: positions in, stacked pictures out, in order, while the device is busy with the batch before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from halation.data.dataset import Picture, Pictures
from halation.data.process_pool import Stack, Workers, draw, joined, pictures, stack
from halation.data.shuffle import BucketOrder, Order

Batch = dict[str, Any]


class Batches:
    """Iterates over {"step", "positions", "indices", "pixels", "captions", "labels", "originals"}, a dict for each (step, positions)
    given; `indices` are the pictures that the order has at those positions.

    `num_threads` threads fetch up to `depth` batches ahead, in the order given. `positions` is read ahead of what is
    delivered, so a saved position is that of the last batch delivered, not of the iterator. With `num_workers` the
    pictures are made in that many processes. `memory_bytes` keeps decoded pictures up to that size; an order without
    repetition gains nothing from eviction, so the first ones stay. `transform` runs in the prefetching thread.
    """

    def __init__(
        self,
        source: Pictures,
        order: Order | BucketOrder,
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
        self._fetcher = _Fetcher(source, num_workers, memory_bytes)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Batch]] = deque()
        self._closed = False
        self._ended = False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        self._fill()
        if not self._ahead:
            self.close()
            raise StopIteration
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._fill()
        return batch

    def _fill(self) -> None:
        while not self._ended and len(self._ahead) < self._depth:
            try:
                step, positions = next(self._positions)
            except StopIteration:
                self._ended = True
                return
            self._ahead.append(self._threads.submit(self._make, step, np.asarray(positions, np.int64)))

    def _make(self, step: int, positions: np.ndarray) -> Batch:
        indices = self._order.at(positions)
        batch = {"step": step, "positions": positions, "indices": indices, **self._fetcher.fetch(indices)._asdict()}
        return batch if self._transform is None else self._transform(batch)

    def close(self) -> None:
        """End the threads and processes; nothing is left behind. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._fetcher.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Fetcher:
    """Pictures by index from memory where they are kept, from processes, or from the source itself."""

    def __init__(self, source: Pictures, num_workers: int, memory_bytes: int) -> None:
        self._source = source
        self._read: Callable[[np.ndarray], Stack] | None = getattr(source, "read", None)
        self._workers = Workers(partial(draw, source), num_workers) if num_workers and self._read is None else None
        self._room = memory_bytes
        self._kept: dict[int, Picture] = {}
        self._lock = threading.Lock()

    def fetch(self, indices: np.ndarray) -> Stack:
        if self._read is not None:
            return self._read(indices)
        wanted = [int(index) for index in indices]
        missing = [index for index in dict.fromkeys(wanted) if index not in self._kept]
        if len(missing) == len(wanted):
            made = self._draw(wanted)
            self._keep(wanted, made)
            return made
        fresh: dict[int, Picture] = {}
        if missing:
            made = self._draw(missing)
            self._keep(missing, made)
            fresh = dict(zip(missing, pictures(made), strict=True))
        return stack([fresh[index] if index in fresh else self._kept[index] for index in wanted])

    def _draw(self, indices: list[int]) -> Stack:
        if self._workers is None:
            return draw(self._source, "train", indices)
        length = -(-len(indices) // self._workers.num_workers)
        pieces = [self._workers.ask("train", indices[at : at + length]) for at in range(0, len(indices), length)]
        return joined([piece.result() for piece in pieces])

    def _keep(self, indices: list[int], made: Stack) -> None:
        for index, picture in zip(indices, pictures(made), strict=True):
            with self._lock:
                if self._room < picture.pixels.nbytes or index in self._kept:
                    continue
                self._room -= picture.pixels.nbytes
                # A copy: a row of the batch would keep all of it alive, and a transform may write into it.
                self._kept[index] = replace(picture, pixels=picture.pixels.copy())

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
