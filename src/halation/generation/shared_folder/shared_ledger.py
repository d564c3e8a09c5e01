"""The ledger of a shared folder: each process appends to one JSONL file and reads all.

Shared file systems keep neither SQLite's locks nor its mapped memory, but they all append to a file with one writer,
and create a name at most once (`create_once`). The SQLite tables here are a private index, built by each process from
the prompt file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import socket
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halation.errors import InputError
from halation.fault_injection import fault_point
from halation.generation import ledger
from halation.input_files import open_regular_file
from halation.runs.run_folder import create_once, sync_path

log = logging.getLogger(__name__)

SHARED_LEDGER = ledger.LEDGER_NAMES["files"]
"""Folder of the ledgers of commands that share a run; one command alone has its ledger in one file."""
LEASES_FOLDER = "leases"
"""Inside the folder of the ledgers."""
OWNER_FILE_SUFFIX = ".card"
"""Of the file in LEASES_FOLDER that a process touches as long as it runs."""
CHUNK_BYTES = 1 << 24
DIGEST_BYTES = 8
NUM_SHOWN = 5
# What a plan is recognised by, in this order for good: folders outlive versions.
PLAN_COLUMNS = "picture, name, id, prompt, negative_prompt, seed, height, width, num_frames, steps, guidance_scale"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Who this is among processes of many machines, whose numbers may be equal and return."""

    host: str = field(default_factory=lambda: re.sub(r"[^A-Za-z0-9_]+", "-", socket.gethostname()).strip("-") or "host")
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        return f"{self.host}-{self.pid}-{self.token}"


class SharedLedger(ledger.Ledger):
    """The rows of the plan with everybody's outcomes, as far as they were read."""

    def __init__(self, folder: Path, process: ProcessIdentity) -> None:
        self.folder = folder
        self.process = process
        self.num_by_others = {"done": 0, "failed": 0}
        """What others did since this process began."""
        self._outcome_files = OutcomeFiles(folder)
        self._settled_mask: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._has_refreshed = False
        super().__init__(folder / f"{process.name}.jsonl")
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        sync_path(folder)
        self._num_bytes = 0

    def _open(self) -> None:
        self.connection = sqlite3.connect("", isolation_level=None)  # a temporary file that SQLite removes by itself
        self._is_intact = True
        ledger.create_tables(self.connection)

    def _write_digest(self) -> None:
        """The private index is gone with its process."""

    def close(self) -> None:
        super().close()
        os.close(self._file)
        if not self._num_bytes:
            self.path.unlink(missing_ok=True)

    # -- the plan

    def agree_on_plan(self) -> None:
        """Refuse a plan that is not the folder's own or its continuation; the first process writes it down."""
        own = self._plan_digests()
        self._check_known_plans(own)
        create_once(self.folder / _plan_file_name(len(own)), own + _plan_checksum(own))
        self._check_known_plans(own)
        self._settled_mask = np.zeros(self.num_planned, dtype=np.bool_)

    def has_longer_plan(self) -> bool:
        """Whether a later command has planned more than this one."""
        return any(path.name > _plan_file_name(self.num_planned * DIGEST_BYTES) for path in self.folder.glob("plan-*"))

    def _plan_digests(self) -> bytes:
        rows = self.connection.execute(f"SELECT {PLAN_COLUMNS} FROM pictures ORDER BY picture")
        return b"".join(hashlib.blake2b(json.dumps(row).encode(), digest_size=DIGEST_BYTES).digest() for row in rows)

    def _check_known_plans(self, own: bytes) -> None:
        for path in sorted(self.folder.glob("plan-*")):
            known = read_plan_digests(path)
            if len(known) > len(own):
                raise InputError(
                    f"fewer prompts than before: the folder holds a plan of {len(known) // DIGEST_BYTES}, "
                    f"this command one of {len(own) // DIGEST_BYTES}",
                    "the same prompts as before, or more behind them",
                    "use the old list, or another --output_dir",
                )
            if not own.startswith(known):
                self._raise_changed_prompts(_digest_array(known), _digest_array(own))

    def _raise_changed_prompts(self, known: npt.NDArray[np.uint64], own: npt.NDArray[np.uint64]) -> None:
        different = np.flatnonzero(known != own[: len(known)])
        specs = [request.spec for request in self.requests(different[:NUM_SHOWN].tolist())]
        lines = "\n".join(f"  row {spec.index + 1}: now {spec.prompt!r} with seed {spec.seed}" for spec in specs)
        raise InputError(
            f"{len(different)} prompts are not those this folder was begun with:\n{lines}",
            "the same prompts as before, or more behind them",
            "use the old list, or another --output_dir",
        )

    def agree_on_fact(self, name: str, value: Any) -> Any:
        """Write down what was found out on the way, with its CRC-32, and return what the first process wrote."""
        path, text = self.folder / name, json.dumps(value)
        return parse_fact(path, create_once(path, f"{text}\ncrc32 {zlib.crc32(text.encode())}\n".encode()))

    # -- the outcomes

    def unfinished_indices(self) -> ledger.Indices:
        """Rows to draw: open ones, and those that failed before this process began; later failures are final."""
        return np.flatnonzero(~self._settled_mask).astype(np.int64)

    def record(self, outcomes: Iterable[ledger.ImageOutcome]) -> None:
        outcomes = list(outcomes)
        lines = b"".join(_outcome_line(outcome) for outcome in outcomes)
        self._retry(lambda: self._append(lines))
        self._mark_settled(outcomes)
        super().record(outcomes)

    def _append(self, lines: bytes) -> None:
        """Append all lines or, as far as a full disk allows, none: others read whole lines, and a retry starts anew."""
        try:
            fault_point("shared.append")
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            fault_point("shared.fsync")
            os.fsync(self._file)
        except OSError:
            os.lseek(self._file, self._num_bytes, os.SEEK_SET)
            os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += len(lines)
        fault_point("shared.appended")

    def _mark_settled(self, outcomes: Iterable[ledger.ImageOutcome]) -> None:
        for outcome in outcomes:
            if outcome.state == "done" or self._has_refreshed:
                self._settled_mask[outcome.index] = True

    def mark_open(self, indices: Iterable[int]) -> None:
        """Every process looks for damage itself, so only the image's next outcome is written for the others."""
        indices = list(indices)
        self._settled_mask[indices] = False
        super().mark_open(indices)

    def refresh(self) -> bool:
        """Read what others wrote since the last call; True if there was anything. The first call reads earlier runs."""
        changed = False
        for name in self._outcome_files.names():
            if name == self.path.name:
                continue
            for read, num_damaged in self._outcome_files.read_new(name):
                changed = True
                for _ in range(num_damaged):
                    log.warning("%s has a line that is no outcome; its image is drawn again", name)
                # A later command with a longer plan may have more rows.
                outcomes = [outcome for outcome in read if outcome.index < len(self._settled_mask)]
                if self._has_refreshed:
                    self._count_by_others(outcomes)
                self._mark_settled(outcomes)
                super().record(outcomes)
        self._has_refreshed = True
        return changed

    def _count_by_others(self, outcomes: list[ledger.ImageOutcome]) -> None:
        for outcome in outcomes:
            if not self._settled_mask[outcome.index]:
                self.num_by_others[outcome.state] += 1


