"""Reads a ledger of either kind as one SQLite table while another process may write it.

Reading must not disturb the writer: transactions are short, nothing is written beside the ledger, and a ledger without
a log, which no command has open, is read without locks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import struct
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from halation.generation import ledger
from halation.generation.metadata_and_summary import METADATA_FILE, frame_name
from halation.generation.shared_folder import shared_ledger
from halation.images.png_codec import SIGNATURE
from halation.input_files import MAX_ROW_BYTES, MAX_TABLE_ROWS, open_regular_file

BUSY_TIMEOUT_S = 0.5
MTIME_SETTLE_S = 1.0
"""Files modified less than this long ago count as changed: they may change again with the same mtime."""
MAX_TEXT_BYTES = 1 << 17
MAX_IMAGES_PER_READ = 2_000
CANNOT_OPEN_CODES = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
MAX_SQL_PARAMETERS = 500
"""Maximum number of row numbers in one query."""


class LedgerConnection(sqlite3.Connection):
    """A connection to the tables of a ledger, with the queries of its readers."""

    def read_facts(self) -> list[tuple[str, str]]:
        """Return the facts that identify the plan."""
        return self.execute("SELECT key, value FROM facts ORDER BY key").fetchall()

    def read_rows(self, first: int) -> list[tuple[Any, ...]]:
        """Return the rows from `first` on.

        Columns: index, state, seed, size (width << 20 | height), worker and number of frames.
        """
        columns = "picture, state, seed, (width << 20) | height, worker, num_frames"
        return self.execute(f"SELECT {columns} FROM pictures WHERE picture >= ?", (first,)).fetchall()

    def read_unfinished(self) -> list[tuple[int, int]]:
        """Return index and state of the rows that are not done."""
        return self.execute("SELECT picture, state FROM pictures WHERE state != 1").fetchall()

    def iter_texts(self, first: int) -> Iterator[tuple[int, str]]:
        """Iterate over the rows from `first` on: index, and prompt and id as two lines."""
        query = "SELECT picture, prompt || char(10) || id FROM pictures WHERE picture >= ? ORDER BY picture"
        return iter(self.execute(query, (first,)))

    def find_last_done(self, below: int) -> int:
        """Return the last done row below this index, or -1."""
        query = "SELECT picture FROM pictures WHERE picture < ? AND state = 1 ORDER BY picture DESC LIMIT 1"
        row = self.execute(query, (below,)).fetchone()
        return int(row[0]) if row else -1

    def count_failure_reasons(self) -> list[tuple[str, int]]:
        """Return each reason of a failure with its number of rows."""
        # `state != 1` lets SQLite use the index of unfinished rows.
        query = f"SELECT reason, COUNT(*) FROM pictures WHERE state != 1 AND state = {ledger.FAILED} GROUP BY reason"
        return self.execute(query).fetchall()

    def select_rows(self, indices: Sequence[int], columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the index and these columns of the given rows, in no particular order."""
        for start in range(0, len(indices), MAX_SQL_PARAMETERS):
            chunk = indices[start : start + MAX_SQL_PARAMETERS]
            placeholders = ", ".join("?" * len(chunk))
            yield from self.execute(f"SELECT picture, {columns} FROM pictures WHERE picture IN ({placeholders})", chunk)


class LedgerReader(Protocol):
    """Provides connections to the tables of a ledger; used by one thread at a time."""

    def poll(self) -> bool:
        """Return True if rows may have changed since the last call; only stats files if not."""

    def connect(self) -> contextlib.AbstractContextManager[LedgerConnection]:
        """Return a short-lived connection; raise sqlite3.Error if the ledger is damaged or gone."""

    def list_lease_files(self) -> list[Path]:
        """Return the files that running commands on a shared folder keep touching."""

    @property
    def last_modified(self) -> float:
        """The modification time of the newest file."""


def open_ledger(folder: Path) -> LedgerReader:
    is_shared = os.path.isdir(folder / shared_ledger.SHARED_LEDGER)
    return SharedLedgerReader(folder) if is_shared else SqliteLedgerReader(folder / ledger.LEDGER_FILE)


