"""A training as the gallery shows it: samples by step and prompt, numbers, checkpoints; folders of `halation sample` are one step of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halation.gallery.metrics_reader import MetricRows
from halation.gallery.run_catalog import read_run_kind
from halation.gallery.run_file_reader import (
    FileStamp,
    RunState,
    find_read_error,
    is_int64,
    read_first_line,
    read_json_object,
    read_last_lines,
    read_record,
    read_run_state,
    read_stamp,
)
from halation.gallery.training_samples import STEP_FOLDER, SampleCell, SampleStep, SampleStepReader
from halation.runs.lock import ENDED_FILE, OWNER_FILE
from halation.runs.run_folder import COMMIT_FILE, CONFIG_FILE, EXTERNAL_TRAINER, METRICS_FILE

IMAGE_KEY = re.compile(r"(?:s(\d{1,15})\.(\d{1,6})(\.raw)?|t\.(\d{1,6}))")
SampleColumn = tuple[str, int, int]
"""Prompt, seed, and the how manieth of those with both the same."""


class TrainingRun:
    """A run of train, distill or sample. `defaults` are settings nobody has to be told of, by kind."""

    def __init__(self, folder: Path, id: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.id = id
        self.folder = folder
        self.kind = read_run_kind(folder) or "train"
        self.version = 0
        self.name = folder.name
        self.parent: str | None = None
        self._defaults = (defaults or {}).get(self.kind)
        self._lock = threading.RLock()
        self._samples = SampleStepReader(folder, self.kind)
        self._metrics = MetricRows(folder / METRICS_FILE)
        self._record: dict[str, Any] = {}
        self._config_error = ""
        self._stamps: dict[str, FileStamp | None] = {}
        self._checkpoints: dict[str, dict[str, Any]] = {}
        self._state = RunState(status="stopped")
        self._started: float | None = None
        self._columns: dict[SampleColumn, int] = {}
        self._image_paths: dict[str, Path] = {}
        self._teacher_versions: dict[Path, str] = {}
        self._cached_detail: tuple[int, dict[str, Any]] | None = None
        self._cached_summary: tuple[int, dict[str, Any]] | None = None

    # -- looking

    def refresh(self) -> bool:
        with self._lock:
            changed = self._has_changed(CONFIG_FILE)
            if changed:
                self._read_record()
            changed |= self._metrics.refresh()
            restarted = self._has_changed(OWNER_FILE)
            changed |= self._samples.refresh(reread_all=restarted or self._metrics.was_rewritten)
            changed |= self._has_changed("checkpoints") and self._read_checkpoints()
            changed |= self._has_changed(f"logs/{self._log_name}")
            self._has_changed(ENDED_FILE)
            done, planned, _ = self._count_progress(self._samples.steps())
            state = read_run_state(self.folder, self._last_modified(), is_complete=done >= planned > 0 or None)
            changed |= state != self._state
            self._state = state
            self.version += changed or not self.version
            return changed

    @property
    def _log_name(self) -> str:
        return "train.log" if self.kind != "sample" else "sample.log"

    def _has_changed(self, name: str) -> bool:
        stamp = read_stamp(self.folder / name)
        new = name not in self._stamps or self._stamps[name] != stamp
        self._stamps[name] = stamp
        return new

    def _read_record(self) -> None:
        self._record = read_record(self.folder)
        self._config_error = find_read_error(self.folder / CONFIG_FILE)
        size = self._settings().get("image_size")
        if isinstance(size, list) and len(size) == 2 and all(map(is_int64, size)):
            self._samples.size = (size[1], size[0])

    def _read_checkpoints(self) -> bool:
        """Each COMMIT.json is read once; it never changes under its name."""
        found = {}
        for path in (self.folder / "checkpoints").glob("step_*"):
            step = STEP_FOLDER.fullmatch(path.name)
            if step:
                known = self._checkpoints.get(path.name)
                kind = (
                    known["kind"] if known else str(read_json_object(path / COMMIT_FILE, self.folder).get("kind") or "")
                )
                found[path.name] = {"step": int(step[1]), "kind": kind}
        changed = found != self._checkpoints
        self._checkpoints = found
        return changed

    def _last_modified(self) -> float:
        newest = [stamp.mtime for stamp in self._stamps.values() if stamp is not None]
        newest += [self._metrics.last_modified, *(step.time for step in self._samples.steps()[-1:])]
        return max(newest, default=0.0)

    # -- showing

    def summary(self) -> dict[str, Any]:
        with self._lock:
            if self._cached_summary is None or self._cached_summary[0] != self.version:
                self._cached_summary = (self.version, self._build_summary())
            return self._cached_summary[1] | {"name": self.name, "parent": self.parent}

    def _build_summary(self) -> dict[str, Any]:
        steps = self._samples.steps()
        running = self._state.status == "running"
        done, planned, failed = self._count_progress(steps)
        rate = self._metrics.steps_per_second() if running else None
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self._state.status,
            "reason": self._state.reason or self._config_error,
            "started": self._start_time(),
            "changed": self._last_modified(),
            "title": run_title(self.kind, self._settings()),
            "done": done,
            "planned": planned,
            "unit": "images" if self.kind == "sample" else "steps",
            "failed": failed,
            "rate": rate,
            "left_s": max(0, planned - done) / rate if rate else None,
            "last": self._latest_image(steps),
            "spark": self._metrics.sparkline(),
            "loss": self._metrics.latest_loss(),
            "version": self.version,
        }

    def _count_progress(self, steps: list[SampleStep]) -> tuple[int, int, int]:
        """Done, planned and, of the newest samples, failed."""
        cells = [cell for step in steps[-1:] for those in step.cells.values() for cell in those]
        failed = sum(bool(cell.failure_reason) for cell in cells)
        if self.kind == "sample":
            prompts = self._settings().get("prompts")
            num_planned = len(prompts) if isinstance(prompts, list) else len(cells)
            return sum(cell.file is not None for cell in cells), num_planned, failed
        planned: Any = self._settings().get("n_steps")
        return self._metrics.last_step(), int(planned) if is_int64(planned) else 0, failed

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
        sizes = {column: step.size for step in steps for column in self._assign_columns(step.cells.get("ema", ()))}
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
        """The columns of these cells, new ones after all that are known."""
        seen: dict[tuple[str, int], int] = {}
        numbers = {}
        for cell in cells:
            nth = seen[cell.prompt, cell.seed] = seen.get((cell.prompt, cell.seed), -1) + 1
            column = (cell.prompt, cell.seed, nth)
            numbers[column] = self._columns.setdefault(column, len(self._columns))
        return numbers

    def _build_row(self, step: SampleStep, variant: str) -> list[dict[str, Any] | None]:
        """One place a column, empty where nothing is drawn."""
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
        """The teacher's images do not change with the steps, so they have one key a column."""
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
            stamp = read_stamp(path)
            self._teacher_versions[path] = f"{stamp.mtime_ns:x}" if stamp else ""
        return self._teacher_versions[path]

    def image(self, key: str) -> Path | None:
        if not IMAGE_KEY.fullmatch(key):
            return None
        with self._lock:
            if key not in self._image_paths:
                self.detail()
            path = self._image_paths.get(key)
        if path is None:
            return None
        try:
            real, top = path.resolve(), self.folder.resolve()
        except (OSError, ValueError, RuntimeError):  # no name of a file, or a link to itself
            return None
        return real if real.suffix == ".png" and real.is_relative_to(top) and real.is_file() else None

    def metrics(self, after: int) -> dict[str, Any]:
        with self._lock:
            return self._metrics.rows_after(after)

    def log(self, num_lines: int) -> list[str]:
        return read_last_lines(self.folder / "logs" / self._log_name, num_lines, self.folder)

    def config(self) -> dict[str, Any]:
        with self._lock:
            record = self._record or read_record(self.folder)
            shown = {name: record[name] for name in ("settings", "fixed", "changes")}
            if self._defaults is not None:
                settings = shown["settings"]
                shown["differs"] = [
                    name
                    for name in settings
                    if settings[name] is not None and settings[name] != self._defaults.get(name)
                ]
            return shown

    # -- the record

    def _settings(self) -> dict[str, Any]:
        settings = self._record.get("fixed" if self.kind == "sample" else "settings")
        return settings if isinstance(settings, dict) else {}

    def _start_time(self) -> float | None:
        """When its log began, or who holds it did."""
        if self._started is None:
            first = read_first_line(self.folder / "logs" / self._log_name, self.folder)
            try:
                self._started = time.mktime(time.strptime(first[:19], "%Y-%m-%d %H:%M:%S"))
            except (ValueError, OverflowError):
                return self._state.since
        return self._started


def run_title(kind: str, settings: Mapping[str, Any]) -> str:
    """What is trained on what, in a few words."""

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
