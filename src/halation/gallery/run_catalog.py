"""Find runs below folders and refresh them; an unreadable run does not affect others."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from halation.gallery import run_file_reader
from halation.generation.ledger import LEDGER_NAMES
from halation.runs.lock import ENDED_FILE, OWNER_FILE
from halation.runs.run_folder import CONFIG_FILE, METRICS_FILE

log = logging.getLogger(__name__)


# RuntimeError covers RecursionError and symlink loops.
READ_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, sqlite3.Error),
)
"""Errors that can occur while reading files with arbitrary contents."""
EMPTY_TRAINING_DETAIL: dict[str, Any] = {
    name: [] for name in ("prompts", "variants", "steps", "checkpoints", "metrics", "scores")
}
EMPTY_GENERATION_DETAIL: dict[str, Any] = {
    **{name: [] for name in ("workers", "reasons", "seeds", "size")},
    "counts": dict.fromkeys(("planned", "open", "done", "failed"), 0),
    "rate": None,
    "left_s": None,
    "last_call": {"images": 0, "seconds": None},
    "model": "",
    "video": False,
}
EMPTY_RESPONSES: dict[str, Any] = {
    "metrics": {"reset": False, "next": 0, "rows": []},
    "search": {"total": 0, "rows": []},
    "spec": None,
}
"""Responses of methods that only some kinds of runs have, if they fail."""
Answer = TypeVar("Answer")
RUN_KINDS = ("train", "distill", "sample", "generate", "watch")
MARKER_FILES = {
    "generate": tuple(LEDGER_NAMES.values()),
    "watch": ("best_checkpoint",),
    "train": (METRICS_FILE, "checkpoints"),
    "sample": ("samples.json",),
}
"""Files that identify the kind of a run if its record is damaged."""
MAX_DEPTH = 6
MAX_CHILDREN = 2_000
MAX_ROOT_CHILDREN = 200_000
"""Folders with more entries than MAX_CHILDREN are taken for image folders and not scanned; this is the limit for
folders named on the command line."""
SCAN_EVERY_S = 3.0
REFRESH_IDLE_EVERY_S = 5.0
"""Interval at which a run that is not running is refreshed."""
NON_RUN_FOLDERS = ("checkpoints", "samples", "logs", "export", "evaluation", "cache", "tensorboard", "wandb", "control")
"""Folders of a training that hold no runs; any other folder in it may be a run."""
MTIME_SETTLE_S = 2.0
"""A folder that changed this recently may change again within the same clock tick, so it is read once more."""


class RunEntry:
    """A run as the page shows it.

    Getters are called from other threads than `refresh`, so each takes the lock. A kind of run implements `_refresh`,
    `_build_summary`, `detail`, `image` and `log`.
    """

    kind = ""
    unit = "steps"

    def __init__(self, folder: Path, id: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`defaults` are the default settings by kind of run."""
        self.id = id
        self.folder = folder
        self.version = 0
        """Incremented whenever anything shown on the page has changed."""
        self.name = folder.name
        """Path relative to the root it was found in; the catalog sets it and `parent`."""
        self.parent: str | None = None
        """Id of the enclosing run: the training around a watch, or the watch around its images."""
        self._defaults = defaults or {}
        self._lock = threading.RLock()
        self._record: dict[str, Any] = {}
        self._config_error = ""
        self._state = run_file_reader.RunState(status="stopped")
        self._stamps: dict[str, run_file_reader.FileStamp | None] = {}
        self._started: float | None = None

    def refresh(self) -> bool:
        """Read the disk (only stats if nothing changed); return True if anything has changed."""
        with self._lock:
            changed = self._has_changed(CONFIG_FILE, ENDED_FILE, OWNER_FILE)
            if changed:
                self._record = run_file_reader.read_record(self.folder)
                self._config_error = run_file_reader.find_read_error(self.folder / CONFIG_FILE)
            changed |= self._refresh()
            state = self._read_state()
            changed |= state != self._state
            self._state = state
            self.version += changed or not self.version
            return changed

    def _refresh(self) -> bool:
        """Return True if anything besides the record and the state has changed."""
        raise NotImplementedError

    def _read_state(self) -> run_file_reader.RunState:
        return run_file_reader.read_run_state(self.folder, self._last_modified())

    def _has_changed(self, *names: str) -> bool:
        """Return True if any of these files or folders changed since the last call."""
        stamps = {name: run_file_reader.read_stamp(self.folder / name) for name in names}
        changed = any(name not in self._stamps or self._stamps[name] != stamp for name, stamp in stamps.items())
        self._stamps |= stamps
        return changed

    def _last_modified(self) -> float:
        return max((stamp.mtime for stamp in self._stamps.values() if stamp is not None), default=0.0)

    def _last_change(self) -> float:
        """Time of the recorded end; of a run without one, of its newest file (a copy has other file times)."""
        return self._state.ended or self._last_modified()

    def summary(self) -> dict[str, Any]:
        with self._lock:
            return self.empty_summary() | self._build_summary()

    def empty_summary(self) -> dict[str, Any]:
        """Summary with the state and empty values."""
        about = {"id": self.id, "name": self.name, "kind": self.kind, "parent": self.parent, "version": self.version}
        state = {"state": self._state.status, "reason": self._state.reason or self._config_error, "title": ""}
        numbers = {"done": 0, "planned": 0, "failed": 0, "changed": self._last_change(), "unit": self.unit}
        return {
            **about,
            **state,
            **numbers,
            **dict.fromkeys(("started", "rate", "left_s", "last", "loss")),
            "seconds": self._state.time_s,
            "spark": [],
        }

    def _build_summary(self) -> dict[str, Any]:
        """Return the values to update in `empty_summary`."""
        raise NotImplementedError

    def _start_time(self, log_file: Path | None) -> float | None:
        """Time of the first line of the log; cached, because the start of a log does not change."""
        if self._started is None and log_file is not None:
            with contextlib.suppress(OSError), run_file_reader.open_regular_file(log_file, self.folder) as file:
                self._started = run_file_reader.parse_time(file.readline(200).decode("utf-8", "replace")[:19])
        return self._started

    def detail(self) -> dict[str, Any]:
        raise NotImplementedError

    def image(self, key: str) -> Path | None:
        """File of a key that this entry has issued; never one outside of its folder."""
        raise NotImplementedError

    def _find_inside(self, path: Path) -> Path | None:
        """Resolve a file; None if it is not a file or is outside of the run."""
        try:
            real_path = path.resolve(strict=True)
            return real_path if real_path.is_relative_to(self.folder.resolve()) and real_path.is_file() else None
        except (OSError, ValueError, RuntimeError):  # an invalid name, or a symlink loop
            return None

    def log(self, num_lines: int) -> list[str]:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        with self._lock:
            record = self._record or run_file_reader.read_record(self.folder)
        shown = {name: record[name] for name in ("settings", "fixed", "changes")}
        defaults = self._defaults.get(self.kind)
        if defaults is not None:
            chosen = {name: value for name, value in record["settings"].items() if value is not None}
            shown["differs"] = [name for name, value in chosen.items() if value != defaults.get(name)]
        return shown


