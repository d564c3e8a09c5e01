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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from halation.gallery.run_file_reader import JsonlTailReader, is_int64, is_number, open_regular_file
from halation.images.png_codec import SIGNATURE

LEDGER_FILE = "ledger.sqlite"
SHARED_LEDGER_FOLDER = "ledger"
METADATA_FILE = "metadata.jsonl"
ROW_STATES = ("open", "done", "failed")
BUSY_TIMEOUT_S = 0.5
MTIME_SETTLE_S = 1.0
"""Files written so recently may be written again within the same tick of their clock, so they count as changed once more."""
DIGEST_BYTES = 8
MAX_TEXT_BYTES = 1 << 17
MAX_IMAGES_PER_READ = 2_000
MAX_PLANNED = 5_000_000
"""More rows than this are damage, not a plan, and would take all memory."""
CANNOT_OPEN_CODES = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
PLAN_FILE = re.compile(r"plan-\d+\.digests")

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
SPEC_COLUMNS = ("id", "prompt", "negative_prompt", "seed", "height", "width", "num_frames", "steps", "guidance_scale")
OUTCOME_COLUMNS = ("sha256", "num_bytes", "worker", "seconds", "micro_batch", "attempts", "reason")
OPEN, DONE, FAILED = range(len(ROW_STATES))
ABSENT = -1
MAX_SQL_PARAMETERS = 500
"""Row numbers in one question to SQLite."""
MAX_SIZES = 20
MAX_SEARCH_WORDS = 16
"""Of a whole prompt that somebody pasted, the longest words are enough to find it."""
Indices = npt.NDArray[np.int64]


