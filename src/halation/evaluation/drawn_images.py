"""Images generated for scoring: the interface, and images of a model in training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halation.distributed.world import World
from halation.errors import HalationError, format_count
from halation.evaluation.image_sources import with_digest
from halation.evaluation.preprocess_pool import ExtractorBatch, PreparedBatch, TransformFn, prepare_images
from halation.work_division import make_batches

if TYPE_CHECKING:
    from halation.sample_specs import SampleBatch
    from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
    from halation.sampling.sample_folder import SampleRow

OnBatch = Callable[[range, list[np.ndarray]], None]
"""Called with the indices and the images of a complete batch."""


class DrawnImages(ABC):
    """Images that a model generates for scoring.

    Each rank generates its chunks and extracts their features.
    """

    @property
    @abstractmethod
    def captions(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def order(self) -> npt.NDArray[np.int64]:
        """The index at each position; these differ because a batch holds images of one shape."""

    @property
    @abstractmethod
    def key(self) -> str:
        """See `ImageSource.key`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of the image at a position, for messages."""

    @abstractmethod
    def chunk_starts(self, chunk: int) -> list[int]:
        """Return the positions at which chunks of about `chunk` images start."""

    @abstractmethod
    def open_on_ranks(self, world: World, folder: Path, has_chunks: bool) -> None:
        """Load the model on ranks that have chunks to generate.

        All ranks call it; `folder` holds the features.
        """

    @abstractmethod
    def iter_prepared(
        self,
        batches: Iterator[ExtractorBatch],
        transforms: Mapping[str, TransformFn],
        on_step: Callable[[], None],
        stop: Callable[[], int],
    ) -> Iterator[tuple[ExtractorBatch, PreparedBatch]]:
        """Generate and prepare the images of these batches."""


class CallbackSink:
    """Passes complete batches to a callback; incomplete batches are not scored."""

    def __init__(self, on_batch: OnBatch) -> None:
        self._on_batch = on_batch

    def put(self, batch: SampleBatch, images: Mapping[int, np.ndarray], rows: Sequence[SampleRow]) -> None:
        if len(images) == len(rows):
            first = batch.specs[0].index
            self._on_batch(range(first, first + len(rows)), [images[number] for number in range(len(rows))])

    def finish(self) -> None:
        """Do nothing: every batch was already passed to the callback."""


@dataclass(frozen=True, kw_only=True)
class SampledImages:
    """Images sampled by the model in training; all ranks sample together."""

    sampler: DenoiserSampler
    settings: SampleSettings
    swap_in_ema: Callable[[], AbstractContextManager[None]]
    """Swaps the EMA weights into the model while images are sampled."""

    @property
    def captions(self) -> tuple[str, ...]:
        return self.settings.prompts

    def __len__(self) -> int:
        return len(self.settings.prompts)

    def name(self, index: int) -> str:
        return f"image {index}"

    def draw(self, todo: Sequence[int], on_batch: OnBatch, name: str) -> None:
        """Sample these batches; `on_batch` is called on the rank that sampled the batch."""
        batches = make_batches(self.settings.specs(), self.settings.batch_size)
        with self.swap_in_ema():
            rows = self.sampler.draw_batches(batches, todo, CallbackSink(on_batch), name)
        failed = [row for row in rows if row["state"] == "failed"]
        if failed:
            raise HalationError(
                f"{len(failed)} of {format_count(len(self), 'image')} could not be sampled or scored, "
                f"the first one on rank {failed[0]['rank']}: {failed[0]['reason']}"
            )

    def prepare(
        self, batch: ExtractorBatch, images: Sequence[np.ndarray], transforms: Mapping[str, TransformFn]
    ) -> PreparedBatch:
        loaders = [(index, partial(with_digest, pixels)) for index, pixels in zip(batch.indices, images, strict=True)]
        return prepare_images(loaders, {name: transforms[name] for name in batch.labels})
