"""Files of a run as the gallery reads them, and the state of the run that they show."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from halation.runs.folder import CONFIG_FILE
from halation.runs.lock import ENDED_FILE, KILLED, OWNER_FILE, is_alive

NUM_LOG_LINES = 300
MAX_LOG_BYTES = 256 * 1024
MAX_OBJECT_BYTES = 8 << 20
MAX_LINE_BYTES = 4 << 20
MAX_DEPTH = 64
"""Of lists in lists: what is deeper could be read here and not be told to a page."""
PIECE = 1 << 20
SILENT_AFTER_S = 300.0
"""A command on another machine cannot be asked; one whose files did not change for so long is taken for gone."""
STATES = ("finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What tells whether a file or folder is what it was."""

    inode: int
    size: int
    mtime_ns: int

    @property
    def mtime(self) -> float:
        return self.mtime_ns / 1e9


def stamp_of(path: Path) -> Stamp | None:
    """None where there is no file or folder that can be read.

    It opens what it asks about, because a file system on a network answers stat() from memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return None
    return Stamp(inode=found.st_ino, size=found.st_size, mtime_ns=found.st_mtime_ns)


@contextlib.contextmanager
def opened(path: Path, within: Path | None = None) -> Iterator[BinaryIO]:
    """A plain file below the folder `within`, which is its own where none is given; OSError where it is something else.

    A pipe or a device would keep its reader waiting for ever, and a link may lead to what is nobody's business.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a name that no file can have
        raise FileNotFoundError(errno.ENOENT, str(error), repr(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if not _is_below(_real(descriptor, path), within or path.parent):
            raise PermissionError(errno.EPERM, "it is a link that leads out of the run", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as file:
        yield file


def _real(descriptor: int, path: Path) -> str:
    """Where an open file really is: Linux knows of the very one that is open, elsewhere its name is followed once more."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.path.realpath(path)


def _is_below(real: str, folder: Path) -> bool:
    return real.startswith(os.path.join(folder, "")) or real.startswith(os.path.join(os.path.realpath(folder), ""))


def read_json(path: Path, within: Path | None = None) -> Any:
    """What a file says. OSError or ValueError, in a few words, where it cannot be read."""
    with opened(path, within) as file:
        if os.fstat(file.fileno()).st_size > MAX_OBJECT_BYTES:
            raise ValueError(f"it is larger than {MAX_OBJECT_BYTES >> 20} MiB")
        data = file.read(MAX_OBJECT_BYTES)
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is too deep") from error
    if _is_deep(data, value):
        raise ValueError("it is too deep")
    return value


def read_object(path: Path, within: Path | None = None) -> dict[str, Any]:
    """A JSON object; an empty one where the file is missing, damaged or something else."""
    try:
        return as_dict(read_json(path, within))
    except (OSError, ValueError):
        return {}


def read_record(folder: Path) -> dict[str, Any]:
    """The config.json of a run; its parts are of the kinds they should be, whatever it says."""
    record = read_object(folder / CONFIG_FILE)
    changes = record.get("changes")
    parts = {name: as_dict(record.get(name)) for name in ("settings", "fixed")}
    return record | parts | {"changes": changes if isinstance(changes, list) else []}


def damage_of(path: Path) -> str:
    """Why the object in a file cannot be read, in a sentence; empty where it can or there is none."""
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
    """The value itself if it is an object, an empty one instead of anything else."""
    return value if isinstance(value, dict) else {}


def is_number(value: object) -> bool:
    """A number that a page can be told: finite, and not larger than its numbers go."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e308 <= value <= 1e308


def finite(value: Any) -> Any:
    """The same for a page: what is not finite, which JSON has no word for, is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def is_count(value: object) -> bool:
    """A whole number as steps, seeds and sizes are."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_deep(data: bytes, value: object) -> bool:
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


class Lines:
    """JSON objects of a file that others append to, each of them given once."""

    def __init__(self, path: Path, within: Path | None = None, having: bytes = b"") -> None:
        """Only lines in which `having` occurs are looked into: of a long file it is most of the work."""
        self.path = path
        self.within = within
        self.having = having
        self.stamp: Stamp | None = None
        self.offset = 0
        self.end = b""
        self._unread = False

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was rewritten, so that all it gave before is void, and the whole lines it has not given yet.

        A line that is no JSON object is left out; one that has no end yet is given when it has.
        """
        return self.look(), list(self.rows())

    def look(self) -> bool:
        """Whether the file was rewritten; to be called before `rows`."""
        stamp = stamp_of(self.path)
        if stamp == self.stamp:
            return False
        rewritten = self._is_rewritten(stamp)
        if rewritten:
            self.offset, self.end = 0, b""
        self.stamp = stamp
        self._unread = stamp is not None
        return rewritten

    def rows(self) -> Iterator[dict[str, Any]]:
        """What came since the last look, a piece of the file at a time: all of a long one would be much."""
        if not self._unread:
            return
        self._unread = False
        try:
            with opened(self.path, self.within) as file:
                file.seek(self.offset)
                rest = b""
                while (piece := file.read(PIECE)) and len(rest) < MAX_LINE_BYTES:
                    *lines, rest = (rest + piece).split(b"\n")
                    if lines:
                        self.offset += sum(len(line) + 1 for line in lines)
                        self.end = (lines[-1] + b"\n")[-64:]
                    yield from (row for line in lines if self.having in line and (row := _object(line)) is not None)
        except OSError:
            self.stamp = None  # looked at again next time

    def _is_rewritten(self, stamp: Stamp | None) -> bool:
        if self.stamp is None or not self.offset:
            return False
        if stamp is None or stamp.inode != self.stamp.inode or stamp.size < self.offset:
            return True
        try:
            with opened(self.path, self.within) as file:
                # Written over in place by something longer: what was last read is not there.
                file.seek(self.offset - len(self.end))
                return file.read(len(self.end)) != self.end
        except OSError:
            return True


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and not _is_deep(line, row) else None


def last_lines(path: Path, num_lines: int, within: Path | None = None) -> list[str]:
    """The end of a log, as text whatever its bytes are."""
    try:
        with opened(path, within) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LOG_BYTES))
            data = file.read(MAX_LOG_BYTES)
    except OSError:
        return []
    lines = data.decode("utf-8", "replace").splitlines()
    if size > MAX_LOG_BYTES:
        lines = lines[1:]
    return lines[-num_lines:] if num_lines > 0 else []


def first_line(path: Path, within: Path | None = None) -> str:
    """The beginning of a log; empty where there is none."""
    try:
        with opened(path, within) as file:
            return file.readline(200).decode("utf-8", "replace")
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class State:
    """`word` is running, finished, stopped or failed."""

    word: str
    reason: str = ""
    command: str = ""
    since: float | None = None


def state_of(folder: Path, changed: float, sharing: Sequence[Path] = (), done: bool | None = None) -> State:
    """The state of a run whose newest file is of the time `changed`.

    `sharing` are files that processes which hold nothing keep touching (leases); `done` says whether all that was planned
    is there, for runs that recorded no end.
    """
    owner = read_object(folder / OWNER_FILE)
    ended = read_object(folder / ENDED_FILE)
    if owner:
        state = _of_owner(owner, changed)
        if state.word == "running" or ended.get("state") not in STATES:
            return state
    touched = max((stamp.mtime for path in sharing if (stamp := stamp_of(path)) is not None), default=0.0)
    if time.time() - touched < SILENT_AFTER_S:
        return State(word="running")
    if ended.get("state") in STATES:
        return State(
            word=ended["state"], reason=str(ended.get("reason") or ""), command=str(ended.get("command") or "")
        )
    if done:
        return State(word="finished")
    return State(word="stopped", reason="" if done is None else "not all of it is there")


def _of_owner(owner: dict[str, object], changed: float) -> State:
    command, host, pid = str(owner.get("command") or ""), owner.get("host"), owner.get("pid")
    since = _seconds(owner.get("since"))
    if host == socket.gethostname() and isinstance(pid, int):
        alive = is_alive(pid, owner.get("start"))
        return State(
            word="running" if alive else "stopped", reason="" if alive else KILLED, command=command, since=since
        )
    newest = max(changed, since or 0.0)
    if time.time() - newest < SILENT_AFTER_S:
        return State(word="running", command=command, since=since)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    return State(word="stopped", reason=f"silent since {when}", command=command, since=since)


def _seconds(text: object) -> float | None:
    try:
        return time.mktime(time.strptime(str(text), "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