class LedgerReader(Protocol):
    """A `pictures` and a `facts` table with the ledger's columns; called by one thread at a time."""

    def poll(self) -> bool:
        """Whether the rows may have changed since the last call; by stats alone where they did not."""

    def connect(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A connection for a moment; sqlite3.Error where the ledger is damaged or gone."""

    @property
    def last_modified(self) -> float:
        """When its newest file was written."""


def open_ledger(folder: Path) -> LedgerReader:
    return (
        SharedLedgerReader(folder)
        if os.path.isdir(folder / SHARED_LEDGER_FOLDER)
        else SqliteLedgerReader(folder / LEDGER_FILE)
    )


class SqliteLedgerReader:
    """ledger.sqlite of one command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wal_path = path.with_name(path.name + "-wal")
        self._last_stats: object = None
        self._last_modified = 0.0

    @property
    def last_modified(self) -> float:
        return self._last_modified

    def poll(self) -> bool:
        # stat(), never open(): closing any descriptor of the file would drop the locks this process's connections have on it.
        stats = [_try_stat(path) for path in (self.path, self.wal_path)]
        self._last_modified = max((found.st_mtime for found in stats if found), default=0.0)
        is_recent = time.time() - self._last_modified < MTIME_SETTLE_S
        current = (
            [(found.st_ino, found.st_size, found.st_mtime_ns) if found else None for found in stats],
            time.time() if is_recent else 0,
        )
        if current == self._last_stats:
            return False
        self._last_stats = current
        return True

    @contextlib.contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        connection = self._open_connection()
        try:
            yield connection
        finally:
            connection.close()

    def _open_connection(self) -> sqlite3.Connection:
        """Without a log beside it no command has the ledger open, and SQLite would make one to be able to read: it must not."""
        if not os.path.isfile(self.path):  # SQLite would wait for somebody to write into a pipe
            raise sqlite3.OperationalError("there is no such file")
        if not os.path.realpath(self.path).startswith(os.path.join(os.path.realpath(self.path.parent), "")):
            raise sqlite3.OperationalError("it is a link that leads out of the run")
        modes = ("mode=ro", "immutable=1") if os.path.isfile(self.wal_path) else ("immutable=1",)
        for mode in modes:
            uri = f"file:{urllib.parse.quote(str(self.path))}?{mode}"
            connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
            try:
                connection.execute("SELECT 1 FROM pictures LIMIT 1").fetchone()
                return connection
            except sqlite3.Error as error:
                connection.close()
                # A log that a dead command left where nothing may be written; never a ledger that is locked, for it is being written.
                if mode == modes[-1] or error.sqlite_errorcode & 0xFF not in CANNOT_OPEN_CODES:
                    raise
        raise AssertionError("unreachable")


class SharedLedgerReader:
    """The outcomes of all commands that share a folder; specs are in metadata.jsonl, and until that is written in the images themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.executescript(SCHEMA)
        self._outcome_readers: dict[str, JsonlTailReader] = {}
        self._metadata_reader = JsonlTailReader(folder / METADATA_FILE)
        self._num_planned = 0
        self._num_described = 0
        self._listed_stat: object = None
        self._known_names: set[str] = set()
        self._unread_names: list[str] = []
        self._has_missing_specs = True
        """Whether a row that is done may have no spec yet."""
        self._last_modified = 0.0

    @property
    def last_modified(self) -> float:
        return self._last_modified

    @contextlib.contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        yield self.connection

    def poll(self) -> bool:
        before = self.connection.total_changes
        self.connection.execute("BEGIN")
        try:
            names = _list_names(self.folder / SHARED_LEDGER_FOLDER)
            self._insert_planned_rows([name for name in names if PLAN_FILE.fullmatch(name)])
            for name in names:
                if name.endswith(".jsonl") and not name.startswith("."):
                    self._read_outcomes(name)
            _, rows = self._metadata_reader.read_new()
            self._update_specs(
                [{**row, "id": row.get("image_id"), "name": _stem(str(row.get("file_name", "")))} for row in rows]
            )
            if self._has_missing_specs or self.connection.total_changes != before:
                self._read_image_specs()
        finally:
            self.connection.execute("COMMIT")
        changed = self.connection.total_changes != before
        if changed:
            stamps = [lines.stamp for lines in [*self._outcome_readers.values(), self._metadata_reader]]
            self._last_modified = max((stamp.mtime for stamp in stamps if stamp), default=0.0)
        return changed

    def _insert_planned_rows(self, names: list[str]) -> None:
        """A row for each that is planned, empty until its image tells."""
        sizes = [found.st_size for name in names if (found := _try_stat(self.folder / SHARED_LEDGER_FOLDER / name))]
        num_planned = min(max(sizes, default=0) // DIGEST_BYTES, MAX_PLANNED)
        if num_planned > self._num_planned:
            self.connection.executemany(
                "INSERT INTO pictures(picture) VALUES (?)",
                [(index,) for index in range(self._num_planned, num_planned)],
            )
            self._num_planned = num_planned

    def _read_outcomes(self, name: str) -> None:
        reader = self._outcome_readers.setdefault(name, JsonlTailReader(self.folder / SHARED_LEDGER_FOLDER / name))
        _, rows = reader.read_new()
        values = [
            (ROW_STATES.index(row["state"]), *(row.get(key, "") for key in OUTCOME_COLUMNS), row["index"])
            for row in rows
            if row.get("state") in ROW_STATES and is_int64(row.get("index")) and all(map(_is_sql_value, row.values()))
        ]
        assignments = ", ".join(f"{key} = ?" for key in OUTCOME_COLUMNS)
        with contextlib.suppress(sqlite3.Error):  # values of other types than a command writes
            self.connection.executemany(
                f"UPDATE pictures SET state = ?, {assignments} WHERE picture = ? AND state != 1", values
            )

    def _update_specs(self, rows: list[dict[str, Any]]) -> None:
        names = ("name", *SPEC_COLUMNS)
        values = [
            tuple(row[key] for key in (*names, "index"))
            for row in rows
            if all(key in row and _is_sql_value(row[key]) for key in (*names, "index")) and is_int64(row["index"])
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

    def _read_image_specs(self) -> None:
        """While rows that are done have no spec: the names that are new in the folder, and the text of a few of these images."""
        missing_query = "SELECT 1 FROM pictures WHERE state = 1 AND name = '' LIMIT 1"
        self._has_missing_specs = self.connection.execute(missing_query).fetchone() is not None
        if not self._has_missing_specs:
            return
        found = _try_stat(self.folder)
        listed_stat = (found.st_ino, found.st_mtime_ns) if found else None
        if listed_stat != self._listed_stat:
            self._listed_stat = listed_stat if found and time.time() - found.st_mtime > MTIME_SETTLE_S else None
            new_names = [
                name for name in _list_names(self.folder) if name not in self._known_names and not name.startswith(".")
            ]
            self._known_names.update(new_names)
            known = {row[0] for row in self.connection.execute("SELECT name FROM pictures WHERE name != ''")}
            self._unread_names += [
                name for name in new_names if name.endswith((".png", ".mp4")) and _stem(name) not in known
            ]
        batch, self._unread_names = self._unread_names[:MAX_IMAGES_PER_READ], self._unread_names[MAX_IMAGES_PER_READ:]
        self._update_specs([{**read_image_spec(self.folder, name), "name": _stem(name)} for name in batch])


def _is_sql_value(value: object) -> bool:
    """What SQLite can take."""
    if isinstance(value, str):
        return value.isprintable() or value == value.encode("utf-8", "replace").decode()
    return is_int64(value) or (isinstance(value, float) and is_number(value))


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def image_file(name: str, num_frames: int, frame: int = 0) -> str:
    """The image of a row within its folder; of a video one frame."""
    return f"{name}.png" if num_frames == 1 else f"{name}/frame_{frame:04d}.png"


def read_image_spec(folder: Path, name: str) -> dict[str, Any]:
    """The spec that an image (or the first frame of a video) carries; empty where it carries none. Its pixels are not read."""
    path = folder / (image_file(_stem(name), 2) if name.endswith(".mp4") else name)
    try:
        with open_regular_file(path, folder) as file:
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


def _try_stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


class RowIndex:
    """State, worker, seed and size of every row. It is brought up to date by reading what is unfinished, never what is done."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.facts = read_facts(connection)
        self.worker_names: list[str] = []
        """Workers, by their number in `workers`."""
        self.states: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self.workers: npt.NDArray[np.int16] = np.zeros(0, np.int16)
        self.seeds: Indices = np.zeros(0, np.int64)
        self.sizes: Indices = np.zeros(0, np.int64)
        self.num_frames = 1
        self.texts: list[str] = []
        """Prompt and id of the first rows, or of all, for searching."""
        self.last_done = -1
        self._worker_numbers: dict[str, int] = {}
        self._add_rows(connection, 0)

    def __len__(self) -> int:
        return len(self.states)

    def _add_rows(self, connection: sqlite3.Connection, first: int) -> None:
        """Rows from `first` on, which are new."""
        query = (
            "SELECT picture, state, seed, (width << 20) | height, worker, num_frames FROM pictures WHERE picture >= ?"
        )
        rows = connection.execute(query, (first,)).fetchall()
        if not rows:
            return
        image, state, seed, size, worker, num_frames = zip(*rows, strict=True)
        indices = np.array(image, np.int64)
        num_rows = int(indices.max()) + 1
        if indices.min() < 0 or num_rows > MAX_PLANNED or not {OPEN, DONE, FAILED}.issuperset(state):
            raise sqlite3.DatabaseError("rows that no plan has")
        self.states = _extend_column(self.states, num_rows, ABSENT)
        self.workers = _extend_column(self.workers, num_rows, 0)
        self.seeds = _extend_column(self.seeds, num_rows, 0)
        self.sizes = _extend_column(self.sizes, num_rows, 0)
        self.states[indices] = state
        self.seeds[indices] = seed
        self.sizes[indices] = size
        for name in dict.fromkeys(worker):
            self._register_worker(name)
        self.workers[indices] = [self._worker_numbers[name] for name in worker]
        self.num_frames = max(num_frames)
        done = np.flatnonzero(self.states == DONE)
        self.last_done = int(done[-1]) if len(done) else -1

    def _register_worker(self, worker: str) -> int:
        if worker not in self._worker_numbers:
            self._worker_numbers[worker] = len(self.worker_names)
            self.worker_names.append(worker)
        return self._worker_numbers[worker]

    def update(self, connection: sqlite3.Connection) -> bool:
        """Take over what changed; False where the plan is another one, so that all must be read anew."""
        (num_planned,) = connection.execute("SELECT COALESCE(MAX(picture) + 1, 0) FROM pictures").fetchone()
        if read_facts(connection) != self.facts or num_planned < len(self):
            return False
        self._update_states(connection)
        if num_planned > len(self):
            self._add_rows(connection, len(self))
        return True

    def _update_states(self, connection: sqlite3.Connection) -> None:
        """What is not unfinished any more is done: the ledger's own index lists the unfinished, so done rows cost nothing."""
        unfinished = connection.execute("SELECT picture, state FROM pictures WHERE state != 1").fetchall()
        states = np.where(self.states == ABSENT, ABSENT, DONE).astype(np.int8)
        if unfinished:
            pairs = np.array(unfinished, np.int64)
            pairs = pairs[pairs[:, 0] < len(self)]
            states[pairs[:, 0]] = pairs[:, 1]
        newly_done = np.flatnonzero((states == DONE) & (self.states != DONE))
        self.states = states
        # A row that failed again may have failed elsewhere.
        changed_rows = [*newly_done.tolist(), *np.flatnonzero(states == FAILED).tolist()]
        for index, worker, seed, size in select_rows(connection, changed_rows, "worker, seed, (width << 20) | height"):
            self.workers[index], self.seeds[index], self.sizes[index] = self._register_worker(worker), seed, size
        if len(newly_done):
            self.last_done = int(newly_done[-1])
        elif self.last_done >= 0 and states[self.last_done] != DONE:
            done = np.flatnonzero(states == DONE)
            self.last_done = int(done[-1]) if len(done) else -1

    def read_texts(self, connection: sqlite3.Connection) -> None:
        """The words of rows that have none yet."""
        query = "SELECT picture, prompt || char(10) || id FROM pictures WHERE picture >= ? ORDER BY picture"
        for image, text in connection.execute(query, (len(self.texts),)):
            self.texts += [""] * (image - len(self.texts))
            self.texts.append(text.casefold())

    # -- questions

    def filter_rows(self, state: str, worker: str | None, seed: int | None) -> Indices:
        """Rows by index for which all of this is true."""
        mask = self.states != ABSENT if not state else self.states == ROW_STATES.index(state)
        if worker is not None:
            mask = mask & (self.workers == self._worker_numbers.get(worker, -1)) & (self.states != OPEN)
        if seed is not None:
            mask = mask & (self.seeds == seed if -(2**63) <= seed < 2**63 else False)
        return np.flatnonzero(mask).astype(np.int64)

    def count_states(self) -> dict[str, int]:
        numbers = [int(np.count_nonzero(self.states == state)) for state in range(len(ROW_STATES))]
        return {"planned": sum(numbers), **dict(zip(ROW_STATES, numbers, strict=True))}

    def count_by_worker(self) -> dict[str, tuple[int, int]]:
        """Done and failed rows of each worker that has any."""
        num_names = len(self.worker_names)
        done = np.bincount(self.workers[self.states == DONE], minlength=num_names)
        failed = np.bincount(self.workers[self.states == FAILED], minlength=num_names)
        found = {
            name: (int(done[n]), int(failed[n])) for n, name in enumerate(self.worker_names) if done[n] or failed[n]
        }
        return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))

    def count_by_size(self) -> list[list[int]]:
        """Width, height and number of rows, the commonest first."""
        sizes = Counter(dict(zip(*map(np.ndarray.tolist, np.unique(self.sizes, return_counts=True)), strict=True)))
        return [[size >> 20, size & 0xFFFFF, count] for size, count in sizes.most_common(MAX_SIZES) if size]