class SqliteLedgerReader:
    """Reads `ledger.sqlite`, the ledger of a single command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wal_path = path.with_name(path.name + "-wal")
        self._last_stats: object = None
        self.last_modified = 0.0

    def poll(self) -> bool:
        # stat(), not open(): closing any descriptor of the file would drop this process's locks on it.
        stats = [_try_stat(path) for path in (self.path, self.wal_path)]
        self.last_modified = max((found.st_mtime for found in stats if found), default=0.0)
        is_recent = time.time() - self.last_modified < MTIME_SETTLE_S
        current = [_stamp(found) for found in stats], time.time() if is_recent else 0
        changed, self._last_stats = current != self._last_stats, current
        return changed

    def list_lease_files(self) -> list[Path]:
        return []

    @contextlib.contextmanager
    def connect(self) -> Iterator[LedgerConnection]:
        connection = self._open_connection()
        try:
            yield connection
        finally:
            connection.close()

    def _open_connection(self) -> LedgerConnection:
        """Open the ledger read-only.

        Without a log, no command has the ledger open. It is then opened as immutable, or SQLite would create a log.
        """
        if not os.path.isfile(self.path):  # SQLite would block on a named pipe
            raise sqlite3.OperationalError("there is no such file")
        if not os.path.realpath(self.path).startswith(os.path.join(os.path.realpath(self.path.parent), "")):
            raise sqlite3.OperationalError("it is a link that leads out of the run")
        modes = ("mode=ro", "immutable=1") if os.path.isfile(self.wal_path) else ("immutable=1",)
        for mode in modes:
            uri = f"file:{urllib.parse.quote(str(self.path))}?{mode}"
            connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False, factory=LedgerConnection
            )
            try:
                connection.execute("SELECT 1 FROM pictures LIMIT 1").fetchone()
                return connection
            except sqlite3.Error as error:
                connection.close()
                # Retry as immutable if a dead command left a log in a read-only folder. A locked ledger is in use.
                if mode == modes[-1] or error.sqlite_errorcode & 0xFF not in CANNOT_OPEN_CODES:
                    raise
        raise AssertionError("unreachable")


class SharedLedgerReader:
    """Reads the outcomes of all commands that share a folder into an in-memory table.

    Specs come from metadata.jsonl or, until that is written, from the images.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False, factory=LedgerConnection
        )
        ledger.create_tables(self.connection)
        self.last_modified = 0.0
        self._outcome_files = shared_ledger.OutcomeFiles(folder / shared_ledger.SHARED_LEDGER)
        self._metadata_stamp: object = None
        self._num_planned = 0
        self._num_described = 0
        self._listed_stamp: object = None
        self._known_names: set[str] = set()
        self._unread_names: list[str] = []
        self._has_missing_specs = True
        """True if a done row may still lack its spec."""

    @contextlib.contextmanager
    def connect(self) -> Iterator[LedgerConnection]:
        yield self.connection

    def list_lease_files(self) -> list[Path]:
        folder = self.folder / shared_ledger.SHARED_LEDGER / shared_ledger.LEASES_FOLDER
        with contextlib.suppress(OSError):
            return [folder / name for name in os.listdir(folder) if name.endswith(shared_ledger.OWNER_FILE_SUFFIX)]
        return []

    def poll(self) -> bool:
        before = self.connection.total_changes
        self.connection.execute("BEGIN")
        try:
            with contextlib.suppress(OSError):  # the folder is gone or not a folder
                self._insert_planned_rows()
                for name in self._outcome_files.names():
                    self._read_outcomes(name)
            self._read_metadata()
            if self._has_missing_specs or self.connection.total_changes != before:
                self._read_image_specs()
        finally:
            self.connection.execute("COMMIT")
        return self.connection.total_changes != before

    def _insert_planned_rows(self) -> None:
        """Insert the planned rows, empty until their metadata or image is read."""
        num_planned = min(shared_ledger.count_planned_rows(self.folder / shared_ledger.SHARED_LEDGER), MAX_TABLE_ROWS)
        self.connection.executemany(
            f"INSERT INTO pictures(picture, name, {', '.join(ledger.SPEC_COLUMNS)}, shape)"
            " VALUES (?, '', '', '', '', 0, 0, 0, 1, 0, 0, 0)",
            ((index,) for index in range(self._num_planned, num_planned)),
        )
        self._num_planned = max(self._num_planned, num_planned)

    def _read_outcomes(self, name: str) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):  # not a regular file, or invalid values
            for outcomes, _ in self._outcome_files.read_new(name):
                values = [ledger.outcome_values(outcome, ledger.STATES.index(outcome.state), 0) for outcome in outcomes]
                self.connection.executemany(f"{ledger.UPDATE_OUTCOME} AND state != 1", values)
        self.last_modified = max(self.last_modified, self._outcome_files.last_modified)

    def _read_metadata(self) -> None:
        """Read metadata.jsonl again if it was replaced; it is always published as a whole."""
        with contextlib.suppress(OSError), open_regular_file(self.folder / METADATA_FILE, within=self.folder) as file:
            status = os.fstat(file.fileno())
            if _stamp(status) != self._metadata_stamp:
                self._metadata_stamp = _stamp(status)
                self.last_modified = max(self.last_modified, status.st_mtime)
                lines = iter(lambda: file.readline(MAX_ROW_BYTES), b"")
                rows = map(_parse_object, itertools.takewhile(lambda line: line.endswith(b"\n"), lines))
                self._update_specs(
                    row | {"id": row.get("image_id"), "name": _stem(str(row.get("file_name", "")))} for row in rows
                )

    def _update_specs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        names = ("name", *ledger.SPEC_COLUMNS)
        with contextlib.suppress(sqlite3.Error):
            cursor = self.connection.executemany(
                f"UPDATE pictures SET {', '.join(f'{name} = ?' for name in names)} WHERE picture = ? AND name = ''",
                (
                    [*(row[name] for name in names[:-1]), ledger.stored_guidance(row["guidance_scale"]), row["index"]]
                    for row in rows
                    if _is_spec(row)
                ),
            )
            if cursor.rowcount > 0:  # existing rows changed, which readers detect by a change of the facts
                self._num_described += cursor.rowcount
                self.connection.execute(
                    "INSERT OR REPLACE INTO facts VALUES ('described', ?)", (str(self._num_described),)
                )

    def _read_image_specs(self) -> None:
        """If done rows lack a spec, list new files in the folder and read some of the images."""
        missing_query = "SELECT 1 FROM pictures WHERE state = 1 AND name = '' LIMIT 1"
        self._has_missing_specs = self.connection.execute(missing_query).fetchone() is not None
        if not self._has_missing_specs:
            return
        found = _try_stat(self.folder)
        if _stamp(found) != self._listed_stamp:
            self._listed_stamp = _stamp(found) if found and time.time() - found.st_mtime > MTIME_SETTLE_S else None
            with contextlib.suppress(OSError):
                names = set(os.listdir(self.folder)) - self._known_names
                self._known_names |= names
                known = {row[0] for row in self.connection.execute("SELECT name FROM pictures WHERE name != ''")}
                self._unread_names += sorted(
                    name
                    for name in names
                    if name.endswith((".png", ".mp4")) and not name.startswith(".") and _stem(name) not in known
                )
        batch, self._unread_names = self._unread_names[:MAX_IMAGES_PER_READ], self._unread_names[MAX_IMAGES_PER_READ:]
        self._update_specs({**read_image_spec(self.folder, name), "name": _stem(name)} for name in batch)


