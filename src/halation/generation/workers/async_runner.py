"""One painter and the threads around it: the painter draws the next sheet while the last one is encoded and published.

All that touches the model runs on one thread. A sheet is begun only when the one before the last is stored, so a kill costs the
sheet being drawn and, for the moment its files take, the one before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from halation.faults import fault_point
from halation.generation.image_writer import Parcel, Style, pack
from halation.generation.ledger import Outcome
from halation.generation.requests import Request
from halation.generation.workers.messages import Task
from halation.generation.workers.model_runner import Model, OnStep, Painter, Piece, collected
from halation.models.image_result import PaintError
from halation.specs import Spec

log = logging.getLogger(__name__)


class Dropped(Exception):
    """The task was taken back before it was begun."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A finished task: its outcomes, and for how long the device worked for it alone."""

    outcomes: list[Outcome]
    seconds_painting: float


class Easel:
    """Draws tasks; `draw` may be called from several threads at once, which is what makes the overlap."""

    def __init__(
        self,
        open_model: Callable[[], Model],
        style: Style,
        label: str,
        store: Callable[[Parcel], None],
        num_encoders: int,
    ) -> None:
        self.style = style
        self.label = label
        self.store = store
        self._painting = ThreadPoolExecutor(1, thread_name_prefix="painting")
        self._encoding = ThreadPoolExecutor(num_encoders, thread_name_prefix="encoding")
        self._unstored = threading.Semaphore(2)
        self._lock = threading.Lock()
        self._dropped: set[int] = set()
        self._busy_until = 0.0
        self.painter = self._on_painting_thread(lambda: Painter(open_model()))

    def _on_painting_thread(self, action: Callable[[], Any]) -> Any:
        return self._painting.submit(action).result()

    def rehearse(self, examples: list[Spec], sheet_size: int, micro_batch: int) -> int:
        size: int = self._on_painting_thread(lambda: self.painter.rehearse(examples, sheet_size, micro_batch))
        return size

    def drop(self, number: int | None) -> None:
        """Take back a task that is not begun, or with None all of them for good."""
        with self._lock:
            self._dropped.add(-1 if number is None else number)

    def draw(self, task: Task, on_begin: Callable[[], None], on_step: OnStep) -> Drawn:
        """Paint, encode, store; the outcome of a picture that could not be made is its reason."""
        with self._unstored:
            began, pieces = self._on_painting_thread(lambda: self._paint(task, on_begin, on_step))
            results: dict[int, tuple[Any, int]] = {}
            for piece in pieces:
                for row, result in zip(piece.rows, collected(piece, self._on_painting_thread), strict=True):
                    results[row] = (result, piece.size)
            seconds = self._busy(began)
            share = seconds / max(1, len(task.wanted))
            parcels = [
                self._encoding.submit(self._finish, task, request, *results[row], share)
                for row, request in enumerate(task.requests)
                if request.spec.index in task.wanted
            ]
            wait(
                parcels
            )  # a sheet that fails may be drawn again at once: nothing of it may still be on its way to the disk
            return Drawn(outcomes=[parcel.result() for parcel in parcels], seconds_painting=seconds)

    def _paint(self, task: Task, on_begin: Callable[[], None], on_step: OnStep) -> tuple[float, list[Piece]]:
        with self._lock:
            if self._dropped & {-1, task.number}:
                self._dropped.discard(task.number)  # it may come back, where who took it over died
                raise Dropped
        on_begin()
        began = time.perf_counter()
        rows = [row for row, request in enumerate(task.requests) if request.spec.index in task.wanted]
        return began, self.painter.paint(task.sheet, task.micro_batch, rows, on_step)

    def _busy(self, began: float) -> float:
        """Seconds since `began` that no other sheet has counted: on a GPU two sheets' times overlap."""
        with self._lock:
            now = time.perf_counter()
            seconds = now - max(began, self._busy_until)
            self._busy_until = now
            return seconds

    def _finish(self, task: Task, request: Request, result: Any, size: int, seconds: float) -> Outcome:
        index = request.spec.index
        if isinstance(result, PaintError):
            return Outcome(index=index, state="failed", worker=self.label, reason=str(result))
        try:
            fault_point("encode")
            parcel = pack(request, result, self.style)
        except Exception as error:
            log.exception("picture %s could not be encoded", request.spec.id)
            reason = f"could not be encoded: {type(error).__name__}: {error}"
            return Outcome(index=index, state="failed", worker=self.label, reason=reason)
        self.store(parcel)
        return Outcome(
            index=index,
            state="done",
            sha256=parcel.sha256,
            num_bytes=parcel.num_bytes,
            worker=self.label,
            seconds=round(seconds, 4),
            micro_batch=0 if size == task.micro_batch else size,
        )