def filter_by_words(indices: Indices, texts: Sequence[str], words: Sequence[str]) -> Indices:
    """Those of the rows in whose texts all words occur; texts are only ever added, so nobody has to hold still for it."""
    if not words:
        return indices
    found = [index for index in indices.tolist() if index < len(texts)]
    for word in words:
        found = [index for index in found if word in texts[index]]
    return np.array(found, np.int64)


def parse_search_words(text: str) -> list[str]:
    """The words to look for: the longest first, which leave the fewest rows, and none that is part of another."""
    words: list[str] = []
    for word in sorted(dict.fromkeys(text.casefold().split()), key=len, reverse=True):
        if len(words) < MAX_SEARCH_WORDS and not any(word in longer for longer in words):
            words.append(word)
    return words


def select_rows(connection: sqlite3.Connection, indices: Sequence[int], columns: str) -> Iterator[tuple[Any, ...]]:
    """The index and these columns of some rows, in no order."""
    for start in range(0, len(indices), MAX_SQL_PARAMETERS):
        chunk = indices[start : start + MAX_SQL_PARAMETERS]
        placeholders = ", ".join("?" * len(chunk))
        yield from connection.execute(
            f"SELECT picture, {columns} FROM pictures WHERE picture IN ({placeholders})", chunk
        )


def count_rows(connection: sqlite3.Connection) -> dict[str, int]:
    """Rows by state, without reading those that are done."""
    (planned,) = connection.execute("SELECT COALESCE(MAX(picture) + 1, 0) FROM pictures").fetchone()
    unfinished = dict(
        connection.execute("SELECT state, COUNT(*) FROM pictures WHERE state != 1 GROUP BY state").fetchall()
    )
    num_open, failed = unfinished.get(0, 0), unfinished.get(2, 0)
    return {"planned": planned, "open": num_open, "done": planned - num_open - failed, "failed": failed}


def read_facts(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """What the plan is recognised by."""
    return connection.execute("SELECT key, value FROM facts ORDER BY key").fetchall()


def _extend_column(column: Any, num_rows: int, filler: int) -> Any:
    return np.concatenate([column, np.full(num_rows - len(column), filler, column.dtype)])