def _is_spec(row: Mapping[str, Any]) -> bool:
    """Return True if all values of a planned row are present and have the right types."""
    try:
        numbers = [row[name] for name in ("seed", "height", "width", "num_frames", "steps")]
        ledger.plan_checksum(
            row["index"],
            [row[name].encode() for name in ledger.PLAN_TEXTS],
            [*numbers, 0],
            ledger.stored_guidance(row["guidance_scale"]),
        )
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, struct.error):
        return False
    return True


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _parse_object(line: bytes) -> dict[str, Any]:
    """Parse a line as a JSON object; return an empty one for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_image_spec(folder: Path, name: str) -> dict[str, Any]:
    """Return the spec inside an image or the first frame of a video, without reading pixels.

    Empty if the file has none.
    """
    path = folder / (frame_name(_stem(name), 0) if name.endswith(".mp4") else name)
    with contextlib.suppress(OSError), open_regular_file(path, within=folder) as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            return {}
        while head := file.read(8):
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if kind == b"IDAT" or length > MAX_TEXT_BYTES:
                return {}
            body = file.read(length + 4)[:-4]
            if kind in (b"tEXt", b"iTXt") and body.startswith(b"halation\0"):
                return _parse_object(body.partition(b"\0")[2].lstrip(b"\0"))
    return {}


def _try_stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _stamp(status: os.stat_result | None) -> tuple[int, int, int] | None:
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None
