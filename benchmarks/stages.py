"""One turn of a side in stages: wall-clock and CPU seconds of each, and its results."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks import measure


@dataclass(kw_only=True)
class Turn:
    """Times and results of one turn.

    CPU seconds are those of all threads and of finished child processes; they are less affected by a busy machine.
    """

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """Add the time of a stage, which may be entered several times.

        With `waiting`, the device is synchronized before and after.
        """
        if waiting:
            measure.synchronise()
        wall, cpu = time.perf_counter(), _cpu_s()
        yield
        if waiting:
            measure.synchronise()
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.perf_counter() - wall
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + _cpu_s() - cpu

    def said(self) -> str:
        stages = ", ".join(f"{name} {wall:.2f} ({self.cpu_s[name]:.2f})" for name, wall in self.wall_s.items())
        return f"{sum(self.wall_s.values()):.2f} s ({sum(self.cpu_s.values()):.2f} s of CPU): {stages}"


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def medians_by_stage(turns: Sequence[Turn]) -> dict[str, float]:
    return {name: round(statistics.median([turn.wall_s[name] for turn in turns]), 3) for name in turns[0].wall_s}


def median_total(turns: Sequence[Turn], without: Sequence[str] = ()) -> float:
    """Return the median duration of whole turns, without the given stages."""
    return statistics.median(
        [sum(seconds for name, seconds in turn.wall_s.items() if name not in without) for turn in turns]
    )
