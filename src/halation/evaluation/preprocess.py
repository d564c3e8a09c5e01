"""Pictures made ready for extractors, in processes of their own: what a stranger's file does to a decoder stays there."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from halation.data.decode import BrokenPictureError
from halation.data.process_pool import WorkerDied, Workers
from halation.errors import HalationError
from halation.evaluation.image_sources import Loaded, Source

PIECE = 8
"""Pictures a process prepares at a time; less would be mostly talk, more would keep the extractor waiting."""
Prepare = Callable[[npt.NDArray[np.uint8]], np.ndarray]
Item = TypeVar("Item")


class Prepared(NamedTuple):
    """Some pictures: for each extractor that wants them a stack of inputs, and what they were made from."""

    inputs: dict[str, np.ndarray]
    digests: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int32]
    """Height and width."""
    broken: dict[int, str]
    """By index, why there is no picture; its inputs are zeros."""


def prepare(
    pictures: Iterable[tuple[int, Callable[[], tuple[npt.NDArray[np.uint8], bytes]]]],
    preparations: Mapping[str, Prepare],
    num_threads: int = 0,
) -> Prepared:
    """Inputs for each of these extractors; `pictures` gives an index and a way to its pixels and digest.

    Hashing and resizing leave the interpreter to others, so threads help; 0 of them means this rank's share of the cores.
    """

    def ready(picture: tuple[int, Callable[[], tuple[npt.NDArray[np.uint8], bytes]]]) -> _Ready:
        index, load = picture
        try:
            pixels, digest = load()
            return _ready(pixels, digest, preparations, {})
        except BrokenPictureError as error:
            why = str(error)
        except MemoryError:
            why = "there is not enough memory for it"
        return _ready(np.zeros((8, 8, 3), np.uint8), bytes(32), preparations, {index: why})

    rows = _by_threads(ready, list(pictures), num_threads or own_cores())
    stacked = {name: np.stack([row.inputs[name] for row in rows]) for name in preparations}
    return Prepared(
        stacked,
        np.stack([row.digest for row in rows]),
        np.array([row.size for row in rows], np.int32),
        {index: why for row in rows for index, why in row.broken.items()},
    )


class _Ready(NamedTuple):
    """One picture of `Prepared`."""

    inputs: dict[str, np.ndarray]
    digest: npt.NDArray[np.uint8]
    size: tuple[int, ...]
    broken: dict[int, str]


def _ready(
    pixels: npt.NDArray[np.uint8], digest: bytes, preparations: Mapping[str, Prepare], broken: dict[int, str]
) -> _Ready:
    try:
        inputs = {name: one(pixels) for name, one in preparations.items()}
    except ValueError as error:
        height, width = pixels.shape[:2]
        raise BrokenPictureError(f"{width} x {height} pixels cannot be prepared for an extractor: {error}") from error
    return _Ready(inputs, np.frombuffer(digest, np.uint8), pixels.shape[:2], broken)


def _by_threads(work: Callable[[Item], _Ready], items: Sequence[Item], num_threads: int) -> list[_Ready]:
    """In the order of the items."""
    num = min(num_threads, len(items))
    if num < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num, "prepare") as threads:
        return list(threads.map(work, items))


def own_cores() -> int:
    """The cores of this machine that fall to this rank."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def joined(pieces: Sequence[Prepared]) -> Prepared:
    return Prepared(
        {name: np.concatenate([piece.inputs[name] for piece in pieces]) for name in pieces[0].inputs},
        np.concatenate([piece.digests for piece in pieces]),
        np.concatenate([piece.sizes for piece in pieces]),
        {index: why for piece in pieces for index, why in piece.broken.items()},
    )


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What travels to a process once: how a picture is had, and how each extractor wants it; which ones comes with each request."""

    load: Callable[[Any], Loaded]
    preparations: Mapping[str, Prepare]

    def __call__(self, tickets: Sequence[tuple[int, Any]], names: Sequence[str]) -> Prepared:
        pictures = [(index, partial(self.load, ticket)) for index, ticket in tickets]
        # One thread: there is a process for every core already.
        return prepare(pictures, {name: self.preparations[name] for name in names}, num_threads=1)


@dataclass(frozen=True, kw_only=True)
class Preparer:
    """A source's pictures, and how each extractor wants them."""

    source: Source
    preparations: Mapping[str, Prepare]

    @property
    def worker(self) -> Worker:
        return Worker(load=self.source.loader, preparations=self.preparations)

    def tickets(self, indices: Iterable[int]) -> list[tuple[int, Any]]:
        return [(index, self.source.ticket(index)) for index in indices]


class Sheet(NamedTuple):
    """Which pictures, and which extractors want them."""

    indices: range
    names: tuple[str, ...]


class Preparations:
    """Sheets in, prepared sheets out, in order and ahead of who takes them; without processes they are made when asked for."""

    def __init__(self, preparer: Preparer, num_workers: int) -> None:
        self.preparer = preparer
        self._worker = preparer.worker
        self._workers = Workers(self._worker, num_workers) if num_workers else None

    def __enter__(self) -> Preparations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()

    def of(self, sheets: Iterable[Sheet]) -> Iterator[tuple[Sheet, Prepared]]:
        if self._workers is None:
            for sheet in sheets:
                yield sheet, self._worker(self.preparer.tickets(sheet.indices), sheet.names)
            return
        coming = iter(sheets)
        ahead: deque[tuple[Sheet, list[Future[Prepared]]]] = deque()
        while True:
            with contextlib.suppress(StopIteration):
                while sum(len(pieces) for _, pieces in ahead) < 2 * self._workers.num_workers + 4:
                    sheet = next(coming)
                    ahead.append((sheet, [self._ask(self._workers, cut, sheet.names) for cut in _cut(sheet.indices)]))
            if not ahead:
                return
            sheet, pieces = ahead.popleft()
            try:
                made = joined([piece.result() for piece in pieces])
            except WorkerDied as error:
                raise self._named(error) from error
            yield sheet, made

    def _ask(self, workers: Workers[Prepared], indices: range, names: Sequence[str]) -> Future[Any]:
        return workers.ask(self.preparer.tickets(indices), list(names))

    def _named(self, error: WorkerDied) -> HalationError:
        """Which pictures it had in hand: one of them is to blame where a decoder crashed."""
        tickets = error.arguments[0] if error.arguments else []
        names = "\n".join(f"  {self.preparer.source.name(index)}" for index, _ in tickets)
        return HalationError(
            f"a process that decodes pictures {error.how} while it had these in hand:\n{names}\n"
            "  expected: processes that last: a decoder crashed on one of these pictures, or memory ran out\n"
            "  to do:    remove the one that cannot be decoded, or use fewer processes (--decode_workers, in training --num_workers); "
            "then run the same command again"
        )


def _cut(indices: range) -> list[range]:
    return [indices[start : start + PIECE] for start in range(0, len(indices), PIECE)]
