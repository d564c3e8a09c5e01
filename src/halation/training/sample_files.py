"""A folder of samples: how its files are called, which of them are there, and threads that write them while the next ones are drawn."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halation.errors import InputError
from halation.faults import fault_point
from halation.pictures import grid
from halation.png import encode_png, picture_text, read_png
from halation.runs import publish, publish_json
from halation.specs import Sheet, Spec

log = logging.getLogger(__name__)

NUM_WRITERS = 2
Row = dict[str, Any]
"""What became of one picture."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a folder of samples goes and how its files are called."""

    folder: Path
    suffix: str = ""
    names: Literal["index", "gpu"] = "index"

    def picture(self, spec: Spec) -> Path:
        name = spec.id if self.names == "index" else f"gpu_{spec.index}_sample"
        return self.folder / f"{name}{self.suffix}.png"

    def prompt(self, spec: Spec) -> Path:
        return self.folder / (f"{spec.id}.txt" if self.names == "index" else f"gpu_{spec.index}_prompt.txt")


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


def publish_index(
    place: Place, rows: Sequence[Row], facts: dict[str, Any], others: Sequence[tuple[Place, Sequence[Row]]] = ()
) -> np.ndarray:
    """grid.png and samples.json of a folder; returns the grid."""
    everything = [(place, rows), *others]
    cells, labels, listed = [], [], []
    for where, drawn in everything:
        for row in drawn:
            path = where.folder / row["file"]
            cells.append(read_png(path)[0] if row["state"] == "done" else None)
            labels.append(row["prompt"] + (" (raw)" if where.suffix else ""))
            listed.append(row | {"raw": bool(where.suffix)})
    picture = (
        grid(cells, columns=min(4, max(1, len(rows))), labels=labels) if cells else np.full((8, 8, 3), 255, np.uint8)
    )
    if cells:
        publish(place.folder / "grid.png", encode_png(picture, {}))
    publish_json(place.folder / "samples.json", facts | {"samples": listed})
    return picture
