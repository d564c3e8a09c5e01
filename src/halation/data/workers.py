"""Processes that make pictures where making them holds the interpreter lock, or is not to be trusted; they die with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from halation.data.base import Picture, Pictures

Made = TypeVar("Made")
_PR_SET_PDEATHSIG = 1


class Stack(NamedTuple):
    """Some pictures, stacked: pixels (or latents) first."""

    pixels: np.ndarray
    captions: list[str]
    labels: np.ndarray


def stack(pictures: Sequence[Picture]) -> Stack:
    """Pictures of one shape as one array."""
    return Stack(
        np.stack([picture.pixels for picture in pictures]),
        [picture.caption for picture in pictures],
        np.array([picture.label for picture in pictures], np.int64),
    )


def pictures(stacked: Stack) -> list[Picture]:
    """The single pictures again; their pixels are views."""
    rows = zip(stacked.pixels, stacked.captions, stacked.labels.tolist(), strict=True)
    return [Picture(pixels=pixels, caption=caption, label=label) for pixels, caption, label in rows]


def joined(stacks: Sequence[Stack]) -> Stack:
    """Several stacks as one, in order."""
    captions = [caption for one in stacks for caption in one.captions]
    labels = np.concatenate([one.labels for one in stacks])
    return Stack(np.concatenate([one.pixels for one in stacks]), captions, labels)


def draw(source: Pictures, part: str, indices: Sequence[int]) -> Stack:
    """The pictures of `part` ("train" or "heldout") at these indices, made in this process."""
    one = source.train if part == "train" else source.heldout
    return stack([one(int(index)) for index in indices])


class Workers(Generic[Made]):
    """A fixed number of spawned processes, each with its own copy of `make`; they live as long as the thread that made them."""

    def __init__(self, make: Callable[..., Made], num_workers: int) -> None:
        self.num_workers = num_workers
        context = multiprocessing.get_context("spawn")
        # The kernel ties "die with the parent" to the thread that starts a process. So all are started here, by the thread
        # that owns the pool, and none later by a prefetching thread, whose end would kill it and leave its lock taken. The
        # pool starts a process for each task that finds none idle; until the last has come to the barrier, none is.
        barrier = context.Barrier(num_workers)
        self._pool = ProcessPoolExecutor(
            num_workers, context, initializer=_start, initargs=(make, os.getpid(), barrier)
        )
        for _ in range(num_workers):
            self._pool.submit(_nothing)

    def ask(self, *arguments: Any) -> Future[Made]:
        """`make` of these arguments, in one of the processes."""
        return self._pool.submit(_make, *arguments)

    def close(self) -> None:
        """End the processes; what was asked for and not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


_made_by: Callable[..., Any] | None = None


def _start(make: Callable[..., Any], parent: int, barrier: Barrier) -> None:
    global _made_by
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # wishes to stop are the parent's to grant; its end is the end of these
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)
    _made_by = make
    barrier.wait()


def _make(*arguments: Any) -> Any:
    assert _made_by is not None
    return _made_by(*arguments)


def _nothing() -> None:
    return None