class SafeRunEntry:
    """An entry that never raises, with a cached summary.

    The summary is that of the last refresh, so that the list of runs does not wait for any run.
    """

    def __init__(self, entry: RunEntry) -> None:
        self._entry = entry
        self.id = entry.id
        self.folder: Path = entry.folder
        self.kind = entry.kind
        self.name = entry.name
        self.parent = entry.parent
        self.version = entry.version
        self._num_error_changes = 0
        """Number of changes of the read error, which the entry's version does not count."""
        self._read_error = ""
        self._logged_errors: set[str] = set()
        self._summary: dict[str, Any] | None = None

    def refresh(self) -> bool:
        changed, read_error = self._call(self._entry.refresh, False)
        self._summary, summary_error = self._call(self._entry.summary, self._summary)
        before, self._read_error = self._read_error, read_error or summary_error
        self._num_error_changes += before != self._read_error
        self.version = self._entry.version + self._num_error_changes
        return changed or before != self._read_error

    def summary(self) -> dict[str, Any]:
        if self._summary is None:
            self._summary, _ = self._call(self._entry.summary, None)
        return self._add_error(self._summary or self._entry.empty_summary(), self._read_error)

    def _add_error(self, summary: dict[str, Any], read_error: str) -> dict[str, Any]:
        return summary | {"reason": summary["reason"] or read_error, "version": self.version}

    def detail(self) -> dict[str, Any]:
        empty = EMPTY_GENERATION_DETAIL if self.kind == "generate" else EMPTY_TRAINING_DETAIL
        found, read_error = self._call(self._entry.detail, empty)
        return found | {
            "summary": self._add_error(found.get("summary") or self.summary(), self._read_error or read_error)
        }

    def image(self, key: str) -> Path | None:
        return self._call(lambda: self._entry.image(key), None)[0]

    def log(self, num_lines: int) -> list[str]:
        empty: list[str] = []
        return self._call(lambda: self._entry.log(num_lines), empty)[0]

    def config(self) -> dict[str, Any]:
        return self._call(self._entry.config, {"settings": {}, "fixed": {}, "changes": []})[0]

    def __getattr__(self, name: str) -> Any:
        """Forward methods that only some kinds of runs have."""
        method = getattr(self._entry, name)
        if name not in EMPTY_RESPONSES:
            return method
        return lambda *args: self._call(lambda: method(*args), EMPTY_RESPONSES[name])[0]

    def _call(self, function: Callable[[], Answer], default: Answer) -> tuple[Answer, str]:
        """Call a function; return its result and "", or the default and an error message."""
        try:
            return function(), ""
        except READ_ERRORS as error:
            message = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            if message not in self._logged_errors and len(self._logged_errors) < 10:  # once, not every second
                self._logged_errors.add(message)
                log.exception("%s cannot be read", self.folder)
            return default, message


