"""Reports of evaluations as they lie on the disk: found in folders, read once, and the pictures they name found again."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halation.gallery.run_files import as_dict, is_count, is_number, read_json

log = logging.getLogger(__name__)

MAX_BYTES = 8 << 20
MAX_CHILDREN = 200_000
LARGE = 2_000
"""Names in a folder above which it is read only once nothing came for a while: pictures are being drawn into it."""
MAX_EXTREMES = 64
MAX_PATH = 4096
FRESH_S = 2.0
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
SIGNS = ("generated", "metrics", "versions")


@dataclass(frozen=True, kw_only=True)
class Report:
    """One file of `halation evaluate --output`, of a watch, or of an evaluation in training."""

    id: str
    path: Path
    changed: float
    value: Mapping[str, Any] = field(repr=False)

    @property
    def metrics(self) -> dict[str, Mapping[str, Any]]:
        """By key, those that are numbers."""
        found = self.value["metrics"]
        return {
            str(key): about for key, about in found.items() if isinstance(about, dict) and is_number(about.get("value"))
        }

    @property
    def step(self) -> int | None:
        step = self.value.get("step")
        return step if is_count(step) else None

    @property
    def generated(self) -> Mapping[str, Any]:
        return as_dict(self.value["generated"])

    def extremes(self, side: str) -> list[dict[str, Any]]:
        """Rows of `nearest` or `farthest` that name a picture and its distance."""
        found = self.value.get("extremes")
        rows = found.get(side) if isinstance(found, dict) else None
        return [
            row
            for row in (rows if isinstance(rows, list) else [])
            if isinstance(row, dict) and isinstance(row.get("name"), str) and is_number(row.get("distance"))
        ][:MAX_EXTREMES]


@dataclass(kw_only=True)
class _Folder:
    mtime_ns: int
    settled: bool
    num_names: int = 0
    reports: dict[str, tuple[tuple[int, int], Report | None]] = field(default_factory=dict)
    """By name: size and time of the file, and what it is; None for other JSON, which is not read again."""


class Shelf:
    """The reports in some folders; a folder is read again when its time changes, a file when its own does."""

    def __init__(self) -> None:
        self._folders: dict[Path, _Folder] = {}

    def look(self, folders: Iterable[Path]) -> bool:
        """Whether any report came, went or changed."""
        before = {report.path: report for report in self.all()}
        kept = {}
        for folder in folders:
            found = self._looked(folder)
            if found is not None:
                kept[folder] = found
        self._folders = kept
        return before != {report.path: report for report in self.all()}

    def all(self) -> list[Report]:
        """In the order of their paths."""
        found = [report for folder in self._folders.values() for _, report in folder.reports.values() if report]
        return sorted(found, key=lambda report: report.path)

    def _looked(self, folder: Path) -> _Folder | None:
        known = self._folders.get(folder)
        try:
            mtime_ns = folder.stat().st_mtime_ns
            settled = time.time() - mtime_ns / 1e9 > FRESH_S
            if known is not None and (
                (known.mtime_ns == mtime_ns and known.settled) or (known.num_names > LARGE and not settled)
            ):
                return known
            fresh = _Folder(mtime_ns=mtime_ns, settled=settled)
            with os.scandir(folder) as entries:
                for entry in itertools.islice(entries, MAX_CHILDREN):
                    fresh.num_names += 1
                    if entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file():
                        stat = entry.stat()
                        seen = (stat.st_size, stat.st_mtime_ns)
                        old = known.reports.get(entry.name) if known else None
                        fresh.reports[entry.name] = (
                            old if old and old[0] == seen else (seen, read_report(folder / entry.name))
                        )
        except OSError:
            return None
        return fresh


def read_report(path: Path) -> Report | None:
    """What a file says, if it is a report: by its content, whatever its name."""
    try:
        stat = path.stat()
        if stat.st_size > MAX_BYTES:
            return None
        value = read_json(path)
    except (OSError, ValueError):
        return None
    if (
        not isinstance(value, dict)
        or not all(sign in value for sign in SIGNS)
        or not isinstance(value["metrics"], dict)
    ):
        return None
    id = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=5).hexdigest()
    return Report(id=id, path=path, changed=stat.st_mtime, value=value)


def place_of(report: Report, roots: Sequence[Path]) -> Path | None:
    """The folder of the pictures that were scored, inside a root.

    The report has the path as its command was given it, from a folder nobody knows, perhaps on another machine: it is looked for
    as it is and, by ever shorter ends of it, beside the report and above.
    """
    said = report.generated.get("path")
    if not isinstance(said, str) or not said or "\0" in said or len(said) > MAX_PATH:
        return None
    path = Path(said)
    ends = [Path(*path.parts[start:]) for start in range(1 if path.is_absolute() else 0, len(path.parts))]
    inside = [above for above in report.path.parents if any(above.is_relative_to(root) for root in roots)]
    for candidate in [path, *(above / end for end in ends for above in inside)]:
        # os.path, for it takes any text for a name: one of 300 letters is no folder, not an error.
        if ".." not in candidate.parts and os.path.isdir(candidate) and _is_inside(candidate.resolve(), roots):
            return candidate.resolve()
    return None


def picture_of(place: Path, name: str, roots: Sequence[Path]) -> Path | None:
    """A picture that a report names, if it is one and lies inside a root, wherever links lead."""
    if not name.lower().endswith(SUFFIXES) or "\0" in name:
        return None
    try:
        path = (place / name).resolve()
        return path if path.is_file() and path.suffix.lower() in SUFFIXES and _is_inside(path, roots) else None
    except (OSError, RuntimeError, ValueError):
        return None


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
