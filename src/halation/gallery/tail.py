"""Files that grow: the whole JSON lines that came since the last look, and the last lines of a log."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LOG_BYTES = 256 * 1024
PIECE = 4 << 20


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
    """None where there is nothing. It opens what it asks about, because a file system on a network answers stat() from memory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return Stamp(inode=found.st_ino, size=found.st_size, mtime_ns=found.st_mtime_ns)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where the file is missing, damaged or something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Lines:
    """JSON objects of a file that others append to, each of them given once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp: Stamp | None = None
        self.offset = 0
        self.end = b""

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was rewritten, so that all it gave before is void, and the whole lines it has not given yet.

        A line that is no JSON object is left out; one that has no end yet is given when it has.
        """
        stamp = stamp_of(self.path)
        if stamp == self.stamp:
            return False, []
        rewritten = self._is_rewritten(stamp)
        if rewritten:
            self.offset, self.end = 0, b""
        self.stamp = stamp
        return rewritten, self._read() if stamp is not None else []

    def _is_rewritten(self, stamp: Stamp | None) -> bool:
        if self.stamp is None or not self.offset:
            return False
        if stamp is None or stamp.inode != self.stamp.inode or stamp.size < self.offset:
            return True
        try:
            with open(
                self.path, "rb"
            ) as file:  # written over in place by something longer: what was last read is not there
                file.seek(self.offset - len(self.end))
                return file.read(len(self.end)) != self.end
        except OSError:
            return True

    def _read(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                rest = b""
                while piece := file.read(PIECE):
                    *lines, rest = (rest + piece).split(b"\n")
                    rows += [row for line in lines if (row := _object(line)) is not None]
                    if lines:
                        self.offset += sum(len(line) + 1 for line in lines)
                        self.end = (lines[-1] + b"\n")[-64:]
        except OSError:
            self.stamp = None  # looked at again next time
        return rows


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def last_lines(path: Path, num_lines: int) -> list[str]:
    """The end of a log, as text whatever its bytes are."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LOG_BYTES))
            data = file.read(MAX_LOG_BYTES)
    except OSError:
        return []
    lines = data.decode("utf-8", "replace").splitlines()
    if size > MAX_LOG_BYTES:
        lines = lines[1:]
    return lines[-num_lines:] if num_lines > 0 else []
