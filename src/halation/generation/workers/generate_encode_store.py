"""One model and the threads around it: the next batch is generated while the last one is encoded and stored.

All that touches the model runs on one thread. A batch is begun only when the one before the last is stored, so a kill costs the
batch being drawn and, for the moment its files take, the one before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from halation.fault_injection import fault_point
from halation.generation.image_requests import ImageRequest
from halation.generation.image_writer import EncodedImage, EncodeOptions, encode_image
from halation.generation.ledger import ImageOutcome
from halation.generation.workers.messages import BatchTask
from halation.generation.workers.model_runner import ImageModel, MicroBatchResult, ModelRunner, OnStep, collect_images
from halation.models.async_image_result import ImageError
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class TaskDropped(Exception):
    """The task was taken back before it was begun."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A finished task: its outcomes, and for how long the device worked for it alone."""

    outcomes: list[ImageOutcome]
    busy_s: float


class AsyncRunner:
    """Runs tasks; `run_task` may be called from several threads at once, which is what makes the overlap."""

    def __init__(
        self,
        open_model: Callable[[], ImageModel],
        encode_options: EncodeOptions,
        label: str,
        store: Callable[[EncodedImage], None],
        num_encoders: int,
    ) -> None:
        self.encode_options = encode_options
        self.label = label
        self.store = store
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="painting")
        self._encoder_threads = ThreadPoolExecutor(num_encoders, thread_name_prefix="encoding")
        self._unstored_batches = threading.Semaphore(2)
        self._lock = threading.Lock()
        self._dropped_tasks: set[int] = set()
        self._busy_until = 0.0
        self.runner = self._run_on_model_thread(lambda: ModelRunner(open_model()))

    def _run_on_model_thread(self, action: Callable[[], Result]) -> Result:
        return self._model_thread.submit(action).result()

    def dry_run(self, examples: list[SampleSpec], batch_size: int, micro_batch: int) -> int:
        return self._run_on_model_thread(lambda: self.runner.dry_run(examples, batch_size, micro_batch))

    def drop(self, number: int | None) -> None:
        """Take back a task that is not begun, or with None all of them for good."""
        with self._lock:
            self._dropped_tasks.add(-1 if number is None else number)

    def run_task(self, task: BatchTask, on_begin: Callable[[], None], on_step: OnStep) -> TaskResult:
        """Run the model, encode, store; the outcome of an image that could not be made is its reason."""
        with self._unstored_batches:
            start_time, micro_batch_results = self._run_on_model_thread(
                lambda: self._run_model(task, on_begin, on_step)
            )
            results: dict[int, tuple[Any, int]] = {}
            for micro_batch_result in micro_batch_results:
                for row, result in zip(
                    micro_batch_result.rows, collect_images(micro_batch_result, self._run_on_model_thread), strict=True
                ):
                    results[row] = (result, micro_batch_result.micro_batch)
            seconds = self._measure_busy_s(start_time)
            image_s = seconds / max(1, len(task.wanted))
            futures = [
                self._encoder_threads.submit(self._encode_and_store, task, request, *results[row], image_s)
                for row, request in enumerate(task.requests)
                if request.spec.index in task.wanted
            ]
            wait(
                futures
            )  # a batch that fails may be drawn again at once: nothing of it may still be on its way to the disk
            return TaskResult(outcomes=[future.result() for future in futures], busy_s=seconds)

    def _run_model(
        self, task: BatchTask, on_begin: Callable[[], None], on_step: OnStep
    ) -> tuple[float, list[MicroBatchResult]]:
        with self._lock:
            if self._dropped_tasks & {-1, task.number}:
                self._dropped_tasks.discard(task.number)  # it may come back, where who took it over died
                raise TaskDropped
        on_begin()
        start_time = time.perf_counter()
        rows = [row for row, request in enumerate(task.requests) if request.spec.index in task.wanted]
        return start_time, self.runner.run_batch(task.batch, task.micro_batch, rows, on_step)

    def _measure_busy_s(self, start_time: float) -> float:
        """Seconds since `start_time` that no other batch has counted: on a GPU two batches' times overlap."""
        with self._lock:
            now = time.perf_counter()
            seconds = now - max(start_time, self._busy_until)
            self._busy_until = now
            return seconds

    def _encode_and_store(
        self, task: BatchTask, request: ImageRequest, result: Any, size: int, seconds: float
    ) -> ImageOutcome:
        index = request.spec.index
        if isinstance(result, ImageError):
            return ImageOutcome(index=index, state="failed", worker=self.label, reason=str(result))
        try:
            fault_point("encode")
            encoded_image = encode_image(request, result, self.encode_options)
        except Exception as error:
            log.exception("image %s could not be encoded", request.spec.id)
            reason = f"could not be encoded: {type(error).__name__}: {error}"
            return ImageOutcome(index=index, state="failed", worker=self.label, reason=reason)
        self.store(encoded_image)
        return ImageOutcome(
            index=index,
            state="done",
            sha256=encoded_image.sha256,
            num_bytes=encoded_image.num_bytes,
            worker=self.label,
            seconds=round(seconds, 4),
            micro_batch=0 if size == task.micro_batch else size,
        )
