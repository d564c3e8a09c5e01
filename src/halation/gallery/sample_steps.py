"""The samples of a run, step by step: each samples.json is read once, and again only where it may have changed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation.gallery.run_files import Stamp, as_dict, is_count, is_number, read_object, stamp_of
from halation.runs.folder import CONFIG_FILE

NUM_WATCHED = 2
"""Newest steps that are looked at every time: the names of older ones do not change while a training runs."""
NUM_READERS = 8
MANY = 64
STEP_FOLDER = re.compile(r"step_(\d{1,15})")
EPOCH_INDEX = re.compile(r"epoch_\d{1,9}_samples\.json")
COMING = re.compile(r"(?:sample_(\d{1,6})|gpu_(\d{1,6})_sample)(_raw)?\.png")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One picture that was asked for; `file` is None where it is not there."""

    prompt: str
    seed: int
    file: Path | None
    v: str = ""
    failed: str = ""
    teacher: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What was drawn at one step, by variant (ema, raw)."""

    step: int
    epoch: int | None
    loss: float | None
    time: float
    size: tuple[int, int] | None
    cells: dict[str, tuple[Cell, ...]]
    whole: bool
    stamps: tuple[Stamp | None, Stamp | None]


class SampleSteps:
    """Steps with samples below a run; before `open` only the newest ones, which is all that a list of runs shows."""

    def __init__(self, run: Path, kind: str) -> None:
        self.run = run
        self.folder = run if kind == "sample" else run / "samples"
        self.alone = kind == "sample"
        self.size: tuple[int, int] | None = None
        self.opened = False
        self.stamp: Stamp | None = None
        self._indices: list[Path] = []
        self._steps: dict[Path, Step] = {}

    def refresh(self, again: bool = False) -> bool:
        """Whether anything is new; `again` looks at every step that is known, because a command began anew."""
        stamp = stamp_of(self.folder)
        if stamp != self.stamp or again:
            self._indices = self._listed()
        self.stamp = stamp
        gone = self._steps.keys() - set(self._indices)
        for index in gone:
            del self._steps[index]
        wanted = self._indices if again and self.opened else self._wanted()
        return self._read(wanted) or bool(gone)

    def open(self) -> None:
        """Read what was left out so far."""
        if not self.opened:
            self.opened = True
            self._read(index for index in self._indices if index not in self._steps)

    def steps(self) -> list[Step]:
        """By step; of two drawings at one step the later one."""
        return list({step.step: step for step in sorted(self._steps.values(), key=lambda s: (s.step, s.time))}.values())

    def _wanted(self) -> list[Path]:
        unsettled = {index for index, step in self._steps.items() if not step.whole}
        unread = set(self._indices) - self._steps.keys() if self.opened else set()
        return sorted(unsettled | unread | self._newest())

    def _newest(self) -> set[Path]:
        """The last ones by step and the last ones by epoch: a run that is asked for samples has both, and its order is neither's."""
        folders = [index for index in self._indices if index.name == "samples.json"]
        epochs = [index for index in self._indices if index.name != "samples.json"]
        return {*folders[-NUM_WATCHED:], *epochs[-NUM_WATCHED:]}

    def _listed(self) -> list[Path]:
        if self.alone:
            return [self.folder / "samples.json"]
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if STEP_FOLDER.fullmatch(entry.name):
                        found.append(self.folder / entry.name / "samples.json")
                    elif EPOCH_INDEX.fullmatch(entry.name):
                        found.append(self.folder / entry.name)
        except OSError:
            return []
        return sorted(found, key=lambda path: (len(str(path)), str(path)))  # more digits are later steps

    def _read(self, indices: Iterable[Path]) -> bool:
        indices = list(indices)
        if len(indices) > MANY:  # on a network's file system each of them is a wait
            with ThreadPoolExecutor(NUM_READERS) as pool:
                read = list(pool.map(self._step, indices))
        else:
            read = [self._step(index) for index in indices]
        changed = False
        for index, step in zip(indices, read, strict=True):
            if step is not None and step is not self._steps.get(index):
                self._steps[index] = step
                changed = True
        return changed

    def _step(self, index: Path) -> Step | None:
        """The step as it is now, the very same object where nothing changed; None before there is anything to show."""
        known = self._steps.get(index)
        stamp = stamp_of(index)
        folder = stamp_of(index.parent) if known is None or not known.whole else None
        if known is not None and known.stamps == (stamp, None if known.whole else folder):
            return known
        said = read_object(index, self.run) if stamp is not None else {}
        number = self._number(index, said)
        if number is None or (stamp is None and not self.alone):
            return known
        settings = as_dict(said.get("settings"))
        if self.alone and not said:
            settings = as_dict(read_object(self.run / CONFIG_FILE).get("fixed"))
        size = _size(settings) or self.size
        rows: list[Any] = said["samples"] if isinstance(said.get("samples"), list) else []
        whole = bool(rows)
        drawn = _cells(index.parent, rows, stamp) if whole else _coming(index.parent, settings)
        return Step(
            step=number,
            epoch=said.get("epoch") if is_count(said.get("epoch")) else None,
            loss=said["loss"] if is_number(said.get("loss")) else None,
            time=stamp.mtime if stamp else folder.mtime if folder else 0.0,
            size=size,
            cells=drawn,
            whole=whole,
            stamps=(stamp, None if whole else folder),
        )

    def _number(self, index: Path, said: dict[str, Any]) -> int | None:
        if is_count(said.get("step")):
            return int(said["step"])
        if self.alone:
            found = STEP_FOLDER.fullmatch(Path(str(said.get("checkpoint", ""))).name)
            return int(found[1]) if found else 0
        found = STEP_FOLDER.fullmatch(index.parent.name)
        return int(found[1]) if found else None


