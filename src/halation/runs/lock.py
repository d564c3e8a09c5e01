"""Locks run folders, detects lost folders and records how the last command ended."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.errors import FolderError, HalationError, InputError, Interrupted
from halation.input_files import read_json
from halation.runs.run_folder import CONFIG_FILE, METRICS_FILE, write_atomic, write_json_atomic

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)
ENDED_FILE = "ended.json"
LOCK_FILE = ".lock"
OWNER_FILE = ".owner.json"
OWN_TRAINER = "own trainer"
"""Value of `command` in the owner record of a user's training loop (RankSampler)."""
KILLED_REASON = "killed; if not by a user, the machine ran out of memory; the same command goes on"
CHECK_INTERVAL_S = 1.5
PATIENCE_S = 2.0
"""How long a folder may be unreachable before the command exits: network file systems have short outages."""
EXIT_TIMEOUT_S = 4.0
"""How long a command may take to exit after its folder was lost. All three together stay below 10 s."""


class WatchedPath:
    """A folder or an open file, with its inode when the command started: detects replacement."""

    def __init__(self, path: Path, identity: tuple[int, int] | None = None) -> None:
        """Use `identity` if another process started the command; by default the current identity."""
        self.path = path
        self.identity = identity or _file_identity(path)

    def find_problem(self) -> str:
        """Return why the path can no longer be written, or an empty string if it can."""
        try:
            identity = _file_identity(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return (
                f"{self.path} is gone: it was removed or moved while this command wrote to it; "
                "put it back, then run the same command again"
            )
        except OSError as error:
            return f"{self.path} cannot be reached: {error.strerror}; fix the cause, then run the same command again"
        if identity != self.identity:
            return (
                f"{self.path} was replaced while this command wrote to it: it was removed or moved, then created "
                "again; put the original back, then run the same command again"
            )
        return "" if os.access(self.path, os.W_OK) or not self.path.is_dir() else self._find_refusal()

    def _find_refusal(self) -> str:
        """Try to create a file, as `access` is wrong on some file systems; return the problem."""
        probe = self.path / f".probe.{os.getpid()}.tmp"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            return (
                f"{self.path} is no longer writable: {error.strerror}; "
                "make it writable, then run the same command again"
            )
        return ""


def _file_identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


class FolderMonitor:
    """Watches the folders that a command writes to, from a thread.

    Long-running code calls `check` regularly, which is free. If the command does not exit within EXIT_TIMEOUT_S after
    its folder was lost, the process is terminated. On exit, errors caused by a lost folder become one FolderError.
    """

    def __init__(self, *paths: Path) -> None:
        self.watched = [WatchedPath(path) for path in paths]
        self.problem = ""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="halation-folder", daemon=True)

    def watch(self, path: Path) -> None:
        """Watch another path, such as an open file, which can still be written after its removal."""
        self.watched.append(WatchedPath(path))

    def find_problem(self) -> str:
        """Check all paths now, independent of the thread."""
        return next((problem for each in self.watched if (problem := each.find_problem())), "")

    def check(self) -> None:
        """Raise FolderError if the thread has found a lost folder."""
        if self.problem:
            raise FolderError(self.problem)

    def check_now(self) -> None:
        """Check all paths now and raise FolderError if one is lost."""
        problem = self.find_problem()
        if problem:
            raise FolderError(problem)

    def __enter__(self) -> FolderMonitor:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._is_closed.set()
        self._thread.join()
        if error is None or (isinstance(error, Exception) and not isinstance(error, FolderError | Interrupted)):
            problem = self.problem or self.find_problem()
            if problem:
                raise FolderError(problem) from error
            if isinstance(error, FileNotFoundError | NotADirectoryError) and self._contains(error.filename):
                raise FolderError(
                    f"cannot write {error.filename}: {error.strerror}; its folder was removed or moved while this "
                    "command wrote to it; put it back, then run the same command again"
                ) from error

    def _contains(self, filename: object) -> bool:
        """True if the file belongs to a watched folder and its parent folder is gone."""
        if not isinstance(filename, str) or os.path.isdir(os.path.dirname(filename)):
            return False
        return any(Path(os.path.abspath(filename)).is_relative_to(each.path.absolute()) for each in self.watched)

    def _watch(self) -> None:
        lost_since = None
        while not self._is_closed.wait(CHECK_INTERVAL_S if lost_since is None else PATIENCE_S / 4):
            problem = self.find_problem()
            now = time.monotonic()
            lost_since = (lost_since or now) if problem else None
            if lost_since is None or now - lost_since < PATIENCE_S:
                continue
            self.problem = problem
            if not self._is_closed.wait(EXIT_TIMEOUT_S):
                sys.stderr.write(f"halation: {problem}\n")
                sys.stderr.flush()
                os._exit(FolderError.exit_code)
            return


