"""A folder of samples: file names, finished images, and the threads that write them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from halation import work_division
from halation.errors import InputError
from halation.fault_injection import fault_point
from halation.images.grid import make_grid
from halation.images.png_codec import encode_png, metadata_texts, read_png
from halation.input_files import parse_json
from halation.runs import run_folder as runs
from halation.sample_specs import SampleBatch, SampleSpec

log = logging.getLogger(__name__)

NUM_WRITERS = 2
SampleRow = dict[str, Any]
"""The result of one image."""


@dataclass(frozen=True, kw_only=True)
class RankNaming:
    """File names with epoch, rank and sample number; all epochs are in one folder.

    Rank and number come from dividing the prompt list into contiguous shares, whichever rank samples the image.
    """

    epoch: int
    num_prompts: int
    num_ranks: int

    @property
    def prefix(self) -> str:
        return f"epoch_{self.epoch:04d}_"

    def name(self, spec: SampleSpec) -> str:
        rank, number = work_division.rank_and_offset(spec.index, self.num_prompts, self.num_ranks)
        return f"{self.prefix}rank_{rank}_sample_{number:02d}"


@dataclass(frozen=True, kw_only=True)
class SampleFolder:
    """Location and file names of a folder of samples.

    `label` names the model if its images are shown beside those of another.
    """

    folder: Path
    suffix: str = ""
    naming: Literal["index", "gpu"] | RankNaming = "index"
    label: str = ""
    depth: int = 2
    """Depth below the run folder; 0 is the run folder, which is never created here, so that its loss is noticed."""

    def create(self) -> None:
        runs.make_subfolder(self.folder, self.depth)

    @property
    def prefix(self) -> str:
        """Prefix of all its file names, if the folder also contains other samples."""
        return self.naming.prefix if isinstance(self.naming, RankNaming) else ""

    @property
    def grid_path(self) -> Path:
        return self.folder / f"{self.prefix}grid.png"

    @property
    def index_path(self) -> Path:
        return self.folder / f"{self.prefix}samples.json"

    def image_path(self, spec: SampleSpec) -> Path:
        if self.naming == "gpu":
            return self.folder / f"gpu_{spec.index}_sample{self.suffix}.png"
        return self.folder / f"{self._stem(spec)}{self.suffix}.png"

    def prompt_path(self, spec: SampleSpec) -> Path:
        return self.folder / (f"gpu_{spec.index}_prompt.txt" if self.naming == "gpu" else f"{self._stem(spec)}.txt")

    def read_index(self) -> dict[str, Any]:
        """Read samples.json; empty if it is missing or damaged."""
        return _read_index(self.index_path)

    def clear(self) -> None:
        """Remove its images and their other files, or the whole folder if it is not shared."""
        if not self.prefix:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            _remove_files(self.folder, self.prefix)

    def _stem(self, spec: SampleSpec) -> str:
        return self.naming.name(spec) if isinstance(self.naming, RankNaming) else spec.id


@dataclass(frozen=True, kw_only=True)
class ComparisonImages:
    """Another model's images for the same prompts and seeds, by index."""

    label: str
    files: Mapping[int, Path]


def remove_samples_after(samples: Path, step: int) -> None:
    """Remove the samples of later steps, which will be trained and sampled again."""
    for folder in samples.glob("step_*"):
        if folder.name > runs.step_name(step) or step < 0:
            shutil.rmtree(folder, ignore_errors=True)
    for path in samples.glob("epoch_*_samples.json"):
        index = _read_index(path)
        if not index and step >= 0:
            log.warning("%s is damaged: keeping its images, because their step is unknown", path)
        elif index.get("step", step + 1) > step:
            _remove_files(samples, path.name.removesuffix("samples.json"))


def _remove_files(folder: Path, prefix: str) -> None:
    """Remove samples.json last, so that an interrupted removal is found and finished later."""
    paths = sorted(folder.glob(f"{prefix}*"), key=lambda path: path.name.endswith("samples.json"))
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = runs.read_json_with_digest(path)
    except (OSError, InputError):
        return {}
    return index if isinstance(index, dict) else {}


