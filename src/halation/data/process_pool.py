"""A pool of spawned processes for decoding, which may crash; they die with their parent.

`concurrent.futures.ProcessPoolExecutor` is not sufficient: its workers share one pipe for results. If one is killed
while it writes, the parent waits forever, and the call it was working on is unknown (decision 25).
"""

from __future__ import annotations

import atexit
import contextlib
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
from typing import Any, Generic, TypeVar

from halation.distributed.child_process import describe_exit, tie_to_parent
from halation.errors import HalationError

Result = TypeVar("Result")
_JOIN_TIMEOUT_S = 5.0
"""How long to wait for a killed process; one that hangs in file system code may take longer."""


class WorkerDied(HalationError):
    """A worker process died: a decoder crashed, or the system killed it for memory."""

    def __init__(self, exit_reason: str, arguments: Sequence[Any]) -> None:
        super().__init__(
            f"a process that loads images {exit_reason}. A decoder crashed on an image, or memory ran out: "
            "use fewer processes (--num_workers)"
        )
        self.exit_reason = exit_reason
        self.arguments = tuple(arguments)
        """Arguments of the call it was working on."""


class ProcessPool(Generic[Result]):
    """A fixed number of processes, each with a copy of `function`, a pipe and a thread.

    Each pipe has one process at its end, so a death is seen as end of file, even in the middle of an answer. The first
    death ends all processes, and all waiting and later calls raise it. The processes die with the thread that created
    the pool.
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
        # The processes must not import the main module: a user's script without `if __name__ == "__main__"` would run
        # again in each of them, and one from standard input could not be read.
        main = sys.modules["__main__"]
        # Run before multiprocessing's exit handler, which would send a signal that they ignore and wait for them.
        atexit.register(self.close)
        try:
            for _ in range(num_workers):
                # Start in this thread: the kernel kills a child together with the thread that started it.
                pipe, child_pipe = context.Pipe()
                with child_pipe:
                    process = context.Process(target=_worker_main, args=(child_pipe, os.getpid()), daemon=True)
                    sys.modules["__main__"] = type(main)("__main__")
                    try:
                        process.start()
                    finally:
                        sys.modules["__main__"] = main
                self._processes.append(process)
                arguments = (process, pipe, pickled_function)
                self._threads.append(threading.Thread(target=self._serve, args=arguments, name="worker", daemon=True))
        except BaseException:
            self.close()
            raise
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> Future[Result]:
        """Call `function` with these arguments in one of the processes."""
        future: Future[Result] = Future()
        with self._lock:
            if self._end_error is None:
                self._calls.put((future, arguments))
            else:
                future.set_exception(self._end_error)
        return future

    def close(self) -> None:
        """Terminate the processes; pending calls raise."""
        atexit.unregister(self.close)
        self._stop(RuntimeError("the processes were closed"))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_JOIN_TIMEOUT_S)
        for process in self._processes:
            process.join(_JOIN_TIMEOUT_S)

    def _stop(self, error: Exception) -> None:
        """Kill the processes; pending calls raise the first error passed to this method."""
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
        """Send calls to one process, one at a time, until the pool is closed or it dies."""
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
        except (EOFError, OSError):  # from the pipe: the process is gone
            pass
        finally:
            process.join(_JOIN_TIMEOUT_S)
            self._stop(WorkerDied(describe_exit(process.exitcode), arguments))
            if future is not None and not future.done():
                future.set_exception(self._end_error)


def _worker_main(pipe: Connection, parent_pid: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, and this process dies with it
    tie_to_parent(parent_pid)
    with contextlib.suppress(EOFError):
        function = pickle.loads(pipe.recv_bytes())
        while True:
            arguments = pipe.recv()
            try:
                answer = pickle.dumps((True, function(*arguments)), pickle.HIGHEST_PROTOCOL)
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                answer = _pickle_error(error)
            pipe.send_bytes(answer)


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an error with its traceback as a note; RuntimeError if it cannot be pickled."""
    formatted = "".join(traceback.format_exception(error))
    error.add_note(f"in another process:\n{formatted}")
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, LookupError, ImportError):
        return pickle.dumps((False, RuntimeError(formatted)))
    return message
