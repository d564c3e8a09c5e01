"""Pictures made ready for extractors, in processes of their own: what a stranger's file does to a decoder stays there."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halation.data.decode import BrokenPictureError
from halation.data.workers import Workers
from halation.evaluation.sources import Source

PIECE = 8
"""Pictures a process prepares at a time; less would be mostly talk, more would keep the extractor waiting."""
Prepare = Callable[[npt.NDArray[np.uint8]], np.ndarray]


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
) -> Prepared:
    """Inputs for each of these extractors; `pictures` gives an index and a way to its pixels and digest."""
    inputs: dict[str, list[np.ndarray]] = {name: [] for name in preparations}
    digests, sizes, broken = [], [], {}
    for index, load in pictures:
        try:
            pixels, digest = load()
        except BrokenPictureError as error:
            broken[index] = str(error)
            pixels, digest = np.zeros((8, 8, 3), np.uint8), bytes(32)
        digests.append(np.frombuffer(digest, np.uint8))
        sizes.append(pixels.shape[:2])
        for name, one in preparations.items():
            inputs[name].append(one(pixels))
    stacked = {name: np.stack(rows) for name, rows in inputs.items()}
    return Prepared(stacked, np.stack(digests), np.array(sizes, np.int32), broken)


def joined(pieces: Sequence[Prepared]) -> Prepared:
    return Prepared(
        {name: np.concatenate([piece.inputs[name] for piece in pieces]) for name in pieces[0].inputs},
        np.concatenate([piece.digests for piece in pieces]),
        np.concatenate([piece.sizes for piece in pieces]),
        {index: why for piece in pieces for index, why in piece.broken.items()},
    )


@dataclass(frozen=True, kw_only=True)
class Preparer:
    """What travels to a process: the source, and how each extractor wants its pictures."""

    source: Source
    preparations: Mapping[str, Prepare]

    def __call__(self, indices: Sequence[int], names: Sequence[str]) -> Prepared:
        def loader(index: int) -> Callable[[], tuple[npt.NDArray[np.uint8], bytes]]:
            return lambda: self.source.load(index)

        wanted = {name: self.preparations[name] for name in names}
        return prepare([(index, loader(index)) for index in indices], wanted)


class Sheet(NamedTuple):
    """Which pictures, and which extractors want them."""

    indices: range
    names: tuple[str, ...]


class Preparations:
    """Sheets in, prepared sheets out, in order and ahead of who takes them; without processes they are made when asked for."""

    def __init__(self, preparer: Preparer, num_workers: int) -> None:
        self.preparer = preparer
        self._workers = Workers(preparer, num_workers) if num_workers else None

    def __enter__(self) -> Preparations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()

    def of(self, sheets: Iterable[Sheet]) -> Iterator[tuple[Sheet, Prepared]]:
        if self._workers is None:
            for sheet in sheets:
                yield sheet, self.preparer(sheet.indices, sheet.names)
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
            yield sheet, joined([piece.result() for piece in pieces])

    def _ask(self, workers: Workers[Prepared], indices: range, names: Sequence[str]) -> Future[Any]:
        return workers.ask(list(indices), list(names))


def _cut(indices: range) -> list[range]:
    return [indices[start : start + PIECE] for start in range(0, len(indices), PIECE)]
