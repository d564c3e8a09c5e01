"""Checkpoints as they appear in a folder: which are there, which are whole, and how one stays alive after its trainer removed it.

It knows names, files and headers; it loads no weights.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from halation.errors import InputError
from halation.models.fingerprint import EXPORT_FILE
from halation.models.pipelines.folder_check import check_safetensors
from halation.runs.folder import COMMIT, sync_folder

MODEL_INDEX = "model_index.json"
UNLINKABLE = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder that holds a model of one step."""

    step: int
    name: str
    folder: Path


def step_of(name: str) -> int | None:
    """The last number in a name: checkpoint-500, epoch_3, step_0002000."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


@dataclass(kw_only=True)
class _Sight:
    """A folder's files as they were seen, and since when they have been so."""

    files: frozenset[tuple[str, int, int]]
    since: float


@dataclass(kw_only=True)
class Arrivals:
    """The checkpoints below a folder, at its top or in `checkpoints/`; remembered from look to look, because a trainer writes while we read."""

    folder: Path
    settle_s: float
    sights: dict[Path, _Sight] = field(default_factory=dict)
    unnumbered: set[str] = field(default_factory=set)
    unsettled: dict[str, str] = field(default_factory=dict)
    """Pipelines that cannot be taken yet, and why."""
    broken: dict[str, str] = field(default_factory=dict)
    """Pipelines that have been quiet for long and are not whole."""
    foreign: set[str] = field(default_factory=set)
    """Folders that have a step in their name and have been quiet for long, but hold neither kind of model."""

    def look(self) -> list[Checkpoint]:
        """All that are whole, oldest step first."""
        found: list[Checkpoint] = []
        self.unsettled, self.broken, self.foreign = {}, {}, set()
        for path in sorted(self._folders()):
            step = step_of(path.name)
            if step is None:
                if path.name != "export" or not (path / EXPORT_FILE).exists():  # a run's export is one of its steps
                    self.unnumbered.add(path.name)
            elif self._is_whole(path):
                found.append(Checkpoint(step=step, name=path.name, folder=path))
        return sorted(found, key=lambda each: (each.step, each.name))

    def _folders(self) -> list[Path]:
        """Those that hold a model, as far as their names and lists say."""
        folders = []
        for top in (self.folder, self.folder / "checkpoints"):
            try:
                visible = [path for path in top.iterdir() if not path.name.startswith(".") and path.is_dir()]
            except OSError:
                continue
            for path in visible:
                if (path / MODEL_INDEX).exists() or ((path / COMMIT).exists() and path.name.startswith("step_")):
                    folders.append(path)
                elif step_of(path.name) is not None and not (path / COMMIT).exists() and self._is_old(path):
                    self.foreign.add(path.name)
        return folders

    def _is_old(self, folder: Path) -> bool:
        try:
            return time.time() - folder.stat().st_mtime >= self.settle_s
        except OSError:
            return False

    def _is_whole(self, folder: Path) -> bool:
        if (folder / COMMIT).exists():  # written last, in a folder that had no name yet
            return True
        try:
            files = frozenset(_files(folder))
            problem = self._is_unsettled(folder, files)
            if problem:
                self.unsettled[folder.name] = problem
                return False
            problem = damage(folder)
        except OSError:  # removed, or renamed, while we looked
            return False
        if problem:
            self.broken[folder.name] = problem
        return not problem

    def _is_unsettled(self, folder: Path, files: frozenset[tuple[str, int, int]]) -> str:
        """Why its writer may not be done; quiet by our own clock, or by the files' where they were there before we came."""
        now = time.monotonic()
        sight = self.sights.get(folder)
        if sight is None or sight.files != files:
            sight = self.sights[folder] = _Sight(files=files, since=now)
        quiet_s = max(now - sight.since, time.time() - max(changed for _, _, changed in files) / 1e9)
        return "" if quiet_s >= self.settle_s else f"changed {quiet_s:.0f} s ago"


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file."""
    facts = [(path, path.stat()) for path in _below(folder)]
    return [(str(path), each.st_size, each.st_mtime_ns) for path, each in facts]


def _below(folder: Path) -> list[Path]:
    """Every file, by name; folders that are links, as some trainers make, are followed."""
    return sorted(Path(top) / name for top, _, names in os.walk(folder, followlinks=True) for name in names)


def damage(folder: Path) -> str:
    """What a checkpoint lacks, by its own lists and headers; empty where it is whole. Sums are the affair of whoever loads it."""
    try:
        if (folder / COMMIT).exists():
            sums = json.loads((folder / COMMIT).read_bytes())["sha256"]
            return next((f"{name} is missing" for name in sums if not (folder / name).is_file()), "")
        index = json.loads((folder / MODEL_INDEX).read_bytes())
        parts = [name for name, value in index.items() if isinstance(value, list) and None not in value]
        missing = [name for name in parts if not name.startswith("_") and not (folder / name).is_dir()]
        if missing:
            return f"{missing[0]}/ is missing"
        for listing in folder.rglob("*.safetensors.index.json"):
            shards = set(json.loads(listing.read_bytes())["weight_map"].values())
            lost = sorted(name for name in shards if not (listing.parent / str(name)).is_file())
            if lost:
                return f"{lost[0]} is missing"
        for weights in folder.rglob("*.safetensors"):
            check_safetensors(weights)
    except InputError as error:
        return error.found
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"a list of its files cannot be read ({error})"
    return ""


def linked(source: Path, target: Path) -> bool:
    """Give a folder's files a second name, so that they outlive the first; False where the file system cannot, and nothing is left then."""
    return _doubled(source, target, os.link)


def kept(source: Path, target: Path) -> None:
    """A second copy of a folder, by hard links where the file system allows."""
    if not linked(source, target):
        _doubled(source, target, shutil.copy2)


def _doubled(source: Path, target: Path, double: Callable[[Path, Path], object]) -> bool:
    """All files of a folder under another name, which it gets only when all of them are there."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for path in _below(source):
            place = temporary / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            double(path.resolve(), place)  # a link to a file elsewhere, as in the hub's cache, is followed
        if damage(temporary):  # its trainer was just removing it
            raise FileNotFoundError(errno.ENOENT, "it is being removed", str(source))
        os.rename(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if double is os.link and error.errno in UNLINKABLE:
            return False
        raise
    sync_folder(target.parent)
    return True


def swept(folder: Path) -> None:
    """Remove folders that a killed call was still making or removing."""
    for ending in (".tmp", ".removing", ".incoming"):
        for leftover in [*folder.glob(f".*{ending}"), *folder.glob(f"*/.*{ending}")]:
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)


def removed(folder: Path) -> None:
    """Take the name away first, so that half a folder never has it."""
    doomed = folder.with_name(f".{folder.name}.removing")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
