"""A run of train, distill or sample for the page: samples, metrics, checkpoints."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic

from halation.gallery import run_file_reader
from halation.gallery.run_catalog import RunEntry, read_run_kind
from halation.gallery.run_file_reader import Thing, is_int64, is_number, select_evenly
from halation.gallery.training_samples import STEP_FOLDER, SampleCell, SampleStep, SampleStepReader
from halation.runs.lock import OWNER_FILE
from halation.runs.run_folder import COMMIT_FILE, EXTERNAL_TRAINER, METRICS_FILE
from halation.training.config import DIT_DEFAULTS

MAX_ROWS = 4_000
"""Limit of rows in one response; this many of the newest rows are kept without thinning."""
MAX_OLDER_ROWS = 16_000
NUM_SPARKLINE_POINTS = 60
MAX_LOSS_POINTS = 8 * NUM_SPARKLINE_POINTS
RATE_WINDOW_S = 60.0
GENERATION_STRIDE = 2**32
"""A cursor is `generation * GENERATION_STRIDE + number`, so that cursors into a rewritten file are recognised."""
NON_METRIC_COLUMNS = ("step", "time_s")
IMAGE_KEY = re.compile(r"(?:s(\d{1,15})\.(\d{1,6})(\.raw)?|t\.(\d{1,6}))")
SampleColumn = tuple[str, int, int]
"""Prompt, seed, and a counter for columns with the same prompt and seed."""


class DownsampledList(Generic[Thing]):
    """Items in order, thinned by powers of two so that there are at most `max_items`."""

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
    """Metrics by step, read as they are appended; older rows of a long run are thinned."""

    def __init__(self, path: Path) -> None:
        self.reader = run_file_reader.JsonlTailReader(path)
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
            self._add_row({sys.intern(name): value for name, value in row.items()})  # all rows have the same names
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
        """Rows of the whole run with equal spacing, and the last row."""
        if self.older_rows.stride == 1:
            return [*self.older_rows.items, *self.recent_rows]
        newer = list(self.recent_rows)[:-1]
        return [*self.older_rows.items, *newer[:: self.older_rows.stride], self.recent_rows[-1]]

    def rows_after(self, cursor: int) -> dict[str, Any]:
        """Rows after a cursor, which is the `next` of an earlier response.

        Returns all rows, thinned, for cursor 0, after a rewrite, and if there are too many rows since the cursor.
        """
        generation, number = divmod(cursor, GENERATION_STRIDE)
        next_cursor = self.generation * GENERATION_STRIDE + self.num_rows
        first = self.num_rows - len(self.recent_rows)
        if cursor and generation == self.generation and first <= number <= self.num_rows:
            return {"reset": False, "next": next_cursor, "rows": list(self.recent_rows)[number - first :]}
        return {
            "reset": cursor != 0,
            "next": next_cursor,
            "rows": select_evenly(self._sampled_rows(), MAX_ROWS),
        }

    def metric_names(self) -> list[str]:
        return [name for name in self.numeric_columns if name not in NON_METRIC_COLUMNS]

    def last_step(self) -> int:
        return int(self.recent_rows[-1]["step"]) if self.recent_rows else 0

    def last_time_s(self) -> float | None:
        """Seconds of training up to the last row, in all sessions of the run."""
        return self._newest_value("time_s")

    def steps_per_epoch(self) -> int:
        """Whole steps of an epoch, from the epochs in the newest row; 0 before the first row."""
        row = next((row for row in reversed(self.recent_rows) if is_number(row.get("epoch"))), None)
        # Epochs are rounded to four digits: without the tolerance, an epoch of whole steps could be one too long.
        return math.ceil(row["step"] / (row["epoch"] + 5e-5)) if row is not None and row["epoch"] > 0 else 0

    def latest_loss(self) -> float | None:
        return self._newest_value("loss")

    def _newest_value(self, name: str) -> float | None:
        newest = itertools.islice(reversed(self.recent_rows), 20)
        return next((row[name] for row in newest if is_number(row.get(name))), None)

    def sparkline(self) -> list[list[float]]:
        points = [*self.loss_points.items]
        if points and points[-1] is not self.last_loss_point:
            points.append(self.last_loss_point)
        return [[step, float(f"{loss:.5g}")] for step, loss in select_evenly(points, NUM_SPARKLINE_POINTS)]

    def steps_per_second(self) -> float | None:
        """Steps per second over the last minute or the last two rows, whichever is longer."""
        newest = itertools.islice(reversed(self.recent_rows), 1000)
        rows = [row for row in newest if is_number(row.get("time_s"))][::-1]
        if len(rows) < 2:
            return None
        last = rows[-1]
        first = next(row for row in rows if row["time_s"] >= last["time_s"] - RATE_WINDOW_S)
        first = rows[-2] if first is last else first
        seconds, steps = last["time_s"] - first["time_s"], last["step"] - first["step"]
        return steps / seconds if seconds > 0 and steps > 0 else None


class TrainingRun(RunEntry):
    """A run of train, distill or sample."""

    def __init__(self, folder: Path, id: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(folder, id, defaults)
        self.kind = read_run_kind(folder) or "train"
        self.unit = "images" if self.kind == "sample" else "steps"
        self._samples = SampleStepReader(folder, self.kind)
        self._metrics = MetricRows(folder / METRICS_FILE)
        self._owner_stamp: object = ()
        self._checkpoints: dict[str, dict[str, Any]] = {}
        self._columns: dict[SampleColumn, int] = {}
        self._image_paths: dict[str, Path] = {}
        self._teacher_versions: dict[Path, str] = {}
        self._cached_detail: tuple[int, dict[str, Any]] | None = None
        self._cached_summary: tuple[int, dict[str, Any]] | None = None

    # -- reading

    def _refresh(self) -> bool:
        size = self._settings().get("image_size")
        if isinstance(size, list) and len(size) == 2 and all(map(is_int64, size)):
            self._samples.size = (size[1], size[0])
        changed = self._metrics.refresh()
        restarted = self._stamps[OWNER_FILE] != self._owner_stamp
        self._owner_stamp = self._stamps[OWNER_FILE]
        changed |= self._samples.refresh(reread_all=restarted or self._metrics.was_rewritten)
        changed |= self._has_changed("checkpoints") and self._read_checkpoints()
        return self._has_changed(f"logs/{self._log_name}") or changed

    def _read_state(self) -> run_file_reader.RunState:
        done, planned, _ = self._count_progress(self._samples.steps())
        return run_file_reader.read_run_state(
            self.folder, self._last_modified(), is_complete=done >= planned > 0 or None
        )

    @property
    def _log_name(self) -> str:
        return "train.log" if self.kind != "sample" else "sample.log"

    def _read_checkpoints(self) -> bool:
        """List checkpoints; each COMMIT.json is read once because it never changes."""
        found = {}
        for path in (self.folder / "checkpoints").glob("step_*"):
            step = STEP_FOLDER.fullmatch(path.name)
            if step:
                known = self._checkpoints.get(path.name)
                kind = (
                    known["kind"]
                    if known
                    else str(run_file_reader.read_json_object(path / COMMIT_FILE, self.folder).get("kind") or "")
                )
                found[path.name] = {"step": int(step[1]), "kind": kind}
        changed = found != self._checkpoints
        self._checkpoints = found
        return changed

    def _last_modified(self) -> float:
        newest_samples = [step.time for step in self._samples.steps()[-1:]]
        return max(super()._last_modified(), self._metrics.last_modified, *newest_samples)

    # -- responses

    def _build_summary(self) -> dict[str, Any]:
        if self._cached_summary is not None and self._cached_summary[0] == self.version:
            return self._cached_summary[1]
        steps = self._samples.steps()
        done, planned, failed = self._count_progress(steps)
        rate = self._metrics.steps_per_second() if self._state.status == "running" else None
        summary = {
            "started": self._start_time(self.folder / "logs" / self._log_name) or self._state.since,
            "title": run_title(self.kind, self._settings()),
            "done": done,
            "planned": planned,
            "failed": failed,
            "rate": rate,
            "left_s": max(0, planned - done) / rate if rate else None,
            "last": self._latest_image(steps),
            "spark": self._metrics.sparkline(),
            "loss": self._metrics.latest_loss(),
            "seconds": max(filter(None, (self._state.time_s, self._metrics.last_time_s())), default=None),
        }
        self._cached_summary = (self.version, summary)
        return summary

    def _count_progress(self, steps: list[SampleStep]) -> tuple[int, int, int]:
        """Return (done, planned, failed samples of the newest step)."""
        cells = [cell for step in steps[-1:] for those in step.cells.values() for cell in those]
        failed = sum(bool(cell.failure_reason) for cell in cells)
        if self.kind == "sample":
            prompts = self._settings().get("prompts")
            num_planned = len(prompts) if isinstance(prompts, list) else len(cells)
            return sum(cell.file is not None for cell in cells), num_planned, failed
        # A run resumes from its newest checkpoint, whose step may have no row of its own.
        saved = max((checkpoint["step"] for checkpoint in self._checkpoints.values()), default=0)
        return max(self._metrics.last_step(), saved), self._count_planned_steps(), failed

    def _count_planned_steps(self) -> int:
        """Total steps; of a run that counts in epochs and did not record them, derived from the metrics."""
        planned: Any = self._settings().get("n_steps")
        num_epochs: Any = self._settings().get("num_epochs")
        if is_int64(num_epochs) and num_epochs and planned in (None, DIT_DEFAULTS["n_steps"]):
            is_finished = self._state.status == "finished"
            return self._metrics.last_step() if is_finished else num_epochs * self._metrics.steps_per_epoch()
        return int(planned) if is_int64(planned) else 0

    def _latest_image(self, steps: list[SampleStep]) -> dict[str, Any] | None:
        for step in reversed(steps):
            for variant in ("ema", "raw"):
                row = self._build_row(step, variant)
                image = next((cell for cell in row if cell and "key" in cell), None)
                if image:
                    return image
        return None

    def detail(self) -> dict[str, Any]:
        with self._lock:
            if not self._samples.is_loaded:
                self._samples.load_all()
                self._cached_detail = self._cached_summary = None
            if self._cached_detail is None or self._cached_detail[0] != self.version:
                self._cached_detail = (self.version, self._build_detail())
            return {"summary": self.summary(), **self._cached_detail[1]}

    def _build_detail(self) -> dict[str, Any]:
        steps = self._samples.steps()
        self._columns = {}
        for step in steps:
            for variant in step.cells:
                self._assign_columns(step.cells[variant])
        self._image_paths = {}
        self._teacher_versions = {}
        step_rows = [self._build_step(step) for step in steps]
        variants = [name for name in ("ema", "raw", "teacher") if any(name in step["cells"] for step in step_rows)]
        sizes = {
            column: cell.size or step.size
            for step in steps
            for cells in (step.cells.get("ema", ()),)
            for column, cell in zip(self._assign_columns(cells), cells, strict=True)
        }
        prompts = [
            {"prompt": prompt, "seed": seed, "size": list(sizes.get((prompt, seed, nth)) or ()) or None}
            for prompt, seed, nth in self._columns
        ]
        return {
            "prompts": prompts,
            "variants": variants or ["ema"],
            "steps": step_rows,
            "checkpoints": sorted(self._checkpoints.values(), key=lambda checkpoint: checkpoint["step"]),
            "metrics": self._metrics.metric_names(),
            "scores": list(self._metrics.scores),
        }

    def _build_step(self, step: SampleStep) -> dict[str, Any]:
        cells = {variant: self._build_row(step, variant) for variant in step.cells}
        teacher_row = self._build_teacher_row(step)
        if teacher_row:
            cells["teacher"] = teacher_row
        return {"step": step.step, "epoch": step.epoch, "loss": step.loss, "time": step.time, "cells": cells}

    def _assign_columns(self, cells: tuple[SampleCell, ...]) -> dict[SampleColumn, int]:
        """Return the columns of these cells; new columns are appended."""
        seen: dict[tuple[str, int], int] = {}
        numbers = {}
        for cell in cells:
            nth = seen[cell.prompt, cell.seed] = seen.get((cell.prompt, cell.seed), -1) + 1
            column = (cell.prompt, cell.seed, nth)
            numbers[column] = self._columns.setdefault(column, len(self._columns))
        return numbers

    def _build_row(self, step: SampleStep, variant: str) -> list[dict[str, Any] | None]:
        """One entry per column, None without an image."""
        cells = step.cells.get(variant, ())
        numbers = self._assign_columns(cells).values()
        row: list[dict[str, Any] | None] = [None] * len(self._columns)
        for number, cell in zip(numbers, cells, strict=True):
            if cell.file is not None:
                key = f"s{step.step}.{number}" + (".raw" if variant == "raw" else "")
                self._image_paths[key] = cell.file
                row[number] = {"key": key, "v": cell.version}
            elif cell.failure_reason:
                row[number] = {"failed": cell.failure_reason}
        return row

    def _build_teacher_row(self, step: SampleStep) -> list[dict[str, Any] | None] | None:
        """Row of the teacher's images, which have one key per column for all steps."""
        cells = next(iter(step.cells.values()), ())
        if not any(cell.teacher for cell in cells):
            return None
        row: list[dict[str, Any] | None] = [None] * len(self._columns)
        for number, cell in zip(self._assign_columns(cells).values(), cells, strict=True):
            if cell.teacher is not None:
                key = f"t.{number}"
                self._image_paths[key] = cell.teacher
                row[number] = {"key": key, "v": self._teacher_version(cell.teacher)}
        return row

    def _teacher_version(self, path: Path) -> str:
        if path not in self._teacher_versions:
            stamp = run_file_reader.read_stamp(path)
            self._teacher_versions[path] = f"{stamp.mtime_ns:x}" if stamp else ""
        return self._teacher_versions[path]

    def image(self, key: str) -> Path | None:
        if not IMAGE_KEY.fullmatch(key):
            return None
        with self._lock:
            if key not in self._image_paths:
                self.detail()
            path = self._image_paths.get(key)
        real_path = self._find_inside(path) if path is not None else None
        return real_path if real_path is not None and real_path.suffix == ".png" else None

    def metrics(self, after: int) -> dict[str, Any]:
        with self._lock:
            return self._metrics.rows_after(after)

    def log(self, num_lines: int) -> list[str]:
        return run_file_reader.read_last_lines(self.folder / "logs" / self._log_name, num_lines, self.folder)

    # -- the record

    def _settings(self) -> dict[str, Any]:
        settings = self._record.get("fixed" if self.kind == "sample" else "settings")
        return settings if isinstance(settings, dict) else {}