class OutcomeFiles:
    """The outcome files of all processes that share a folder: each line is given once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_modified = 0.0
        """Of the newest file that was read."""
        self._offsets: dict[str, int] = {}

    def names(self) -> list[str]:
        names = os.listdir(self.folder)
        return sorted(name for name in names if name.endswith(".jsonl") and not name.startswith("."))

    def read_new(self, name: str) -> Iterator[tuple[list[ledger.ImageOutcome], int]]:
        """The outcomes in whole lines behind those that were read, and the number of damaged lines; in pieces."""
        try:
            # Opened anew each time: that is when NFS looks at what others wrote.
            with open_regular_file(self.folder / name, within=self.folder) as file:
                while True:
                    offset = self._offsets.get(name, 0)
                    file.seek(offset)
                    data = file.read(CHUNK_BYTES)
                    end = data.rfind(b"\n") + 1
                    if not end:
                        return
                    self._offsets[name] = offset + end
                    self.last_modified = max(self.last_modified, os.fstat(file.fileno()).st_mtime)
                    lines = data[:end].splitlines()
                    outcomes = [outcome for line in lines if (outcome := _parse_outcome(line)) is not None]
                    yield outcomes, len(lines) - len(outcomes)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # NFS's word for one that is gone
                raise


def _parse_outcome(line: bytes) -> ledger.ImageOutcome | None:
    """None for a line that a power cut left, or that holds values no process writes."""
    try:
        values: dict[str, Any] = json.loads(line)
        check = values.pop("check", None)
        outcome = ledger.ImageOutcome(**values)
        ledger.outcome_values(outcome, ledger.STATES.index(outcome.state), 0)  # raises for other types
        is_intact = check is None or line == _outcome_line(outcome).rstrip(b"\n")  # earlier versions wrote no check
        return outcome if is_intact and outcome.index >= 0 and math.isfinite(outcome.seconds) else None
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, struct.error):
        return None


def _outcome_line(outcome: ledger.ImageOutcome) -> bytes:
    """One line of a process's outcomes, with a CRC-32 of what stands before it."""
    text = json.dumps(asdict(outcome))
    return f'{text[:-1]}, "check": {zlib.crc32(text.encode())}}}\n'.encode()


def parse_fact(path: Path, data: bytes) -> Any:
    """The value in a file of `agree_on_fact`; earlier versions wrote no checksum."""
    text, _, check = data.partition(b"\n")
    if check and check != b"crc32 %d\n" % zlib.crc32(text):
        raise damaged_file_error(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path) from error


def read_plan_digests(path: Path) -> bytes:
    """A digest for each planned row; behind them stands a CRC-32 of all, which earlier versions did not write."""
    data = path.read_bytes()
    number = path.stem.removeprefix("plan-")
    num_bytes = int(number) * DIGEST_BYTES if number.isdecimal() else -1
    if len(data) == num_bytes:
        return data
    if num_bytes < 0 or _plan_checksum(data[:num_bytes]) != data[num_bytes:]:
        raise damaged_file_error(path)
    return data[:num_bytes]


def damaged_file_error(path: Path) -> InputError:
    return InputError(
        f"{path} is damaged", "the file as Halation wrote it", "restore it from a copy, or choose another --output_dir"
    )


def _plan_checksum(digests: bytes) -> bytes:
    """Shorter than a digest: the number of planned rows follows from the size of the file."""
    return zlib.crc32(digests).to_bytes(4, "little")


def count_planned_rows(folder: Path) -> int:
    """The number of rows in the longest plan, by the sizes of the files alone; 0 where there is none."""
    sizes = [path.stat().st_size for path in folder.glob("plan-*.digests")]
    return max(sizes, default=0) // DIGEST_BYTES


def _plan_file_name(num_bytes: int) -> str:
    return f"plan-{num_bytes // DIGEST_BYTES:09d}.digests"


def _digest_array(digests: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digests, dtype=np.uint64)
