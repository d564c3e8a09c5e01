"""A folder of samples: how its files are called, which of them are there, and threads that write them while the next ones are drawn."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halation import plan
from halation.errors import InputError
from halation.faults import fault_point
from halation.images.grid import grid
from halation.images.png import encode_png, picture_text, read_png
from halation.runs.folder import publish, publish_json, step_name
from halation.specs import Sheet, Spec

log = logging.getLogger(__name__)

NUM_WRITERS = 2
Row = dict[str, Any]
"""What became of one picture."""


@dataclass(frozen=True, kw_only=True)
class ByRank:
    """Names by the epoch and by a prompt's place in the contiguous shares of the whole list, whoever draws it; all epochs in one folder."""

    epoch: int
    num_prompts: int
    num_ranks: int

    @property
    def prefix(self) -> str:
        return f"epoch_{self.epoch:04d}_"

    def name(self, spec: Spec) -> str:
        rank, number = plan.place_in_shares(spec.index, self.num_prompts, self.num_ranks)
        return f"{self.prefix}rank_{rank}_sample_{number:02d}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a folder of samples goes and how its files are called; `label` says whose they are where two stand side by side."""

    folder: Path
    suffix: str = ""
    names: Literal["index", "gpu"] | ByRank = "index"
    label: str = ""

    @property
    def prefix(self) -> str:
        """What the names of all its files begin with, where the folder holds other samples too."""
        return self.names.prefix if isinstance(self.names, ByRank) else ""

    @property
    def grid(self) -> Path:
        return self.folder / f"{self.prefix}grid.png"

    @property
    def index(self) -> Path:
        return self.folder / f"{self.prefix}samples.json"

    def picture(self, spec: Spec) -> Path:
        if self.names == "gpu":
            return self.folder / f"gpu_{spec.index}_sample{self.suffix}.png"
        return self.folder / f"{self._name(spec)}{self.suffix}.png"

    def prompt(self, spec: Spec) -> Path:
        return self.folder / (f"gpu_{spec.index}_prompt.txt" if self.names == "gpu" else f"{self._name(spec)}.txt")

    def recorded(self) -> dict[str, Any]:
        """What samples.json says; nothing where it is missing or damaged."""
        return _read_index(self.index)

    def clear(self) -> None:
        """Remove its pictures and what belongs to them; of a folder of its own, everything."""
        if not self.prefix:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            _remove_all(self.folder, self.prefix)

    def _name(self, spec: Spec) -> str:
        return self.names.name(spec) if isinstance(self.names, ByRank) else spec.id


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Somebody else's pictures for the same prompts and seeds, by index."""

    label: str
    files: Mapping[int, Path]


def forget_after(samples: Path, step: int) -> None:
    """Remove the samples of later steps: they will be drawn again, from weights trained again."""
    for folder in samples.glob("step_*"):
        if folder.name > step_name(step) or step < 0:
            shutil.rmtree(folder, ignore_errors=True)
    for path in samples.glob("epoch_*_samples.json"):
        if _read_index(path).get("step", step + 1) > step:
            _remove_all(samples, path.name.removesuffix("samples.json"))


def _remove_all(folder: Path, prefix: str) -> None:
    """samples.json last: what a kill leaves behind is found again by it."""
    paths = sorted(folder.glob(f"{prefix}*"), key=lambda path: path.name.endswith("samples.json"))
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _read_index(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


class Writer:
    """Encodes and publishes pictures in threads while the next ones are drawn; never more than a few wait in memory."""

    def __init__(self, place: Place, sampler: str) -> None:
        self.place = place
        self.sampler = sampler
        self.pool = ThreadPoolExecutor(max_workers=NUM_WRITERS, thread_name_prefix="halation-writer")
        self.room = threading.BoundedSemaphore(2 * NUM_WRITERS)
        self.written: list[tuple[Row, Future[None]]] = []

    def put(self, sheet: Sheet, pictures: Mapping[int, np.ndarray], rows: Sequence[Row]) -> None:
        for number, pixels in pictures.items():
            self.submit(sheet.specs[number], pixels, rows[number])

    def submit(self, spec: Spec, pixels: np.ndarray, row: Row) -> None:
        self.room.acquire()
        future = self.pool.submit(self._write, spec, pixels)
        future.add_done_callback(lambda _: self.room.release())
        self.written.append((row, future))

    def _write(self, spec: Spec, pixels: np.ndarray) -> None:
        fault_point("sample.write")
        data = encode_png(pixels, picture_text(spec.as_json(), sampler=self.sampler))
        for last in (False, True):  # a full or flickering disk gets a second chance
            try:
                publish(self.place.picture(spec), data)
                publish(self.place.prompt(spec), spec.prompt.encode())
                return
            except OSError:
                if last:
                    raise

    def finish(self) -> None:
        """Wait for all files; a picture that could not be written becomes a failed row."""
        for row, future in self.written:
            error = future.exception()
            if isinstance(error, OSError):
                row |= {
                    "state": "failed",
                    "reason": f"OSError: cannot write to directory {self.place.folder}: {error.strerror or error}",
                }
            elif error is not None:
                row |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
            if error is not None:
                log.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])
        self.pool.shutdown()


def is_drawn(place: Place, spec: Spec) -> bool:
    """Whether the picture of this very spec is there, whole, with its prompt beside it."""
    try:
        _, text = read_png(place.picture(spec))
        return (
            json.loads(text["halation"]) == spec.as_json() and place.prompt(spec).read_bytes() == spec.prompt.encode()
        )
    except (InputError, OSError, ValueError, KeyError):
        return False


def _picture(path: Path) -> np.ndarray | None:
    """One that is not there costs its cell: it is not of this drawing."""
    try:
        return read_png(path)[0]
    except (InputError, OSError):
        return None


def publish_index(
    place: Place,
    rows: Sequence[Row],
    facts: dict[str, Any],
    others: Sequence[tuple[Place, Sequence[Row]]] = (),
    beside: Beside | None = None,
) -> np.ndarray:
    """grid.png and samples.json of a folder; returns the grid, in which the pictures of `beside` stand next to their own ones."""
    cells, labels, listed = [], [], []
    for where, drawn in [(place, rows), *others]:
        for row in drawn:
            raw = " (raw)" if where.suffix else ""
            cells.append(read_png(where.folder / row["file"])[0] if row["state"] == "done" else None)
            labels.append(f"{place.label}{raw}: {row['prompt']}" if beside else row["prompt"] + raw)
            listed.append(row | {"raw": bool(where.suffix)})
            if beside:
                path = beside.files[row["index"]]
                cells.append(_picture(path))
                labels.append(f"{beside.label}: {row['prompt']}")
                listed[-1][beside.label] = os.path.relpath(path, place.folder)
    picture = np.full((8, 8, 3), 255, np.uint8)
    if cells:
        group = 2 if beside else 1
        picture = grid(cells, columns=min(4, group * len(rows)), labels=labels, group=group)
        publish(place.grid, encode_png(picture, {}))
    publish_json(place.index, facts | {"samples": listed})
    return picture
