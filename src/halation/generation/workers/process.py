"""One worker of `halation generate`, as its worker pool starts it: `python -m halation.generation.workers.process SOCKET`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from halation.distributed.child_process import tie_to_parent
from halation.distributed.stop_signals import leave_signals_to_parent
from halation.errors import HalationError
from halation.generation.image_requests import BatchTask
from halation.generation.image_writer import DiskWriteError
from halation.generation.workers.image_runner import ImageRunner, TaskDropped
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
QUEUE_DEPTH = 3
"""Tasks a worker holds: one that is being stored, one that is being drawn, and the next, so that it never waits for an answer."""
HEARTBEAT_INTERVAL_S = 0.2


class TaskHandler(ABC):
    """What is done with a task, and the words for whatever comes of it; where the words go is another's affair."""

    @abstractmethod
    def send_event(self, kind: str, task: int = -1, **body: Any) -> None:
        """Tell the supervisor."""

    def dry_run(self, runner: ImageRunner, settings: dict[str, Any]) -> None:
        try:
            examples = [SampleSpec(**spec) for spec in settings["examples"]]
            size = runner.dry_run(examples, settings["batch_size"], settings["micro_batch"])
            self.send_event("rehearsed", micro_batch=size)
        except HalationError as error:
            self.send_event("refused", message=str(error), exit_code=error.exit_code)
        except Exception as error:
            log.exception("the dry run failed")
            self.send_event(
                "refused", message=f"the model cannot draw: {_error_text(error)}\n{traceback.format_exc()}", exit_code=1
            )

    def run_task(self, runner: ImageRunner, task: BatchTask) -> None:
        total = task.requests[0].spec.steps * -(-task.batch_size // task.micro_batch)
        step_reporter = _StepReporter(lambda done: self.send_event("step", task.number, done=done, total=total))
        try:
            result = runner.run_task(task, step_reporter.report, step_reporter.step)
            self.send_event(
                "drawn",
                task.number,
                outcomes=[asdict(outcome) for outcome in result.outcomes],
                seconds=round(result.busy_s, 4),
            )
        except TaskDropped:
            self.send_event("dropped", task.number)
        except DiskWriteError as error:
            self.send_event("failed", task.number, reason=str(error), disk=True)
        except Exception as error:
            log.exception("task %d failed", task.number)
            self.send_event("failed", task.number, reason=_error_text(error), disk=False)


class EventLogHandler(logging.Handler):
    """Warnings of ours, told to whoever draws the bars: a person reads no worker's log unasked."""

    def __init__(self, task_handler: TaskHandler) -> None:
        super().__init__(logging.WARNING)
        self.task_handler = task_handler

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:  # what went wrong with a batch is told with the batch
            self.task_handler.send_event("said", words=record.getMessage())


class LocalWorker(TaskHandler):
    """Reads orders on the main thread and handles tasks on others."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._send_lock = threading.Lock()

    def send_event(self, kind: str, task: int = -1, **body: Any) -> None:
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(json.dumps({"kind": kind, "task": task, "body": body}).encode())

    def serve(self) -> None:
        """Until the supervisor is gone, or sends `stop` and everything begun is reported."""
        message = self._receive_message()
        if message is None:
            return
        start_time = time.perf_counter()
        logging.getLogger("halation").addHandler(EventLogHandler(self))
        try:
            runner = ImageRunner(message)
            runner.prepare()
        except HalationError as error:
            self.send_event("refused", message=str(error), exit_code=error.exit_code)
            return
        self.send_event("ready", facts=runner.model.facts, seconds=round(time.perf_counter() - start_time, 2))
        with ThreadPoolExecutor(QUEUE_DEPTH, thread_name_prefix="task") as executor:
            while (message := self._receive_message()) is not None:
                match message["do"]:
                    case "draw":
                        executor.submit(self.run_task, runner, BatchTask.from_json(message["task"]))
                    case "rehearse":
                        executor.submit(self.dry_run, runner, message)
                    case "drop":
                        runner.drop(message["number"])
                    case "stop":
                        runner.drop(None)
                        break

    def _receive_message(self) -> dict[str, Any] | None:
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
            return message
        except (EOFError, OSError):
            os._exit(1)  # the supervisor is gone; what is half done is its ledger's to forget


class _StepReporter:
    """Counts steps and tells of them now and then: a sign of life, and the bar within a batch."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self.send = send
        self.num_done = 0
        self.last_report_at = 0.0

    def report(self) -> None:
        self.last_report_at = time.monotonic()
        self.send(self.num_done)

    def step(self) -> None:
        self.num_done += 1
        if time.monotonic() - self.last_report_at >= HEARTBEAT_INTERVAL_S:
            self.report()


def _error_text(error: BaseException) -> str:
    text = str(error).strip()
    return (
        text
        if isinstance(error, HalationError)
        else f"{type(error).__name__}: {text}"
        if text
        else type(error).__name__
    )


def main() -> int:
    tie_to_parent()
    leave_signals_to_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    LocalWorker(Connection(int(sys.argv[1]))).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' own threads have nothing left to say, and some never end


if __name__ == "__main__":
    sys.exit(main())
