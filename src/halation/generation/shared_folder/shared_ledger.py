"""The ledger of a shared folder: each process appends to one JSONL file and reads all.

Shared file systems support neither SQLite's locks nor its memory mapping, but all support appending to a file with a
single writer and creating a name at most once (`create_once`). The SQLite tables here are a private index that each
process builds from the prompt file.
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

from halation.errors import InputError, format_count
from halation.fault_injection import fault_point
from halation.generation import ledger
from halation.input_files import open_regular_file
from halation.runs.run_folder import create_once, sync_path

log = logging.getLogger(__name__)

SHARED_LEDGER = ledger.LEDGER_NAMES["files"]
"""Folder of the ledger files of commands that share a run; a single command has its ledger in one file."""
LEASES_FOLDER = "leases"
"""Subfolder of the ledger folder."""
OWNER_FILE_SUFFIX = ".card"
"""Suffix of the file in LEASES_FOLDER that a process touches while it runs."""
CHUNK_BYTES = 1 << 24
DIGEST_BYTES = 8
NUM_SHOWN = 5
# The columns that identify a plan. Their order must never change, because folders outlive versions.
PLAN_COLUMNS = "picture, name, id, prompt, negative_prompt, seed, height, width, num_frames, steps, guidance_scale"


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Identifies a process among many machines, where process ids may coincide or be reused."""

    host: str = field(default_factory=lambda: re.sub(r"[^A-Za-z0-9_]+", "-", socket.gethostname()).strip("-") or "host")
    pid: int = field(default_factory=os.getpid)
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        return f"{self.host}-{self.pid}-{self.token}"


