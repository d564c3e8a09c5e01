"""A loaded model on one device: it draws batches in micro-batches of one size, and in smaller ones where memory runs out."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from halation.errors import HalationError, InputError
from halation.fault_injection import fault_point
from halation.models.async_image_result import DRY_RUN, Frames, ImageError, NonFiniteImageError, OnStep, PendingImages
from halation.sample_specs import SampleBatch, SampleSpec

log = logging.getLogger(__name__)


class ImageModel(Protocol):
    """What a runner generates with: a diffusers pipeline, a checkpoint of ours, or the test card."""

    facts: dict[str, Any]
    """What the run records about it."""

    def check(self, spec: SampleSpec) -> None:
        """InputError where it cannot draw such a spec."""

    def draw(self, specs: Sequence[SampleSpec], on_step: OnStep) -> PendingImages:
        """Specs of one shape and guidance; `on_step` is called after each step of the solver."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchResult:
    """Some rows of a batch that were drawn together."""

    rows: range
    result: PendingImages
    micro_batch: int
    """Images that were really drawn at once, fillers included."""


class ModelRunner:
    """`run_batch(batch)`; all its methods belong on the thread that opened the model."""

    def __init__(self, model: ImageModel) -> None:
        self.model = model

    def run_batch(
        self, batch: SampleBatch, micro_batch: int, rows: Sequence[int], on_step: OnStep
    ) -> list[MicroBatchResult]:
        """The pieces that hold these rows of a batch, each drawn at `micro_batch` images at once unless memory forbids."""
        for spec in {batch.specs[row].id for row in rows}:
            fault_point(f"paint.{spec}")
        fault_point("paint")
        results: list[MicroBatchResult] = []
        for start in range(0, len(batch.specs), micro_batch):
            micro_rows = range(start, min(start + micro_batch, len(batch.specs)))
            if any(row in micro_rows for row in rows):
                results.extend(self._run_micro_batch(batch, micro_rows, micro_batch, on_step))
        return results

    def _run_micro_batch(
        self, batch: SampleBatch, rows: range, micro_batch: int, on_step: OnStep
    ) -> Iterator[MicroBatchResult]:
        """These rows, padded to `micro_batch`; in two halves where memory runs out, and so on down to one."""
        specs = [batch.specs[row] for row in rows]
        padded = specs + [specs[-1]] * (micro_batch - len(specs))
        try:
            for name in ("draw", *dict.fromkeys(f"draw.{spec.id}" for spec in specs)):
                fault_point(name)
            yield MicroBatchResult(rows=rows, result=self.model.draw(padded, on_step), micro_batch=micro_batch)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if micro_batch == 1:
                raise ImageError(f"out of memory with one image at a time: {error}") from error
        free_memory()
        half = -(-micro_batch // 2)
        log.warning("out of memory with %d images at once: drawing %d at once for this batch", micro_batch, half)
        for part in (rows[:half], rows[half:]):
            if len(part):
                yield from self._run_micro_batch(batch, part, half, on_step)

    def dry_run(self, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> int:
        """Check examples of all shapes and, where the micro-batch is not known (0), draw the largest to find out what fits."""
        for spec in examples:
            try:
                self.model.check(spec)
            except InputError as error:
                raise InputError(f"image {spec.id}: {error.found}", error.expected, error.action) from error
        if micro_batch:
            return micro_batch
        fault_point("rehearse")
        largest = max(examples, key=lambda spec: spec.height * spec.width * spec.num_frames)
        try:
            return self._find_micro_batch(replace(largest, steps=min(largest.steps, 2)), batch_size)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, HalationError) or largest.steps <= 2:
                raise
        # Some solvers need more steps than two; the steps that are asked for must do.
        return self._find_micro_batch(largest, batch_size)

    def _find_micro_batch(self, spec: SampleSpec, size: int) -> int:
        while True:
            try:
                with force_eager():
                    self.model.draw([spec] * size, lambda: None).collect()
                return size
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
            free_memory()
            log.warning("%d images of %d x %d at once do not fit into memory", size, spec.height, spec.width)
            size = -(-size // 2)


def collect_images(
    micro_batch_result: MicroBatchResult, run_on_model_thread: Callable[[Callable[[], Any]], Any]
) -> list[Frames | ImageError]:
    """The images of a piece; those that overflowed in half precision are decoded again in float32, on the painting thread."""
    results = micro_batch_result.result.collect()[: len(micro_batch_result.rows)]
    overflowed = [row for row, result in enumerate(results) if isinstance(result, NonFiniteImageError)]
    repair = micro_batch_result.result.decode_in_float32
    if overflowed and repair is not None:
        for row, result in zip(overflowed, run_on_model_thread(lambda: repair(overflowed)), strict=True):
            results[row] = result
    return results


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Compiled blocks run as they are written: a dry run must not wait for a compiler."""
    torch = sys.modules.get("torch")
    token = DRY_RUN.set(True)
    try:
        with torch.compiler.set_stance("force_eager") if torch is not None else contextlib.nullcontext():
            yield
    finally:
        DRY_RUN.reset(token)
