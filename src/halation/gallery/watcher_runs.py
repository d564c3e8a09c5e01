"""A watch as the gallery lists it: how many checkpoints it has scored and which is best; its images are runs of their own below it."""

from __future__ import annotations

import itertools
import os
import re
import threading
from pathlib import Path
from typing import Any

from halation.gallery.metrics_reader import select_evenly
from halation.gallery.run_file_reader import (
    FileStamp,
    JsonlTailReader,
    RunState,
    find_read_error,
    is_int64,
    is_number,
    read_json_object,
    read_last_lines,
    read_record,
    read_run_state,
    read_stamp,
)
from halation.runs.lock import ENDED_FILE, OWNER_FILE
from halation.runs.run_folder import CONFIG_FILE, METRICS_FILE

IMAGE_KEY = re.compile(r"s(\d{1,15})\.0")
NUM_SPARKLINE_POINTS = 60
STATE_FILES = (CONFIG_FILE, OWNER_FILE, ENDED_FILE, "best", "failed.json")
CHECKPOINT_NAME = re.compile(r"(?:step_|checkpoint-)(\d{1,15})")
MAX_FOLDER_ENTRIES = 10_000


class WatchRun:
    """The scores of `halation watch`; a grid of images stands for each step that was scored."""

    kind = "watch"

    def __init__(self, folder: Path, id: str) -> None:
        self.id = id
        self.folder = folder
        self.version = 0
        self.name = folder.name
        self.parent: str | None = None
        self._lock = threading.RLock()
        self._metrics_reader = JsonlTailReader(folder / METRICS_FILE)
        self._scores: list[dict[str, Any]] = []
        self._record: dict[str, Any] = {}
        self._config_error = ""
        self._failed: dict[str, Any] = {}
        self._best = ""
        self._stamps: dict[str, FileStamp | None] = {}
        self._folder_stamps: dict[Path, FileStamp | None] = {}
        self._available_steps: set[int] = set()
        self._state = RunState(status="stopped")

    def refresh(self) -> bool:
        with self._lock:
            stamps = {name: read_stamp(self.folder / name) for name in STATE_FILES}
            changed = stamps != self._stamps
            if changed:
                self._stamps = stamps
                self._record = read_record(self.folder)
                self._config_error = find_read_error(self.folder / CONFIG_FILE)
                self._failed = read_json_object(self.folder / "failed.json")
                self._best = "".join(read_last_lines(self.folder / "best", 1)).strip()
            rewritten, rows = self._metrics_reader.read_new()
            if rewritten:
                self._scores = []
            self._scores += [score for row in rows if (score := _parse_score(row)) is not None]
            state = read_run_state(self.folder, self._last_modified())
            changed |= self._scan_checkpoints() or rewritten or bool(rows) or state != self._state
            self._state = state
            self.version += changed or not self.version
            return changed

    def _last_modified(self) -> float:
        stamps = (*self._stamps.values(), self._metrics_reader.stamp)
        return max((stamp.mtime for stamp in stamps if stamp is not None), default=0.0)

    def _scan_checkpoints(self) -> bool:
        """See which checkpoints lie where it looks for them, by their names alone; whether that changed."""
        watched, settings = self._record["fixed"].get("watched"), self._record["settings"]
        if not isinstance(watched, str) or "\0" in watched:
            return False
        top = self.folder / watched
        folder_stamps = {folder: read_stamp(folder) for folder in (top, top / "checkpoints", self.folder / ".pinned")}
        if folder_stamps == self._folder_stamps:
            return False
        every, first = (settings.get(name) for name in ("every", "min_step"))
        steps = itertools.chain.from_iterable(map(_list_steps, folder_stamps))
        every, first = every if is_int64(every) and every else 1, first if is_int64(first) else 0
        available = {step for step in steps if step >= first and step % every == 0}
        changed = available != self._available_steps
        self._folder_stamps, self._available_steps = folder_stamps, available
        return changed

    def _num_planned(self, steps: list[int]) -> int:
        """What is scored, what failed, and what waits where this has not said that nothing does."""
        failed = {failure.get("step") for failure in self._failed.values() if isinstance(failure, dict)}
        waiting = set() if self._state.status == "finished" else self._available_steps - failed - set(steps)
        return len(steps) + len(self._failed) + len(waiting)

    def _scored_steps(self) -> list[int]:
        return sorted({score["step"] for score in self._scores})

    def summary(self) -> dict[str, Any]:
        with self._lock:
            steps = self._scored_steps()
            first = self._scores[0]["metric"] if self._scores else ""
            points = [[score["step"], score["value"]] for score in self._scores if score["metric"] == first]
            best = f"best: {self._best}" if self._best else "nothing scored yet"
            return {
                "id": self.id,
                "name": self.name,
                "parent": self.parent,
                "kind": self.kind,
                "state": self._state.status,
                "reason": self._state.reason or self._config_error,
                "started": self._state.since,
                "changed": self._last_modified(),
                "title": f"{best}, by {first}" if first and self._best else best,
                "done": len(steps),
                "planned": self._num_planned(steps),
                "unit": "checkpoints",
                "failed": len(self._failed),
                "rate": None,
                "left_s": None,
                "last": self._grid_image(steps[-1]) if steps else None,
                "spark": select_evenly(points, NUM_SPARKLINE_POINTS),
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
                    "time": self._scored_at(step),
                    "cells": {"ema": [self._grid_image(step)]},
                }
                for step in self._scored_steps()
            ]
            return {
                "summary": self.summary(),
                "prompts": [{"prompt": "images that were scored", "seed": 0, "size": None}] if steps else [],
                "variants": ["ema"],
                "steps": steps,
                "checkpoints": [],
                "metrics": [],
                "scores": list(self._scores),
                "best": self._best,
            }

    def _scored_at(self, step: int) -> float:
        """When a step was scored: its evaluation is what is written last."""
        stamp = read_stamp(self.folder / f"step_{step:07d}" / "evaluation.json")
        return stamp.mtime if stamp is not None else self._last_modified()

    def _grid_path(self, step: int) -> Path:
        return self.folder / f"step_{step:07d}" / "grid.png"

    def _grid_image(self, step: int) -> dict[str, Any] | None:
        stamp = read_stamp(self._grid_path(step))
        return {"key": f"s{step}.0", "v": f"{stamp.mtime_ns:x}"} if stamp is not None else None

    def image(self, key: str) -> Path | None:
        found = IMAGE_KEY.fullmatch(key)
        with self._lock:
            if found is None or int(found[1]) not in self._scored_steps():
                return None
        real = self._grid_path(int(found[1])).resolve()
        return real if real.is_relative_to(self.folder.resolve()) and real.is_file() else None

    def metrics(self, after: int) -> dict[str, Any]:
        return {"reset": False, "next": after, "rows": []}

    def log(self, num_lines: int) -> list[str]:
        """The newest step's own words, or what it said while it looked at the reference."""
        with self._lock:
            steps = self._scored_steps()
        newest = self.folder / f"step_{steps[-1]:07d}" / "evaluate.log" if steps else self.folder / "check.log"
        return read_last_lines(newest, num_lines, self.folder)

    def config(self) -> dict[str, Any]:
        with self._lock:
            record = self._record or read_record(self.folder)
            return {name: record[name] for name in ("settings", "fixed", "changes")}


def _parse_score(row: dict[str, Any]) -> dict[str, Any] | None:
    if not is_int64(row.get("step")) or not is_number(row.get("value")):
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


def _list_steps(folder: Path) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_FOLDER_ENTRIES)]
    except (OSError, ValueError):
        return []
    return [int(found[1]) for name in names if (found := CHECKPOINT_NAME.fullmatch(name)) is not None]
