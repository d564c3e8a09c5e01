"""A training as the gallery shows it: samples by step and prompt, numbers, checkpoints; folders of `halation sample` are one step of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halation.gallery.catalog import kind_of
from halation.gallery.metric_rows import MetricRows
from halation.gallery.run_files import (
    Stamp,
    State,
    damage_of,
    first_line,
    is_count,
    last_lines,
    read_object,
    read_record,
    stamp_of,
    state_of,
)
from halation.gallery.sample_steps import STEP_FOLDER, Cell, SampleSteps, Step
from halation.runs.folder import COMMIT, CONFIG_FILE, METRICS_FILE, OWN_TRAINER
from halation.runs.lock import ENDED_FILE, OWNER_FILE

KEY = re.compile(r"(?:s(\d{1,15})\.(\d{1,6})(\.raw)?|t\.(\d{1,6}))")
Column = tuple[str, int, int]
"""Prompt, seed, and the how manieth of those with both the same."""


class TrainingRun:
    """A run of train, distill or sample. `defaults` are settings nobody has to be told of, by kind."""

    def __init__(self, folder: Path, id: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.id = id
        self.folder = folder
        self.kind = kind_of(folder) or "train"
        self.version = 0
        self.name = folder.name
        self.parent: str | None = None
        self._defaults = (defaults or {}).get(self.kind)
        self._lock = threading.RLock()
        self._samples = SampleSteps(folder, self.kind)
        self._metrics = MetricRows(folder / METRICS_FILE)
        self._record: dict[str, Any] = {}
        self._damage = ""
        self._stamps: dict[str, Stamp | None] = {}
        self._checkpoints: dict[str, dict[str, Any]] = {}
        self._state = State(word="stopped")
        self._started: float | None = None
        self._columns: dict[Column, int] = {}
        self._pictures: dict[str, Path] = {}
        self._teacher_versions: dict[Path, str] = {}
        self._made: tuple[int, dict[str, Any]] | None = None
        self._summed: tuple[int, dict[str, Any]] | None = None

    # -- looking

    def refresh(self) -> bool:
        with self._lock:
            changed = self._is_new(CONFIG_FILE)
            if changed:
                self._read_record()
            changed |= self._metrics.refresh()
            began_anew = self._is_new(OWNER_FILE)
            changed |= self._samples.refresh(again=began_anew or self._metrics.rewound)
            changed |= self._is_new("checkpoints") and self._read_checkpoints()
            changed |= self._is_new(f"logs/{self._log_name}")
            self._is_new(ENDED_FILE)
            done, planned, _ = self._counts(self._samples.steps())
            state = state_of(self.folder, self._changed(), done=done >= planned > 0 or None)
            changed |= state != self._state
            self._state = state
            self.version += changed or not self.version
            return changed

    @property
    def _log_name(self) -> str:
        return "train.log" if self.kind != "sample" else "sample.log"

    def _is_new(self, name: str) -> bool:
        stamp = stamp_of(self.folder / name)
        new = name not in self._stamps or self._stamps[name] != stamp
        self._stamps[name] = stamp
        return new

    def _read_record(self) -> None:
        self._record = read_record(self.folder)
        self._damage = damage_of(self.folder / CONFIG_FILE)
        size = self._settings().get("image_size")
        if isinstance(size, list) and len(size) == 2 and all(map(is_count, size)):
            self._samples.size = (size[1], size[0])

    def _read_checkpoints(self) -> bool:
        """Each COMMIT.json is read once; it never changes under its name."""
        found = {}
        for path in (self.folder / "checkpoints").glob("step_*"):
            step = STEP_FOLDER.fullmatch(path.name)
            if step:
                known = self._checkpoints.get(path.name)
                kind = known["kind"] if known else str(read_object(path / COMMIT, self.folder).get("kind") or "")
                found[path.name] = {"step": int(step[1]), "kind": kind}
        changed = found != self._checkpoints
        self._checkpoints = found
        return changed

    def _changed(self) -> float:
        newest = [stamp.mtime for stamp in self._stamps.values() if stamp is not None]
        newest += [self._metrics.changed, *(step.time for step in self._samples.steps()[-1:])]
        return max(newest, default=0.0)

    # -- showing

    def summary(self) -> dict[str, Any]:
        with self._lock:
            if self._summed is None or self._summed[0] != self.version:
                self._summed = (self.version, self._summary())
            return self._summed[1] | {"name": self.name, "parent": self.parent}

    def _summary(self) -> dict[str, Any]:
        steps = self._samples.steps()
        running = self._state.word == "running"
        done, planned, failed = self._counts(steps)
        rate = self._metrics.rate() if running else None
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self._state.word,
            "reason": self._state.reason or self._damage,
            "started": self._begun(),
            "changed": self._changed(),
            "title": title_of(self.kind, self._settings()),
            "done": done,
            "planned": planned,
            "unit": "pictures" if self.kind == "sample" else "steps",
            "failed": failed,
            "rate": rate,
            "left_s": max(0, planned - done) / rate if rate else None,
            "last": self._last(steps),
            "spark": self._metrics.spark(),
            "loss": self._metrics.loss(),
            "version": self.version,
        }

    def _counts(self, steps: list[Step]) -> tuple[int, int, int]:
        """Done, planned and, of the newest samples, failed."""
        cells = [cell for step in steps[-1:] for those in step.cells.values() for cell in those]
        failed = sum(bool(cell.failed) for cell in cells)
        if self.kind == "sample":
            prompts = self._settings().get("prompts")
            asked = len(prompts) if isinstance(prompts, list) else len(cells)
            return sum(cell.file is not None for cell in cells), asked, failed
        planned: Any = self._settings().get("n_steps")
        return self._metrics.last_step(), int(planned) if is_count(planned) else 0, failed

    def _last(self, steps: list[Step]) -> dict[str, Any] | None:
        for step in reversed(steps):
            for variant in ("ema", "raw"):
                row = self._row(step, variant)
                picture = next((cell for cell in row if cell and "key" in cell), None)
                if picture:
                    return picture
        return None

    def detail(self) -> dict[str, Any]:
        with self._lock:
            if not self._samples.opened:
                self._samples.open()
                self._made = self._summed = None
            if self._made is None or self._made[0] != self.version:
                self._made = (self.version, self._detail())
            return {"summary": self.summary(), **self._made[1]}

    def _detail(self) -> dict[str, Any]:
        steps = self._samples.steps()
        self._columns = {}
        for step in steps:
            for variant in step.cells:
                self._numbers(step.cells[variant])
        self._pictures = {}
        self._teacher_versions = {}
        told = [self._told(step) for step in steps]
        variants = [name for name in ("ema", "raw", "teacher") if any(name in step["cells"] for step in told)]
        sizes = {column: step.size for step in steps for column in self._numbers(step.cells.get("ema", ()))}
        prompts = [
            {"prompt": prompt, "seed": seed, "size": list(sizes.get((prompt, seed, nth)) or ()) or None}
            for prompt, seed, nth in self._columns
        ]
        return {
            "prompts": prompts,
            "variants": variants or ["ema"],
            "steps": told,
            "checkpoints": sorted(self._checkpoints.values(), key=lambda checkpoint: checkpoint["step"]),
            "metrics": self._metrics.metric_names(),
            "scores": list(self._metrics.scores),
        }

    def _told(self, step: Step) -> dict[str, Any]:
        cells = {variant: self._row(step, variant) for variant in step.cells}
        teachers = self._teachers(step)
        if teachers:
            cells["teacher"] = teachers
        return {"step": step.step, "epoch": step.epoch, "loss": step.loss, "time": step.time, "cells": cells}

    def _numbers(self, cells: tuple[Cell, ...]) -> dict[Column, int]:
        """The columns of these cells, new ones after all that are known."""
        seen: dict[tuple[str, int], int] = {}
        numbers = {}
        for cell in cells:
            nth = seen[cell.prompt, cell.seed] = seen.get((cell.prompt, cell.seed), -1) + 1
            column = (cell.prompt, cell.seed, nth)
            numbers[column] = self._columns.setdefault(column, len(self._columns))
        return numbers

    def _row(self, step: Step, variant: str) -> list[dict[str, Any] | None]:
        """One place a column, empty where nothing is drawn."""
        cells = step.cells.get(variant, ())
        numbers = self._numbers(cells).values()
        row: list[dict[str, Any] | None] = [None] * len(self._columns)
        for number, cell in zip(numbers, cells, strict=True):
            if cell.file is not None:
                key = f"s{step.step}.{number}" + (".raw" if variant == "raw" else "")
                self._pictures[key] = cell.file
                row[number] = {"key": key, "v": cell.v}
            elif cell.failed:
                row[number] = {"failed": cell.failed}
        return row

    def _teachers(self, step: Step) -> list[dict[str, Any] | None] | None:
        """The teacher's pictures do not change with the steps, so they have one key a column."""
        cells = next(iter(step.cells.values()), ())
        if not any(cell.teacher for cell in cells):
            return None
        row: list[dict[str, Any] | None] = [None] * len(self._columns)
        for number, cell in zip(self._numbers(cells).values(), cells, strict=True):
            if cell.teacher is not None:
                key = f"t.{number}"
                self._pictures[key] = cell.teacher
                row[number] = {"key": key, "v": self._teacher_version(cell.teacher)}
        return row

    def _teacher_version(self, path: Path) -> str:
        if path not in self._teacher_versions:
            stamp = stamp_of(path)
            self._teacher_versions[path] = f"{stamp.mtime_ns:x}" if stamp else ""
        return self._teacher_versions[path]

    def picture(self, key: str) -> Path | None:
        if not KEY.fullmatch(key):
            return None
        with self._lock:
            if key not in self._pictures:
                self.detail()
            path = self._pictures.get(key)
        if path is None:
            return None
        try:
            real, top = path.resolve(), self.folder.resolve()
        except (OSError, ValueError, RuntimeError):  # no name of a file, or a link to itself
            return None
        return real if real.suffix == ".png" and real.is_relative_to(top) and real.is_file() else None

    def metrics(self, after: int) -> dict[str, Any]:
        with self._lock:
            return self._metrics.after(after)

    def log(self, num_lines: int) -> list[str]:
        return last_lines(self.folder / "logs" / self._log_name, num_lines, self.folder)

    def config(self) -> dict[str, Any]:
        with self._lock:
            record = self._record or read_record(self.folder)
            told = {name: record[name] for name in ("settings", "fixed", "changes")}
            if self._defaults is not None:
                settings = told["settings"]
                told["differs"] = [
                    name
                    for name in settings
                    if settings[name] is not None and settings[name] != self._defaults.get(name)
                ]
            return told

    # -- the record

    def _settings(self) -> dict[str, Any]:
        settings = self._record.get("fixed" if self.kind == "sample" else "settings")
        return settings if isinstance(settings, dict) else {}

    def _begun(self) -> float | None:
        """When its log began, or who holds it did."""
        if self._started is None:
            first = first_line(self.folder / "logs" / self._log_name, self.folder)
            try:
                self._started = time.mktime(time.strptime(first[:19], "%Y-%m-%d %H:%M:%S"))
            except (ValueError, OverflowError):
                return self._state.since
        return self._started


def title_of(kind: str, settings: Mapping[str, Any]) -> str:
    """What is trained on what, in a few words."""

    def last(name: str) -> str:
        path = Path(str(settings.get(name) or ""))
        return path.parents[1].name if path.parent.name == "checkpoints" else path.name

    if kind == "sample":
        size: Any = (settings.get("height"), settings.get("width"))
        words = ["samples"]
    else:
        size = settings.get("image_size")
        words = [_subject(kind, settings, last), last("data_path" if kind == "distill" else "data")]
        words += [str(settings.get("objective") or "")] if kind == "distill" else []
    if isinstance(size, list | tuple) and len(size) == 2 and all(size):
        words.append(f"{size[1]}x{size[0]}")
    return ", ".join(word for word in words if word)


def _subject(kind: str, settings: Mapping[str, Any], last: Callable[[str], str]) -> str:
    if kind == "distill":
        teacher = last("teacher_path")
        return f"student of {teacher}" if teacher else "student"
    if settings.get("model_path"):
        return f"adapters on {last('model_path')}" if settings.get("lora_rank") else last("model_path")
    model = last("model")
    if settings.get("trainer") == OWN_TRAINER:
        return model or "a trainer of one's own"
    return f"{model} DiT" if model else ""
