"""A pool of spawned processes for decoding, which may crash; they end with their parent.

`concurrent.futures.ProcessPoolExecutor` is not enough here: its workers share one pipe for results, so one that is
killed while it writes leaves the parent waiting for ever, and nothing says which call it had (decision 25).
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from halation.distributed.child_process import describe_exit, tie_to_parent
from halation.errors import HalationError

Result = TypeVar("Result")
_JOIN_TIMEOUT_S = 5.0
"""For the end of a process that was killed; one that hangs in a file system's code outlasts it."""


class WorkerDied(HalationError):
    """A process ended while it was needed: a decoder crashed, or the system killed it for memory."""

    def __init__(self, exit_reason: str, arguments: Sequence[Any]) -> None:
        super().__init__(
            f"a process that makes images {exit_reason}. A decoder crashed on an image, or memory ran out: "
            "use fewer processes (--num_workers)"
        )
        self.exit_reason = exit_reason
        self.arguments = tuple(arguments)
        """Of the call it was working on."""


class ProcessPool(Generic[Result]):
    """A fixed number of processes, each with its own copy of `function`, its own pipe and a thread that hands it calls.

    A pipe has one process at its end, so a death is an end of file, even in the middle of an answer. The first death
    ends all processes, and every call that is waiting or made later raises it. It lives as long as the thread that made
    it.
    """

    def __init__(self, function: Callable[..., Result], num_workers: int) -> None:
        self.num_workers = num_workers
        self._calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end_error: Exception | None = None
        self._processes: list[SpawnProcess] = []
        self._threads: list[threading.Thread] = []
        pickled_function = pickle.dumps(function)
        context = multiprocessing.get_context("spawn")
        # Before multiprocessing ends them: by a signal that they ignore, and waiting for them.
        atexit.register(self.close)
        try:
            for _ in range(num_workers):
                # In this thread: the kernel ends a child with the thread that started it.
                pipe, child_pipe = context.Pipe()
                with child_pipe:
                    process = context.Process(target=_worker_main, args=(child_pipe, os.getpid()), daemon=True)
                    process.start()
                self._processes.append(process)
                arguments = (process, pipe, pickled_function)
                self._threads.append(threading.Thread(target=self._serve, args=arguments, name="worker", daemon=True))
        except BaseException:
            self.close()
            raise
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> Future[Result]:
        """`function` of these arguments, in one of the processes."""
        future: Future[Result] = Future()
        with self._lock:
            if self._end_error is None:
                self._calls.put((future, arguments))
            else:
                future.set_exception(self._end_error)
        return future

    def close(self) -> None:
        """End the processes; calls that are not answered raise."""
        atexit.unregister(self.close)
        self._stop(RuntimeError("the processes were closed"))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_TIMEOUT_S)
        for process in self._processes:
            process.join(_JOIN_TIMEOUT_S)

    def _stop(self, error: Exception) -> None:
        """Kill the processes, and raise the first error that this was called with wherever an answer is awaited."""
        with self._lock:
            self._end_error = self._end_error or error
            with contextlib.suppress(queue.Empty):
                while True:
                    call = self._calls.get_nowait()
                    if call is not None and call[0].set_running_or_notify_cancel():
                        call[0].set_exception(self._end_error)
            for process in self._processes:
                process.kill()
                self._calls.put(None)

    def _serve(self, process: SpawnProcess, pipe: Connection, pickled_function: bytes) -> None:
        """Hand calls to one process, one after the other, until there are no more or it dies."""
        future: Future[Any] | None = None
        arguments: tuple[Any, ...] = ()
        try:
            with pipe:
                pipe.send_bytes(pickled_function)
                while (call := self._calls.get()) is not None:
                    future, arguments = call
                    if future.set_running_or_notify_cancel():
                        pipe.send(arguments)
                        succeeded, value = pipe.recv()
                        if succeeded:
                            future.set_result(value)
                        else:
                            future.set_exception(value)
        except (EOFError, OSError):  # of the pipe: the process is gone
            pass
        finally:
            process.join(_JOIN_TIMEOUT_S)
            self._stop(WorkerDied(describe_exit(process.exitcode), arguments))
            if future is not None and not future.done():
                future.set_exception(self._end_error)


def _worker_main(pipe: Connection, parent_pid: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and its end is the end of this process
    tie_to_parent(parent_pid)
    with contextlib.suppress(EOFError):
        function = pickle.loads(pipe.recv_bytes())
        while True:
            arguments = pipe.recv()
            try:
                answer = pickle.dumps((True, function(*arguments)), pickle.HIGHEST_PROTOCOL)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answer = _pickle_error(error)
            pipe.send_bytes(answer)


def _pickle_error(error: BaseException) -> bytes:
    """An error with its traceback as a note; one that cannot be pickled becomes a RuntimeError."""
    formatted = "".join(traceback.format_exception(error))
    error.add_note(f"in another process:\n{formatted}")
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, LookupError, ImportError):
        return pickle.dumps((False, RuntimeError(formatted)))
    return message