@contextlib.contextmanager
def lock_folder(folder: Path, command: str) -> Iterator[FolderMonitor]:
    """Lock a run folder and watch it; a second command raises InputError, naming the owner.

    The operating system releases the lock when its owner dies, so a killed command leaves no stale lock. ended.json
    exists while the folder is not locked. It records how the last command ended, how long that command took (`seconds`)
    and how long all commands on the folder took together (`time_s`, null if one was run by a version that recorded no
    times).
    """
    from filelock import FileLock

    path = folder / LOCK_FILE
    owner_path = folder / OWNER_FILE
    identity = _file_identity(folder)
    lock = FileLock(path)
    _acquire(lock, folder, "--output_dir")
    try:
        previous_end = read_json_object(folder / ENDED_FILE) or None
        if previous_end is None and owner_path.exists():  # a killed command leaves its owner file and no ended.json
            previous_end = {
                **_end_record("", None),
                "state": "stopped",
                "reason": KILLED_REASON,
                "time_s": _killed_time_s(folder, read_json_object(owner_path)),
            }
        time_before = 0.0 if previous_end is None else previous_end.get("time_s")
        write_json_atomic(owner_path, {**_owner_record(command), "time_s": time_before})
        with contextlib.suppress(FileNotFoundError):
            (folder / ENDED_FILE).unlink()
        with _record_end(folder, command, previous_end, time_before), FolderMonitor(folder) as monitor:
            yield monitor
    finally:
        for leftover in (owner_path, path):
            with contextlib.suppress(OSError):
                if _file_identity(folder) == identity:  # in a replaced folder the files are another command's
                    leftover.unlink()
        lock.release()


def hold_folder(folder: Path) -> BaseFileLock:
    """Lock the folder of a user's training loop.

    The lock is held while it is referenced and this process lives. A second training raises InputError, naming the
    owner; loops of one process share the lock. The gallery shows the run as running while the process lives, then as
    stopped. ended.json is written in advance, because nothing is called when the process ends.
    """
    from filelock import FileLock

    lock = FileLock(folder / LOCK_FILE, is_singleton=True, thread_local=False)
    if not lock.is_locked:
        try:
            _acquire(lock, folder, "out=")
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            log.warning("%s is on a file system without locks: a second training in it is not detected", folder)
    write_json_atomic(folder / ENDED_FILE, {**_end_record(OWN_TRAINER, None), "state": "stopped"})
    write_json_atomic(folder / OWNER_FILE, _owner_record(OWN_TRAINER))
    return lock


def _acquire(lock: BaseFileLock, folder: Path, option: str) -> None:
    from filelock import Timeout

    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        owner = read_json_object(folder / OWNER_FILE)
        holder = "another command"
        if {"command", "pid", "host", "since"} <= owner.keys():
            command = "a training" if owner["command"] == OWN_TRAINER else f"`halation {owner['command']}`"
            holder = f"{command}, process {owner['pid']} on {owner['host']} since {owner['since']}"
        raise InputError(
            f"{folder} is in use by {holder}",
            "one command or training at a time in a folder",
            f"wait for it, stop it, or choose another {option}",
        ) from None


