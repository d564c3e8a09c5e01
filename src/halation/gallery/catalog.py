"""Which runs there are below some folders: found, kept, looked at again; a run that cannot be read harms no other."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from halation.gallery.run_files import read_json
from halation.runs.folder import CONFIG_FILE, METRICS_FILE
from halation.runs.lock import OWNER_FILE

log = logging.getLogger(__name__)


# RuntimeError: too deep a recursion, and a link that leads to itself.
DAMAGE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, sqlite3.Error),
)
"""What reading files that hold anything at all can end in."""
NO_TRAINING: dict[str, Any] = {
    name: [] for name in ("prompts", "variants", "steps", "checkpoints", "metrics", "scores")
}
NO_GENERATION: dict[str, Any] = {
    **{name: [] for name in ("workers", "reasons", "seeds", "size")},
    "counts": dict.fromkeys(("planned", "open", "done", "failed"), 0),
    "rate": None,
    "left_s": None,
    "model": "",
    "video": False,
}
NOTHING: dict[str, Any] = {
    "metrics": {"reset": False, "next": 0, "rows": []},
    "search": {"total": 0, "rows": []},
    "spec": None,
}
"""What the questions that only some kinds answer are answered with."""
Answer = TypeVar("Answer")
KINDS = ("train", "distill", "sample", "generate", "watch")
MAX_DEPTH = 6
MAX_CHILDREN = 2_000
MAX_ROOT_CHILDREN = 200_000
"""A folder with more is one of pictures; not one that somebody named, which is looked through."""
WALK_EVERY_S = 3.0
REST_EVERY_S = 5.0
"""How often a run that is not running is looked at."""
OWN_FOLDERS = ("checkpoints", "samples", "logs", "export", "evaluation", "cache", "tensorboard", "wandb", "control")
"""Folders of a training that hold no runs; any other one below it may be a run that somebody put there."""
FRESH_S = 2.0
"""A folder that changed so recently may change again within the same tick of its clock, so it is read once more."""


class Guarded:
    """An entry that never raises. Its summary is the one of the last look, so that a list of runs waits for none of them."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.id = entry.id
        self.folder: Path = entry.folder
        self.kind = entry.kind
        self.name = entry.name
        self.parent = entry.parent
        self.version = entry.version
        self._num_own = 0
        """Changes of what cannot be read, which the entry does not count."""
        self._damage = ""
        self._said: set[str] = set()
        self._summary: dict[str, Any] | None = None

    def refresh(self) -> bool:
        changed, damage = self._asked(self._entry.refresh, False)
        self._summary, more = self._asked(self._entry.summary, self._summary)
        before, self._damage = self._damage, damage or more
        self._num_own += before != self._damage
        self.version = self._entry.version + self._num_own
        return changed or before != self._damage

    def summary(self) -> dict[str, Any]:
        if self._summary is None:
            self._summary, _ = self._asked(self._entry.summary, None)
        return self._told(self._summary or self._bare(), self._damage)

    def _told(self, summary: dict[str, Any], damage: str) -> dict[str, Any]:
        return summary | {"reason": summary["reason"] or damage, "version": self.version}

    def _bare(self) -> dict[str, Any]:
        numbers = {"done": 0, "planned": 0, "failed": 0, "changed": 0.0}
        unknown = dict.fromkeys(("started", "rate", "left_s", "last", "loss"))
        about = {"id": self.id, "name": self.name, "kind": self.kind, "parent": self.parent, "title": ""}
        unit = "pictures" if self.kind in ("generate", "sample") else "steps"
        return {**about, **numbers, **unknown, "state": "stopped", "reason": "", "unit": unit, "spark": []}

    def detail(self) -> dict[str, Any]:
        nothing = NO_GENERATION if self.kind == "generate" else NO_TRAINING
        found, damage = self._asked(self._entry.detail, nothing)
        return found | {"summary": self._told(found.get("summary") or self.summary(), self._damage or damage)}

    def picture(self, key: str) -> Path | None:
        return self._asked(lambda: self._entry.picture(key), None)[0]

    def log(self, num_lines: int) -> list[str]:
        nothing: list[str] = []
        return self._asked(lambda: self._entry.log(num_lines), nothing)[0]

    def config(self) -> dict[str, Any]:
        return self._asked(self._entry.config, {"settings": {}, "fixed": {}, "changes": []})[0]

    def __getattr__(self, name: str) -> Any:
        """What only some kinds of runs can do."""
        asked = getattr(self._entry, name)
        if name not in NOTHING:
            return asked
        return lambda *words: self._asked(lambda: asked(*words), NOTHING[name])[0]

    def _asked(self, question: Callable[[], Answer], otherwise: Answer) -> tuple[Answer, str]:
        """An answer, and why there is none."""
        try:
            return question(), ""
        except DAMAGE as error:
            words = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            if words not in self._said and len(self._said) < 10:  # once, not every second
                self._said.add(words)
                log.exception("%s cannot be read", self.folder)
            return otherwise, words


