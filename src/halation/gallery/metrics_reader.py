"""The numbers of metrics.jsonl: steps of a training as rows that go on, evaluations as scores, and what follows from the newest ones."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from halation.gallery.run_file_reader import JsonlTailReader, is_int64, is_number

MAX_ROWS = 4_000
"""In one answer; so many of the newest are kept as they are."""
MAX_OLDER_ROWS = 16_000
NUM_SPARKLINE_POINTS = 60
MAX_LOSS_POINTS = 8 * NUM_SPARKLINE_POINTS
RATE_WINDOW_S = 60.0
GENERATION_STRIDE = 2**32
"""A place among the rows is `generation * GENERATION + number`, so that a place in a file that was rewound since is recognised."""
NON_METRIC_COLUMNS = ("step", "time_s")
Thing = TypeVar("Thing")


class DownsampledList(Generic[Thing]):
    """Things in their order: every one, then every second, every fourth, so that they are never more than `max_items`."""

    def __init__(self, max_items: int) -> None:
        self.max_items = max_items
        self.stride = 1
        self.num_added = 0
        self.items: list[Thing] = []

    def add(self, item: Thing) -> None:
        if self.num_added % self.stride == 0:
            self.items.append(item)
            if len(self.items) > self.max_items:
                self.items = self.items[::2]
                self.stride *= 2
        self.num_added += 1


class MetricRows:
    """Numbers by step, read as they come. Of a long run the older rows are thinned, so that neither time nor memory grows with it."""

    def __init__(self, path: Path) -> None:
        self.reader = JsonlTailReader(path)
        self.generation = 0
        self.was_rewritten = False
        self._reset()

    def _reset(self) -> None:
        self.num_rows = 0
        self.recent_rows: deque[dict[str, Any]] = deque()
        self.older_rows: DownsampledList[dict[str, Any]] = DownsampledList(MAX_OLDER_ROWS)
        self.loss_points: DownsampledList[list[float]] = DownsampledList(MAX_LOSS_POINTS)
        self.last_loss_point: list[float] = []
        self.scores: list[dict[str, Any]] = []
        self.numeric_columns: dict[str, None] = {}

    @property
    def last_modified(self) -> float:
        return self.reader.stamp.mtime if self.reader.stamp else 0.0

    def refresh(self) -> bool:
        self.was_rewritten = self.reader.poll()
        if self.was_rewritten:
            self.generation += 1
            self._reset()
        any_new = False
        for row in self.reader.iter_rows():
            any_new = True
            self._add_line(row)
        return self.was_rewritten or any_new

    def _add_line(self, row: dict[str, Any]) -> None:
        if not is_int64(row.get("step")):
            return
        if "metric" not in row:
            self._add_row(
                {sys.intern(name): value for name, value in row.items()}
            )  # the names of all rows are the same
        elif is_number(row.get("value")):
            score = {name: row.get(name) for name in ("step", "metric", "value", "std", "better")}
            score["std"] = score["std"] if is_number(score["std"]) else None
            better = str(score["better"] or "") or ("lowest" if "loss" in str(row["metric"]) else None)
            self.scores.append(score | {"metric": str(row["metric"]), "name": str(row["metric"]), "better": better})

    def _add_row(self, row: dict[str, Any]) -> None:
        self.num_rows += 1
        self.recent_rows.append(row)
        if len(self.recent_rows) > MAX_ROWS:
            self.older_rows.add(self.recent_rows.popleft())
        if not self.numeric_columns.keys() >= row.keys():
            self.numeric_columns |= dict.fromkeys(name for name, value in row.items() if is_number(value))
        if is_number(row.get("loss")):
            self.last_loss_point = [row["step"], row["loss"]]
            self.loss_points.add(self.last_loss_point)

    def _sampled_rows(self) -> list[dict[str, Any]]:
        """Of the whole run, as far apart everywhere, and the last."""
        if self.older_rows.stride == 1:
            return [*self.older_rows.items, *self.recent_rows]
        newer = list(self.recent_rows)[:-1]
        return [*self.older_rows.items, *newer[:: self.older_rows.stride], self.recent_rows[-1]]

    def rows_after(self, cursor: int) -> dict[str, Any]:
        """Rows after a place that an earlier answer gave as `next`.

        All of them, thinned, for 0, after a rewind, and for whoever was away for so long that these would be too many.
        """
        generation, number = divmod(cursor, GENERATION_STRIDE)
        next_cursor = self.generation * GENERATION_STRIDE + self.num_rows
        first = self.num_rows - len(self.recent_rows)
        if cursor and generation == self.generation and first <= number <= self.num_rows:
            return {"reset": False, "next": next_cursor, "rows": list(self.recent_rows)[number - first :]}
        return {"reset": cursor != 0, "next": next_cursor, "rows": select_evenly(self._sampled_rows(), MAX_ROWS)}

    def metric_names(self) -> list[str]:
        return [name for name in self.numeric_columns if name not in NON_METRIC_COLUMNS]

    def last_step(self) -> int:
        return int(self.recent_rows[-1]["step"]) if self.recent_rows else 0

    def latest_loss(self) -> float | None:
        newest = itertools.islice(reversed(self.recent_rows), 20)
        return next((row["loss"] for row in newest if is_number(row.get("loss"))), None)

    def sparkline(self) -> list[list[float]]:
        points = [*self.loss_points.items]
        if points and points[-1] is not self.last_loss_point:
            points.append(self.last_loss_point)
        return [[step, float(f"{loss:.5g}")] for step, loss in select_evenly(points, NUM_SPARKLINE_POINTS)]

    def steps_per_second(self) -> float | None:
        """Steps in a second, over the last minute of training or the last two rows, whichever is longer."""
        newest = itertools.islice(reversed(self.recent_rows), 1000)
        rows = [row for row in newest if is_number(row.get("time_s"))][::-1]
        if len(rows) < 2:
            return None
        last = rows[-1]
        first = next(row for row in rows if row["time_s"] >= last["time_s"] - RATE_WINDOW_S)
        first = rows[-2] if first is last else first
        seconds, steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
        return steps / seconds if seconds > 0 and steps > 0 else None


def select_evenly(items: Sequence[Thing], max_items: int) -> list[Thing]:
    """At most so many of them, evenly spread, the first and the last among them; of one alone, the last."""
    if len(items) <= max_items:
        return list(items)
    if max_items <= 1:
        return [items[-1]] if max_items == 1 else []
    return [items[round(number * (len(items) - 1) / (max_items - 1))] for number in range(max_items)]
