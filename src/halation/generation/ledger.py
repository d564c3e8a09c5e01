"""The ledger: every planned image and what became of it, in one SQLite file with one writer; the only truth on resume."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from halation.errors import HalationError, InputError
from halation.fault_injection import fault_point
from halation.generation.image_requests import ImageRequest
from halation.sample_specs import SampleSpec

RowState = Literal["open", "done", "failed"]
Indices = npt.NDArray[np.int64]
Result = TypeVar("Result")

LEDGER_FILE = "ledger.sqlite"
STATES: tuple[RowState, ...] = ("open", "done", "failed")
DONE = STATES.index("done")
RETRY_WAITS_S = (0.1, 0.5, 2.0)
CLOSE_WAIT_MS = 2_000
CLOSE_WAITS_S = (0.02, 0.1, 0.4)

# `unfinished` is a partial index, so that a resume reads what is missing and never what is there.
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shapes(number INTEGER PRIMARY KEY, shape TEXT NOT NULL UNIQUE, negative INTEGER);
CREATE TABLE IF NOT EXISTS pictures(
    picture INTEGER PRIMARY KEY, name TEXT NOT NULL, id TEXT NOT NULL, prompt TEXT NOT NULL, negative_prompt TEXT NOT NULL,
    seed INTEGER NOT NULL, height INTEGER NOT NULL, width INTEGER NOT NULL, num_frames INTEGER NOT NULL, steps INTEGER NOT NULL,
    guidance_scale REAL NOT NULL, shape INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, sha256 TEXT NOT NULL DEFAULT '', num_bytes INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '', seconds REAL NOT NULL DEFAULT 0, micro_batch INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', epoch INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS unfinished ON pictures(state, picture) WHERE state != 1;
"""
_SPEC_COLUMNS = "picture, name, id, prompt, negative_prompt, seed, height, width, num_frames, steps, guidance_scale"
_OUTCOME_COLUMNS = "state, sha256, num_bytes, worker, seconds, micro_batch, attempts, reason, epoch"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOutcome:
    """What became of one image."""

    index: int
    state: Literal["done", "failed"]
    sha256: str = ""
    num_bytes: int = 0
    worker: str = ""
    """The GPU's id as given, or the worker's number on a CPU."""
    seconds: float = 0.0
    micro_batch: int = 0
    """0: drawn as planned; otherwise the smaller number of images at once that memory allowed."""
    attempts: int = 1
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRow:
    """A planned image with its outcome."""

    request: ImageRequest
    state: RowState
    sha256: str
    num_bytes: int
    worker: str
    seconds: float
    micro_batch: int
    attempts: int
    reason: str
    epoch: int


def group_key(spec: SampleSpec) -> tuple[float, ...]:
    """What must be equal for two specs to stand in one batch: a pipeline takes one guidance scale for all its rows."""
    return (*spec.shape, spec.guidance_scale)


