"""The ledger: every planned image and its outcome, in one SQLite file with one writer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from halation.errors import HalationError, InputError
from halation.fault_injection import fault_point
from halation.generation.image_requests import ImageRequest
from halation.input_files import RefusedFileError, open_regular_file
from halation.runs.run_folder import is_same_file, write_atomic
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
RowState = Literal["open", "done", "failed"]
Indices = npt.NDArray[np.int64]
Result = TypeVar("Result")

LedgerKind = Literal["sqlite", "files"]
LEDGER_FILE = "ledger.sqlite"
LEDGER_NAMES: dict[LedgerKind, str] = {"sqlite": LEDGER_FILE, "files": "ledger"}
"""A single file, or a folder of files that several commands write."""
STATES: tuple[RowState, ...] = ("open", "done", "failed")
OPEN, DONE, FAILED = range(len(STATES))
"""States as stored in the table."""
REMEDY = "fix the cause (for a full disk, free some space) and run the same command again"
RETRY_WAITS_S = (0.1, 0.5, 2.0)
CLOSE_WAIT_MS = 2_000
CLOSE_WAITS_S = (0.02, 0.1, 0.4)

APPLICATION_ID = 0x48414C4F
"""Marks the file as a Halation ledger in SQLite's header. Ledgers of earlier versions have 0 there."""
DIGEST_FILE = "ledger.sha256"
"""SHA-256 of the database file without its log: a fast check that the file is unchanged since it was written."""
DIGEST_BLOCK_BYTES = 1 << 20
MAX_OUTCOMES_IN_LOG = 4_000
"""After this many outcomes, the write-ahead log is checkpointed into the file and the digest is recomputed."""

