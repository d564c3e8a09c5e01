"""One side's turn in stages: seconds on the clock and of the CPU for each, and the numbers it came to."""

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
    """CPU seconds are those of all threads and of children that have ended: they bear a machine that is not quiet."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """A stage may come again. Without `waiting` the device may go on with what it has; its queue is emptied otherwise."""
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
    """Of whole turns, less the stages named."""
    return statistics.median(
        [sum(seconds for name, seconds in turn.wall_s.items() if name not in without) for turn in turns]
    )
