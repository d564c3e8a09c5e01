"""A worker on a node of a Ray cluster: an easel that is asked for sheets and answers with words and with the pictures themselves.

It touches no folder of the run: what it draws travels back with the answer. Ray may start it again in a new process at any time,
so nothing here is needed that a new process could not make again from the order.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from halation.distributed.launcher import FOREIGN
from halation.errors import HalationError, InputError
from halation.generation.image_writer import Parcel
from halation.generation.workers.async_runner import Easel
from halation.generation.workers.messages import Task
from halation.generation.workers.worker import DEPTH, Hand

CALLS_AT_ONCE = DEPTH + 4
"""Sheets, and the short calls that must not wait behind them."""
NEWS_EVERY_S = 0.25
MAX_LINES = 1000
PACKAGES = ("halation", "torch", "diffusers", "transformers", "numpy", "isal", "av")
OpenEasel = Callable[[Mapping[str, Any], Callable[[Parcel], None]], Easel]


class PaintingActor(Hand):
    """Its methods are called from several threads at once; each answer is a message as a local worker would send it."""

    def __init__(self, order: dict[str, Any], open_easel: OpenEasel, environment: dict[str, str]) -> None:
        for name in FOREIGN:
            os.environ.pop(name, None)
        os.environ.update(environment)
        self._order = order
        self._open_easel = open_easel
        self._who = uuid.uuid4().hex
        self._easel: Easel | None = None
        self._opening = threading.Lock()
        self._lock = threading.Condition()
        self._steps: dict[int, dict[str, int]] = {}
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._answers: dict[int, dict[str, Any]] = {}
        self._expected: Counter[str] = Counter()
        self._parcels: dict[str, Parcel] = {}
        logger = logging.getLogger("halation")
        logger.setLevel(logging.INFO)
        logger.addHandler(_Lines(self._lines))

    def say(self, kind: str, task: int = -1, **body: Any) -> None:
        with self._lock:
            if kind == "step":
                self._steps[task] = body
                self._lock.notify_all()
            else:
                self._answers[task] = {"kind": kind, "task": task, "body": body}

    # -- called by the crew

    def hear(self, wait_s: float) -> dict[str, Any]:
        """News: steps and log lines; an answer without any, after `wait_s`, says that it lives."""
        time.sleep(NEWS_EVERY_S)
        with self._lock:
            self._lock.wait_for(lambda: self._steps or self._lines, wait_s)
            steps, self._steps = self._steps, {}
        return {"who": self._who, "host": platform.node(), "steps": steps, "lines": self._taken_lines()}

    def open(self) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            easel = self._opened()
        except HalationError as error:
            return _refused(error)
        facts = dict(easel.painter.model.facts)
        return {
            "kind": "ready",
            "task": -1,
            "body": {"facts": facts, "seconds": round(time.perf_counter() - began, 2)},
            "who": self._who,
        }

    def rehearse_sheet(self, examples: Sequence[dict[str, Any]], sheet_size: int, micro_batch: int) -> dict[str, Any]:
        order = {"examples": examples, "sheet_size": sheet_size, "micro_batch": micro_batch}
        try:
            self.rehearse(self._opened(), order)
        except HalationError as error:
            return _refused(error)
        return self._answers.pop(-1)

    def draw_sheet(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[Parcel]]:
        """What became of the sheet, and its pictures."""
        task = Task.from_json(values)
        names = [request.name for request in task.requests if request.spec.index in task.wanted]
        with self._lock:
            self._expected.update(names)
        try:
            self.draw(self._opened(), task)
        except HalationError as error:
            return _refused(error), []
        finally:
            parcels = self._collected(names)
        return {**self._answers.pop(task.number), "lines": self._taken_lines(), "who": self._who}, parcels

    def drop(self, number: int | None) -> None:
        if self._easel is not None:
            self._easel.drop(number)

    # -- inside

    def _taken_lines(self) -> list[str]:
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
            return lines

    def _opened(self) -> Easel:
        """The easel, opened by whoever needs it first: after a restart by Ray that is the sheet that is drawn again."""
        with self._opening:
            if self._easel is None:
                self._check()
                self._easel = self._open_easel(self._order, self._deliver)
        return self._easel

    def _check(self) -> None:
        node = f"{self._order['node']} ({platform.node()})"
        path = self._order["model"].get("path")
        if path is not None and not Path(path).is_dir():
            raise InputError(
                f"{node} has no folder {path}",
                "the model under the same path on every node of the cluster",
                "put it on a shared file system, or copy it to every node",
            )
        different = [
            f"{name} {here or 'missing'} instead of {there}"
            for name, there in self._order["versions"].items()
            if (here := installed().get(name)) != there
        ]
        if different:
            raise InputError(
                f"{node} has {', '.join(different)}",
                "the same versions on every node: they are part of the pictures",
                "install there what the machine with this command has",
            )

    def _deliver(self, parcel: Parcel) -> None:
        with self._lock:
            name = parcel.files[-1][0].rpartition(".")[0]
            if self._expected[name]:  # the sheet of a late one may have failed by another picture
                self._parcels[name] = parcel

    def _collected(self, names: Sequence[str]) -> list[Parcel]:
        """The sheet's parcels; the last sheet that expects a picture takes it out (one may be here twice, alone the second time)."""
        with self._lock:
            parcels = [self._parcels[name] for name in names if name in self._parcels]
            self._expected.subtract(names)
            for name in names:
                if not self._expected[name]:
                    del self._expected[name]
                    self._parcels.pop(name, None)
            return parcels


def installed() -> dict[str, str]:
    """Versions of what decides a picture's bytes; a build's suffix (+cpu, +cu128) may differ between a head node and the others."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


class _Lines(logging.Handler):
    """Keeps what is logged until the crew asks for it."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self.lines = lines
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _refused(error: HalationError) -> dict[str, Any]:
    return {"kind": "refused", "task": -1, "body": {"message": str(error), "exit_code": error.exit_code}}
