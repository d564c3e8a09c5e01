"""Processes that make images where making them holds the interpreter lock, or is not to be trusted; they die with their parent."""

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

from halation.data.dataset_protocol import CaptionedImage, ImageDataset
from halation.errors import HalationError

Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
_JOIN_TIMEOUT_S = 5.0
"""For the end of a process that was killed; one that hangs in a file system's code outlasts it."""


class ImageBatch(NamedTuple):
    """Some images, stacked: pixels (or latents) first."""

    pixels: np.ndarray
    captions: list[str]
    labels: np.ndarray
    originals: np.ndarray
    """(n, 2) int64: heights and widths of the images as they were."""


def stack_images(images: Sequence[CaptionedImage]) -> ImageBatch:
    """Images of one shape as one array."""
    return ImageBatch(
        np.stack([image.pixels for image in images]),
        [image.caption for image in images],
        np.array([image.label for image in images], np.int64),
        np.array([image.original_size for image in images], np.int64).reshape(-1, 2),
    )


def unstack_images(batch: ImageBatch) -> list[CaptionedImage]:
    """The single images again; their pixels are views."""
    originals = [(height, width) for height, width in batch.originals.tolist()]
    rows = zip(batch.pixels, batch.captions, batch.labels.tolist(), originals, strict=True)
    return [
        CaptionedImage(pixels=pixels, caption=text, label=label, original_size=size)
        for pixels, text, label, size in rows
    ]


def concat_batches(batches: Sequence[ImageBatch]) -> ImageBatch:
    """Several stacks as one, in order."""
    captions = [caption for one in batches for caption in one.captions]
    labels = np.concatenate([one.labels for one in batches])
    originals = np.concatenate([one.originals for one in batches])
    return ImageBatch(np.concatenate([one.pixels for one in batches]), captions, labels, originals)


def load_images(source: ImageDataset, split: str, indices: Sequence[int]) -> ImageBatch:
    """The images of `split` ("train" or "heldout") at these indices, made in this process."""
    load_image = source.train if split == "train" else source.validation
    return stack_images([load_image(int(index)) for index in indices])


class WorkerDied(HalationError):
    """A process ended while it was needed: a decoder crashed, or the system killed it for memory."""

    def __init__(self, exit_reason: str, arguments: Sequence[Any]) -> None:
        super().__init__(
            f"a process that makes images {exit_reason}: a decoder crashed on an image, or memory ran out; use fewer processes (--num_workers)"
        )
        self.exit_reason = exit_reason
        self.arguments = tuple(arguments)
        """What it was asked for last."""


class _PoolRequest(NamedTuple):
    future: Future[Any]
    arguments: tuple[Any, ...]
    message: bytes


class ProcessPool(Generic[Result]):
    """A fixed number of spawned processes, each with its own copy of `function`; they live as long as the thread that made them.

    Each has a pipe of its own, which nobody else holds: its death is an end of file, even in the middle of an answer. The
    first death ends all, and whatever was or is asked for is a WorkerDied.
    """

    def __init__(self, function: Callable[..., Result], num_workers: int) -> None:
        self.num_workers = num_workers
        self._requests: queue.SimpleQueue[_PoolRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._make_end_error: Callable[[], BaseException] | None = None
        self._processes: list[SpawnProcess] = []
        self._threads: list[threading.Thread] = []
        pickled_function = pickle.dumps(function)
        # They end here when the interpreter does: multiprocessing would end them by a signal that they ignore, and wait.
        atexit.register(self.close)
        try:
            # The kernel ties "die with the parent" to the thread that starts a process: the one that owns this pool starts
            # them all, or a prefetching thread's end would kill some.
            pipes = [self._start_process() for _ in range(num_workers)]
        except BaseException:
            self.close()
            raise
        for process, pipe in zip(self._processes, pipes, strict=True):
            thread = threading.Thread(
                target=self._serve_process, args=(process, pipe, pickled_function), name="worker", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _start_process(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        parent_pipe, child_pipe = context.Pipe()
        with child_pipe:
            process = context.Process(target=_worker_main, args=(child_pipe, os.getpid()), daemon=True)
            process.start()
        self._processes.append(process)
        return parent_pipe

    def submit(self, *arguments: Any) -> Future[Result]:
        """`function` of these arguments, in one of the processes."""
        future: Future[Result] = Future()
        request = _PoolRequest(future, arguments, pickle.dumps(arguments))
        with self._lock:
            if self._make_end_error is None:
                self._requests.put(request)
            else:
                future.set_exception(self._make_end_error())
        return future

    def close(self) -> None:
        """End the processes; what was asked for and not answered is dropped."""
        atexit.unregister(self.close)
        self._stop(lambda: RuntimeError("the processes were closed"))
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        for process in self._processes:
            process.join(_JOIN_TIMEOUT_S)

    def _stop(self, make_error: Callable[[], BaseException]) -> None:
        """The first reason counts; nothing waits for ever after this."""
        with self._lock:
            self._make_end_error = self._make_end_error or make_error
            with contextlib.suppress(queue.Empty):
                while True:
                    request = self._requests.get_nowait()
                    if request is not None and request.future.set_running_or_notify_cancel():
                        request.future.set_exception(self._make_end_error())
            for process in self._processes:
                process.kill()
                self._requests.put(None)

    def _serve_process(self, process: SpawnProcess, pipe: Connection, pickled_function: bytes) -> None:
        """One process's requests and answers, one after the other, until there are no more or it dies."""
        request: _PoolRequest | None = None
        try:
            with pipe:
                pipe.send_bytes(pickled_function)
                while (request := self._requests.get()) is not None:
                    if request.future.set_running_or_notify_cancel():
                        pipe.send_bytes(request.message)
                        _set_result(pickle.loads(pipe.recv_bytes()), request.future)
        except (EOFError, OSError):  # of the pipe: the process is gone
            pass
        finally:
            process.join(_JOIN_TIMEOUT_S)
            exit_reason, arguments = _describe_exit(process.exitcode), request.arguments if request else ()
            self._stop(lambda: WorkerDied(exit_reason, arguments))
            if request is not None and not request.future.done():
                assert self._make_end_error is not None
                request.future.set_exception(self._make_end_error())


def _set_result(answer: tuple[bool, Any], future: Future[Any]) -> None:
    succeeded, value = answer
    if succeeded:
        future.set_result(value)
    else:
        future.set_exception(value)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"


# -- in the processes


def _worker_main(pipe: Connection, parent_pid: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # wishes to stop are the parent's to grant; its end is the end of these
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above took effect
            os._exit(1)
    function = pickle.loads(pipe.recv_bytes())
    while True:
        try:
            arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_run_request(function, arguments))


def _run_request(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, function(*arguments)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # noqa: BLE001 - whatever it is, who asked must hear of it
        return _pickle_error(error)


def _pickle_error(error: BaseException) -> bytes:
    """With what happened here as a note; an error that cannot travel becomes one that can."""
    formatted = "".join(traceback.format_exception(error))
    error.add_note(f"in another process:\n{formatted}")
    try:
        message = pickle.dumps((False, error))
        pickle.loads(message)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, LookupError, ImportError):
        return pickle.dumps((False, RuntimeError(formatted)))
    return message
