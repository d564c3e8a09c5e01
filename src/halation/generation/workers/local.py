"""The workers of this machine: one process a device, started, spoken to, killed and waited for by one parent.

A worker dies with its parent (PR_SET_PDEATHSIG) and hears no Ctrl+C of the terminal (own process group): the parent decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from halation.distributed.launcher import FOREIGN, PARENT, devices, ending
from halation.generation.config import GenerateConfig
from halation.generation.workers.messages import Event, Task
from halation.specs import Spec

GRACE_S = 5.0


class Crew(Protocol):
    """Workers, wherever they are; they are known by their numbers."""

    labels: Sequence[str]
    """The GPU's id as given, or the worker's number on a CPU: what the ledger calls them."""
    names: Sequence[str]
    """What a person reads: GPU 0, or worker 0."""

    def start(self, worker: int) -> None:
        """Start it, or start it again; `ready` or `refused` follows."""

    def rehearse(self, worker: int, examples: Sequence[Spec], sheet_size: int, micro_batch: int) -> None:
        """Check that it can draw these, and find out how many at once where `micro_batch` is 0; `rehearsed` or `refused` follows."""

    def give(self, worker: int, task: Task) -> None: ...

    def drop(self, worker: int, number: int) -> None:
        """Take a task back where it is not begun; `dropped`, or what became of it, follows."""

    def stop(self, worker: int) -> None:
        """Let it finish what it has begun, drop the rest, and end; `gone` follows."""

    def kill(self, worker: int) -> None:
        """End it now; `gone` follows."""

    def events(self, timeout_s: float) -> list[Event]:
        """What the workers said, or an empty list after `timeout_s`."""

    def end(self, *, at_once: bool) -> None:
        """End all of them and wait; those that are in the middle of something get a moment, unless at once."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker draws."""

    label: str
    """The GPU's id as given, or the worker's number on a CPU."""
    device: str


class _Post:
    """Orders on their way to a worker: sent by a thread, because a worker that is stopped would keep a sender waiting."""

    def __init__(self, line: connection.Connection) -> None:
        self.line = line
        self.orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._send, name="post", daemon=True)
        self.thread.start()

    def _send(self) -> None:
        # One that is already dead is told nothing, and found out by `events`.
        with contextlib.suppress(OSError):
            while (order := self.orders.get()) is not None:
                self.line.send_bytes(order)

    def close(self) -> None:
        """Called when the other end is closed, so nothing that is being sent can wait for long."""
        self.orders.put(None)
        self.thread.join(GRACE_S)
        self.line.close()


class LocalCrew:
    """One subprocess a place, each at the other end of a socket pair."""

    def __init__(self, places: Sequence[Place], settings: Mapping[str, Any], logs: Path, threads: int) -> None:
        self.places = places
        self.labels: Sequence[str] = [place.label for place in places]
        self.names: Sequence[str] = [
            f"{'worker' if place.device == 'cpu' else 'GPU'} {place.label}" for place in places
        ]
        self.settings = dict(settings)
        self.logs = logs
        self.threads = threads
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._posts: dict[int, _Post] = {}
        self._opened: set[int] = set()

    def start(self, worker: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in FOREIGN} | {
            "RANK": str(worker),
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        # -P: the folder the user stands in must not shadow modules the worker imports.
        command = [sys.executable, "-P", "-m", "halation.generation.workers.process", str(theirs.fileno())]
        self.logs.mkdir(parents=True, exist_ok=True)
        with open(self.logs / f"worker_{self.labels[worker]}.log", "ab") as log, theirs:
            self._processes[worker] = subprocess.Popen(
                command,
                env=environment,
                process_group=0,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._posts[worker] = _Post(connection.Connection(ours.detach()))
        self._opened.discard(worker)
        place = self.places[worker]
        self._tell(worker, {"do": "open", "device": place.device, "label": place.label, **self.settings})

    def rehearse(self, worker: int, examples: Sequence[Spec], sheet_size: int, micro_batch: int) -> None:
        specs = [spec.as_json() for spec in examples]
        self._tell(worker, {"do": "rehearse", "examples": specs, "sheet_size": sheet_size, "micro_batch": micro_batch})

    def give(self, worker: int, task: Task) -> None:
        self._tell(worker, {"do": "draw", "task": task.as_json()})

    def drop(self, worker: int, number: int) -> None:
        self._tell(worker, {"do": "drop", "number": number})

    def stop(self, worker: int) -> None:
        self._tell(worker, {"do": "stop"})

    def _tell(self, worker: int, order: Mapping[str, Any]) -> None:
        if worker in self._posts:
            self._posts[worker].orders.put(json.dumps(order).encode())

    def kill(self, worker: int) -> None:
        self._processes[worker].kill()

    def events(self, timeout_s: float) -> list[Event]:
        by_line = {post.line: worker for worker, post in self._posts.items()}
        if not by_line:
            time.sleep(timeout_s)
        return [
            self._heard(by_line[line])
            for line in connection.wait(list(by_line), timeout_s)
            if isinstance(line, connection.Connection)
        ]

    def _heard(self, worker: int) -> Event:
        try:
            event = Event(worker=worker, **json.loads(self._posts[worker].line.recv_bytes()))
        except (EOFError, OSError):
            return self._gone(worker)
        if event.kind == "ready":
            self._opened.add(worker)
        return event

    def _gone(self, worker: int) -> Event:
        """The line is cut: the process has ended, or is about to."""
        self._posts.pop(worker).close()
        process = self._processes[worker]
        try:
            code = process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return Event(worker=worker, kind="gone", body={"code": code, "words": ending(code)})

    def end(self, *, at_once: bool) -> None:
        for worker in list(self._posts):
            if worker in self._opened:
                self._tell(worker, {"do": "stop"})
            else:
                self.kill(worker)  # it is still loading, for nobody
        deadline = time.monotonic() + (0.0 if at_once else GRACE_S)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for post in self._posts.values():
            post.close()
        self._posts.clear()


def places_of(config: GenerateConfig) -> list[Place]:
    """A place for each worker that the flags ask for."""
    found = devices(config.nproc, config.gpu_ids, config.oversubscribe)
    labels = (
        [device.removeprefix("cuda:") for device in found] if found[0] != "cpu" else list(map(str, range(len(found))))
    )
    if len(set(labels)) < len(labels):  # several workers on one GPU
        labels = [f"{label}-{number}" for number, label in enumerate(labels)]
    return [Place(label=label, device=device) for label, device in zip(labels, found, strict=True)]
