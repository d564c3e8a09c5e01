"""A run of `halation watch` for the page: its scored checkpoints and the best one."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from pathlib import Path
from typing import Any

from halation.gallery import run_file_reader
from halation.gallery.run_catalog import RunEntry
from halation.gallery.run_file_reader import is_int64, is_number, select_evenly
from halation.runs.run_folder import METRICS_FILE

IMAGE_KEY = re.compile(r"s(\d{1,15})\.0")
NUM_SPARKLINE_POINTS = 60
CHECKPOINT_NAME = re.compile(r"(?:step_|checkpoint-)(\d{1,15})")
MAX_FOLDER_ENTRIES = 10_000


class WatchRun(RunEntry):
    """The scores of `halation watch`, with a grid of images for each scored step."""

    kind = "watch"

    unit = "checkpoints"

    def __init__(self, folder: Path, id: str) -> None:
        super().__init__(folder, id)
        self._metrics_reader = run_file_reader.JsonlTailReader(folder / METRICS_FILE)
        self._scores: list[dict[str, Any]] = []
        self._failed: dict[str, Any] = {}
        self._best = ""
        self._folder_stamps: dict[Path, run_file_reader.FileStamp | None] = {}
        self._available_steps: set[int] = set()

    def _refresh(self) -> bool:
        changed = self._has_changed("best", "failed.json")
        if changed:
            self._failed = run_file_reader.read_json_object(self.folder / "failed.json")
            self._best = "".join(run_file_reader.read_last_lines(self.folder / "best", 1)).strip()
        rewritten, rows = self._metrics_reader.read_new()
        if rewritten:
            self._scores = []
        self._scores += [score for row in rows if (score := _parse_score(row)) is not None]
        return self._scan_checkpoints() or changed or rewritten or bool(rows)

    def _last_modified(self) -> float:
        stamp = self._metrics_reader.stamp
        return max(super()._last_modified(), stamp.mtime if stamp else 0.0)

    def _scan_checkpoints(self) -> bool:
        """List the checkpoints in the watched folders by name; return True if the list changed."""
        watched, settings = self._record["fixed"].get("watched"), self._record["settings"]
        if not isinstance(watched, str) or "\0" in watched:
            return False
        top = self.folder / watched
        folder_stamps = {
            folder: run_file_reader.read_stamp(folder) for folder in (top, top / "checkpoints", self.folder / ".pinned")
        }
        if folder_stamps == self._folder_stamps:
            return False
        every, first = (settings.get(name) for name in ("every", "min_step"))
        names: list[str] = []
        for folder in folder_stamps:
            with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
                names += [entry.name for entry in itertools.islice(entries, MAX_FOLDER_ENTRIES)]
        steps = [int(found[1]) for name in names if (found := CHECKPOINT_NAME.fullmatch(name)) is not None]
        every, first = (
            every if is_int64(every) and every else 1,
            first if is_int64(first) else 0,
        )
        available = {step for step in steps if step >= first and step % every == 0}
        changed = available != self._available_steps
        self._folder_stamps, self._available_steps = folder_stamps, available
        return changed

    def _num_planned(self, steps: list[int]) -> int:
        """Number of checkpoints scored, failed and, unless the watch is finished, waiting."""
        failed = {failure.get("step") for failure in self._failed.values() if isinstance(failure, dict)}
        waiting = set() if self._state.status == "finished" else self._available_steps - failed - set(steps)
        return len(steps) + len(self._failed) + len(waiting)

    def _scored_steps(self) -> list[int]:
        return sorted({score["step"] for score in self._scores})

    def _build_summary(self) -> dict[str, Any]:
        steps = self._scored_steps()
        first = self._scores[0]["metric"] if self._scores else ""
        points = [[score["step"], score["value"]] for score in self._scores if score["metric"] == first]
        best = f"best: {self._best}" if self._best else "nothing scored yet"
        return {
            "started": self._state.since,
            "title": f"{best}, by {first}" if first and self._best else best,
            "done": len(steps),
            "planned": self._num_planned(steps),
            "failed": len(self._failed),
            "last": self._grid_image(steps[-1]) if steps else None,
            "spark": select_evenly(points, NUM_SPARKLINE_POINTS),
        }

    def detail(self) -> dict[str, Any]:
        """Detail in the form of a training, with one column: the grid of each step."""
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
        """Time at which a step was scored: evaluation.json is written last."""
        stamp = run_file_reader.read_stamp(self.folder / f"step_{step:07d}" / "evaluation.json")
        return stamp.mtime if stamp is not None else self._last_modified()

    def _grid_path(self, step: int) -> Path:
        return self.folder / f"step_{step:07d}" / "grid.png"

    def _grid_image(self, step: int) -> dict[str, Any] | None:
        stamp = run_file_reader.read_stamp(self._grid_path(step))
        return {"key": f"s{step}.0", "v": f"{stamp.mtime_ns:x}"} if stamp is not None else None

    def image(self, key: str) -> Path | None:
        found = IMAGE_KEY.fullmatch(key)
        with self._lock:
            if found is None or int(found[1]) not in self._scored_steps():
                return None
        return self._find_inside(self._grid_path(int(found[1])))

    def metrics(self, after: int) -> dict[str, Any]:
        return {"reset": False, "next": after, "rows": []}

    def log(self, num_lines: int) -> list[str]:
        """The log of the newest step, or of the check of the reference before the first step."""
        with self._lock:
            steps = self._scored_steps()
        newest = self.folder / f"step_{steps[-1]:07d}" / "evaluate.log" if steps else self.folder / "check.log"
        return run_file_reader.read_last_lines(newest, num_lines, self.folder)


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