# `unfinished` is a partial index, so that a resume reads only the missing rows.
# SQLite stores this text in the file. It must not change, so backslashes join long lines.
SCHEMA = """
CREATE TABLE IF NOT EXISTS facts(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shapes(number INTEGER PRIMARY KEY, shape TEXT NOT NULL UNIQUE, negative INTEGER);
CREATE TABLE IF NOT EXISTS pictures(
    picture INTEGER PRIMARY KEY, name TEXT NOT NULL, id TEXT NOT NULL, prompt TEXT NOT NULL, \
negative_prompt TEXT NOT NULL,
    seed INTEGER NOT NULL, height INTEGER NOT NULL, width INTEGER NOT NULL, num_frames INTEGER NOT NULL, \
steps INTEGER NOT NULL,
    guidance_scale REAL NOT NULL, shape INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, sha256 TEXT NOT NULL DEFAULT '', num_bytes INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '', seconds REAL NOT NULL DEFAULT 0, micro_batch INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', epoch INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS unfinished ON pictures(state, picture) WHERE state != 1;
"""
# Added by ALTER TABLE in new ledgers too, so that their schema text equals that of ledgers of earlier versions.
CHECKSUM_COLUMNS = ("plan_check", "outcome_check")
NO_GUIDANCE = -1.0
"""Stored as the guidance scale of an image whose model takes none: the column holds numbers only."""
SPEC_COLUMNS = ("id", "prompt", "negative_prompt", "seed", "height", "width", "num_frames", "steps", "guidance_scale")
OUTCOME_COLUMNS = ("sha256", "num_bytes", "worker", "seconds", "micro_batch", "attempts", "reason")
_REQUEST = f"picture, name, {', '.join(SPEC_COLUMNS)}"
_OUTCOME = f"state, {', '.join(OUTCOME_COLUMNS)}, epoch"
PLAN_TEXTS = ("name", "id", "prompt", "negative_prompt")
_PLAN_INTEGERS = ("seed", "height", "width", "num_frames", "steps", "shape")
_OUTCOME_TEXTS = ("sha256", "worker", "reason")
_OUTCOME_INTEGERS = ("state", "num_bytes", "micro_batch", "attempts", "epoch")
_PLAN_NUMBERS = struct.Struct("<qqqqqqqd").pack
_OUTCOME_NUMBERS = struct.Struct("<qqqqqqd").pack
CHECKSUM_VERSION = 1
"""SQLite's user_version of ledgers whose rows have checksums; older ledgers have 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOutcome:
    """The outcome of one image."""

    index: int
    state: Literal["done", "failed"]
    sha256: str = ""
    num_bytes: int = 0
    worker: str = ""
    """The GPU id as given, or the worker number on a CPU."""
    seconds: float = 0.0
    micro_batch: int = 0
    """0 if the planned micro-batch was used, else the smaller size that fit into memory."""
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


def group_key(spec: SampleSpec) -> tuple[float | None, ...]:
    """Return the values that all specs of a batch must share.

    The guidance scale is one of them because a pipeline call takes a single one for all its rows.
    """
    return (*spec.shape, spec.guidance_scale)


def stored_guidance(guidance_scale: float | None) -> float:
    """Return the number that the ledger stores for a guidance scale."""
    return NO_GUIDANCE if guidance_scale is None else guidance_scale


def loaded_guidance(stored: float) -> float | None:
    """Return the guidance scale of a number that the ledger stores."""
    return None if stored == NO_GUIDANCE else stored


@dataclass(frozen=True, kw_only=True)
class LedgerDamage:
    """Indices of rows whose content is damaged; missing rows are in both lists."""

    planned: tuple[int, ...] = ()
    outcomes: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.planned or self.outcomes)


def plan_checksum(index: int, texts: Sequence[bytes], numbers: Sequence[int], guidance_scale: float) -> int:
    """Return the CRC-32 of the planned part of a row.

    `texts` are name, id, prompt and negative prompt; `numbers` seed, height, width, frames, steps and shape.
    """
    return zlib.crc32(_PLAN_NUMBERS(index, *numbers, guidance_scale), zlib.crc32(b"\x1f".join(texts)))


def outcome_checksum(index: int, texts: Sequence[bytes], numbers: Sequence[int], seconds: float) -> int:
    """Return the CRC-32 of the outcome of a row.

    `texts` are SHA-256, worker and reason; `numbers` state, bytes, micro-batch, attempts and epoch. The index is
    included, so that an outcome in the wrong row counts as damaged.
    """
    return zlib.crc32(_OUTCOME_NUMBERS(index, *numbers, seconds), zlib.crc32(b"\x1f".join(texts)))


class Ledger:
    """The planned rows and their outcomes.

    Only one thread of the process that holds the folder lock may use it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        """Number of accepted changes of the settings so far; stored with each new outcome."""
        self._num_in_log = 0
        self._closing = contextlib.ExitStack()
        try:
            self._open()
        except BaseException as error:
            self._closing.close()
            if isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError | OSError):
                raise _database_error(path, error) from error
            raise

    def _open(self) -> None:
        if not self.path.exists():
            self.path.touch()
        # Stays open as long as the connection: closing any descriptor of the file would drop SQLite's locks on it, and
        # a reader that closes its connection would then consider itself the last one and remove the log.
        self._database_file = self._closing.enter_context(open_regular_file(self.path))
        has_content = os.fstat(self._database_file.fileno()).st_size > 0
        self._is_intact = not has_content or self._matches_digest()
        """True if every row is known to be undamaged. Only then is a digest written on close."""
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        if has_content:
            _check_schema(self.path, self.connection)
        # WAL saves one fsync per commit, and readers (the gallery) never wait. A power cut may lose the last outcomes.
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = NORMAL")
        self.connection.execute("PRAGMA wal_autocheckpoint = 0")  # _move_log checkpoints and updates the digest
        create_tables(self.connection)

    @property
    def _digest_path(self) -> Path:
        return self.path.with_name(DIGEST_FILE)

    @property
    def _log_path(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _matches_digest(self) -> bool:
        """Return True if the file is bit-identical to the last write.

        This is cheaper than checking every row. A log beside the file has its own checksums: SQLite reads it up to the
        first wrong one.
        """
        try:
            return self._digest_path.read_text().strip() == self._digest()
        except (OSError, ValueError):
            return False

    def _move_log(self) -> None:
        """Checkpoint the log into the database file, which changes at no other time."""
        self._num_in_log = 0
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the rows stay in the log
            _, num_pages, num_moved = self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if num_moved == num_pages:  # fewer if a reader still needs the old content
                self._write_digest()

    def close(self) -> None:
        """Checkpoint everything into the database file and close it.

        SQLite on its own leaves rows in the log while a reader has the ledger open.
        """
        with contextlib.suppress(sqlite3.Error):  # a full disk: the rows stay in the log; the next command reads them
            self.connection.execute(f"PRAGMA busy_timeout = {CLOSE_WAIT_MS}")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self.connection.close()
        self._remove_wal()
        self._write_digest()
        self._closing.close()

    def _digest(self) -> str:
        digest, offset = hashlib.sha256(), 0
        while block := os.pread(self._database_file.fileno(), DIGEST_BLOCK_BYTES, offset):
            digest.update(block)
            offset += len(block)
        return digest.hexdigest()

    def _write_digest(self) -> None:
        """Write the digest of an intact ledger.

        Without a valid digest, the next command checks every row.
        """
        if self._is_intact:
            with contextlib.suppress(OSError):
                if not is_same_file(self.path, self._database_file.fileno()):
                    return  # the folder was moved, and another one now has its name
                digest = self._digest() + "\n"
                if not self._digest_path.exists() or self._digest_path.read_text() != digest:
                    write_atomic(self._digest_path, digest.encode(), point="ledger.digest")

    def _remove_wal(self) -> None:
        """Remove an empty log that a reader kept alive.

        The last connection to close removes the log, but a read-only one cannot. Retry a few times, in case the reader
        closes.
        """
        wal_path = self._log_path
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
        if isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError):
            raise _database_error(self.path, error) from error

    # -- damage

    def find_damage(self) -> LedgerDamage:
        """Return the rows whose checksums do not match their content.

        Skips the scan if the digest of the file matches. Raises if SQLite itself finds the file damaged. Rows of
        earlier versions, which have no checksums, get them here.
        """
        if self._is_intact:
            return LedgerDamage()
        self.connection.execute("REINDEX unfinished")  # the index holds no data that is not in the rows
        problems = [row[0] for row in self.connection.execute("PRAGMA quick_check(1)")]
        if problems != ["ok"]:
            raise sqlite3.DatabaseError(problems[0])
        has_checksums = self._has_checksums()
        if has_checksums and self._are_all_rows_intact():
            self._is_intact = True
            return LedgerDamage()
        planned: list[int] = []
        outcomes: list[int] = []
        last = -1
        added: list[tuple[int, int, int]] = []
        num_planned = self.read_fact("num_planned")
        num_planned = num_planned if isinstance(num_planned, int) and num_planned <= self._max_rows else 0
        for index, expected, found in self._iter_checksums():
            if not 0 <= index < self._max_rows:
                raise sqlite3.DatabaseError(f"a row has the number {index}")
            missing = range(last + 1, index)
            planned += missing
            outcomes += missing
            last = index
            if not has_checksums:
                added.append((*expected, index))
                continue
            if expected[0] != found[0]:
                planned.append(index)
            if expected[1] != found[1]:
                outcomes.append(index)
        lost = range(last + 1, num_planned)
        if added:
            self._add_checksums(added)
        damage = LedgerDamage(planned=(*planned, *lost), outcomes=(*outcomes, *lost))
        self._is_intact = not damage
        return damage

    def _has_checksums(self) -> bool:
        """Return True if the version number or any row shows that checksums were written.

        The version number alone may be damaged.
        """
        is_any = "SELECT EXISTS(SELECT 1 FROM pictures WHERE plan_check IS NOT NULL OR outcome_check IS NOT NULL)"
        version, is_checked = (
            self.connection.execute(query).fetchone()[0] for query in ("PRAGMA user_version", is_any)
        )
        return bool(version or is_checked)

    @property
    def _max_rows(self) -> int:
        """An upper bound on the number of rows: the size of the file in bytes.

        It rejects absurd row numbers that a flipped bit may produce.
        """
        pages, page_size = (
            self.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
        )
        return int(pages * page_size)

    def _are_all_rows_intact(self) -> bool:
        """Return True if all rows match their checksums.

        Takes half the time of the scan that finds the damaged rows.
        """
        wrong_types = " OR ".join(f"typeof({name}) != 'text'" for name in (*PLAN_TEXTS, *_OUTCOME_TEXTS))
        if self.connection.execute(f"SELECT 1 FROM pictures WHERE {wrong_types} LIMIT 1").fetchone():
            return False
        columns = ", ".join((*PLAN_TEXTS, *_PLAN_INTEGERS, *_OUTCOME_TEXTS, *_OUTCOME_INTEGERS))
        num_rows = 0
        with self._texts_as_bytes():
            # Inlined: there may be a million rows, and calls and slices for each would be slow.
            for (
                index, name, id_, prompt, negative_prompt, seed, height, width, num_frames, steps, shape,
                sha256, worker, reason, state, num_bytes, micro_batch, attempts, epoch,
                guidance_scale, seconds, plan_check, outcome_check,
            ) in self.connection.execute(
                f"SELECT picture, {columns}, guidance_scale, seconds, plan_check, outcome_check"
                " FROM pictures NOT INDEXED ORDER BY picture"
            ):  # fmt: skip
                try:
                    plan_numbers = _PLAN_NUMBERS(index, seed, height, width, num_frames, steps, shape, guidance_scale)
                    outcome_numbers = _OUTCOME_NUMBERS(index, state, num_bytes, micro_batch, attempts, epoch, seconds)
                except (TypeError, struct.error):
                    return False
                if (
                    index != num_rows
                    or zlib.crc32(plan_numbers, zlib.crc32(b"\x1f".join((name, id_, prompt, negative_prompt))))
                    != plan_check
                    or zlib.crc32(outcome_numbers, zlib.crc32(b"\x1f".join((sha256, worker, reason)))) != outcome_check
                ):
                    return False
                num_rows += 1
        return num_rows == (self.read_fact("num_planned") or 0)

    @contextlib.contextmanager
    def _texts_as_bytes(self) -> Iterator[None]:
        """Read text columns as bytes, because damaged text may not be valid UTF-8."""
        self.connection.text_factory = bytes
        try:
            yield
        finally:
            self.connection.text_factory = str

    def _iter_checksums(self) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Yield the index and the computed and stored checksums of every row.

        The computed checksum is -1 if a value has the wrong type.
        """
        query = (
            f"SELECT picture, {', '.join((*PLAN_TEXTS, *_PLAN_INTEGERS))}, guidance_scale,"
            f" {', '.join((*_OUTCOME_TEXTS, *_OUTCOME_INTEGERS))}, seconds, "
            + " AND ".join(f"typeof({name}) = 'text'" for name in PLAN_TEXTS)
            + ", "
            + " AND ".join(f"typeof({name}) = 'text'" for name in _OUTCOME_TEXTS)
            + ", plan_check, outcome_check FROM pictures NOT INDEXED ORDER BY picture"
        )
        with self._texts_as_bytes():
            for index, *values, are_texts, are_outcome_texts, plan_check, outcome_check in self.connection.execute(
                query
            ):
                planned = outcome = -1
                with contextlib.suppress(TypeError, struct.error):
                    if are_texts:
                        planned = plan_checksum(index, values[:4], values[4:10], values[10])
                with contextlib.suppress(TypeError, struct.error):
                    if are_outcome_texts:
                        outcome = outcome_checksum(index, values[11:14], values[14:19], values[19])
                yield index, (planned, outcome), (plan_check, outcome_check)

    def _add_checksums(self, rows: Sequence[tuple[int, int, int]]) -> None:
        with self._transaction("checksums"):
            self.connection.executemany("UPDATE pictures SET plan_check = ?, outcome_check = ? WHERE picture = ?", rows)
            self.connection.execute(
                "INSERT OR IGNORE INTO facts VALUES ('num_planned', ?)", (json.dumps(self.num_planned),)
            )
            self.connection.execute(f"PRAGMA user_version = {CHECKSUM_VERSION}")

    # -- the plan

    @property
    def num_planned(self) -> int:
        return count_planned(self.connection)

    def read_fact(self, key: str) -> Any:
        """Return the fact with that key, or None if it is missing or damaged.

        Facts can be derived again from the prompt list.
        """
        row = self.connection.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        try:
            return None if row is None else json.loads(row[0])
        except (ValueError, TypeError, RecursionError):
            return None

    def add_plan(
        self,
        requests: Iterable[ImageRequest],
        facts: dict[str, Any],
        changed: Sequence[ImageRequest] = (),
        *,
        replaces: bool = False,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Append requests to the plan in one transaction; `facts` identify the plan.

        The requests in `changed` replace rows that are not done. With `replaces`, `requests` replace the whole plan.
        """
        with self._transaction("plan"):
            for table in ("pictures", "shapes", "facts") if replaces else ():
                self.connection.execute(f"DELETE FROM {table}")
            self.connection.executemany(
                "DELETE FROM pictures WHERE picture = ?", [(request.spec.index,) for request in changed]
            )
            for rows in (changed, requests):
                self.connection.executemany(
                    f"INSERT INTO pictures({_REQUEST}, shape, plan_check, outcome_check)"
                    f" VALUES ({', '.join('?' * 14)})",
                    self._plan_values(rows),
                )
            facts = facts | {"num_planned": self.num_planned}
            self.connection.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?)", [(key, json.dumps(value)) for key, value in facts.items()]
            )
            before_commit()
        self._move_log()

    def restore_plan(self, requests: Iterable[ImageRequest]) -> None:
        """Rewrite the planned values of these rows; missing rows are added as open."""
        columns = [*_REQUEST.split(", ")[1:], "shape", "plan_check"]
        with self._transaction("restore"):
            self.connection.executemany(
                f"INSERT INTO pictures({_REQUEST}, shape, plan_check, outcome_check)"
                f" VALUES ({', '.join('?' * 14)})"
                f" ON CONFLICT(picture) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in columns)}",
                self._plan_values(requests),
            )

    def read_damaged_name(self, index: int) -> str:
        """Return the stored file stem of a row, which may be damaged; empty if it cannot be read."""
        with self._texts_as_bytes():
            row = self.connection.execute("SELECT name FROM pictures WHERE picture = ?", (index,)).fetchone()
        return row[0].decode(errors="replace") if row is not None and isinstance(row[0], bytes) else ""

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
            texts = [text.encode() for text in (request.name, spec.id, spec.prompt, spec.negative_prompt)]
            numbers = (spec.seed, spec.height, spec.width, spec.num_frames, spec.steps, shapes[shape])
            guidance_scale = stored_guidance(spec.guidance_scale)
            yield (
                spec.index, request.name, spec.id, spec.prompt, spec.negative_prompt, spec.seed, spec.height,
                spec.width, spec.num_frames, spec.steps, guidance_scale, shapes[shape],
                plan_checksum(spec.index, texts, numbers, guidance_scale),
                outcome_checksum(spec.index, (b"", b"", b""), (0, 0, 0, 0, 0), 0.0),
            )  # fmt: skip

    def groups(self) -> list[Indices]:
        """Return the indices of each group of rows that may share batches, ascending."""
        num_shapes = self.connection.execute("SELECT COUNT(*) FROM shapes").fetchone()[0]
        if num_shapes <= 1:
            return [np.arange(self.num_planned, dtype=np.int64)] if num_shapes else []
        rows = self.connection.execute("SELECT shape FROM pictures ORDER BY picture").fetchall()
        shapes = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(rows))
        groups = [np.flatnonzero(shapes == number).astype(np.int64) for number in range(num_shapes)]
        return [group for group in groups if len(group)]

    def examples(self) -> list[SampleSpec]:
        """Return one spec of each group and, if it has one, a spec with a negative prompt.

        Not every model supports negative prompts.
        """
        firsts = [int(group[0]) for group in self.groups()]
        negatives = self.connection.execute("SELECT negative FROM shapes WHERE negative IS NOT NULL").fetchall()
        chosen = dict.fromkeys([*firsts, *(row[0] for row in negatives)])
        return [request.spec for request in self.requests(list(chosen))]

    def requests(self, indices: Sequence[int]) -> list[ImageRequest]:
        """Return the requests of these rows, in this order."""
        query = f"SELECT {_REQUEST} FROM pictures WHERE picture = ?"
        found = [(index, self.connection.execute(query, (int(index),)).fetchone()) for index in indices]
        for index, row in found:
            if row is None:
                raise sqlite3.DatabaseError(f"row {index + 1} is missing")
        return [_parse_request(row) for _, row in found]

    # -- the outcomes

    def unfinished_indices(self) -> Indices:
        """Return the rows without an image, ascending: open rows, and failed rows to retry."""
        rows = self.connection.execute("SELECT picture FROM pictures WHERE state != 1").fetchall()
        return np.sort(np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(rows)))

    def unfinished_names(self) -> Iterator[tuple[int, str, int]]:
        """Iterate over index, file stem and number of frames of the rows without an image."""
        return iter(self.connection.execute("SELECT picture, name, num_frames FROM pictures WHERE state != 1"))

    def has_videos(self) -> bool:
        """Return True if any row has more than one frame."""
        query = "SELECT EXISTS(SELECT 1 FROM pictures WHERE num_frames != 1)"
        return bool(self.connection.execute(query).fetchone()[0])

    def counts(self) -> dict[str, int]:
        """Return the numbers of planned, open, done and failed rows."""
        return count_rows(self.connection)

    def sample_done(self) -> list[ImageRequest]:
        """Return the requests of the first, middle and last done row (fewer if few are done)."""
        num_done = self.counts()["done"]
        query = f"SELECT {_REQUEST} FROM pictures WHERE state = {DONE} ORDER BY picture LIMIT 1 OFFSET ?"
        offsets = sorted({0, num_done // 2, num_done - 1}) if num_done else ()
        return [_parse_request(self.connection.execute(query, (offset,)).fetchone()) for offset in offsets]

    def is_done(self, index: int) -> bool:
        """Return True if the image is recorded as done."""
        row = self.connection.execute("SELECT state FROM pictures WHERE picture = ?", (int(index),)).fetchone()
        return row is not None and row[0] == DONE

    def record(self, outcomes: Iterable[ImageOutcome]) -> None:
        """Write outcomes; later outcomes of images that are already done are ignored."""
        values = [outcome_values(outcome, STATES.index(outcome.state), self.epoch) for outcome in outcomes]

        def write() -> None:
            with self._transaction("record"):
                self.connection.executemany(f"{UPDATE_OUTCOME} AND state != 1", values)

        self._retry(write)
        self._num_in_log += len(values)
        if self._num_in_log >= MAX_OUTCOMES_IN_LOG:
            self._move_log()

    def restore_outcomes(self, outcomes: Iterable[ImageOutcome], opened: Iterable[int]) -> None:
        """Replace the outcomes of these rows, even of done ones; rows in `opened` become open."""
        values = [outcome_values(outcome, STATES.index(outcome.state), self.epoch) for outcome in outcomes]
        values += [outcome_values(ImageOutcome(index=index, state="failed", attempts=0), 0, 0) for index in opened]
        with self._transaction("restore"):
            self.connection.executemany(UPDATE_OUTCOME, values)

    def mark_open(self, indices: Iterable[int]) -> None:
        """Set done rows back to open, because their files are missing or damaged."""
        with self._transaction("reopen"):
            for index in indices:
                query = f"SELECT {_OUTCOME} FROM pictures WHERE picture = ?"
                _, _, num_bytes, worker, seconds, micro_batch, attempts, _, epoch = self.connection.execute(
                    query, (int(index),)
                ).fetchone()
                outcome = ImageOutcome(
                    index=int(index), state="failed", num_bytes=num_bytes, worker=worker, seconds=seconds,
                    micro_batch=micro_batch, attempts=attempts,
                )  # fmt: skip
                self.connection.execute(UPDATE_OUTCOME, outcome_values(outcome, 0, epoch))

    def rows(self) -> Iterator[LedgerRow]:
        """Iterate over all rows by index."""
        return self._select_rows("")

    def done_rows(self) -> Iterator[LedgerRow]:
        """Iterate over the done rows by index."""
        return self._select_rows(f"WHERE state = {DONE}")

    def failed_rows(self) -> Iterator[LedgerRow]:
        return self._select_rows(
            "WHERE state != 1 AND state = 2"
        )  # both conditions, so that SQLite uses the index of unfinished rows

    def done_names(self) -> Iterator[tuple[int, str, int]]:
        """Iterate over index, file stem and number of frames of the done rows."""
        return iter(self.connection.execute(f"SELECT picture, name, num_frames FROM pictures WHERE state = {DONE}"))

    def num_images_in_smaller_micro_batches(self) -> int:
        """Return the number of images generated with a smaller micro-batch than planned."""
        return int(self.connection.execute("SELECT COUNT(*) FROM pictures WHERE micro_batch > 0").fetchone()[0])

    def _select_rows(self, condition: str) -> Iterator[LedgerRow]:
        for row in self.connection.execute(f"SELECT {_REQUEST}, {_OUTCOME} FROM pictures {condition} ORDER BY picture"):
            state, *outcome = row[11:]
            names = _OUTCOME.split(", ")[1:]
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
        """Retry writes that fail, because disk errors may be temporary; raise if they persist."""
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                return action()
            except (sqlite3.OperationalError, OSError) as error:
                if wait_s is None:
                    raise HalationError(
                        f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}; {REMEDY}"
                    ) from error
                time.sleep(wait_s)
        raise AssertionError("unreachable")


UPDATE_OUTCOME = (
    f"UPDATE pictures SET {', '.join(f'{name} = ?' for name in (*_OUTCOME.split(', '), 'outcome_check'))}"
    " WHERE picture = ?"
)


def count_planned(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT COALESCE(MAX(picture) + 1, 0) FROM pictures").fetchone()[0])


def count_rows(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the numbers of planned, open, done and failed rows without reading the done ones."""
    unfinished = dict(connection.execute("SELECT state, COUNT(*) FROM pictures WHERE state != 1 GROUP BY state"))
    counts: dict[str, int] = {state: unfinished.get(number, 0) for number, state in enumerate(STATES)}
    planned = count_planned(connection)
    return {"planned": planned, **counts, "done": planned - sum(unfinished.values())}


def outcome_values(outcome: ImageOutcome, state: int, epoch: int) -> tuple[Any, ...]:
    """Return the parameters of `UPDATE_OUTCOME`."""
    texts = [text.encode() for text in (outcome.sha256, outcome.worker, outcome.reason)]
    numbers = (state, outcome.num_bytes, outcome.micro_batch, outcome.attempts, epoch)
    return (
        state, outcome.sha256, outcome.num_bytes, outcome.worker, outcome.seconds, outcome.micro_batch,
        outcome.attempts, outcome.reason, epoch, outcome_checksum(outcome.index, texts, numbers, outcome.seconds),
        outcome.index,
    )  # fmt: skip


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of a ledger, or upgrade those of an earlier version."""
    connection.executescript(SCHEMA)
    known = {row[1] for row in connection.execute("PRAGMA table_info(pictures)")}
    for name in CHECKSUM_COLUMNS:
        if name not in known:
            connection.execute(f"ALTER TABLE pictures ADD COLUMN {name} INTEGER")
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    if connection.execute("SELECT 1 FROM pictures LIMIT 1").fetchone() is None:
        connection.execute(f"PRAGMA user_version = {CHECKSUM_VERSION}")


@functools.cache
def _known_schemas() -> dict[str, set[str]]:
    """Return the SQL of each table and index, in every state that a killed command may leave."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        schemas: dict[str, set[str]] = {}
        for name in ("", *CHECKSUM_COLUMNS):
            if name:
                connection.execute(f"ALTER TABLE pictures ADD COLUMN {name} INTEGER")
            for table, text in _read_schema(connection).items():
                schemas.setdefault(table, set()).add(text)
    return schemas


def _read_schema(connection: sqlite3.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def _check_schema(path: Path, connection: sqlite3.Connection) -> None:
    """Raise unless the file is a Halation ledger or an empty database."""
    found, known = _read_schema(connection), _known_schemas()
    if found and not any(name in known for name in found):
        raise InputError(
            f"{path} is a database of another program (tables: {', '.join(sorted(found)[:5])})",
            "a ledger written by `halation generate`",
            "choose another --output_dir",
        )
    for name, text in found.items():
        if text not in known.get(name, set()):
            raise sqlite3.DatabaseError(f"{name} has an unknown schema")


def _parse_request(row: Sequence[Any]) -> ImageRequest:
    index, name, id_, prompt, negative_prompt, seed, height, width, num_frames, steps, guidance_scale = row
    spec = SampleSpec(
        index=index, id=id_, prompt=prompt, negative_prompt=negative_prompt, seed=seed, height=height, width=width,
        num_frames=num_frames, steps=steps, guidance_scale=loaded_guidance(guidance_scale),
    )  # fmt: skip
    return ImageRequest(spec=spec, name=name)


def _database_error(path: Path, error: Exception) -> HalationError:
    """Return the error for users: the disk is full or broken, or the file is damaged."""
    if isinstance(error, RefusedFileError):
        return error.as_input_error()
    disk = ("disk is full", "disk I/O", "unable to open", "readonly", "locked")
    if isinstance(error, OSError) or any(words in str(error) for words in disk):
        return HalationError(f"cannot read or write {path}: {error}; {REMEDY}")
    return InputError(
        f"{path} is damaged: {error}",
        "the ledger as Halation wrote it",
        "restore it from a copy, or start in a new --output_dir",
    )