RunFactory = Callable[[Path, str], RunEntry]


def make_run_id(folder: Path) -> str:
    """Id of a run: stable between restarts, and does not reveal the path."""
    return hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=5).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """A run found on disk."""

    folder: Path
    kind: str
    name: str
    parent: str | None


@dataclass(kw_only=True)
class _FolderScan:
    """Contents of a folder when it was last read."""

    mtime_ns: int
    is_settled: bool
    children: tuple[str, ...] = ()
    kind: str | None = None


class RunCatalog:
    """The runs below `roots`. One thread calls `refresh`, any thread the rest."""

    def __init__(self, roots: Sequence[Path], factories: Mapping[str, RunFactory]) -> None:
        self.roots = [root.resolve() for root in roots]
        self._root_labels = _shortest_labels(self.roots)
        self.factories = dict(factories)
        self._scans: dict[Path, _FolderScan] = {}
        self._entries: dict[str, SafeRunEntry] = {}
        self._refreshed_at: dict[str, float] = {}
        self._owner_mtimes: dict[str, int] = {}
        self._scanned_at = -float("inf")
        self._lock = threading.Lock()

    def refresh(self, now: float | None = None) -> list[str]:
        """Return ids of runs that changed since the last call, and "" if the list itself changed.

        `now` is in seconds of the monotonic clock.
        """
        now = time.monotonic() if now is None else now
        changed = []
        if now - self._scanned_at >= SCAN_EVERY_S:
            self._scanned_at = now
            if self._update_entries(self._scan()):
                changed.append("")
        for entry in list(self._entries.values()):
            if self._is_due(entry, now):
                self._refreshed_at[entry.id] = now
                if entry.refresh():
                    changed.append(entry.id)
        return changed

    def entries(self) -> list[SafeRunEntry]:
        """All entries, the latest change first."""
        with self._lock:
            entries = list(self._entries.values())
        return sorted(entries, key=lambda entry: -float(entry.summary().get("changed") or 0))

    def get(self, id: str) -> SafeRunEntry | None:
        with self._lock:
            return self._entries.get(id)

    def scanned_folders(self) -> list[Path]:
        """The folders that were scanned for runs, including those of runs."""
        return list(self._scans)

    def _is_due(self, entry: SafeRunEntry, now: float) -> bool:
        """Return True if a run should be refreshed.

        An idle run is due at intervals, and immediately when a command locks or unlocks its folder.
        """
        last = self._refreshed_at.get(entry.id)
        try:
            owner = (entry.folder / OWNER_FILE).stat().st_mtime_ns
        except OSError:
            owner = 0
        owner_changed = self._owner_mtimes.get(entry.id) != owner
        self._owner_mtimes[entry.id] = owner
        return (
            last is None
            or owner_changed
            or entry.summary().get("state") == "running"
            or now - last >= REFRESH_IDLE_EVERY_S
        )

    def _update_entries(self, found: Mapping[str, RunLocation]) -> bool:
        """Create entries for new runs and remove entries of lost ones; return True if any changed."""
        gone = [id for id, entry in self._entries.items() if id not in found or found[id].kind != entry.kind]
        new = {id: run for id, run in found.items() if id not in self._entries or id in gone}
        created: dict[str, SafeRunEntry] = {}
        for id, run in new.items():
            try:
                entry = self.factories[run.kind](run.folder, id)
            except READ_ERRORS:
                log.exception("%s cannot be listed", run.folder)
                continue
            entry.name, entry.parent = run.name, run.parent
            created[id] = SafeRunEntry(entry)
        with self._lock:
            for id in gone:
                del self._entries[id]
                self._refreshed_at.pop(id, None)
                self._owner_mtimes.pop(id, None)
            self._entries |= created
        return bool(gone or created)

    # -- finding

    def _scan(self) -> dict[str, RunLocation]:
        """Find all runs, by id; only folders whose mtime changed are read again."""
        seen: set[Path] = set()
        found: dict[str, RunLocation] = {}
        for root in self.roots:
            for run in self._find_runs(root, root, 0, None, seen):
                if run.kind in self.factories:
                    found.setdefault(make_run_id(run.folder), run)
        for path in self._scans.keys() - seen:
            del self._scans[path]
        return found

    def _find_runs(
        self, folder: Path, root: Path, depth: int, enclosing: RunLocation | None, seen: set[Path]
    ) -> Iterator[RunLocation]:
        if folder in seen or depth > MAX_DEPTH:
            return
        seen.add(folder)
        scan = self._scan_folder(folder)
        if scan is None:
            return
        if scan.kind is not None:
            belongs = enclosing is not None and "watch" in (scan.kind, enclosing.kind)
            parent = make_run_id(enclosing.folder) if enclosing is not None and belongs else None
            enclosing = RunLocation(folder=folder, kind=scan.kind, name=self._run_name(folder, root), parent=parent)
            yield enclosing
        for name in scan.children:
            yield from self._find_runs(folder / name, root, depth + 1, enclosing, seen)

    def _scan_folder(self, folder: Path) -> _FolderScan | None:
        try:
            mtime_ns = folder.stat().st_mtime_ns
            known = self._scans.get(folder)
            if known is not None and known.mtime_ns == mtime_ns and known.is_settled:
                return known
            max_children = MAX_ROOT_CHILDREN if folder in self.roots else MAX_CHILDREN
            scan = _read_folder(folder, mtime_ns, max_children)
        except (OSError, ValueError):
            self._scans.pop(folder, None)
            return None
        self._scans[folder] = scan
        return scan

    def _run_name(self, folder: Path, root: Path) -> str:
        below = folder.relative_to(root)
        if below == Path():
            return root.name or str(root)
        return str(self._root_labels[root] / below if len(self._root_labels) > 1 else below)


