"""The counts of one call of `halation generate`, the rates and times that follow from them, and how they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(kw_only=True)
class Lane:
    """One worker's part: the pictures it should reach, what came of those it drew, and what it is doing."""

    share: int = 0
    success: int = 0
    failed: int = 0
    state: str = "waiting"
    began: float | None = None
    ended: float | None = None

    @property
    def position(self) -> int:
        return self.success + self.failed

    @property
    def drawing(self) -> bool:
        return self.state.startswith("drawing")


class Board:
    """The counts of one call, and the rates and times that follow from them."""

    def __init__(
        self, workers: Sequence[str], planned: int, done: int, failed: int, clock: Callable[[], float]
    ) -> None:
        self.lanes = {worker: Lane() for worker in workers}
        self.planned = planned
        self.done_before = done
        self.failed_before = failed
        self.done_elsewhere = 0
        self.failed_elsewhere = 0
        self.clock = clock
        self.began = clock()
        self.drawing_since: float | None = None
        self.lock = threading.RLock()

    def lane(self, worker: str) -> Lane:
        return self.lanes.setdefault(worker, Lane())

    def begin_drawing(self, lane: Lane) -> None:
        """Rates count from here: loading a model says nothing about how fast it draws."""
        if lane.began is None:
            lane.began = self.clock()
        if self.drawing_since is None:
            self.drawing_since = lane.began

    @property
    def drawn_now(self) -> int:
        elsewhere = self.done_elsewhere + self.failed_elsewhere
        return elsewhere + sum(lane.position for lane in self.lanes.values())

    @property
    def done(self) -> int:
        return self.done_before + self.done_elsewhere + sum(lane.success for lane in self.lanes.values())

    @property
    def failed(self) -> int:
        return self.failed_before + self.failed_elsewhere + sum(lane.failed for lane in self.lanes.values())

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    def per_s(self) -> float | None:
        return _rate(self.drawn_now, self.drawing_since, self.clock())

    def left_s(self) -> float | None:
        return _left(self.planned - self.done - self.failed, self.per_s())

    def lane_per_s(self, lane: Lane) -> float | None:
        return _rate(lane.position, lane.began, lane.ended or self.clock())

    def lane_left_s(self, lane: Lane) -> float | None:
        if lane.ended is not None:
            return 0.0
        if not lane.share:  # it loads, and has not been given anything to be done with
            return None
        return _left(lane.share - lane.position, self.lane_per_s(lane))


def _rate(num: int, since: float | None, now: float) -> float | None:
    return num / (now - since) if num and since is not None and now > since else None


def _left(num: int, per_s: float | None) -> float | None:
    if num <= 0:
        return 0.0
    return num / per_s if per_s else None


def speed(per_s: float) -> str:
    """Pictures a second; slow ones by the minute, because 0.0/s tells nobody anything."""
    if per_s >= 0.1:
        return f"{per_s:.1f}/s" if per_s < 100 else f"{per_s:.0f}/s"
    return f"{per_s * 60:.1f}/min" if per_s * 60 >= 0.1 else f"{per_s * 3600:.1f}/h"


def in_words(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.1f} days"


def clock_face(seconds: float | None) -> str:
    """30:00, 2:30:00, or 4d02:30 where a clock has no more room."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def printable(text: str) -> str:
    """Text with its control characters spelled out: a prompt must not be able to steer a terminal."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
