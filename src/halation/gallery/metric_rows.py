"""The numbers of metrics.jsonl: steps of a training as rows that go on, evaluations as scores, and what follows from the newest ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from halation.gallery.tail import Lines

MAX_ROWS = 4_000
NUM_SPARK = 60
RECENT_S = 60.0
GENERATION = 2**32
"""A place among the rows is `generation * GENERATION + number`, so that a place in a file that was rewound since is recognised."""
BEFORE_ALL = ("step", "time_s")
Thing = TypeVar("Thing")


class MetricRows:
    """Numbers by step, read as they come."""

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.generation = 0
        self.rows: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.names: dict[str, None] = {}
        self.rewound = False

    @property
    def changed(self) -> float:
        return self.lines.stamp.mtime if self.lines.stamp else 0.0

    def refresh(self) -> bool:
        self.rewound, new = self.lines.new()
        if self.rewound:
            self.generation += 1
            self.rows, self.scores, self.names = [], [], {}
        for row in new:
            self._take(row)
        return self.rewound or bool(new)

    def _take(self, row: dict[str, Any]) -> None:
        if not isinstance(row.get("step"), int):
            return
        if "metric" not in row:
            self.rows.append(row)
            self.names |= dict.fromkeys(name for name, value in row.items() if _is_number(value))
        elif _is_number(row.get("value")):
            kept = {name: row.get(name) for name in ("step", "metric", "value", "std", "better")}
            better = kept["better"] or ("lowest" if "loss" in str(row["metric"]) else None)
            self.scores.append(kept | {"metric": str(row["metric"]), "name": str(row["metric"]), "better": better})

    def after(self, place: int) -> dict[str, Any]:
        """Rows after a place that an earlier answer gave as `next`; all of them, thinned, for 0 and after a rewind."""
        generation, number = divmod(place, GENERATION)
        begun = self.generation * GENERATION + len(self.rows)
        if place and generation == self.generation and number <= len(self.rows):
            return {"reset": False, "next": begun, "rows": self.rows[number:]}
        return {"reset": place != 0, "next": begun, "rows": evenly(self.rows, MAX_ROWS)}

    def metric_names(self) -> list[str]:
        return [name for name in self.names if name not in BEFORE_ALL]

    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def loss(self) -> float | None:
        return next((row["loss"] for row in reversed(self.rows[-20:]) if _is_number(row.get("loss"))), None)

    def spark(self) -> list[list[float]]:
        points = [[row["step"], row["loss"]] for row in self.rows if _is_number(row.get("loss"))]
        return [[step, float(f"{loss:.5g}")] for step, loss in evenly(points, NUM_SPARK)]

    def rate(self) -> float | None:
        """Steps in a second, over the last minute of training or the last two rows, whichever is longer."""
        rows = [row for row in self.rows[-1000:] if _is_number(row.get("time_s"))]
        if len(rows) < 2:
            return None
        last = rows[-1]
        first = next(row for row in rows if row["time_s"] >= last["time_s"] - RECENT_S)
        first = rows[-2] if first is last else first
        seconds, steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
        return steps / seconds if seconds > 0 and steps > 0 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def evenly(things: Sequence[Thing], most: int) -> list[Thing]:
    """At most so many of them, evenly spread, the first and the last among them."""
    if len(things) <= most:
        return list(things)
    return [things[round(number * (len(things) - 1) / (most - 1))] for number in range(most)]
