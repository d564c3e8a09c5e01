"""Processes that make pictures where making them holds the interpreter lock, or is not to be trusted; they die with their parent."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from halation.data.dataset import Picture, Pictures
from halation.errors import HalationError

Made = TypeVar("Made")
_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 5.0
"""For the end of a process that was killed; one that hangs in a file system's code outlasts it."""


class Stack(NamedTuple):
    """Some pictures, stacked: pixels (or latents) first."""

    pixels: np.ndarray
    captions: list[str]
    labels: np.ndarray
    originals: np.ndarray
    """(n, 2) int64: heights and widths of the pictures as they were."""


def stack(pictures: Sequence[Picture]) -> Stack:
    """Pictures of one shape as one array."""
    return Stack(
        np.stack([picture.pixels for picture in pictures]),
        [picture.caption for picture in pictures],
        np.array([picture.label for picture in pictures], np.int64),
        np.array([picture.original for picture in pictures], np.int64).reshape(-1, 2),
    )


def pictures(stacked: Stack) -> list[Picture]:
    """The single pictures again; their pixels are views."""
    originals = [(height, width) for height, width in stacked.originals.tolist()]
    rows = zip(stacked.pixels, stacked.captions, stacked.labels.tolist(), originals, strict=True)
    return [Picture(pixels=pixels, caption=text, label=label, original=size) for pixels, text, label, size in rows]


def joined(stacks: Sequence[Stack]) -> Stack:
    """Several stacks as one, in order."""
    captions = [caption for one in stacks for caption in one.captions]
    labels = np.concatenate([one.labels for one in stacks])
    originals = np.concatenate([one.originals for one in stacks])
    return Stack(np.concatenate([one.pixels for one in stacks]), captions, labels, originals)


def draw(source: Pictures, part: str, indices: Sequence[int]) -> Stack:
    """The pictures of `part` ("train" or "heldout") at these indices, made in this process."""
    one = source.train if part == "train" else source.heldout
    return stack([one(int(index)) for index in indices])


class WorkerDied(HalationError):
    """A process ended while it was needed: a decoder crashed, or the system killed it for memory."""

    def __init__(self, how: str, arguments: Sequence[Any]) -> None:
        super().__init__(
            f"a process that makes pictures {how}: a decoder crashed on a picture, or memory ran out; use fewer processes (--num_workers)"
        )
        self.how = how
        self.arguments = tuple(arguments)
        """What it was asked for last."""


class _Request(NamedTuple):
    future: Future[Any]
    arguments: tuple[Any, ...]
    message: bytes


class Workers(Generic[Made]):
    """A fixed number of spawned processes, each with its own copy of `make`; they live as long as the thread that made them.

    Each has a pipe of its own, which nobody else holds: its death is an end of file, even in the middle of an answer. The
    first death ends all, and whatever was or is asked for is a WorkerDied.
    """

    def __init__(self, make: Callable[..., Made], num_workers: int) -> None:
        self.num_workers = num_workers
        self._asked: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over: Callable[[], BaseException] | None = None
        self._processes: list[SpawnProcess] = []
        self._threads: list[threading.Thread] = []
        plan = pickle.dumps(make)
        # They end here when the interpreter does: multiprocessing would end them by a signal that they ignore, and wait.
        atexit.register(self.close)
        try:
            # The kernel ties "die with the parent" to the thread that starts a process: the one that owns this pool starts
            # them all, or a prefetching thread's end would kill some.
            pipes = [self._started() for _ in range(num_workers)]
        except BaseException:
            self.close()
            raise
        for process, pipe in zip(self._processes, pipes, strict=True):
            thread = threading.Thread(target=self._tend, args=(process, pipe, plan), name="worker", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _started(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        with there:
            process = context.Process(target=_serve, args=(there, os.getpid()), daemon=True)
            process.start()
        self._processes.append(process)
        return here

    def ask(self, *arguments: Any) -> Future[Made]:
        """`make` of these arguments, in one of the processes."""
        future: Future[Made] = Future()
        request = _Request(future, arguments, pickle.dumps(arguments))
        with self._lock:
            if self._over is None:
                self._asked.put(request)
            else:
                future.set_exception(self._over())
        return future

    def close(self) -> None:
        """End the processes; what was asked for and not answered is dropped."""
        atexit.unregister(self.close)
        self._end(lambda: RuntimeError("the processes were closed"))
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        for process in self._processes:
            process.join(_PATIENCE_S)

    def _end(self, why: Callable[[], BaseException]) -> None:
        """The first reason counts; nothing waits for ever after this."""
        with self._lock:
            self._over = self._over or why
            with contextlib.suppress(queue.Empty):
                while True:
                    request = self._asked.get_nowait()
                    if request is not None and request.future.set_running_or_notify_cancel():
                        request.future.set_exception(self._over())
            for process in self._processes:
                process.kill()
                self._asked.put(None)

    def _tend(self, process: SpawnProcess, pipe: Connection, plan: bytes) -> None:
        """One process's requests and answers, one after the other, until there are no more or it dies."""
        request: _Request | None = None
        try:
            with pipe:
                pipe.send_bytes(plan)
                while (request := self._asked.get()) is not None:
                    if request.future.set_running_or_notify_cancel():
                        pipe.send_bytes(request.message)
                        _deliver(pickle.loads(pipe.recv_bytes()), request.future)
        except (EOFError, OSError):  # of the pipe: the process is gone
            pass
        finally:
            process.join(_PATIENCE_S)
            how, arguments = _how(process.exitcode), request.arguments if request else ()
            self._end(lambda: WorkerDied(how, arguments))
            if request is not None and not request.future.done():
                assert self._over is not None
                request.future.set_exception(self._over())


def _deliver(answer: tuple[bool, Any], future: Future[Any]) -> None:
    made, value = answer
    if made:
        future.set_result(value)
    else:
        future.set_exception(value)


def _how(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"


# -- in the processes


def _serve(pipe: Connection, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # wishes to stop are the parent's to grant; its end is the end of these
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)
    make = pickle.loads(pipe.recv_bytes())
    while True:
        try:
            arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_answer(make, arguments))


def _answer(make: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, make(*arguments)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # noqa: BLE001 - whatever it is, who asked must hear of it
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    """With what happened here as a note; an error that cannot travel becomes one that can."""
    story = "".join(traceback.format_exception(error))
    error.add_note(f"in another process:\n{story}")
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, LookupError, ImportError):
        return pickle.dumps((False, RuntimeError(story)))
    return message