def _owner_record(command: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "start": process_start_ticks(os.getpid()),
        "host": socket.gethostname(),
        "command": command,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@contextlib.contextmanager
def _record_end(
    folder: Path, command: str, previous_end: Mapping[str, Any] | None, time_before: object
) -> Iterator[None]:
    """Write ended.json on exit; after a rejected start, restore it and config.json."""
    outputs_before, place, start_time = _output_stats(folder), WatchedPath(folder), time.monotonic()

    def end_record(error: BaseException | None) -> dict[str, Any]:
        seconds = time.monotonic() - start_time
        total = round(time_before + seconds, 3) if isinstance(time_before, int | float) else None
        return {**_end_record(command, error), "seconds": round(seconds, 3), "time_s": total}

    config = folder / CONFIG_FILE
    record = config.read_bytes() if previous_end and config.exists() else None
    try:
        yield
    except BaseException as error:
        if isinstance(error, FolderError) and place.find_problem():
            raise  # a folder of this name now belongs to another command
        # Compare exit codes: an InputError of a rank or worker arrives here as another type.
        code = error.exit_code if isinstance(error, HalationError) else None
        is_refused = (code == InputError.exit_code or isinstance(error, GeneratorExit)) and _output_stats(
            folder
        ) == outputs_before
        if is_refused and record is not None:
            with contextlib.suppress(OSError):
                if config.read_bytes() != record:
                    write_atomic(config, record)
        _write_end(folder, previous_end if is_refused and previous_end else end_record(error))
        raise
    _write_end(folder, end_record(None))


def _killed_time_s(folder: Path, owner: Mapping[str, Any]) -> float | None:
    """Return the time of all commands including a killed one, which counts up to its last output."""
    outputs = [time_ns for _, _, time_ns in _output_stats(folder)]
    with contextlib.suppress(OSError):  # what a killed generation wrote last is in SQLite's log
        outputs.append((folder / "ledger.sqlite-wal").stat().st_mtime_ns)
    try:
        since = time.mktime(time.strptime(str(owner.get("since")), "%Y-%m-%d %H:%M:%S"))
        return round(float(owner["time_s"]) + max(0.0, max(outputs, default=0) / 1e9 - since), 3)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _end_record(command: str, error: BaseException | None) -> dict[str, Any]:
    stopped = isinstance(error, Interrupted | KeyboardInterrupt | GeneratorExit)
    words = str(error).strip().split("\n")[0] if error is not None else ""
    return {
        "state": "finished" if error is None else "stopped" if stopped else "failed",
        "reason": words or (type(error).__name__ if error is not None else ""),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
    }


def _write_end(folder: Path, end: Mapping[str, Any]) -> None:
    if not (folder / CONFIG_FILE).exists():
        return  # not a run: a rejected first start leaves nothing behind
    with contextlib.suppress(OSError):  # a full disk raises elsewhere; the folder may be gone
        write_json_atomic(folder / ENDED_FILE, dict(end), "ended")


def _output_stats(folder: Path) -> list[tuple[int, int, int]]:
    """Return inode, size and time of output files, which change with a command's first output."""
    names = (METRICS_FILE, "ledger.sqlite", "metadata.jsonl", "samples.json", "summary.json")
    found = [path.stat() for path in map(folder.joinpath, names) if path.exists()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, or return an empty one if the file is missing, damaged or no object."""
    with contextlib.suppress(OSError, ValueError):
        value = read_json(path)
        if isinstance(value, dict):
            return value
    return {}


def process_start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks (to detect reused pids), or None."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, start: object = None) -> bool:
    """Return True if the process is alive and was started at `start`. Zombies count as dead."""
    if not 0 < pid < 2**31 or (start is not None and process_start_ticks(pid) not in (None, start)):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return True
