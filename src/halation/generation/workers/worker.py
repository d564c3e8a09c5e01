"""A worker's side of the talk: tasks come in over a socket, words about them go out; it ends when the socket does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from halation.errors import HalationError
from halation.generation.image_writer import Refused
from halation.generation.workers.async_runner import Dropped, Easel
from halation.generation.workers.messages import Task
from halation.specs import Spec

log = logging.getLogger(__name__)
DEPTH = 3
"""Tasks a worker holds: one that is being stored, one that is being drawn, and the next, so that it never waits for an answer."""
BEAT_EVERY_S = 0.2


class Hand(ABC):
    """What is done with a task, and the words for whatever comes of it; where the words go is another's affair."""

    @abstractmethod
    def say(self, kind: str, task: int = -1, **body: Any) -> None:
        """Tell the supervisor."""

    def rehearse(self, easel: Easel, order: dict[str, Any]) -> None:
        try:
            examples = [Spec(**spec) for spec in order["examples"]]
            size = easel.rehearse(examples, order["sheet_size"], order["micro_batch"])
            self.say("rehearsed", micro_batch=size)
        except HalationError as error:
            self.say("refused", message=str(error), exit_code=error.exit_code)
        except Exception as error:
            log.exception("the rehearsal failed")
            self.say(
                "refused", message=f"the model cannot draw: {_words(error)}\n{traceback.format_exc()}", exit_code=1
            )

    def draw(self, easel: Easel, task: Task) -> None:
        total = task.requests[0].spec.steps * -(-task.sheet_size // task.micro_batch)
        beat = _Beat(lambda done: self.say("step", task.number, done=done, total=total))
        try:
            drawn = easel.draw(task, beat.now, beat.step)
            self.say(
                "drawn",
                task.number,
                outcomes=[asdict(outcome) for outcome in drawn.outcomes],
                seconds=round(drawn.seconds_painting, 4),
            )
        except Dropped:
            self.say("dropped", task.number)
        except Refused as error:
            self.say("failed", task.number, reason=str(error), disk=True)
        except Exception as error:
            log.exception("task %d failed", task.number)
            self.say("failed", task.number, reason=_words(error), disk=False)


class Telling(logging.Handler):
    """Warnings of ours, told to whoever draws the bars: a person reads no worker's log unasked."""

    def __init__(self, hand: Hand) -> None:
        super().__init__(logging.WARNING)
        self.hand = hand

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:  # what went wrong with a sheet is told with the sheet
            self.hand.say("said", words=record.getMessage())


class Worker(Hand):
    """Reads orders on the main thread and handles tasks on others."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    def say(self, kind: str, task: int = -1, **body: Any) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(json.dumps({"kind": kind, "task": task, "body": body}).encode())

    def serve(self, open_easel: Callable[[dict[str, Any]], Easel]) -> None:
        """Until the supervisor is gone, or says stop and everything begun is told."""
        order = self._next()
        if order is None:
            return
        began = time.perf_counter()
        logging.getLogger("halation").addHandler(Telling(self))
        try:
            easel = open_easel(order)
        except HalationError as error:
            self.say("refused", message=str(error), exit_code=error.exit_code)
            return
        self.say("ready", facts=easel.painter.model.facts, seconds=round(time.perf_counter() - began, 2))
        with ThreadPoolExecutor(DEPTH, thread_name_prefix="task") as tasks:
            while (order := self._next()) is not None:
                match order["do"]:
                    case "draw":
                        tasks.submit(self.draw, easel, Task.from_json(order["task"]))
                    case "rehearse":
                        tasks.submit(self.rehearse, easel, order)
                    case "drop":
                        easel.drop(order["number"])
                    case "stop":
                        easel.drop(None)
                        break

    def _next(self) -> dict[str, Any] | None:
        try:
            order: dict[str, Any] = json.loads(self.connection.recv_bytes())
            return order
        except (EOFError, OSError):
            os._exit(1)  # the supervisor is gone; what is half done is its ledger's to forget


class _Beat:
    """Counts steps and tells of them now and then: a sign of life, and the bar within a sheet."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell = tell
        self.done = 0
        self.told = 0.0

    def now(self) -> None:
        self.told = time.monotonic()
        self.tell(self.done)

    def step(self) -> None:
        self.done += 1
        if time.monotonic() - self.told >= BEAT_EVERY_S:
            self.now()


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return (
        text
        if isinstance(error, HalationError)
        else f"{type(error).__name__}: {text}"
        if text
        else type(error).__name__
    )
