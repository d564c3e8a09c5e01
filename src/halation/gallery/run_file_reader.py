"""Read the files of a run for the gallery, and derive the state of the run from them."""

from __future__ import annotations

import datetime
import json
import math
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from halation import input_files
from halation.input_files import is_too_deep
from halation.runs.lock import ENDED_FILE, KILLED_REASON, OWN_TRAINER, OWNER_FILE, is_alive
from halation.runs.run_folder import CONFIG_FILE, DIGEST_KEY, json_digest

NUM_LOG_LINES = 300
MAX_LOG_BYTES = 256 * 1024
MAX_OBJECT_BYTES = 8 << 20
MAX_LINE_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
STALE_AFTER_S = 300.0
"""Processes on another machine cannot be checked; after this time without a file change they count as dead."""
END_STATES = ("finished", "stopped", "failed")
Thing = TypeVar("Thing")


@dataclass(frozen=True, kw_only=True)
class FileStamp:
    """Identity of a file or folder, to detect changes."""

    inode: int
    size: int
    mtime_ns: int

    @property
    def mtime(self) -> float:
        return self.mtime_ns / 1e9


def read_stamp(path: Path) -> FileStamp | None:
    """Return the stamp of a file or folder, or None if it cannot be read.

    The path is opened first, because network file systems answer stat() from a cache.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return None
    return FileStamp(inode=status.st_ino, size=status.st_size, mtime_ns=status.st_mtime_ns)


def open_regular_file(path: Path, within: Path | None = None) -> BinaryIO:
    """Open a regular file below `within`, by default its own folder; OSError if it is not one."""
    return input_files.open_regular_file(path, within=within or path.parent)


def read_json(path: Path, within: Path | None = None) -> Any:
    """Read a JSON file; raise OSError or ValueError with a short message if it cannot be read."""
    value = input_files.read_json(path, within=within or path.parent, max_bytes=MAX_OBJECT_BYTES)
    if isinstance(value, dict) and value.pop(DIGEST_KEY, None) not in (None, json_digest(value)):
        raise ValueError("it is damaged: it is not what was written")
    return value


def read_json_object(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing, damaged or no object."""
    try:
        return as_dict(read_json(path, within))
    except (OSError, ValueError):
        return {}


def read_record(folder: Path) -> dict[str, Any]:
    """Read the config.json of a run; its parts always have the expected types."""
    record = read_json_object(folder / CONFIG_FILE)
    changes = record.get("changes")
    parts = {name: as_dict(record.get(name)) for name in ("settings", "fixed")}
    return record | parts | {"changes": changes if isinstance(changes, list) else []}


def find_read_error(path: Path) -> str:
    """Message why a JSON object cannot be read; empty if it can, or if there is no file."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {path.name}: {error.strerror or error}"
    except ValueError as error:
        return f"cannot be read: {path.name}: {str(error)[:200]}"
    return "" if isinstance(value, dict) else f"cannot be read: {path.name} holds something else"


def as_dict(value: object) -> dict[str, Any]:
    """Return the value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def is_number(value: object) -> bool:
    """Return True for a finite number within the range of JavaScript numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 <= value <= 1e308


def encode_json(value: Any, escaped: str = "<") -> str:
    """Encode JSON for browsers: non-finite numbers are null, and `<` is escaped for HTML."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_replace_non_finite(value), allow_nan=False, separators=(",", ":"))
    for sign in escaped:
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _replace_non_finite(value: Any) -> Any:
    """Replace numbers that are not finite, which JSON cannot hold, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value


def is_int64(value: object) -> bool:
    """Return True for an integer of 64 bits, as steps, seeds and sizes are."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def select_evenly(items: Sequence[Thing], max_items: int) -> list[Thing]:
    """Select at most `max_items` evenly, including the first and the last; of one, the last."""
    if len(items) <= max_items:
        return list(items)
    if max_items <= 1:
        return [items[-1]] if max_items == 1 else []
    return [items[round(number * (len(items) - 1) / (max_items - 1))] for number in range(max_items)]


