"""Find complete checkpoints in a folder, and preserve those that their trainer removes.

Only names, files and headers are read; no weights are loaded.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from halation.errors import InputError
from halation.input_files import MAX_MODEL_ENTRIES, RefusedFileError, read_json, walk_folder
from halation.models.model_folder import EXPORT_FILE
from halation.models.pipelines.folder_safety_check import check_safetensors
from halation.runs.run_folder import COMMIT_FILE, publish_folder, temporary_path

MODEL_INDEX = "model_index.json"
NO_HARD_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A folder with the model of one step."""

    step: int
    name: str
    folder: Path


def parse_step(name: str) -> int | None:
    """The last number in a name: checkpoint-500, epoch_3, step_0002000."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


@dataclass(kw_only=True)
class _FolderSnapshot:
    """The files of a folder (name, size, mtime), and since when they are unchanged."""

    files: frozenset[tuple[str, int, int]]
    unchanged_since: float


@dataclass(kw_only=True)
class CheckpointScanner:
    """Finds checkpoints in a folder or its `checkpoints/`, in repeated scans during training."""

    folder: Path
    settle_s: float
    snapshots: dict[Path, _FolderSnapshot] = field(default_factory=dict)
    unnumbered: set[str] = field(default_factory=set)
    unsettled: dict[str, str] = field(default_factory=dict)
    """Pipelines that may still be written, with the reason."""
    incomplete: dict[str, str] = field(default_factory=dict)
    """Pipelines that are unchanged for `settle_s` and incomplete, with the reason."""
    unrecognized: set[str] = field(default_factory=set)
    """Folders with a step in their name that are unchanged for `settle_s` but hold neither kind of model."""

    def scan(self) -> list[CheckpointFolder]:
        """Return all complete checkpoints, oldest step first."""
        found: list[CheckpointFolder] = []
        self.unsettled, self.incomplete, self.unrecognized = {}, {}, set()
        for path in sorted(self._list_folders()):
            step = parse_step(path.name)
            if step is None:
                if path.name != "export" or not (path / EXPORT_FILE).exists():  # an export is a copy of a checkpoint
                    self.unnumbered.add(path.name)
            elif self._is_complete(path):
                found.append(CheckpointFolder(step=step, name=path.name, folder=path))
        return sorted(found, key=lambda each: (each.step, each.name))

    def _list_folders(self) -> list[Path]:
        """Return the folders that hold a model, judged by names and index files."""
        folders = []
        for top in (self.folder, self.folder / "checkpoints"):
            try:
                visible = [path for path in top.iterdir() if not path.name.startswith(".") and path.is_dir()]
            except OSError:
                continue
            for path in visible:
                if (path / MODEL_INDEX).exists() or ((path / COMMIT_FILE).exists() and path.name.startswith("step_")):
                    folders.append(path)
                elif parse_step(path.name) is not None and not (path / COMMIT_FILE).exists() and self._is_old(path):
                    self.unrecognized.add(path.name)
        return folders

    def _is_old(self, folder: Path) -> bool:
        try:
            return time.time() - folder.stat().st_mtime >= self.settle_s
        except OSError:
            return False

    def _is_complete(self, folder: Path) -> bool:
        if (folder / COMMIT_FILE).exists():  # written last, before the folder gets its final name
            return True
        try:
            stats = {path: path.stat() for path in _walk_files(folder)}
            files = frozenset((str(path), each.st_size, each.st_mtime_ns) for path, each in stats.items())
            problem = self._find_recent_change(folder, files)
            if problem:
                self.unsettled[folder.name] = problem
                return False
            problem = find_missing_parts(folder)
        except RefusedFileError as error:
            problem = str(error.strerror)
        except OSError:  # removed or renamed during the scan
            return False
        if problem:
            self.incomplete[folder.name] = problem
        return not problem

    def _find_recent_change(self, folder: Path, files: frozenset[tuple[str, int, int]]) -> str:
        """Return a message if the files changed recently, so that the folder may still be written.

        Time counts from the first scan that saw these files, or from their mtime if that is earlier.
        """
        now = time.monotonic()
        snapshot = self.snapshots.get(folder)
        if snapshot is None or snapshot.files != files:
            snapshot = self.snapshots[folder] = _FolderSnapshot(files=files, unchanged_since=now)
        unchanged_s = max(now - snapshot.unchanged_since, time.time() - max(changed for _, _, changed in files) / 1e9)
        return "" if unchanged_s >= self.settle_s else f"changed {unchanged_s:.0f} s ago"


def _walk_files(folder: Path) -> list[Path]:
    """Return every file, sorted; symlinked folders, which some trainers create, are followed."""
    walk = walk_folder(folder, max_entries=MAX_MODEL_ENTRIES)
    return sorted(Path(top) / name for top, _, names in walk for name in names)


def find_missing_parts(folder: Path) -> str:
    """Return what a checkpoint lacks by its index files and headers; empty if it is complete.

    Hashes are checked on loading.
    """
    try:
        if (folder / COMMIT_FILE).exists():
            sums = read_json(folder / COMMIT_FILE)["sha256"]
            return next((f"{name} is missing" for name in sums if not (folder / name).is_file()), "")
        index = read_json(folder / MODEL_INDEX)
        parts = [name for name, value in index.items() if isinstance(value, list) and None not in value]
        missing = [name for name in parts if not name.startswith("_") and not (folder / name).is_dir()]
        if missing:
            return f"{missing[0]}/ is missing"
        for listing in folder.rglob("*.safetensors.index.json"):
            shards = set(read_json(listing)["weight_map"].values())
            lost = sorted(name for name in shards if not (listing.parent / str(name)).is_file())
            if lost:
                return f"{lost[0]} is missing"
        for weights in folder.rglob("*.safetensors"):
            check_safetensors(weights)
    except InputError as error:
        return error.found
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"an index of its files cannot be read ({error})"
    return ""


def hard_link(source: Path, target: Path) -> bool:
    """Hard-link the files of a folder to `target`; return False if the file system cannot."""
    return _duplicate_folder(source, target, os.link)


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a folder, by hard links if the file system supports them."""
    if not hard_link(source, target):
        _duplicate_folder(source, target, shutil.copy2)


def _duplicate_folder(source: Path, target: Path, copy_file: Callable[[Path, Path], object]) -> bool:
    """Copy or link all files of a folder; `target` appears only when it is complete."""
    temporary = temporary_path(target)
    temporary.mkdir(parents=True)
    try:
        for path in _walk_files(source):
            destination = temporary / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path.resolve(), destination)  # follows symlinks, as in the hub's cache
        if find_missing_parts(temporary):  # its trainer is removing it
            raise FileNotFoundError(errno.ENOENT, "it is being removed", str(source))
        publish_folder(temporary, target, "checkpoint_copy")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if copy_file is os.link and error.errno in NO_HARD_LINK_ERRNOS:
            return False
        raise
    return True


def clean_up(folder: Path) -> None:
    """Remove temporary folders of a killed call; two of the suffixes are of earlier versions."""
    for ending in (".tmp", ".removing", ".incoming"):
        for leftover in [*folder.glob(f".*{ending}"), *folder.glob(f"*/.*{ending}")]:
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
