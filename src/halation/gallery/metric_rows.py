"""The numbers of metrics.jsonl: steps of a training as rows that go on, evaluations as scores, and what follows from the newest ones."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from halation.gallery.run_files import Lines, is_count, is_number

MAX_ROWS = 4_000
"""In one answer; so many of the newest are kept as they are."""
MAX_OLDER = 16_000
NUM_SPARK = 60
MAX_SPARK = 8 * NUM_SPARK
RECENT_S = 60.0
GENERATION = 2**32
"""A place among the rows is `generation * GENERATION + number`, so that a place in a file that was rewound since is recognised."""
BEFORE_ALL = ("step", "time_s")
Thing = TypeVar("Thing")


class Thinned(Generic[Thing]):
    """Things in their order: every one, then every second, every fourth, so that they are never more than `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.every = 1
        self.num = 0
        self.kept: list[Thing] = []

    def add(self, thing: Thing) -> None:
        if self.num % self.every == 0:
            self.kept.append(thing)
            if len(self.kept) > self.most:
                self.kept = self.kept[::2]
                self.every *= 2
        self.num += 1


class MetricRows:
    """Numbers by step, read as they come. Of a long run the older rows are thinned, so that neither time nor memory grows with it."""

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.generation = 0
        self.rewound = False
        self._forget()

    def _forget(self) -> None:
        self.num_rows = 0
        self.recent: deque[dict[str, Any]] = deque()
        self.older: Thinned[dict[str, Any]] = Thinned(MAX_OLDER)
        self.losses: Thinned[list[float]] = Thinned(MAX_SPARK)
        self.last_loss: list[float] = []
        self.scores: list[dict[str, Any]] = []
        self.names: dict[str, None] = {}

    @property
    def changed(self) -> float:
        return self.lines.stamp.mtime if self.lines.stamp else 0.0

    def refresh(self) -> bool:
        self.rewound = self.lines.look()
        if self.rewound:
            self.generation += 1
            self._forget()
        any_new = False
        for row in self.lines.rows():
            any_new = True
            self._take(row)
        return self.rewound or any_new

    def _take(self, row: dict[str, Any]) -> None:
        if not is_count(row.get("step")):
            return
        if "metric" not in row:
            self._keep({sys.intern(name): value for name, value in row.items()})  # the names of all rows are the same
        elif is_number(row.get("value")):
            kept = {name: row.get(name) for name in ("step", "metric", "value", "std", "better")}
            kept["std"] = kept["std"] if is_number(kept["std"]) else None
            better = str(kept["better"] or "") or ("lowest" if "loss" in str(row["metric"]) else None)
            self.scores.append(kept | {"metric": str(row["metric"]), "name": str(row["metric"]), "better": better})

    def _keep(self, row: dict[str, Any]) -> None:
        self.num_rows += 1
        self.recent.append(row)
        if len(self.recent) > MAX_ROWS:
            self.older.add(self.recent.popleft())
        if not self.names.keys() >= row.keys():
            self.names |= dict.fromkeys(name for name, value in row.items() if is_number(value))
        if is_number(row.get("loss")):
            self.last_loss = [row["step"], row["loss"]]
            self.losses.add(self.last_loss)

    def _all(self) -> list[dict[str, Any]]:
        """Of the whole run, as far apart everywhere, and the last."""
        if self.older.every == 1:
            return [*self.older.kept, *self.recent]
        newer = list(self.recent)[:-1]
        return [*self.older.kept, *newer[:: self.older.every], self.recent[-1]]

    def after(self, place: int) -> dict[str, Any]:
        """Rows after a place that an earlier answer gave as `next`.

        All of them, thinned, for 0, after a rewind, and for whoever was away for so long that these would be too many.
        """
        generation, number = divmod(place, GENERATION)
        begun = self.generation * GENERATION + self.num_rows
        first = self.num_rows - len(self.recent)
        if place and generation == self.generation and first <= number <= self.num_rows:
            return {"reset": False, "next": begun, "rows": list(self.recent)[number - first :]}
        return {"reset": place != 0, "next": begun, "rows": evenly(self._all(), MAX_ROWS)}

    def metric_names(self) -> list[str]:
        return [name for name in self.names if name not in BEFORE_ALL]

    def last_step(self) -> int:
        return int(self.recent[-1]["step"]) if self.recent else 0

    def loss(self) -> float | None:
        newest = itertools.islice(reversed(self.recent), 20)
        return next((row["loss"] for row in newest if is_number(row.get("loss"))), None)

    def spark(self) -> list[list[float]]:
        points = [*self.losses.kept]
        if points and points[-1] is not self.last_loss:
            points.append(self.last_loss)
        return [[step, float(f"{loss:.5g}")] for step, loss in evenly(points, NUM_SPARK)]

    def rate(self) -> float | None:
        """Steps in a second, over the last minute of training or the last two rows, whichever is longer."""
        newest = itertools.islice(reversed(self.recent), 1000)
        rows = [row for row in newest if is_number(row.get("time_s"))][::-1]
        if len(rows) < 2:
            return None
        last = rows[-1]
        first = next(row for row in rows if row["time_s"] >= last["time_s"] - RECENT_S)
        first = rows[-2] if first is last else first
        seconds, steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
        return steps / seconds if seconds > 0 and steps > 0 else None


def evenly(things: Sequence[Thing], most: int) -> list[Thing]:
    """At most so many of them, evenly spread, the first and the last among them; of one alone, the last."""
    if len(things) <= most:
        return list(things)
    if most <= 1:
        return [things[-1]] if most == 1 else []
    return [things[round(number * (len(things) - 1) / (most - 1))] for number in range(most)]