class Entry(Protocol):
    """A run as a page sees it. Getters are called from other threads than `refresh`: each entry guards itself by a lock."""

    id: str
    folder: Path
    kind: str
    version: int
    """Counts up whenever anything a page shows has changed."""
    name: str
    """Path relative to the folder it was found below; the catalog sets it, as it does `parent`, right after the entry was made."""
    parent: str | None
    """Id of the run it belongs to: the training of a watch inside it, the watch of its pictures."""

    def refresh(self) -> bool:
        """Look at the disk, by stats alone where nothing changed; whether anything a page shows has changed."""

    def summary(self) -> dict[str, Any]: ...

    def detail(self) -> dict[str, Any]: ...

    def picture(self, key: str) -> Path | None:
        """The file of a key this entry has given out itself, never one outside of its folder."""

    def log(self, num_lines: int) -> list[str]: ...

    def config(self) -> dict[str, Any]: ...


Maker = Callable[[Path, str], Entry]


def id_of(folder: Path) -> str:
    """Stable between restarts, and says nothing."""
    return hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=5).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run on the disk."""

    folder: Path
    kind: str
    name: str
    parent: str | None


@dataclass(kw_only=True)
class _Looked:
    """What a folder held when it was last read."""

    mtime_ns: int
    settled: bool
    children: tuple[str, ...] = ()
    kind: str | None = None


class Catalog:
    """The runs below `roots`. One thread calls `refresh`, any thread the rest."""

    def __init__(self, roots: Sequence[Path], makers: Mapping[str, Maker]) -> None:
        self.roots = [root.resolve() for root in roots]
        self._labels = _labels(self.roots)
        self.makers = dict(makers)
        self._folders: dict[Path, _Looked] = {}
        self._entries: dict[str, Entry] = {}
        self._looked_at: dict[str, float] = {}
        self._owners: dict[str, int] = {}
        self._walked_at = -float("inf")
        self._lock = threading.Lock()

    def refresh(self, now: float | None = None) -> list[str]:
        """Ids of the runs that changed since the last call, and "" where the list itself did; `now` is a clock in seconds."""
        now = time.monotonic() if now is None else now
        changed = []
        if now - self._walked_at >= WALK_EVERY_S:
            self._walked_at = now
            if self._settle(self._walk()):
                changed.append("")
        for entry in list(self._entries.values()):
            if self._is_due(entry, now):
                self._looked_at[entry.id] = now
                if entry.refresh():
                    changed.append(entry.id)
        return changed

    def entries(self) -> list[Entry]:
        """All of them, the newest change first."""
        with self._lock:
            entries = list(self._entries.values())
        return sorted(entries, key=lambda entry: -float(entry.summary().get("changed") or 0))

    def get(self, id: str) -> Entry | None:
        with self._lock:
            return self._entries.get(id)

    def walked(self) -> list[Path]:
        """The folders that were looked into for runs, those of runs included."""
        return list(self._folders)

    def _is_due(self, entry: Entry, now: float) -> bool:
        """A run at rest is looked at now and then, but at once when a command takes it or lets it go."""
        last, owner = self._looked_at.get(entry.id), _time_of(entry.folder / OWNER_FILE)
        taken = self._owners.get(entry.id) != owner
        self._owners[entry.id] = owner
        return last is None or taken or entry.summary().get("state") == "running" or now - last >= REST_EVERY_S

    def _settle(self, found: Mapping[str, Found]) -> bool:
        """Make entries of what is new and forget what is gone; whether there was either."""
        gone = [id for id, entry in self._entries.items() if id not in found or found[id].kind != entry.kind]
        fresh = {id: run for id, run in found.items() if id not in self._entries or id in gone}
        made: dict[str, Entry] = {}
        for id, run in fresh.items():
            try:
                entry = self.makers[run.kind](run.folder, id)
            except DAMAGE:
                log.exception("%s cannot be listed", run.folder)
                continue
            entry.name, entry.parent = run.name, run.parent
            made[id] = Guarded(entry)
        with self._lock:
            for id in gone:
                del self._entries[id]
                self._looked_at.pop(id, None)
                self._owners.pop(id, None)
            self._entries |= made
        return bool(gone or made)

    # -- finding

    def _walk(self) -> dict[str, Found]:
        """All runs, by id; only folders whose time changed are read again."""
        seen: set[Path] = set()
        found: dict[str, Found] = {}
        for root in self.roots:
            for run in self._below(root, root, 0, None, seen):
                if run.kind in self.makers:
                    found.setdefault(id_of(run.folder), run)
        for path in self._folders.keys() - seen:
            del self._folders[path]
        return found

    def _below(self, folder: Path, root: Path, depth: int, within: Found | None, seen: set[Path]) -> Iterator[Found]:
        if folder in seen or depth > MAX_DEPTH:
            return
        seen.add(folder)
        looked = self._look(folder)
        if looked is None:
            return
        if looked.kind is not None:
            belongs = within is not None and "watch" in (looked.kind, within.kind)
            parent = id_of(within.folder) if within is not None and belongs else None
            within = Found(folder=folder, kind=looked.kind, name=self._name(folder, root), parent=parent)
            yield within
        for name in looked.children:
            yield from self._below(folder / name, root, depth + 1, within, seen)

    def _look(self, folder: Path) -> _Looked | None:
        try:
            mtime_ns = folder.stat().st_mtime_ns
            known = self._folders.get(folder)
            if known is not None and known.mtime_ns == mtime_ns and known.settled:
                return known
            most = MAX_ROOT_CHILDREN if folder in self.roots else MAX_CHILDREN
            looked = _read(folder, mtime_ns, most)
        except (OSError, ValueError):
            self._folders.pop(folder, None)
            return None
        self._folders[folder] = looked
        return looked

    def _name(self, folder: Path, root: Path) -> str:
        below = folder.relative_to(root)
        if below == Path():
            return root.name or str(root)
        return str(self._labels[root] / below if len(self._labels) > 1 else below)


def _labels(roots: Sequence[Path]) -> dict[Path, Path]:
    """The shortest ends by which folders differ from each other."""
    distinct = dict.fromkeys(roots)
    for length in range(1, max((len(root.parts) for root in distinct), default=0) + 1):
        labels = {root: Path(*root.parts[-length:]) for root in distinct}
        if len(set(labels.values())) == len(labels):
            return labels
    return {root: root for root in distinct}


def _time_of(path: Path) -> int:
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(folder: Path, mtime_ns: int, most: int) -> _Looked:
    """One pass over a folder; a run's own folders are not searched but where runs may be inside it."""
    settled = time.time() - mtime_ns / 1e9 > FRESH_S
    kind = kind_of(folder)
    if kind in ("generate", "sample"):  # nothing but pictures, and these may be many
        return _Looked(mtime_ns=mtime_ns, settled=settled, kind=kind)
    children = []
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= most:
                return _Looked(mtime_ns=mtime_ns, settled=settled, kind=kind)
            if (
                not entry.name.startswith(".")
                and entry.is_dir(follow_symlinks=False)
                and _may_hold_runs(kind, entry.name)
            ):
                children.append(entry.name)
    return _Looked(mtime_ns=mtime_ns, settled=settled, children=tuple(sorted(children)), kind=kind)


def _may_hold_runs(kind: str | None, name: str) -> bool:
    return name.startswith("step_") if kind == "watch" else kind is None or name not in OWN_FOLDERS


def kind_of(folder: Path) -> str | None:
    """What kind of run a folder is, by its record, and where that is damaged by its files; None for any other folder."""
    try:
        record = read_json(folder / CONFIG_FILE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return _kind_by_files(folder)
    job = record.get("job") if isinstance(record, dict) else None
    return job if job in KINDS else None


def _kind_by_files(folder: Path) -> str | None:
    signs = {
        "generate": ("ledger.sqlite", "ledger"),
        "watch": ("best_checkpoint",),
        "train": (METRICS_FILE, "checkpoints"),
        "sample": ("samples.json",),
    }
    return next((kind for kind, names in signs.items() if any(os.path.lexists(folder / name) for name in names)), None)
