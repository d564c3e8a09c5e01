"""Who holds a run's folder, whether that process still lives, and how the last one that held it ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halation.errors import HalationError, InputError, Interrupted
from halation.runs.run_folder import CONFIG_FILE, METRICS_FILE, write_atomic, write_json_atomic

ENDED_FILE = "ended.json"
OWNER_FILE = ".owner.json"
KILLED_REASON = "killed; where nobody did it, the machine ran out of memory; the same command goes on"


@contextlib.contextmanager
def lock_folder(folder: Path, command: str) -> Iterator[None]:
    """Hold a run folder alone; a second command on it is refused and told who holds it, a dead owner's hold is taken over.

    The operating system drops the lock with its owner, so a lock left by a killed command never has to be guessed about.
    How it ended is told in ended.json, which is there while nobody holds the folder.
    """
    from filelock import FileLock, Timeout

    path = folder / ".lock"
    owner_path = folder / OWNER_FILE
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        holder = _describe_owner(owner_path)
        raise InputError(
            f"{folder} is in use by {holder}",
            "one command at a time on a folder",
            "wait for it, stop it, or choose another --output_dir",
        ) from None
    try:
        previous_end = _read_previous_end(folder)
        write_json_atomic(owner_path, _owner_record(command))
        with contextlib.suppress(FileNotFoundError):
            (folder / ENDED_FILE).unlink()
        with _record_end(folder, command, previous_end):
            yield
    finally:
        for leftover in (owner_path, path):
            with contextlib.suppress(OSError):
                leftover.unlink()
        lock.release()


def write_owner(folder: Path, command: str) -> None:
    """Tell whoever looks that this process works here, without a hold on the folder: running while it lives, then stopped.

    The end is told beforehand, because nobody will be asked when it comes; it counts only once the process is gone.
    """
    stopped = {**_end_record(command, None), "state": "stopped"}
    write_json_atomic(folder / ENDED_FILE, stopped)
    write_json_atomic(folder / OWNER_FILE, _owner_record(command))


def _owner_record(command: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "start": process_start_ticks(os.getpid()),
        "host": socket.gethostname(),
        "command": command,
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


@contextlib.contextmanager
def _record_end(folder: Path, command: str, previous_end: Mapping[str, Any] | None) -> Iterator[None]:
    """ended.json of what happens inside; a start that was refused leaves the run what it was, its record too."""
    outputs_before = _output_stats(folder)
    config = folder / CONFIG_FILE
    record = config.read_bytes() if previous_end and config.exists() else None
    try:
        yield
    except BaseException as error:
        # By its code: a refusal that a rank or a worker spoke arrives as another kind of error.
        code = error.exit_code if isinstance(error, HalationError) else None
        is_refused = (code == InputError.exit_code or isinstance(error, GeneratorExit)) and _output_stats(
            folder
        ) == outputs_before
        if is_refused and record is not None:
            with contextlib.suppress(OSError):
                if config.read_bytes() != record:
                    write_atomic(config, record)
        _write_end(folder, previous_end if is_refused and previous_end else _end_record(command, error))
        raise
    _write_end(folder, _end_record(command, None))


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
        return  # it never became a run, and a start that was refused leaves nothing
    with contextlib.suppress(OSError):  # a full disk has an error of its own; a folder may be gone
        write_atomic(folder / ENDED_FILE, (json.dumps(end, indent=2, ensure_ascii=False) + "\n").encode(), "ended")


def _read_previous_end(folder: Path) -> dict[str, Any] | None:
    """How the last hold of this folder ended; an owner's card alone is that of a killed one."""
    try:
        end = json.loads((folder / ENDED_FILE).read_bytes())
        return end if isinstance(end, dict) else None
    except (OSError, ValueError):
        killed = {**_end_record("", None), "state": "stopped", "reason": KILLED_REASON}
        return killed if (folder / OWNER_FILE).exists() else None


def _output_stats(folder: Path) -> list[tuple[int, int, int]]:
    """What changes with the first thing that a command makes in its folder."""
    names = (METRICS_FILE, "ledger.sqlite", "metadata.jsonl", "samples.json", "summary.json")
    found = [path.stat() for path in map(folder.joinpath, names) if path.exists()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]


def _describe_owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return f"`halation {owner['command']}`, process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError):
        return "another command"


def process_start_ticks(pid: int) -> int | None:
    """When a process began, in the machine's ticks: of two that had the same number in turn, each has its own; None where nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, start: object = None) -> bool:
    """Whether there is such a process here, and it is the one that began at `start`; one that only waits to be buried is none."""
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
