"""Processes that produce pictures for a source whose drawing holds the interpreter lock; they die with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import numpy as np

from halation.data.base import Picture, Pictures

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


class Workers:
    """A fixed number of spawned processes, each with its own copy of the source; they live as long as the thread that made them."""

    def __init__(self, source: Pictures, num_workers: int) -> None:
        self.num_workers = num_workers
        context = multiprocessing.get_context("spawn")
        # The kernel ties "die with the parent" to the thread that starts a process. So all are started here, by the thread
        # that owns the pool, and none later by a prefetching thread, whose end would kill it and leave its lock taken. The
        # pool starts a process for each task that finds none idle; until the last has come to the barrier, none is.
        barrier = context.Barrier(num_workers)
        self._pool = ProcessPoolExecutor(
            num_workers, context, initializer=_start, initargs=(source, os.getpid(), barrier)
        )
        for _ in range(num_workers):
            self._pool.submit(_nothing)

    def draw(self, part: str, indices: Sequence[int]) -> Future[Stack]:
        """As the function `draw`, but in one of the processes."""
        return self._pool.submit(_draw, part, [int(index) for index in indices])

    def close(self) -> None:
        """End the processes; what was asked for and not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


_source: Pictures | None = None


def _start(source: Pictures, parent: int, barrier: Barrier) -> None:
    global _source
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # wishes to stop are the parent's to grant; its end is the end of these
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(1)
    _source = source
    barrier.wait()


def _draw(part: str, indices: list[int]) -> Stack:
    assert _source is not None
    return draw(_source, part, indices)


def _nothing() -> None:
    return None
