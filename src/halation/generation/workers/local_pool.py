"""The local workers: a pool of one process per device, and the loop that they run.

A worker is `python -m halation.generation.workers.local_pool SOCKET`; it exchanges JSON messages with the pool.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Protocol

from halation.distributed import child_process
from halation.distributed.launcher import select_devices
from halation.distributed.stop_signals import leave_signals_to_parent
from halation.errors import HalationError
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import BatchTask
from halation.generation.workers.image_runner import DiskWriteError, ImageRunner, TaskDropped
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
QUEUE_DEPTH = 3
"""Tasks a worker holds: one being stored, one in progress, and the next, so that it never waits for work."""
HEARTBEAT_INTERVAL_S = 0.2
GRACE_S = 5.0
EventKind = Literal["ready", "rehearsed", "refused", "said", "step", "drawn", "failed", "dropped", "gone"]


@dataclass(frozen=True, kw_only=True)
class WorkerEvent:
    """A message from a worker, or about it: `gone` when its process ended."""

    worker: int
    kind: EventKind
    task: int = -1
    body: dict[str, Any] = field(default_factory=dict)


class WorkerPool(Protocol):
    """A pool of workers, local or remote, addressed by number."""

    labels: Sequence[str]
    """Names in the ledger: the GPU id as given, or the worker number on a CPU."""
    names: Sequence[str]
    """Names for users: GPU 0, or worker 0."""

    def start(self, worker: int) -> None:
        """Start or restart a worker; a `ready` or `refused` event follows."""

    def dry_run(self, worker: int, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> None:
        """Check that its model supports these specs; measure the micro-batch if it is 0.

        A `rehearsed` or `refused` event follows.
        """

    def submit(self, worker: int, task: BatchTask) -> None: ...

    def drop(self, worker: int, number: int) -> None:
        """Take a task back if it has not started; `dropped` or the outcome of the task follows."""

    def stop(self, worker: int) -> None:
        """Let a worker finish its started tasks, drop the rest, and exit; `gone` follows."""

    def kill(self, worker: int) -> None:
        """Kill a worker; `gone` follows."""

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        """Return the events of the workers; wait up to `timeout_s` if there are none."""

    def shutdown(self, *, at_once: bool) -> None:
        """End all workers and wait for them; busy ones get a grace period unless `at_once`."""


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """The device of a worker."""

    label: str
    """The GPU id as given, or the worker number on a CPU."""
    device: str


class SendQueue:
    """Sends messages to a worker on a thread, because a suspended worker blocks the sender."""

    def __init__(self, conn: connection.Connection) -> None:
        self.conn = conn
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._send_messages, name="post", daemon=True)
        self.thread.start()

    def _send_messages(self) -> None:
        # Errors are ignored: `events` detects a dead worker.
        with contextlib.suppress(OSError):
            while (message := self.messages.get()) is not None:
                self.conn.send_bytes(message)

    def close(self) -> None:
        """Stop the thread; the other end is already closed, so that no send blocks for long."""
        self.messages.put(None)
        self.thread.join(GRACE_S)
        self.conn.close()


class LocalWorkerPool:
    """A pool of subprocesses, one per slot, each connected by a socket pair."""

    def __init__(self, slots: Sequence[WorkerSlot], settings: Mapping[str, Any], logs: Path, threads: int) -> None:
        self.slots = slots
        self.labels: Sequence[str] = [slot.label for slot in slots]
        self.names: Sequence[str] = [f"{'worker' if place.device == 'cpu' else 'GPU'} {place.label}" for place in slots]
        self.settings = dict(settings)
        self.logs = logs
        self.threads = threads
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._send_queues: dict[int, SendQueue] = {}
        self._ready_workers: set[int] = set()

    def start(self, worker: int) -> None:
        ours, theirs = socket.socketpair()
        environment = child_process.environment_without_launcher() | {
            "RANK": str(worker),
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        arguments = ["-m", "halation.generation.workers.local_pool", str(theirs.fileno())]
        self.logs.mkdir(exist_ok=True)
        with open(self.logs / f"worker_{self.labels[worker]}.log", "ab") as file, theirs:
            self._processes[worker] = child_process.start_child(
                arguments, environment, stdout=file, stderr=file, pass_fds=[theirs.fileno()]
            )
        self._send_queues[worker] = SendQueue(connection.Connection(ours.detach()))
        self._ready_workers.discard(worker)
        slot = self.slots[worker]
        self._send(worker, {"do": "open", "device": slot.device, "label": slot.label, **self.settings})

    def dry_run(self, worker: int, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> None:
        specs = [spec.as_json() for spec in examples]
        self._send(worker, {"do": "rehearse", "examples": specs, "batch_size": batch_size, "micro_batch": micro_batch})

    def submit(self, worker: int, task: BatchTask) -> None:
        self._send(worker, {"do": "draw", "task": task.as_json()})

    def drop(self, worker: int, number: int) -> None:
        self._send(worker, {"do": "drop", "number": number})

    def stop(self, worker: int) -> None:
        self._send(worker, {"do": "stop"})

    def _send(self, worker: int, message: Mapping[str, Any]) -> None:
        if worker in self._send_queues:
            self._send_queues[worker].messages.put(json.dumps(message).encode())

    def kill(self, worker: int) -> None:
        self._processes[worker].kill()

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        worker_by_conn = {send_queue.conn: worker for worker, send_queue in self._send_queues.items()}
        if not worker_by_conn:
            time.sleep(timeout_s)
        return [
            self._receive_event(worker_by_conn[conn])
            for conn in connection.wait(list(worker_by_conn), timeout_s)
            if isinstance(conn, connection.Connection)
        ]

    def _receive_event(self, worker: int) -> WorkerEvent:
        try:
            event = WorkerEvent(worker=worker, **json.loads(self._send_queues[worker].conn.recv_bytes()))
        except (EOFError, OSError):
            return self._handle_exit(worker)
        if event.kind == "ready":
            self._ready_workers.add(worker)
        return event

    def _handle_exit(self, worker: int) -> WorkerEvent:
        """Handle a closed connection: the process has ended or is about to."""
        self._send_queues.pop(worker).close()
        process = self._processes[worker]
        child_process.wait_or_kill([process], GRACE_S)
        code = process.returncode
        return WorkerEvent(worker=worker, kind="gone", body={"code": code, "words": child_process.describe_exit(code)})

    def shutdown(self, *, at_once: bool) -> None:
        for worker in list(self._send_queues):
            if worker in self._ready_workers:
                self._send(worker, {"do": "stop"})
            else:
                self.kill(worker)  # still loading
        child_process.wait_or_kill(list(self._processes.values()), 0.0 if at_once else GRACE_S)
        for send_queue in self._send_queues.values():
            send_queue.close()
        self._send_queues.clear()


def list_local_slots(config: GenerateConfig) -> list[WorkerSlot]:
    """Return one slot for each worker that the flags request."""
    found = select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    labels = (
        [device.removeprefix("cuda:") for device in found] if found[0] != "cpu" else list(map(str, range(len(found))))
    )
    if len(set(labels)) < len(labels):  # several workers on one GPU
        labels = [f"{label}-{number}" for number, label in enumerate(labels)]
    return [WorkerSlot(label=label, device=device) for label, device in zip(labels, found, strict=True)]


# -- in the worker's process


class TaskHandler(ABC):
    """Runs tasks and reports their outcomes; a subclass defines how events are sent."""

    @abstractmethod
    def send_event(self, kind: str, task: int = -1, **body: Any) -> None:
        """Send an event to the supervisor."""

    def open_runner(self, runner: ImageRunner) -> bool:
        """Load the model; return False if it is refused."""
        start_time = time.perf_counter()
        try:
            runner.prepare()
        except HalationError as error:
            self.send_event("refused", message=str(error), exit_code=error.exit_code)
            return False
        self.send_event("ready", facts=dict(runner.model.facts), seconds=round(time.perf_counter() - start_time, 2))
        return True

    def check_plan(self, runner: ImageRunner, settings: dict[str, Any]) -> None:
        """Check that the model supports the plan's examples, and measure the micro-batch if it is 0."""
        try:
            examples = [SampleSpec(**spec) for spec in settings["examples"]]
            size = runner.dry_run(examples, settings["batch_size"], settings["micro_batch"])
            self.send_event("rehearsed", micro_batch=size)
        except HalationError as error:
            self.send_event("refused", message=str(error), exit_code=error.exit_code)
        except Exception as error:
            log.exception("the dry run failed")
            self.send_event(
                "refused",
                message=f"the model cannot generate images: {_error_text(error)}\n{traceback.format_exc()}",
                exit_code=1,
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
    """Sends warnings to the supervisor, which logs them, because worker logs are seldom read."""

    def __init__(self, task_handler: TaskHandler) -> None:
        super().__init__(logging.WARNING)
        self.task_handler = task_handler

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:  # an error is reported with its batch
            self.task_handler.send_event("said", words=record.getMessage())


class LocalWorker(TaskHandler):
    """The worker process: receives messages on the main thread, runs tasks on other threads."""

    def __init__(self, conn: connection.Connection) -> None:
        self.conn = conn
        self._send_lock = threading.Lock()

    def send_event(self, kind: str, task: int = -1, **body: Any) -> None:
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.conn.send_bytes(json.dumps({"kind": kind, "task": task, "body": body}).encode())

    def serve(self) -> None:
        """Run until the supervisor is gone, or sent `stop` and all started tasks are reported."""
        message = self._receive_message()
        if message is None:
            return
        logging.getLogger("halation").addHandler(EventLogHandler(self))
        runner = ImageRunner(message)
        if not self.open_runner(runner):
            return
        with ThreadPoolExecutor(QUEUE_DEPTH, thread_name_prefix="task") as executor:
            while (message := self._receive_message()) is not None:
                match message["do"]:
                    case "draw":
                        executor.submit(self.run_task, runner, BatchTask.from_json(message["task"]))
                    case "rehearse":
                        executor.submit(self.check_plan, runner, message)
                    case "drop":
                        runner.drop(message["number"])
                    case "stop":
                        runner.drop(None)
                        break

    def _receive_message(self) -> dict[str, Any] | None:
        try:
            message: dict[str, Any] = json.loads(self.conn.recv_bytes())
            return message
        except (EOFError, OSError):
            os._exit(1)  # the supervisor is gone; unfinished work is not in the ledger


class _StepReporter:
    """Counts steps and reports them at intervals, as a heartbeat and for the progress bar."""

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
    if isinstance(error, HalationError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> int:
    child_process.tie_to_parent()
    leave_signals_to_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    LocalWorker(connection.Connection(int(sys.argv[1]))).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of some libraries never end


if __name__ == "__main__":
    sys.exit(main())
