"""Prepares images for extractors in worker processes, which isolates decoder crashes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halation.data.decode import BrokenImageError
from halation.data.process_pool import ProcessPool, WorkerDied
from halation.errors import HalationError
from halation.evaluation.image_sources import ImageSource, LoadedImage

IMAGES_PER_TASK = 8
"""Images per call to a process: fewer would spend the time on pickling, more would let the extractor wait."""
TransformFn = Callable[[npt.NDArray[np.uint8]], np.ndarray]


class PreparedBatch(NamedTuple):
    """Prepared images: stacked inputs for each extractor, digests and sizes."""

    inputs: dict[str, np.ndarray]
    digests: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int32]
    """Height and width."""
    broken: dict[int, str]
    """Reasons by index for images that could not be read; their inputs come from a black image."""

    @classmethod
    def concatenate(cls, batches: Sequence[PreparedBatch]) -> PreparedBatch:
        return cls(
            {name: np.concatenate([piece.inputs[name] for piece in batches]) for name in batches[0].inputs},
            np.concatenate([piece.digests for piece in batches]),
            np.concatenate([piece.sizes for piece in batches]),
            {index: why for piece in batches for index, why in piece.broken.items()},
        )


def prepare_images(
    images: Iterable[tuple[int, Callable[[], tuple[npt.NDArray[np.uint8], bytes]]]],
    transforms: Mapping[str, TransformFn],
    num_threads: int = 0,
) -> PreparedBatch:
    """Prepare the inputs of each extractor.

    `images` yields an index and a function that loads its pixels and digest. Hashing and resizing release the GIL, so
    that threads help; 0 threads means this rank's share of the cores.
    """

    def transform(pixels: npt.NDArray[np.uint8]) -> dict[str, np.ndarray]:
        try:
            return {name: one(pixels) for name, one in transforms.items()}
        except ValueError as error:
            height, width = pixels.shape[:2]
            raise BrokenImageError(f"{width} x {height} pixels cannot be prepared for an extractor: {error}") from error

    def prepare_one(
        image: tuple[int, Callable[[], tuple[npt.NDArray[np.uint8], bytes]]],
    ) -> tuple[dict[str, np.ndarray], bytes, tuple[int, ...], dict[int, str]]:
        index, load = image
        try:
            pixels, digest = load()
            return transform(pixels), digest, pixels.shape[:2], {}
        except BrokenImageError as error:
            why = str(error)
        except MemoryError:
            why = "not enough memory to decode it"
        return transform(np.zeros((8, 8, 3), np.uint8)), bytes(32), (8, 8), {index: why}

    tasks = list(images)
    num = min(num_threads or num_rank_cores(), len(tasks))
    if num < 2:
        rows = [prepare_one(task) for task in tasks]
    else:
        with ThreadPoolExecutor(num, "prepare") as threads:
            rows = list(threads.map(prepare_one, tasks))
    inputs, digests, sizes, broken = zip(*rows, strict=True)
    return PreparedBatch(
        {name: np.stack([row[name] for row in inputs]) for name in transforms},
        np.stack([np.frombuffer(digest, np.uint8) for digest in digests]),
        np.array(sizes, np.int32),
        {index: why for row in broken for index, why in row.items()},
    )


def num_rank_cores() -> int:
    """Return the number of CPU cores for this rank."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True, kw_only=True)
class PreprocessWorker:
    """Loads and transforms images in a worker process; pickled once per process."""

    load: Callable[[Any], LoadedImage]
    transforms: Mapping[str, TransformFn]

    def __call__(self, image_refs: Sequence[tuple[int, Any]], names: Sequence[str]) -> PreparedBatch:
        images = [(index, partial(self.load, ticket)) for index, ticket in image_refs]
        # One thread, because there already is one process per core.
        return prepare_images(images, {name: self.transforms[name] for name in names}, num_threads=1)


@dataclass(frozen=True, kw_only=True)
class SourcePreprocessor:
    """An image source and the transform of each extractor."""

    source: ImageSource
    transforms: Mapping[str, TransformFn]

    @property
    def worker(self) -> PreprocessWorker:
        return PreprocessWorker(load=self.source.loader, transforms=self.transforms)

    def image_refs(self, indices: Iterable[int]) -> list[tuple[int, Any]]:
        return [(index, self.source.image_ref(index)) for index in indices]


class ExtractorBatch(NamedTuple):
    """The indices of a batch and the labels of the extractors that need it."""

    indices: range
    labels: tuple[str, ...]


class PreprocessPool:
    """Prepares batches in order, ahead of use; without worker processes, on demand."""

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
        refs = self.preprocessor.image_refs
        if self._workers is None:
            for batch in batches:
                yield batch, self._worker(refs(batch.indices), batch.labels)
            return
        remaining = iter(batches)
        pending: deque[tuple[ExtractorBatch, list[Future[PreparedBatch]]]] = deque()
        while True:
            while sum(len(pieces) for _, pieces in pending) < 2 * self._workers.num_workers + 4:
                following = next(remaining, None)
                if following is None:
                    break
                indices, labels = following
                chunks = [indices[at : at + IMAGES_PER_TASK] for at in range(0, len(indices), IMAGES_PER_TASK)]
                pending.append((following, [self._workers.submit(refs(cut), list(labels)) for cut in chunks]))
            if not pending:
                return
            batch, futures = pending.popleft()
            try:
                prepared = PreparedBatch.concatenate([piece.result() for piece in futures])
            except WorkerDied as error:
                raise self._worker_died_error(error) from error
            yield batch, prepared

    def _worker_died_error(self, error: WorkerDied) -> HalationError:
        """Return an error that lists the images the process was decoding when it died."""
        image_refs = error.arguments[0] if error.arguments else []
        names = "\n".join(f"  {self.preprocessor.source.name(index)}" for index, _ in image_refs)
        return HalationError(
            f"a decoder process {error.exit_reason} while it decoded these images:\n{names}\n"
            "  expected: images that can be decoded, and enough memory\n"
            "  to do:    remove the image that crashes the decoder, or use fewer processes (--decode_workers, in "
            "training --num_workers); then run the same command again"
        )