class SharedLedger(ledger.Ledger):
    """The rows of the plan with the outcomes of all processes, as of the last refresh."""

    def __init__(self, folder: Path, process: ProcessIdentity) -> None:
        self.folder = folder
        self.process = process
        self.num_by_others = {"done": 0, "failed": 0}
        """Outcomes of other processes since this one started."""
        self._outcome_files = OutcomeFiles(folder)
        self._settled_mask: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._has_refreshed = False
        super().__init__(folder / f"{process.name}.jsonl")
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        sync_path(folder)
        self._num_bytes = 0

    def _open(self) -> None:
        self.connection = sqlite3.connect("", isolation_level=None)  # a temporary file that SQLite removes itself
        self._is_intact = True
        ledger.create_tables(self.connection)

    def _write_digest(self) -> None:
        """Do nothing: the private index is deleted with its process."""

    def close(self) -> None:
        super().close()
        os.close(self._file)
        if not self._num_bytes:
            self.path.unlink(missing_ok=True)

    # -- the plan

    def agree_on_plan(self) -> None:
        """Raise unless this plan equals or extends the plans in the folder; write it if it is new."""
        own = self._plan_digests()
        self._check_known_plans(own)
        create_once(self.folder / _plan_file_name(len(own)), own + _plan_checksum(own))
        self._check_known_plans(own)
        self._settled_mask = np.zeros(self.num_planned, dtype=np.bool_)

    def has_longer_plan(self) -> bool:
        """Return True if another command has planned more rows than this one."""
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
                    "the same prompts as before, with new ones only at the end",
                    "use the old list, or another --output_dir",
                )
            if not own.startswith(known):
                self._raise_changed_prompts(_digest_array(known), _digest_array(own))

    def _raise_changed_prompts(self, known: npt.NDArray[np.uint64], own: npt.NDArray[np.uint64]) -> None:
        different = np.flatnonzero(known != own[: len(known)])
        specs = [request.spec for request in self.requests(different[:NUM_SHOWN].tolist())]
        lines = "\n".join(f"  row {spec.index + 1}: now {spec.prompt!r} with seed {spec.seed}" for spec in specs)
        raise InputError(
            f"{format_count(len(different), 'prompt')} changed since this folder was started:\n{lines}",
            "the same prompts as before, with new ones only at the end",
            "use the old list, or another --output_dir",
        )

    def agree_on_fact(self, name: str, value: Any) -> Any:
        """Write a fact found at run time, with its CRC-32; return the value of the first process."""
        path, text = self.folder / name, json.dumps(value)
        return parse_fact(path, create_once(path, f"{text}\ncrc32 {zlib.crc32(text.encode())}\n".encode()))

    # -- the outcomes

    def unfinished_indices(self) -> ledger.Indices:
        """Return the rows to generate: open, or failed before this process started.

        Later failures are final for this process.
        """
        return np.flatnonzero(~self._settled_mask).astype(np.int64)

    def record(self, outcomes: Iterable[ledger.ImageOutcome]) -> None:
        outcomes = list(outcomes)
        lines = b"".join(_outcome_line(outcome) for outcome in outcomes)
        self._retry(lambda: self._append(lines))
        self._mark_settled(outcomes)
        super().record(outcomes)

    def _append(self, lines: bytes) -> None:
        """Append all lines or, on an error such as a full disk, none.

        Other processes read whole lines only, and a retry writes all lines again.
        """
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
        """Set rows back to open in this process only.

        Every process looks for damage itself; the others read the next outcome of the image.
        """
        indices = list(indices)
        self._settled_mask[indices] = False
        super().mark_open(indices)

    def refresh(self) -> bool:
        """Read the outcomes that others wrote since the last call; return True if there were any.

        The first call reads the outcomes of earlier runs.
        """
        changed = False
        for name in self._outcome_files.names():
            if name == self.path.name:
                continue
            for read, num_damaged in self._outcome_files.read_new(name):
                changed = True
                for _ in range(num_damaged):
                    log.warning("%s has an invalid line; its image is generated again", name)
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
    """Reads the outcome files of all processes that share a folder; returns each line once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_modified = 0.0
        """Modification time of the newest file that was read."""
        self._offsets: dict[str, int] = {}

    def names(self) -> list[str]:
        names = os.listdir(self.folder)
        return sorted(name for name in names if name.endswith(".jsonl") and not name.startswith("."))

    def read_new(self, name: str) -> Iterator[tuple[list[ledger.ImageOutcome], int]]:
        """Yield the new outcomes in chunks, each with its number of damaged lines.

        Only complete lines are read.
        """
        try:
            # Opened again each time, because NFS checks for new content when a file is opened.
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
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: removed, on NFS
                raise


def _parse_outcome(line: bytes) -> ledger.ImageOutcome | None:
    """Parse one line; return None if it is damaged or has invalid values."""
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
    """Return the line of an outcome, with a CRC-32 of the values before it."""
    text = json.dumps(asdict(outcome))
    return f'{text[:-1]}, "check": {zlib.crc32(text.encode())}}}\n'.encode()


def parse_fact(path: Path, data: bytes) -> Any:
    """Return the value in a file of `agree_on_fact`; earlier versions wrote no checksum."""
    text, _, check = data.partition(b"\n")
    if check and check != b"crc32 %d\n" % zlib.crc32(text):
        raise damaged_file_error(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path) from error


def read_plan_digests(path: Path) -> bytes:
    """Return the digests of the planned rows.

    A CRC-32 of all digests follows them; earlier versions did not write it.
    """
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
    """Return the CRC-32 of the digests.

    It is shorter than a digest, so that the number of rows still follows from the file size.
    """
    return zlib.crc32(digests).to_bytes(4, "little")


def count_planned_rows(folder: Path) -> int:
    """Return the number of rows in the longest plan, from the file sizes; 0 without a plan."""
    sizes = [path.stat().st_size for path in folder.glob("plan-*.digests")]
    return max(sizes, default=0) // DIGEST_BYTES


def _plan_file_name(num_bytes: int) -> str:
    return f"plan-{num_bytes // DIGEST_BYTES:09d}.digests"


def _digest_array(digests: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digests, dtype=np.uint64)