def _size(settings: Any) -> tuple[int, int] | None:
    """Width and height."""
    if not isinstance(settings, dict):
        return None
    width, height = settings.get("width"), settings.get("height")
    return (int(width), int(height)) if is_count(width) and is_count(height) else None  # type: ignore[arg-type]


def _cells(folder: Path, rows: list[Any], stamp: Stamp | None) -> dict[str, tuple[Cell, ...]]:
    """Cells of a whole index. samples.json is written after its pictures, so its own stamp tells their versions."""
    cells: dict[str, list[Cell]] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not is_count(row.get("seed")):
            continue
        there = row.get("state") == "done" and isinstance(row.get("file"), str)
        teacher = row.get("teacher")
        cell = Cell(
            prompt=row["prompt"],
            seed=row["seed"],
            file=folder / row["file"] if there else None,
            v=_version(f"{row['file']} {stamp}") if there else "",
            failed=str(row.get("reason") or "failed") if row.get("state") == "failed" else "",
            teacher=folder / teacher if isinstance(teacher, str) else None,
        )
        cells.setdefault("raw" if row.get("raw") else "ema", []).append(cell)
    return {variant: tuple(those) for variant, those in cells.items()}


def _coming(folder: Path, settings: Any) -> dict[str, tuple[Cell, ...]]:
    """Cells of a step that is being drawn: the pictures that are there already, by the numbers in their names."""
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    seed = settings.get("seed") if isinstance(settings, dict) else None
    if not isinstance(prompts, list) or seed is None or not is_count(seed):
        return {}
    found: dict[tuple[str, int], tuple[Path, str]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = COMING.fullmatch(entry.name)
                if name:
                    number, stat = int(name[1] or name[2]), entry.stat()
                    v = _version(f"{entry.name} {stat.st_size} {stat.st_mtime_ns}")
                    found["raw" if name[3] else "ema", number] = (folder / entry.name, v)
    except OSError:
        return {}
    cells: dict[str, tuple[Cell, ...]] = {}
    for variant in ("ema", *(["raw"] if any(key[0] == "raw" for key in found) else [])):
        row = []
        for number, prompt in enumerate(prompts):
            file, v = found.get((variant, number), (None, ""))
            own = seed if settings.get("same_seed") else seed + number
            row.append(Cell(prompt=str(prompt), seed=own, file=file, v=v))
        cells[variant] = tuple(row)
    return cells


def _version(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()
