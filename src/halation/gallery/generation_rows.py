"""A generation's rows as a table to ask: the ledger of one command, only read; or one put together from a folder that many commands share.

Whoever draws must not notice: transactions are short, nothing is written beside a ledger, and a ledger that nobody has open is
read without locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from halation.gallery.run_files import Lines, is_count, is_number, opened
from halation.images.png import SIGNATURE

LEDGER_FILE = "ledger.sqlite"
SHARED_FOLDER = "ledger"
METADATA_FILE = "metadata.jsonl"
STATES = ("open", "done", "failed")
WAIT_S = 0.5
FRESH_S = 1.0
"""Files written so recently may be written again within the same tick of their clock, so they count as changed once more."""
DIGEST_BYTES = 8
MAX_TEXT_BYTES = 1 << 17
MAX_READ_AT_ONCE = 2_000
MAX_PLANNED = 5_000_000
"""More rows than this are damage, not a plan, and would take all memory."""
CANNOT_OPEN = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
PLAN = re.compile(r"plan-\d+\.digests")

# The columns that are asked for, with the ledger's own names and numbers of states.
SCHEMA = """
CREATE TABLE facts(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE pictures(
    picture INTEGER PRIMARY KEY, name TEXT NOT NULL DEFAULT '', id TEXT NOT NULL DEFAULT '', prompt TEXT NOT NULL DEFAULT '',
    negative_prompt TEXT NOT NULL DEFAULT '', seed INTEGER NOT NULL DEFAULT 0, height INTEGER NOT NULL DEFAULT 0,
    width INTEGER NOT NULL DEFAULT 0, num_frames INTEGER NOT NULL DEFAULT 1, steps INTEGER NOT NULL DEFAULT 0,
    guidance_scale REAL NOT NULL DEFAULT 0,
    state INTEGER NOT NULL DEFAULT 0, sha256 TEXT NOT NULL DEFAULT '', num_bytes INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '', seconds REAL NOT NULL DEFAULT 0, micro_batch INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', epoch INTEGER NOT NULL DEFAULT 0);
CREATE INDEX unfinished ON pictures(state, picture) WHERE state != 1;
"""
SPEC = ("id", "prompt", "negative_prompt", "seed", "height", "width", "num_frames", "steps", "guidance_scale")
OUTCOME = ("sha256", "num_bytes", "worker", "seconds", "micro_batch", "attempts", "reason")


class Tables(Protocol):
    """A `pictures` and a `facts` table with the ledger's columns; called by one thread at a time."""

    def look(self) -> bool:
        """Whether the rows may have changed since the last call; by stats alone where they did not."""

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A connection for a moment; sqlite3.Error where the ledger is damaged or gone."""

    @property
    def changed(self) -> float:
        """When its newest file was written."""


def tables_of(folder: Path) -> Tables:
    return SharedTables(folder) if os.path.isdir(folder / SHARED_FOLDER) else LedgerTables(folder / LEDGER_FILE)


class LedgerTables:
    """ledger.sqlite of one command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wal = path.with_name(path.name + "-wal")
        self._seen: object = None
        self._changed = 0.0

    @property
    def changed(self) -> float:
        return self._changed

    def look(self) -> bool:
        # stat(), never open(): closing any descriptor of the file would drop the locks this process's connections have on it.
        stats = [_stat(path) for path in (self.path, self.wal)]
        self._changed = max((found.st_mtime for found in stats if found), default=0.0)
        fresh = time.time() - self._changed < FRESH_S
        seen = (
            [(found.st_ino, found.st_size, found.st_mtime_ns) if found else None for found in stats],
            time.time() if fresh else 0,
        )
        if seen == self._seen:
            return False
        self._seen = seen
        return True

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        connection = self._connected()
        try:
            yield connection
        finally:
            connection.close()

    def _connected(self) -> sqlite3.Connection:
        """Without a log beside it no command has the ledger open, and SQLite would make one to be able to read: it must not."""
        if not os.path.isfile(self.path):  # SQLite would wait for somebody to write into a pipe
            raise sqlite3.OperationalError("there is no such file")
        if not os.path.realpath(self.path).startswith(os.path.join(os.path.realpath(self.path.parent), "")):
            raise sqlite3.OperationalError("it is a link that leads out of the run")
        ways = ("mode=ro", "immutable=1") if os.path.isfile(self.wal) else ("immutable=1",)
        for way in ways:
            address = f"file:{urllib.parse.quote(str(self.path))}?{way}"
            connection = sqlite3.connect(address, uri=True, timeout=WAIT_S, check_same_thread=False)
            try:
                connection.execute("SELECT 1 FROM pictures LIMIT 1").fetchone()
                return connection
            except sqlite3.Error as error:
                connection.close()
                # A log that a dead command left where nothing may be written; never a ledger that is locked, for it is being written.
                if way == ways[-1] or error.sqlite_errorcode & 0xFF not in CANNOT_OPEN:
                    raise
        raise AssertionError("unreachable")


class SharedTables:
    """The outcomes of all commands that share a folder; specs are in metadata.jsonl, and until that is written in the pictures themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.executescript(SCHEMA)
        self._lines: dict[str, Lines] = {}
        self._metadata = Lines(folder / METADATA_FILE)
        self._num_planned = 0
        self._num_described = 0
        self._listed_at: object = None
        self._names: set[str] = set()
        self._unread: list[str] = []
        self._waiting = True
        """Whether a row that is done may have no spec yet."""
        self._changed = 0.0

    @property
    def changed(self) -> float:
        return self._changed

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        yield self.connection

    def look(self) -> bool:
        before = self.connection.total_changes
        self.connection.execute("BEGIN")
        try:
            names = _names(self.folder / SHARED_FOLDER)
            self._plan([name for name in names if PLAN.fullmatch(name)])
            for name in names:
                if name.endswith(".jsonl") and not name.startswith("."):
                    self._outcomes(name)
            _, rows = self._metadata.new()
            self._describe(
                [{**row, "id": row.get("image_id"), "name": _stem(str(row.get("file_name", "")))} for row in rows]
            )
            if self._waiting or self.connection.total_changes != before:
                self._pictures()
        finally:
            self.connection.execute("COMMIT")
        changed = self.connection.total_changes != before
        if changed:
            stamps = [lines.stamp for lines in [*self._lines.values(), self._metadata]]
            self._changed = max((stamp.mtime for stamp in stamps if stamp), default=0.0)
        return changed

    def _plan(self, names: list[str]) -> None:
        """A row for each that is planned, empty until its picture tells."""
        sizes = [found.st_size for name in names if (found := _stat(self.folder / SHARED_FOLDER / name))]
        num_planned = min(max(sizes, default=0) // DIGEST_BYTES, MAX_PLANNED)
        if num_planned > self._num_planned:
            self.connection.executemany(
                "INSERT INTO pictures(picture) VALUES (?)",
                [(index,) for index in range(self._num_planned, num_planned)],
            )
            self._num_planned = num_planned

    def _outcomes(self, name: str) -> None:
        lines = self._lines.setdefault(name, Lines(self.folder / SHARED_FOLDER / name))
        _, rows = lines.new()
        values = [
            (STATES.index(row["state"]), *(row.get(key, "") for key in OUTCOME), row["index"])
            for row in rows
            if row.get("state") in STATES and is_count(row.get("index")) and all(map(_is_plain, row.values()))
        ]
        assignments = ", ".join(f"{key} = ?" for key in OUTCOME)
        with contextlib.suppress(sqlite3.Error):  # values of other types than a command writes
            self.connection.executemany(
                f"UPDATE pictures SET state = ?, {assignments} WHERE picture = ? AND state != 1", values
            )

    def _describe(self, rows: list[dict[str, Any]]) -> None:
        names = ("name", *SPEC)
        values = [
            tuple(row[key] for key in (*names, "index"))
            for row in rows
            if all(key in row and _is_plain(row[key]) for key in (*names, "index")) and is_count(row["index"])
        ]
        assignments = ", ".join(f"{key} = ?" for key in names)
        with contextlib.suppress(sqlite3.Error):
            cursor = self.connection.executemany(
                f"UPDATE pictures SET {assignments} WHERE picture = ? AND name = ''", values
            )
            if cursor.rowcount > 0:  # rows that were there are others now, which is what a plan's facts tell
                self._num_described += cursor.rowcount
                self.connection.execute(
                    "INSERT OR REPLACE INTO facts VALUES ('described', ?)", (str(self._num_described),)
                )

    def _pictures(self) -> None:
        """While rows that are done have no spec: the names that are new in the folder, and the text of a few of these pictures."""
        waiting = "SELECT 1 FROM pictures WHERE state = 1 AND name = '' LIMIT 1"
        self._waiting = self.connection.execute(waiting).fetchone() is not None
        if not self._waiting:
            return
        found = _stat(self.folder)
        listed_at = (found.st_ino, found.st_mtime_ns) if found else None
        if listed_at != self._listed_at:
            self._listed_at = listed_at if found and time.time() - found.st_mtime > FRESH_S else None
            fresh = [name for name in _names(self.folder) if name not in self._names and not name.startswith(".")]
            self._names.update(fresh)
            known = {row[0] for row in self.connection.execute("SELECT name FROM pictures WHERE name != ''")}
            self._unread += [name for name in fresh if name.endswith((".png", ".mp4")) and _stem(name) not in known]
        now, self._unread = self._unread[:MAX_READ_AT_ONCE], self._unread[MAX_READ_AT_ONCE:]
        self._describe([{**spec_in(self.folder, name), "name": _stem(name)} for name in now])


def _is_plain(value: object) -> bool:
    """What SQLite can take."""
    if isinstance(value, str):
        return value.isprintable() or value == value.encode("utf-8", "replace").decode()
    return is_count(value) or (isinstance(value, float) and is_number(value))


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def file_of(name: str, num_frames: int, frame: int = 0) -> str:
    """The picture of a row within its folder; of a video one frame."""
    return f"{name}.png" if num_frames == 1 else f"{name}/frame_{frame:04d}.png"


def spec_in(folder: Path, name: str) -> dict[str, Any]:
    """The spec that a picture (or the first frame of a video) carries; empty where it carries none. Its pixels are not read."""
    path = folder / (file_of(_stem(name), 2) if name.endswith(".mp4") else name)
    try:
        with opened(path, folder) as file:
            if file.read(len(SIGNATURE)) != SIGNATURE:
                return {}
            while head := file.read(8):
                length, kind = int.from_bytes(head[:4], "big"), head[4:]
                if kind == b"IDAT" or length > MAX_TEXT_BYTES:
                    return {}
                body = file.read(length + 4)[:-4]
                if kind in (b"tEXt", b"iTXt") and body.startswith(b"halation\0"):
                    spec = json.loads(body.partition(b"\0")[2].lstrip(b"\0"))
                    return spec if isinstance(spec, dict) else {}
    except (OSError, ValueError, RecursionError):
        pass
    return {}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