class Ledger:
    """Rows and outcomes; call it from one thread of one process, which holds the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        """Which of the run's settings, counted from 0, the outcomes recorded from now on belong to."""
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            raise _database_error(path, error) from error

    def _open(self) -> None:
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        # WAL: one fsync less a commit, and a reader (the gallery) never waits. A power cut may cost the last outcomes, never the file.
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = NORMAL")
        self.connection.executescript(SCHEMA)

    def close(self) -> None:
        """Everything into the one file: SQLite itself leaves rows in the log beside it where a reader happens to be there."""
        with contextlib.suppress(
            sqlite3.Error
        ):  # a full disk: the rows stay in the log, from which the next command reads them
            self.connection.execute(f"PRAGMA busy_timeout = {CLOSE_WAIT_MS}")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self.connection.close()
        self._remove_wal()

    def _remove_wal(self) -> None:
        """Whoever is the last to close removes the log; a reader cannot, so it is tried again once that has gone."""
        wal_path = self.path.with_name(self.path.name + "-wal")
        for wait_s in CLOSE_WAITS_S:
            try:
                if not wal_path.exists() or wal_path.stat().st_size:
                    return
                time.sleep(wait_s)
                with contextlib.closing(sqlite3.connect(self.path, timeout=0)) as connection:
                    connection.execute("SELECT 1 FROM facts LIMIT 1").fetchone()
            except (sqlite3.Error, OSError):
                return

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
        if isinstance(error, sqlite3.DatabaseError):
            raise _database_error(self.path, error) from error

    # -- the plan

    @property
    def num_planned(self) -> int:
        return int(self.connection.execute("SELECT COALESCE(MAX(picture) + 1, 0) FROM pictures").fetchone()[0])

    def read_fact(self, key: str) -> Any:
        row = self.connection.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add_plan(
        self, requests: Iterable[ImageRequest], facts: dict[str, Any], changed: Sequence[ImageRequest] = ()
    ) -> None:
        """Add requests behind those that are planned, all of them or, where anything fails, none; `facts` say which plan it is.

        `changed` take the place of rows that are not done.
        """
        with self._transaction("plan"):
            self.connection.executemany(
                "DELETE FROM pictures WHERE picture = ?", [(request.spec.index,) for request in changed]
            )
            self.connection.executemany(
                f"INSERT INTO pictures({_SPEC_COLUMNS}, shape) VALUES ({', '.join('?' * 12)})",
                self._plan_values(changed),
            )
            self.connection.executemany(
                f"INSERT INTO pictures({_SPEC_COLUMNS}, shape) VALUES ({', '.join('?' * 12)})",
                self._plan_values(requests),
            )
            self.connection.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)", [(key, json.dumps(value)) for key, value in facts.items()]
            )

    def _plan_values(self, requests: Iterable[ImageRequest]) -> Iterator[tuple[Any, ...]]:
        shapes = {shape: number for number, shape in self.connection.execute("SELECT number, shape FROM shapes")}
        shapes_with_negative: set[str] = set()
        for request in requests:
            spec = request.spec
            shape = json.dumps(group_key(spec))
            if shape not in shapes:
                shapes[shape] = len(shapes)
                self.connection.execute("INSERT INTO shapes VALUES (?, ?, NULL)", (shapes[shape], shape))
            if spec.negative_prompt and shape not in shapes_with_negative:
                shapes_with_negative.add(shape)
                self.connection.execute(
                    "UPDATE shapes SET negative = COALESCE(negative, ?) WHERE shape = ?", (spec.index, shape)
                )
            yield (
                spec.index, request.name, spec.id, spec.prompt, spec.negative_prompt, spec.seed, spec.height, spec.width,
                spec.num_frames, spec.steps, spec.guidance_scale, shapes[shape],
            )  # fmt: skip

    def delete_plan(self) -> None:
        """Before the first image is drawn, other settings may still make another plan."""
        with self._transaction("forget"):
            for table in ("pictures", "shapes", "facts"):
                self.connection.execute(f"DELETE FROM {table}")

    def groups(self) -> list[Indices]:
        """The indices of each group of rows that may share batches, ascending."""
        num_shapes = self.connection.execute("SELECT COUNT(*) FROM shapes").fetchone()[0]
        if num_shapes <= 1:
            return [np.arange(self.num_planned, dtype=np.int64)] if num_shapes else []
        rows = self.connection.execute("SELECT shape FROM pictures ORDER BY picture").fetchall()
        shapes = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(rows))
        groups = [np.flatnonzero(shapes == number).astype(np.int64) for number in range(num_shapes)]
        return [group for group in groups if len(group)]

    def examples(self) -> list[SampleSpec]:
        """A spec of each group and, where the group has one, a spec with a negative prompt, which not every model takes."""
        firsts = [int(group[0]) for group in self.groups()]
        negatives = self.connection.execute("SELECT negative FROM shapes WHERE negative IS NOT NULL").fetchall()
        chosen = dict.fromkeys([*firsts, *(row[0] for row in negatives)])
        return [request.spec for request in self.requests(list(chosen))]

    def requests(self, indices: Sequence[int]) -> list[ImageRequest]:
        """The requests of these rows, in this order."""
        query = f"SELECT {_SPEC_COLUMNS} FROM pictures WHERE picture = ?"
        return [_parse_request(self.connection.execute(query, (int(index),)).fetchone()) for index in indices]

    # -- the outcomes

    def unfinished_indices(self) -> Indices:
        """Rows without an image, ascending: open ones, and failed ones, which a new call tries again."""
        rows = self.connection.execute("SELECT picture FROM pictures WHERE state != 1").fetchall()
        return np.sort(np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(rows)))

    def counts(self) -> dict[str, int]:
        """How many rows are planned, open, done and failed."""
        planned = self.num_planned
        rest = dict(
            self.connection.execute("SELECT state, COUNT(*) FROM pictures WHERE state != 1 GROUP BY state").fetchall()
        )
        counts: dict[str, int] = {state: rest.get(number, 0) for number, state in enumerate(STATES)}
        return {"planned": planned, **counts, "done": planned - sum(rest.values())}

    def record(self, outcomes: Iterable[ImageOutcome]) -> None:
        """Write outcomes down; an image that is done stays done, so that a late second word changes nothing."""
        values = [
            (
                STATES.index(outcome.state), outcome.sha256, outcome.num_bytes, outcome.worker, outcome.seconds,
                outcome.micro_batch, outcome.attempts, outcome.reason, self.epoch, outcome.index,
            )
            for outcome in outcomes
        ]  # fmt: skip
        assignments = ", ".join(f"{name} = ?" for name in _OUTCOME_COLUMNS.split(", "))

        def write() -> None:
            with self._transaction("record"):
                self.connection.executemany(
                    f"UPDATE pictures SET {assignments} WHERE picture = ? AND state != 1", values
                )

        self._retry(write)

    def mark_open(self, indices: Iterable[int]) -> None:
        """Back to open: the file of a done image is gone or damaged."""
        with self._transaction("reopen"):
            self.connection.executemany(
                "UPDATE pictures SET state = 0, sha256 = '', reason = '' WHERE picture = ?",
                [(int(index),) for index in indices],
            )

    def rows(self) -> Iterator[LedgerRow]:
        """All rows by index."""
        return self._select_rows("")

    def done_rows(self) -> Iterator[LedgerRow]:
        """Rows whose image is there, by index."""
        return self._select_rows(f"WHERE state = {DONE}")

    def failed_rows(self) -> Iterator[LedgerRow]:
        return self._select_rows(
            "WHERE state != 1 AND state = 2"
        )  # both, so that the index of unfinished rows is found

    def done_names(self) -> Iterator[tuple[int, str, int]]:
        """Index, file stem and number of frames of every image that should be in the folder."""
        return iter(self.connection.execute(f"SELECT picture, name, num_frames FROM pictures WHERE state = {DONE}"))

    def num_images_in_smaller_micro_batches(self) -> int:
        """Images that were drawn with fewer at once than planned."""
        return int(self.connection.execute("SELECT COUNT(*) FROM pictures WHERE micro_batch > 0").fetchone()[0])

    def _select_rows(self, condition: str) -> Iterator[LedgerRow]:
        for row in self.connection.execute(
            f"SELECT {_SPEC_COLUMNS}, {_OUTCOME_COLUMNS} FROM pictures {condition} ORDER BY picture"
        ):
            state, *outcome = row[11:]
            names = _OUTCOME_COLUMNS.split(", ")[1:]
            yield LedgerRow(
                request=_parse_request(row[:11]), state=STATES[state], **dict(zip(names, outcome, strict=True))
            )

    @contextlib.contextmanager
    def _transaction(self, point: str) -> Iterator[None]:
        fault_point(f"ledger.{point}")
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            fault_point(f"ledger.{point}.commit")
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        fault_point(f"ledger.{point}.committed")

    def _retry(self, action: Callable[[], Result]) -> Result:
        """A disk that refuses may be a passing matter; one that goes on refusing ends the run with a sentence."""
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                return action()
            except (sqlite3.OperationalError, OSError) as error:
                if wait_s is None:
                    raise HalationError(
                        f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}; "
                        "mend that, for a full disk free some space, then run the same command again"
                    ) from error
                time.sleep(wait_s)
        raise AssertionError("unreachable")


def _parse_request(row: Sequence[Any]) -> ImageRequest:
    index, name, id_, prompt, negative_prompt, seed, height, width, num_frames, steps, guidance_scale = row
    spec = SampleSpec(
        index=index, id=id_, prompt=prompt, negative_prompt=negative_prompt, seed=seed, height=height, width=width,
        num_frames=num_frames, steps=steps, guidance_scale=guidance_scale,
    )  # fmt: skip
    return ImageRequest(spec=spec, name=name)


def _database_error(path: Path, error: sqlite3.DatabaseError) -> HalationError:
    """What a person should read: the disk is full or broken, or the file is."""
    disk = ("disk is full", "disk I/O", "unable to open", "readonly", "locked")
    if any(words in str(error) for words in disk):
        return HalationError(
            f"cannot read or write {path}: {error}; mend that, for a full disk free some space, then run the same command again"
        )
    return InputError(
        f"{path} is damaged: {error}",
        "the ledger as Halation wrote it",
        "restore it from a copy, or start in a new --output_dir",
    )
