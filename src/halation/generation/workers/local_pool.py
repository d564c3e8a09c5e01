"""The workers of this machine: one process a device, started, spoken to, killed and waited for by one parent."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Protocol

from halation.distributed.child_process import describe_exit, environment_without_launcher, start_child, wait_or_kill
from halation.distributed.launcher import select_devices
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import BatchTask
from halation.sample_specs import SampleSpec

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
    """Workers, wherever they are; they are known by their numbers."""

    labels: Sequence[str]
    """The GPU's id as given, or the worker's number on a CPU: what the ledger calls them."""
    names: Sequence[str]
    """What a person reads: GPU 0, or worker 0."""

    def start(self, worker: int) -> None:
        """Start it, or start it again; `ready` or `refused` follows."""

    def dry_run(self, worker: int, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> None:
        """Check that it can draw these, and find out how many at once where `micro_batch` is 0; a `rehearsed` or `refused` event follows."""

    def submit(self, worker: int, task: BatchTask) -> None: ...

    def drop(self, worker: int, number: int) -> None:
        """Take a task back where it is not begun; `dropped`, or what became of it, follows."""

    def stop(self, worker: int) -> None:
        """Let it finish what it has begun, drop the rest, and end; `gone` follows."""

    def kill(self, worker: int) -> None:
        """End it now; `gone` follows."""

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        """What the workers said, or an empty list after `timeout_s`."""

    def shutdown(self, *, at_once: bool) -> None:
        """End all of them and wait; those that are in the middle of something get a moment, unless at once."""


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """Where a worker draws."""

    label: str
    """The GPU's id as given, or the worker's number on a CPU."""
    device: str


class SendQueue:
    """Orders on their way to a worker: sent by a thread, because a worker that is stopped would keep a sender waiting."""

    def __init__(self, conn: connection.Connection) -> None:
        self.conn = conn
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._send_messages, name="post", daemon=True)
        self.thread.start()

    def _send_messages(self) -> None:
        # One that is already dead is told nothing, and found out by `events`.
        with contextlib.suppress(OSError):
            while (message := self.messages.get()) is not None:
                self.conn.send_bytes(message)

    def close(self) -> None:
        """Called when the other end is closed, so nothing that is being sent can wait for long."""
        self.messages.put(None)
        self.thread.join(GRACE_S)
        self.conn.close()


class LocalWorkerPool:
    """One subprocess a place, each at the other end of a socket pair."""

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
        environment = environment_without_launcher() | {
            "RANK": str(worker),
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        arguments = ["-m", "halation.generation.workers.process", str(theirs.fileno())]
        self.logs.mkdir(exist_ok=True)
        with open(self.logs / f"worker_{self.labels[worker]}.log", "ab") as log, theirs:
            self._processes[worker] = start_child(
                arguments, environment, stdout=log, stderr=log, pass_fds=[theirs.fileno()]
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
        """The line is cut: the process has ended, or is about to."""
        self._send_queues.pop(worker).close()
        process = self._processes[worker]
        wait_or_kill([process], GRACE_S)
        code = process.returncode
        return WorkerEvent(worker=worker, kind="gone", body={"code": code, "words": describe_exit(code)})

    def shutdown(self, *, at_once: bool) -> None:
        for worker in list(self._send_queues):
            if worker in self._ready_workers:
                self._send(worker, {"do": "stop"})
            else:
                self.kill(worker)  # it is still loading, for nobody
        wait_or_kill(list(self._processes.values()), 0.0 if at_once else GRACE_S)
        for send_queue in self._send_queues.values():
            send_queue.close()
        self._send_queues.clear()


def list_local_slots(config: GenerateConfig) -> list[WorkerSlot]:
    """A place for each worker that the flags ask for."""
    found = select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    labels = (
        [device.removeprefix("cuda:") for device in found] if found[0] != "cpu" else list(map(str, range(len(found))))
    )
    if len(set(labels)) < len(labels):  # several workers on one GPU
        labels = [f"{label}-{number}" for number, label in enumerate(labels)]
    return [WorkerSlot(label=label, device=device) for label, device in zip(labels, found, strict=True)]
