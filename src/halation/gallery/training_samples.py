"""The samples of a run by step; samples.json files are reread if they may have changed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation.gallery import run_file_reader
from halation.gallery.run_file_reader import FileStamp, as_dict, is_int64, is_number, read_json_object, read_stamp
from halation.runs.run_folder import CONFIG_FILE

NUM_POLLED_STEPS = 2
"""Newest steps that are polled every time; older ones do not change while a training runs."""
NUM_READER_THREADS = 8
PARALLEL_READ_ABOVE = 64
STEP_FOLDER = re.compile(r"step_(\d{1,15})")
EPOCH_INDEX_FILE = re.compile(r"epoch_\d{1,9}_samples\.json")
SAMPLE_FILE = re.compile(r"(?:sample_(\d{1,6})|gpu_(\d{1,6})_sample)(_raw)?\.png")


@dataclass(frozen=True, kw_only=True)
class SampleCell:
    """One requested image; `file` is None if it does not exist."""

    prompt: str
    seed: int
    file: Path | None
    version: str = ""
    failure_reason: str = ""
    teacher: Path | None = None
    size: tuple[int, int] | None = None
    """Width and height, if they are its own."""


@dataclass(frozen=True, kw_only=True)
class SampleStep:
    """The samples of one step, by variant (ema, raw)."""

    step: int
    epoch: int | None
    loss: float | None
    time: float
    size: tuple[int, int] | None
    cells: dict[str, tuple[SampleCell, ...]]
    is_complete: bool
    stamps: tuple[FileStamp | None, FileStamp | None]


class SampleStepReader:
    """Steps with samples of a run; before `load_all` only the newest, for the list of runs."""

    def __init__(self, run: Path, kind: str) -> None:
        self.run_folder = run
        self.folder = run if kind == "sample" else run / "samples"
        self.is_single_step = kind == "sample"
        self.size: tuple[int, int] | None = None
        self.is_loaded = False
        self.stamp: FileStamp | None = None
        self._index_files: list[Path] = []
        self._steps: dict[Path, SampleStep] = {}

    def refresh(self, reread_all: bool = False) -> bool:
        """Return True if anything changed; `reread_all` rereads every known step, after a restart."""
        stamp = read_stamp(self.folder)
        if stamp != self.stamp or reread_all:
            self._index_files = self._list_index_files()
        self.stamp = stamp
        gone = self._steps.keys() - set(self._index_files)
        for index in gone:
            del self._steps[index]
        wanted = self._index_files if reread_all and self.is_loaded else self._select_files()
        return self._read_steps(wanted) or bool(gone)

    def load_all(self) -> None:
        """Read all steps that were not read so far."""
        if not self.is_loaded:
            self.is_loaded = True
            self._read_steps(index for index in self._index_files if index not in self._steps)

    def steps(self) -> list[SampleStep]:
        """Samples by step; if a step was sampled twice, the later ones."""
        return list({step.step: step for step in sorted(self._steps.values(), key=lambda s: (s.step, s.time))}.values())

    def _select_files(self) -> list[Path]:
        incomplete = {index for index, step in self._steps.items() if not step.is_complete}
        unread = set(self._index_files) - self._steps.keys() if self.is_loaded else set()
        return sorted(incomplete | unread | self._newest_files())

    def _newest_files(self) -> set[Path]:
        """The newest files by step and by epoch: a run with requested samples has both kinds."""
        folders = [index for index in self._index_files if index.name == "samples.json"]
        epochs = [index for index in self._index_files if index.name != "samples.json"]
        return {*folders[-NUM_POLLED_STEPS:], *epochs[-NUM_POLLED_STEPS:]}

    def _list_index_files(self) -> list[Path]:
        if self.is_single_step:
            return [self.folder / "samples.json"]
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if STEP_FOLDER.fullmatch(entry.name):
                        found.append(self.folder / entry.name / "samples.json")
                    elif EPOCH_INDEX_FILE.fullmatch(entry.name):
                        found.append(self.folder / entry.name)
        except OSError:
            return []
        return sorted(found, key=lambda path: (len(str(path)), str(path)))  # names with more digits are later steps

    def _read_steps(self, indices: Iterable[Path]) -> bool:
        indices = list(indices)
        if len(indices) > PARALLEL_READ_ABOVE:  # on a network file system each read has a latency
            with ThreadPoolExecutor(NUM_READER_THREADS) as pool:
                read = list(pool.map(self._read_step, indices))
        else:
            read = [self._read_step(index) for index in indices]
        changed = False
        for index, step in zip(indices, read, strict=True):
            if step is not None and step is not self._steps.get(index):
                self._steps[index] = step
                changed = True
        return changed

    def _read_step(self, index: Path) -> SampleStep | None:
        """Read a step; return the same object if nothing changed, None if there is no data."""
        known = self._steps.get(index)
        stamp = read_stamp(index)
        folder = read_stamp(index.parent) if known is None or not known.is_complete else None
        if known is not None and known.stamps == (stamp, None if known.is_complete else folder):
            return known
        index_data = read_json_object(index, self.run_folder) if stamp is not None else {}
        number = self._step_number(index, index_data)
        if number is None or (stamp is None and not self.is_single_step):
            return known
        settings = as_dict(index_data.get("settings"))
        if self.is_single_step and not index_data:
            settings = as_dict(read_json_object(self.run_folder / CONFIG_FILE).get("fixed"))
        has_size = all(is_int64(settings.get(name)) for name in ("width", "height"))
        size = (settings["width"], settings["height"]) if has_size else self.size
        rows: list[Any] = index_data["samples"] if isinstance(index_data.get("samples"), list) else []
        is_complete = bool(rows)
        cells = _complete_cells(index.parent, rows, stamp) if is_complete else _partial_cells(index.parent, settings)
        return SampleStep(
            step=number,
            epoch=index_data.get("epoch") if is_int64(index_data.get("epoch")) else None,
            loss=index_data["loss"] if is_number(index_data.get("loss")) else None,
            time=run_file_reader.parse_utc_offset_time(index_data.get("time"))
            or (stamp.mtime if stamp else folder.mtime if folder else 0.0),
            size=size,
            cells=cells,
            is_complete=is_complete,
            stamps=(stamp, None if is_complete else folder),
        )

    def _step_number(self, index: Path, index_data: dict[str, Any]) -> int | None:
        if is_int64(index_data.get("step")):
            return int(index_data["step"])
        if self.is_single_step:
            found = STEP_FOLDER.fullmatch(Path(str(index_data.get("checkpoint", ""))).name)
            return int(found[1]) if found else 0
        found = STEP_FOLDER.fullmatch(index.parent.name)
        return int(found[1]) if found else None


def _complete_cells(folder: Path, rows: list[Any], stamp: FileStamp | None) -> dict[str, tuple[SampleCell, ...]]:
    """Cells of a complete index. It is written after its images; its stamp is their version."""
    cells: dict[str, list[SampleCell]] = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not is_int64(row.get("seed")):
            continue
        is_done = row.get("state") == "done" and isinstance(row.get("file"), str)
        teacher = row.get("teacher")
        cell = SampleCell(
            prompt=row["prompt"],
            seed=row["seed"],
            file=folder / row["file"] if is_done else None,
            version=_hash_version(f"{row['file']} {stamp}") if is_done else "",
            failure_reason=str(row.get("reason") or "failed") if row.get("state") == "failed" else "",
            teacher=folder / teacher if isinstance(teacher, str) else None,
            size=_own_size(row),
        )
        cells.setdefault("raw" if row.get("raw") else "ema", []).append(cell)
    return {variant: tuple(items) for variant, items in cells.items()}


def _own_size(row: dict[str, Any]) -> tuple[int, int] | None:
    width: Any = row.get("width")
    height: Any = row.get("height")
    return (width, height) if is_int64(width) and is_int64(height) else None


def _partial_cells(folder: Path, settings: Any) -> dict[str, tuple[SampleCell, ...]]:
    """Cells of a step in progress: the existing images, by the numbers in their names."""
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    seed = settings.get("seed") if isinstance(settings, dict) else None
    if not isinstance(prompts, list) or seed is None or not is_int64(seed):
        return {}
    found: dict[tuple[str, int], tuple[Path, str]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = SAMPLE_FILE.fullmatch(entry.name)
                if name:
                    number, stat = int(name[1] or name[2]), entry.stat()
                    v = _hash_version(f"{entry.name} {stat.st_size} {stat.st_mtime_ns}")
                    found["raw" if name[3] else "ema", number] = (folder / entry.name, v)
    except OSError:
        return {}
    rows = settings["rows"] if isinstance(settings.get("rows"), list) else []
    cells: dict[str, tuple[SampleCell, ...]] = {}
    for variant in ("ema", *(["raw"] if any(key[0] == "raw" for key in found) else [])):
        row = []
        for number, prompt in enumerate(prompts):
            file, v = found.get((variant, number), (None, ""))
            cell_seed = seed if settings.get("same_seed") else seed + number
            own = as_dict(rows[number]) if number < len(rows) else {}
            cell_seed = own["seed"] if is_int64(own.get("seed")) else cell_seed
            row.append(SampleCell(prompt=str(prompt), seed=cell_seed, file=file, version=v))
        cells[variant] = tuple(row)
    return cells


def _hash_version(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()