class SampleWriter:
    """Encodes and publishes images in threads while the next ones are sampled.

    Only a few images wait in memory.
    """

    def __init__(self, sample_folder: SampleFolder, sampler: str) -> None:
        self.sample_folder = sample_folder
        self.sampler = sampler
        self.pool = ThreadPoolExecutor(max_workers=NUM_WRITERS, thread_name_prefix="halation-writer")
        self.free_slots = threading.BoundedSemaphore(2 * NUM_WRITERS)
        self.pending: list[tuple[SampleRow, Future[None]]] = []

    def put(self, batch: SampleBatch, images: Mapping[int, np.ndarray], rows: Sequence[SampleRow]) -> None:
        for number, pixels in images.items():
            self.submit(batch.specs[number], pixels, rows[number])

    def submit(self, spec: SampleSpec, pixels: np.ndarray, row: SampleRow) -> None:
        self.free_slots.acquire()
        future = self.pool.submit(self._write, spec, pixels)
        future.add_done_callback(lambda _: self.free_slots.release())
        self.pending.append((row, future))

    def _write(self, spec: SampleSpec, pixels: np.ndarray) -> None:
        fault_point("sample.write")
        data = encode_png(pixels, metadata_texts(spec.as_json(), sampler=self.sampler))
        for is_last_try in (False, True):  # retry once: the disk may have been full or unavailable for a moment
            try:
                runs.write_atomic(self.sample_folder.image_path(spec), data)
                runs.write_atomic(self.sample_folder.prompt_path(spec), spec.prompt.encode())
                return
            except OSError:
                if is_last_try:
                    raise

    def finish(self) -> None:
        """Wait for all files; an image that could not be written becomes a failed row."""
        for row, future in self.pending:
            error = future.exception()
            if isinstance(error, OSError):
                where, why = self.sample_folder.folder, error.strerror or error
                row |= {"state": "failed", "reason": f"OSError: cannot write to directory {where}: {why}"}
            elif error is not None:
                row |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
            if error is not None:
                log.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])
        self.pool.shutdown()


def is_drawn(sample_folder: SampleFolder, spec: SampleSpec) -> bool:
    """Return True if the complete image of exactly this spec exists, with its prompt file."""
    try:
        _, text = read_png(sample_folder.image_path(spec))
        return (
            parse_json(text["halation"].encode()) == spec.as_json()
            and sample_folder.prompt_path(spec).read_bytes() == spec.prompt.encode()
        )
    except (InputError, OSError, ValueError, KeyError):
        return False


def publish_index(
    sample_folder: SampleFolder,
    rows: Sequence[SampleRow],
    metadata: dict[str, Any],
    others: Sequence[tuple[SampleFolder, Sequence[SampleRow]]] = (),
    comparison: ComparisonImages | None = None,
) -> np.ndarray:
    """Write grid.png and samples.json of a folder, and return the grid.

    In the grid, each image of `comparison` is next to its counterpart.
    """
    cells, labels, index_rows = [], [], []
    for row_folder, folder_rows in [(sample_folder, rows), *others]:
        for row in folder_rows:
            raw = " (raw)" if row_folder.suffix else ""
            cells.append(read_png(row_folder.folder / row["file"])[0] if row["state"] == "done" else None)
            labels.append(f"{sample_folder.label}{raw}: {row['prompt']}" if comparison else row["prompt"] + raw)
            index_rows.append(row | {"raw": bool(row_folder.suffix)})
            if comparison:
                path = comparison.files[row["index"]]
                cells.append(None)
                with contextlib.suppress(InputError, OSError):  # a missing image leaves only its cell empty
                    cells[-1] = read_png(path)[0]
                labels.append(f"{comparison.label}: {row['prompt']}")
                index_rows[-1][comparison.label] = os.path.relpath(path, sample_folder.folder)
    image = np.full((8, 8, 3), 255, np.uint8)
    if cells:
        group = 2 if comparison else 1
        image = make_grid(cells, columns=min(4, group * len(rows)), labels=labels, group=group)
        runs.write_atomic(sample_folder.grid_path, encode_png(image, {}))
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    runs.write_json_with_digest(sample_folder.index_path, metadata | {"time": now, "samples": index_rows})
    return image
