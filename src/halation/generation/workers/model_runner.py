"""A loaded model on one device: it draws sheets in micro-batches of one size, and in smaller ones where memory runs out."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from halation.errors import HalationError, InputError
from halation.faults import fault_point
from halation.models.image_result import REHEARSING, Frames, NotFinite, OnStep, PaintError, Painting
from halation.specs import Sheet, Spec

log = logging.getLogger(__name__)


class Model(Protocol):
    """What a painter draws with: a diffusers pipeline, a checkpoint of ours, or the test card."""

    facts: dict[str, Any]
    """What the run records about it."""

    def check(self, spec: Spec) -> None:
        """InputError where it cannot draw such a spec."""

    def draw(self, specs: Sequence[Spec], on_step: OnStep) -> Painting:
        """Specs of one shape and guidance; `on_step` is called after each step of the solver."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of a sheet that were drawn together."""

    rows: range
    painting: Painting
    size: int
    """Pictures that were really drawn at once, fillers included."""


class Painter:
    """`paint(sheet)`; all its methods belong on the thread that opened the model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def paint(self, sheet: Sheet, micro_batch: int, rows: Sequence[int], on_step: OnStep) -> list[Piece]:
        """The pieces that hold these rows of a sheet, each drawn at `micro_batch` pictures at once unless memory forbids."""
        for spec in {sheet.specs[row].id for row in rows}:
            fault_point(f"paint.{spec}")
        fault_point("paint")
        pieces: list[Piece] = []
        for start in range(0, len(sheet.specs), micro_batch):
            batch = range(start, min(start + micro_batch, len(sheet.specs)))
            if any(row in batch for row in rows):
                pieces.extend(self._fitting(sheet, batch, micro_batch, on_step))
        return pieces

    def _fitting(self, sheet: Sheet, rows: range, size: int, on_step: OnStep) -> Iterator[Piece]:
        """These rows, padded to `size`; in two halves where memory runs out, and so on down to one."""
        specs = [sheet.specs[row] for row in rows]
        padded = specs + [specs[-1]] * (size - len(specs))
        try:
            for name in ("draw", *dict.fromkeys(f"draw.{spec.id}" for spec in specs)):
                fault_point(name)
            yield Piece(rows=rows, painting=self.model.draw(padded, on_step), size=size)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise PaintError(f"out of memory with one picture at a time: {error}") from error
        free_memory()
        half = -(-size // 2)
        log.warning("out of memory with %d pictures at once: drawing %d at once for this sheet", size, half)
        for part in (rows[:half], rows[half:]):
            if len(part):
                yield from self._fitting(sheet, part, half, on_step)

    def rehearse(self, examples: Sequence[Spec], sheet_size: int, micro_batch: int) -> int:
        """Check examples of all shapes and, where the micro-batch is not known (0), draw the largest to find out what fits."""
        for spec in examples:
            try:
                self.model.check(spec)
            except InputError as error:
                raise InputError(f"picture {spec.id}: {error.found}", error.expected, error.action) from error
        if micro_batch:
            return micro_batch
        fault_point("rehearse")
        largest = max(examples, key=lambda spec: spec.height * spec.width * spec.num_frames)
        try:
            return self._largest(replace(largest, steps=min(largest.steps, 2)), sheet_size)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, HalationError) or largest.steps <= 2:
                raise
        # Some solvers need more steps than two; the steps that are asked for must do.
        return self._largest(largest, sheet_size)

    def _largest(self, spec: Spec, size: int) -> int:
        while True:
            try:
                with eagerly():
                    self.model.draw([spec] * size, lambda: None).collect()
                return size
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
            free_memory()
            log.warning("%d pictures of %d x %d at once do not fit into memory", size, spec.height, spec.width)
            size = -(-size // 2)


def collected(piece: Piece, on_painting_thread: Callable[[Callable[[], Any]], Any]) -> list[Frames | PaintError]:
    """The pictures of a piece; those that overflowed in half precision are decoded again in float32, on the painting thread."""
    results = piece.painting.collect()[: len(piece.rows)]
    overflowed = [row for row, result in enumerate(results) if isinstance(result, NotFinite)]
    repair = piece.painting.repair
    if overflowed and repair is not None:
        for row, result in zip(overflowed, on_painting_thread(lambda: repair(overflowed)), strict=True):
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
def eagerly() -> Iterator[None]:
    """Compiled blocks run as they are written: a rehearsal must not wait for a compiler."""
    torch = sys.modules.get("torch")
    token = REHEARSING.set(True)
    try:
        with torch.compiler.set_stance("force_eager") if torch is not None else contextlib.nullcontext():
            yield
    finally:
        REHEARSING.reset(token)