class JsonlTailReader:
    """Reads each JSON object once from a file that another process appends to."""

    def __init__(self, path: Path, within: Path | None = None, must_contain: bytes = b"") -> None:
        """Only lines that contain `must_contain` are parsed: parsing is most of the work."""
        self.path = path
        self.within = within
        self.must_contain = must_contain
        self.stamp: FileStamp | None = None
        self.offset = 0
        self.last_bytes = b""
        self._has_unread = False

    def read_new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was rewritten, and the new objects.

        After a rewrite, all objects returned before are void. Lines that are not JSON objects are skipped; an
        incomplete line is returned once it is complete.
        """
        return self.poll(), list(self.iter_rows())

    def poll(self) -> bool:
        """Return True if the file was rewritten. Call it before `iter_rows`."""
        stamp = read_stamp(self.path)
        if stamp == self.stamp:
            return False
        rewritten = self._is_rewritten(stamp)
        if rewritten:
            self.offset, self.last_bytes = 0, b""
        self.stamp = stamp
        self._has_unread = stamp is not None
        return rewritten

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """Yield new objects since the last poll; the file is read in chunks to limit memory."""
        if not self._has_unread:
            return
        self._has_unread = False
        try:
            with open_regular_file(self.path, self.within) as file:
                file.seek(self.offset)
                rest = b""
                while (chunk := file.read(CHUNK_BYTES)) and len(rest) < MAX_LINE_BYTES:
                    *lines, rest = (rest + chunk).split(b"\n")
                    if lines:
                        self.offset += sum(len(line) + 1 for line in lines)
                        self.last_bytes = (lines[-1] + b"\n")[-64:]
                    yield from (
                        row for line in lines if self.must_contain in line and (row := _parse_object(line)) is not None
                    )
        except OSError:
            self.stamp = None  # read again next time

    def _is_rewritten(self, stamp: FileStamp | None) -> bool:
        if self.stamp is None or not self.offset:
            return False
        if stamp is None or stamp.inode != self.stamp.inode or stamp.size < self.offset:
            return True
        try:
            with open_regular_file(self.path, self.within) as file:
                # Overwritten in place by something longer: the last bytes read have changed.
                file.seek(self.offset - len(self.last_bytes))
                return file.read(len(self.last_bytes)) != self.last_bytes
        except OSError:
            return True


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and not is_too_deep(line, row) else None


def read_last_lines(path: Path, num_lines: int, within: Path | None = None) -> list[str]:
    """Read the last lines of a log; invalid bytes are replaced."""
    try:
        with open_regular_file(path, within) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LOG_BYTES))
            data = file.read(MAX_LOG_BYTES)
    except OSError:
        return []
    lines = data.decode("utf-8", "replace").splitlines()
    if size > MAX_LOG_BYTES:
        lines = lines[1:]
    return lines[-num_lines:] if num_lines > 0 else []


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run; `status` is running, finished, stopped or failed."""

    status: str
    reason: str = ""
    command: str = ""
    since: float | None = None
    ended: float | None = None
    """When the last command ended, as it recorded."""
    time_s: float | None = None
    """How long all commands on the folder took together, as they recorded."""


def read_run_state(
    folder: Path, last_modified: float, lease_files: Sequence[Path] = (), is_complete: bool | None = None
) -> RunState:
    """Return the state of a run whose newest file has the time `last_modified`.

    `lease_files` are touched by processes that hold no lock on the folder. `is_complete` is True if all planned results
    exist; it decides for runs that recorded no end.
    """
    owner = read_json_object(folder / OWNER_FILE)
    ended = read_json_object(folder / ENDED_FILE)
    if owner:
        state = _owner_state(owner, last_modified)
        if state.status == "running" or ended.get("state") not in END_STATES:
            return state
    lease_mtime = max((stamp.mtime for path in lease_files if (stamp := read_stamp(path)) is not None), default=0.0)
    if time.time() - lease_mtime < STALE_AFTER_S:
        return RunState(status="running")
    if ended.get("state") in END_STATES:
        command, time_s = str(ended.get("command") or ""), ended.get("time_s")
        return RunState(
            status=ended["state"],
            reason=str(ended.get("reason") or ""),
            command=command,
            # A user's training loop writes its end in advance.
            ended=parse_utc_offset_time(ended.get("time")) if command != OWN_TRAINER else None,
            time_s=time_s if is_number(time_s) else None,
        )
    if is_complete:
        return RunState(status="finished")
    return RunState(status="stopped", reason="" if is_complete is None else "not all of it is there")


def _owner_state(owner: dict[str, object], last_modified: float) -> RunState:
    command, host, pid = str(owner.get("command") or ""), owner.get("host"), owner.get("pid")
    since = parse_time(owner.get("since"))
    if host == socket.gethostname() and isinstance(pid, int):
        alive = is_alive(pid, owner.get("start"))
        return RunState(
            status="running" if alive else "stopped",
            reason="" if alive else KILLED_REASON,
            command=command,
            since=since,
        )
    newest = max(last_modified, since or 0.0)
    if time.time() - newest < STALE_AFTER_S:
        return RunState(status="running", command=command, since=since)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    return RunState(status="stopped", reason=f"silent since {when}", command=command, since=since)


def parse_time(text: object) -> float | None:
    """Parse a local time of logs and owner files to seconds since the epoch; None if invalid."""
    try:
        return time.mktime(time.strptime(str(text), "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def parse_utc_offset_time(text: object) -> float | None:
    """Parse a time with its offset, as in ended.json and samples.json; None if invalid."""
    try:
        return datetime.datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None
