"""Images made ready for extractors, in processes of their own: what a stranger's file does to a decoder stays there."""

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

from halation.data.decode import BrokenImageError
from halation.data.decode_pool import ProcessPool, WorkerDied
from halation.errors import HalationError
from halation.evaluation.image_sources import ImageSource, LoadedImage

IMAGES_PER_TASK = 8
"""Images a process prepares at a time; less would be mostly talk, more would keep the extractor waiting."""
TransformFn = Callable[[npt.NDArray[np.uint8]], np.ndarray]
Item = TypeVar("Item")


class PreparedBatch(NamedTuple):
    """Some images: for each extractor that wants them a stack of inputs, and what they were made from."""

    inputs: dict[str, np.ndarray]
    digests: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int32]
    """Height and width."""
    broken: dict[int, str]
    """By index, why there is no image; its inputs are zeros."""


def prepare_images(
    images: Iterable[tuple[int, Callable[[], tuple[npt.NDArray[np.uint8], bytes]]]],
    transforms: Mapping[str, TransformFn],
    num_threads: int = 0,
) -> PreparedBatch:
    """Inputs for each of these extractors; `images` gives an index and a way to its pixels and digest.

    Hashing and resizing leave the interpreter to others, so threads help; 0 of them means this rank's share of the cores.
    """

    def prepare_one(image: tuple[int, Callable[[], tuple[npt.NDArray[np.uint8], bytes]]]) -> _PreparedImage:
        index, load = image
        try:
            pixels, digest = load()
            return _apply_transforms(pixels, digest, transforms, {})
        except BrokenImageError as error:
            why = str(error)
        except MemoryError:
            why = "there is not enough memory for it"
        return _apply_transforms(np.zeros((8, 8, 3), np.uint8), bytes(32), transforms, {index: why})

    rows = _map_threaded(prepare_one, list(images), num_threads or num_rank_cores())
    stacked = {name: np.stack([row.inputs[name] for row in rows]) for name in transforms}
    return PreparedBatch(
        stacked,
        np.stack([row.digest for row in rows]),
        np.array([row.size for row in rows], np.int32),
        {index: why for row in rows for index, why in row.broken.items()},
    )


class _PreparedImage(NamedTuple):
    """One image of `PreparedBatch`."""

    inputs: dict[str, np.ndarray]
    digest: npt.NDArray[np.uint8]
    size: tuple[int, ...]
    broken: dict[int, str]


def _apply_transforms(
    pixels: npt.NDArray[np.uint8], digest: bytes, transforms: Mapping[str, TransformFn], broken: dict[int, str]
) -> _PreparedImage:
    try:
        inputs = {name: one(pixels) for name, one in transforms.items()}
    except ValueError as error:
        height, width = pixels.shape[:2]
        raise BrokenImageError(f"{width} x {height} pixels cannot be prepared for an extractor: {error}") from error
    return _PreparedImage(inputs, np.frombuffer(digest, np.uint8), pixels.shape[:2], broken)


def _map_threaded(
    function: Callable[[Item], _PreparedImage], items: Sequence[Item], num_threads: int
) -> list[_PreparedImage]:
    """In the order of the items."""
    num = min(num_threads, len(items))
    if num < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num, "prepare") as threads:
        return list(threads.map(function, items))


def num_rank_cores() -> int:
    """The cores of this machine that fall to this rank."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def concatenate_batches(batches: Sequence[PreparedBatch]) -> PreparedBatch:
    return PreparedBatch(
        {name: np.concatenate([piece.inputs[name] for piece in batches]) for name in batches[0].inputs},
        np.concatenate([piece.digests for piece in batches]),
        np.concatenate([piece.sizes for piece in batches]),
        {index: why for piece in batches for index, why in piece.broken.items()},
    )


@dataclass(frozen=True, kw_only=True)
class PreprocessWorker:
    """What travels to a process once: how an image is had, and how each extractor wants it; which ones comes with each request."""

    load: Callable[[Any], LoadedImage]
    transforms: Mapping[str, TransformFn]

    def __call__(self, image_refs: Sequence[tuple[int, Any]], names: Sequence[str]) -> PreparedBatch:
        images = [(index, partial(self.load, ticket)) for index, ticket in image_refs]
        # One thread: there is a process for every core already.
        return prepare_images(images, {name: self.transforms[name] for name in names}, num_threads=1)


@dataclass(frozen=True, kw_only=True)
class SourcePreprocessor:
    """A source's images, and how each extractor wants them."""

    source: ImageSource
    transforms: Mapping[str, TransformFn]

    @property
    def worker(self) -> PreprocessWorker:
        return PreprocessWorker(load=self.source.loader, transforms=self.transforms)

    def image_refs(self, indices: Iterable[int]) -> list[tuple[int, Any]]:
        return [(index, self.source.image_ref(index)) for index in indices]


class ExtractorBatch(NamedTuple):
    """Which images, and which extractors want them."""

    indices: range
    labels: tuple[str, ...]


class PreprocessPool:
    """Batches in, prepared batches out, in order and ahead of who takes them; without processes they are made when asked for."""

    def __init__(self, preprocessor: SourcePreprocessor, num_workers: int) -> None:
        self.preprocessor = preprocessor
        self._worker = preprocessor.worker
        self._workers = ProcessPool(self._worker, num_workers) if num_workers else None

    def __enter__(self) -> PreprocessPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()

    def iter_batches(self, batches: Iterable[ExtractorBatch]) -> Iterator[tuple[ExtractorBatch, PreparedBatch]]:
        if self._workers is None:
            for batch in batches:
                yield batch, self._worker(self.preprocessor.image_refs(batch.indices), batch.labels)
            return
        remaining = iter(batches)
        pending: deque[tuple[ExtractorBatch, list[Future[PreparedBatch]]]] = deque()
        while True:
            with contextlib.suppress(StopIteration):
                while sum(len(pieces) for _, pieces in pending) < 2 * self._workers.num_workers + 4:
                    batch = next(remaining)
                    pending.append(
                        (
                            batch,
                            [self._submit(self._workers, cut, batch.labels) for cut in _split_indices(batch.indices)],
                        )
                    )
            if not pending:
                return
            batch, futures = pending.popleft()
            try:
                prepared = concatenate_batches([piece.result() for piece in futures])
            except WorkerDied as error:
                raise self._worker_died_error(error) from error
            yield batch, prepared

    def _submit(self, workers: ProcessPool[PreparedBatch], indices: range, names: Sequence[str]) -> Future[Any]:
        return workers.submit(self.preprocessor.image_refs(indices), list(names))

    def _worker_died_error(self, error: WorkerDied) -> HalationError:
        """Which images it had in hand: one of them is to blame where a decoder crashed."""
        image_refs = error.arguments[0] if error.arguments else []
        names = "\n".join(f"  {self.preprocessor.source.name(index)}" for index, _ in image_refs)
        return HalationError(
            f"a process that decodes images {error.exit_reason} while it had these in hand:\n{names}\n"
            "  expected: processes that last: a decoder crashed on one of these images, or memory ran out\n"
            "  to do:    remove the one that cannot be decoded, or use fewer processes (--decode_workers, in training --num_workers); "
            "then run the same command again"
        )


def _split_indices(indices: range) -> list[range]:
    return [indices[start : start + IMAGES_PER_TASK] for start in range(0, len(indices), IMAGES_PER_TASK)]
