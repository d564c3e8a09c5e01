"""A watch as the gallery lists it: how many checkpoints it has scored and which is best; its pictures are runs of their own below it."""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path
from typing import Any

from halation.gallery.metric_rows import evenly
from halation.gallery.run_files import (
    Lines,
    Stamp,
    State,
    damage_of,
    is_count,
    is_number,
    last_lines,
    read_object,
    read_record,
    stamp_of,
    state_of,
)
from halation.runs.folder import CONFIG_FILE, METRICS_FILE
from halation.runs.lock import ENDED_FILE, OWNER_FILE

KEY = re.compile(r"s(\d{1,15})\.0")
NUM_SPARK = 60
FILES = (CONFIG_FILE, OWNER_FILE, ENDED_FILE, "best", "failed.json")
CHECKPOINT = re.compile(r"(?:step_|checkpoint-)(\d{1,15})")
MAX_NAMES = 10_000


class WatchRun:
    """The verdicts of `halation watch`; a grid of pictures stands for each step that was scored."""

    kind = "watch"

    def __init__(self, folder: Path, id: str) -> None:
        self.id = id
        self.folder = folder
        self.version = 0
        self.name = folder.name
        self.parent: str | None = None
        self._lock = threading.RLock()
        self._lines = Lines(folder / METRICS_FILE)
        self._scores: list[dict[str, Any]] = []
        self._record: dict[str, Any] = {}
        self._damage = ""
        self._failed: dict[str, Any] = {}
        self._best = ""
        self._stamps: dict[str, Stamp | None] = {}
        self._places: dict[Path, Stamp | None] = {}
        self._there: set[int] = set()
        self._state = State(word="stopped")

    def refresh(self) -> bool:
        with self._lock:
            stamps = {name: stamp_of(self.folder / name) for name in FILES}
            changed = stamps != self._stamps
            if changed:
                self._stamps = stamps
                self._record = read_record(self.folder)
                self._damage = damage_of(self.folder / CONFIG_FILE)
                self._failed = read_object(self.folder / "failed.json")
                self._best = "".join(last_lines(self.folder / "best", 1)).strip()
            rewritten, rows = self._lines.new()
            if rewritten:
                self._scores = []
            self._scores += [score for row in rows if (score := _score(row)) is not None]
            state = state_of(self.folder, self._changed())
            changed |= self._count_checkpoints() or rewritten or bool(rows) or state != self._state
            self._state = state
            self.version += changed or not self.version
            return changed

    def _changed(self) -> float:
        stamps = (*self._stamps.values(), self._lines.stamp)
        return max((stamp.mtime for stamp in stamps if stamp is not None), default=0.0)

    def _count_checkpoints(self) -> bool:
        """See which checkpoints lie where it looks for them, by their names alone; whether that changed."""
        watched, settings = self._record["fixed"].get("watched"), self._record["settings"]
        if not isinstance(watched, str) or "\0" in watched:
            return False
        top = self.folder / watched
        places = {place: stamp_of(place) for place in (top, top / "checkpoints", self.folder / ".pinned")}
        if places == self._places:
            return False
        every, first = (settings.get(name) for name in ("every", "min_step"))
        steps = itertools.chain.from_iterable(map(_steps_in, places))
        every, first = every if is_count(every) and every else 1, first if is_count(first) else 0
        there = {step for step in steps if step >= first and step % every == 0}
        changed = there != self._there
        self._places, self._there = places, there
        return changed

    def _num_planned(self, steps: list[int]) -> int:
        """What is scored, what failed, and what waits where this has not said that nothing does."""
        failed = {facts.get("step") for facts in self._failed.values() if isinstance(facts, dict)}
        waiting = set() if self._state.word == "finished" else self._there - failed - set(steps)
        return len(steps) + len(self._failed) + len(waiting)

    def _steps(self) -> list[int]:
        return sorted({score["step"] for score in self._scores})

    def summary(self) -> dict[str, Any]:
        with self._lock:
            steps = self._steps()
            first = self._scores[0]["metric"] if self._scores else ""
            line = [[score["step"], score["value"]] for score in self._scores if score["metric"] == first]
            best = f"best: {self._best}" if self._best else "nothing scored yet"
            return {
                "id": self.id,
                "name": self.name,
                "parent": self.parent,
                "kind": self.kind,
                "state": self._state.word,
                "reason": self._state.reason or self._damage,
                "started": self._state.since,
                "changed": self._changed(),
                "title": f"{best}, by {first}" if first and self._best else best,
                "done": len(steps),
                "planned": self._num_planned(steps),
                "unit": "checkpoints",
                "failed": len(self._failed),
                "rate": None,
                "left_s": None,
                "last": self._grid(steps[-1]) if steps else None,
                "spark": evenly(line, NUM_SPARK),
                "loss": None,
                "version": self.version,
            }

    def detail(self) -> dict[str, Any]:
        """In the form of a training, with one column: the grid of each step."""
        with self._lock:
            steps = [
                {
                    "step": step,
                    "epoch": None,
                    "loss": None,
                    "time": self._time(step),
                    "cells": {"ema": [self._grid(step)]},
                }
                for step in self._steps()
            ]
            return {
                "summary": self.summary(),
                "prompts": [{"prompt": "pictures that were scored", "seed": 0, "size": None}] if steps else [],
                "variants": ["ema"],
                "steps": steps,
                "checkpoints": [],
                "metrics": [],
                "scores": list(self._scores),
                "best": self._best,
            }

    def _time(self, step: int) -> float:
        """When a step was scored: its evaluation is what is written last."""
        stamp = stamp_of(self.folder / f"step_{step:07d}" / "evaluation.json")
        return stamp.mtime if stamp is not None else self._changed()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:07d}" / "grid.png"

    def _grid(self, step: int) -> dict[str, Any] | None:
        stamp = stamp_of(self._path(step))
        return {"key": f"s{step}.0", "v": f"{stamp.mtime_ns:x}"} if stamp is not None else None

    def picture(self, key: str) -> Path | None:
        found = KEY.fullmatch(key)
        with self._lock:
            if found is None or int(found[1]) not in self._steps():
                return None
        real = self._path(int(found[1])).resolve()
        return real if real.is_relative_to(self.folder.resolve()) and real.is_file() else None

    def metrics(self, after: int) -> dict[str, Any]:
        return {"reset": False, "next": after, "rows": []}

    def log(self, num_lines: int) -> list[str]:
        """The newest step's own words, or what it said while it looked at the reference."""
        with self._lock:
            steps = self._steps()
        newest = self.folder / f"step_{steps[-1]:07d}" / "evaluate.log" if steps else self.folder / "check.log"
        return last_lines(newest, num_lines, self.folder)

    def config(self) -> dict[str, Any]:
        with self._lock:
            record = self._record or read_record(self.folder)
            return {name: record[name] for name in ("settings", "fixed", "changes")}


def _score(row: dict[str, Any]) -> dict[str, Any] | None:
    if not is_count(row.get("step")) or not is_number(row.get("value")):
        return None
    name = str(row.get("name") or row.get("metric"))
    return {
        "step": row["step"],
        "metric": str(row.get("metric")),
        "name": name,
        "value": row["value"],
        "std": row.get("std") if is_number(row.get("std")) else None,
        "better": str(row.get("better") or "") or None,
    }


def _steps_in(place: Path) -> list[int]:
    try:
        with os.scandir(place) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_NAMES)]
    except (OSError, ValueError):
        return []
    return [int(found[1]) for name in names if (found := CHECKPOINT.fullmatch(name)) is not None]