def _shortest_labels(roots: Sequence[Path]) -> dict[Path, Path]:
    """Return the shortest path suffixes that distinguish the folders."""
    distinct = dict.fromkeys(roots)
    for length in range(1, max((len(root.parts) for root in distinct), default=0) + 1):
        labels = {root: Path(*root.parts[-length:]) for root in distinct}
        if len(set(labels.values())) == len(labels):
            return labels
    return {root: root for root in distinct}


def _read_folder(folder: Path, mtime_ns: int, max_children: int) -> _FolderScan:
    """Scan one folder; of a run's own folders, only those that may contain runs are listed."""
    settled = time.time() - mtime_ns / 1e9 > MTIME_SETTLE_S
    kind = read_run_kind(folder)
    if kind in ("generate", "sample"):  # only images, possibly many
        return _FolderScan(mtime_ns=mtime_ns, is_settled=settled, kind=kind)
    children = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= max_children:
                return _FolderScan(mtime_ns=mtime_ns, is_settled=settled, kind=kind)
            if (
                not entry.name.startswith(".")
                and entry.is_dir(follow_symlinks=False)
                and (
                    entry.name.startswith("step_") if kind == "watch" else not kind or entry.name not in NON_RUN_FOLDERS
                )
            ):
                children.append(entry.name)
    return _FolderScan(mtime_ns=mtime_ns, is_settled=settled, children=tuple(sorted(children)), kind=kind)


def read_run_kind(folder: Path) -> str | None:
    """Kind of the run in a folder, or None. A run with a damaged record is known by its files."""
    try:
        record = run_file_reader.read_json(folder / CONFIG_FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = (kind for kind, names in MARKER_FILES.items() if any(os.path.lexists(folder / name) for name in names))
        return next(found, None)
    job = record.get("job") if isinstance(record, dict) else None
    return job if job in RUN_KINDS else None