def run_title(kind: str, settings: Mapping[str, Any]) -> str:
    """Short title of a run: model, data, objective, size."""

    def short_name(name: str) -> str:
        path = Path(str(settings.get(name) or ""))
        return path.parents[1].name if path.parent.name == "checkpoints" else path.name

    if kind == "sample":
        size: Any = (settings.get("height"), settings.get("width"))
        words = ["samples"]
    else:
        size = settings.get("image_size")
        words = [_model_title(kind, settings, short_name), short_name("data_path" if kind == "distill" else "data")]
        words += [str(settings.get("objective") or "")] if kind == "distill" else []
    if isinstance(size, list | tuple) and len(size) == 2 and all(size):
        words.append(f"{size[1]}x{size[0]}")
    return ", ".join(word for word in words if word)


def _model_title(kind: str, settings: Mapping[str, Any], short_name: Callable[[str], str]) -> str:
    if kind == "distill":
        teacher = short_name("teacher_path")
        return f"student of {teacher}" if teacher else "student"
    if settings.get("model_path"):
        return f"adapters on {short_name('model_path')}" if settings.get("lora_rank") else short_name("model_path")
    model = short_name("model")
    if settings.get("trainer") == EXTERNAL_TRAINER:
        return model or "a trainer of one's own"
    return f"{model} DiT" if model else ""
