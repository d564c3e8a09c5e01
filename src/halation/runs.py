"""A run's folder: where its files are, how one is published whole, who holds it, and what may change between two calls."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from halation.errors import HalationError, InputError, Interrupted
from halation.faults import fault_point

CONFIG_FILE = "config.json"
ENDED_FILE = "ended.json"
KILLED = "killed; where nobody did it, the machine ran out of memory; the same command goes on"
OWNER_FILE = ".owner.json"
METRICS_FILE = "metrics.jsonl"
_num_temporaries = itertools.count()


def cache_folder() -> Path:
    """Where things are kept that can be made again: `$HALATION_CACHE`, or `~/.cache/halation`."""
    return Path(os.environ.get("HALATION_CACHE") or Path.home() / ".cache" / "halation")


def temporary_for(path: Path) -> Path:
    """A name beside `path` for what is not whole yet, which no other writer has: not even another thread of this process."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{next(_num_temporaries)}.tmp")


def writer_of(temporary: Path) -> int:
    """The process that such a name belongs to, on this machine."""
    return int(temporary.name.removesuffix(".tmp").rsplit("-", 2)[1])


@contextlib.contextmanager
def publishing(path: Path, point: str = "publish") -> Iterator[BinaryIO]:
    """A file to write into that gets its name only when it is whole: temporary name, fsync, rename, fsync of the folder.

    `point` is what its fault points are called.
    """
    temporary = temporary_for(path)
    try:
        fault_point(f"{point}.open")
        with open(temporary, "wb", buffering=1 << 20) as file:
            fault_point(f"{point}.write")
            yield file
            file.flush()
            fault_point(f"{point}.fsync")
            os.fsync(file.fileno())
        fault_point(f"{point}.rename")
        os.replace(temporary, path)
        fault_point(f"{point}.renamed")
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk is told by write(), which knows no name
        raise
    sync_folder(path.parent)


def publish(path: Path, data: bytes, point: str = "publish") -> None:
    """Write a whole file, so that its name never stands for half of it."""
    with publishing(path, point) as file:
        file.write(data)


def publish_json(path: Path, value: Any) -> None:
    publish(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not JSON ({error})",
            "the file as Halation wrote it",
            "restore it, or start in a new --output_dir",
        ) from error


def remove_temporaries(folder: Path) -> None:
    """Sweep what a killed writer left behind; call it only while the run is held."""
    for path in folder.rglob(".*.tmp"):
        if path.relative_to(folder).parts[0] not in ("cache", "watch"):  # other commands may be writing there
            with contextlib.suppress(OSError):
                path.unlink()


class Run:
    """The paths of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / CONFIG_FILE
        self.metrics = folder / METRICS_FILE
        self.checkpoints = folder / "checkpoints"
        self.samples = folder / "samples"
        self.logs = folder / "logs"
        self.export = folder / "export"

    def has_saved(self) -> bool:
        """Whether there ever was a checkpoint, a damaged one included."""
        return any(path.name.startswith(("step_", "damaged_")) for path in self.checkpoints.glob("*"))

    def samples_at(self, step: int) -> Path:
        return self.samples / step_name(step)


def step_name(step: int) -> str:
    return f"step_{step:07d}"


def make_folder(folder: Path) -> None:
    """Create a folder a person asked for, or say why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror or error}",
            "a folder that can be created and written",
            "check the path, its permissions and the free space, or choose another --output_dir",
        ) from error


@contextlib.contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
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
        holder = _owner(owner_path)
        raise InputError(
            f"{folder} is in use by {holder}",
            "one command at a time on a folder",
            "wait for it, stop it, or choose another --output_dir",
        ) from None
    try:
        owner = {
            "pid": os.getpid(),
            "start": start_of(os.getpid()),
            "host": socket.gethostname(),
            "command": what,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        before = _end_before(folder)
        publish_json(owner_path, owner)
        with contextlib.suppress(FileNotFoundError):
            (folder / ENDED_FILE).unlink()
        with _telling_the_end(folder, what, before):
            yield
    finally:
        for leftover in (owner_path, path):
            with contextlib.suppress(OSError):
                leftover.unlink()
        lock.release()


@contextlib.contextmanager
def _telling_the_end(folder: Path, what: str, before: Mapping[str, Any] | None) -> Iterator[None]:
    """ended.json of what happens inside; a start that was refused leaves the run what it was, its record too."""
    began = _traces(folder)
    config = folder / CONFIG_FILE
    record = config.read_bytes() if before and config.exists() else None
    try:
        yield
    except BaseException as error:
        # By its code: a refusal that a rank or a worker spoke arrives as another kind of error.
        code = error.exit_code if isinstance(error, HalationError) else None
        refused = (code == InputError.exit_code or isinstance(error, GeneratorExit)) and _traces(folder) == began
        if refused and record is not None:
            with contextlib.suppress(OSError):
                if config.read_bytes() != record:
                    publish(config, record)
        _tell_end(folder, before if refused and before else _end(what, error))
        raise
    _tell_end(folder, _end(what, None))


def _end(what: str, error: BaseException | None) -> dict[str, Any]:
    stopped = isinstance(error, Interrupted | KeyboardInterrupt | GeneratorExit)
    words = str(error).strip().split("\n")[0] if error is not None else ""
    return {
        "state": "finished" if error is None else "stopped" if stopped else "failed",
        "reason": words or (type(error).__name__ if error is not None else ""),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": what,
    }


def _tell_end(folder: Path, end: Mapping[str, Any]) -> None:
    if not (folder / CONFIG_FILE).exists():
        return  # it never became a run, and a start that was refused leaves nothing
    with contextlib.suppress(OSError):  # a full disk has an error of its own; a folder may be gone
        publish(folder / ENDED_FILE, (json.dumps(end, indent=2, ensure_ascii=False) + "\n").encode(), "ended")


def _end_before(folder: Path) -> dict[str, Any] | None:
    """How the last hold of this folder ended; an owner's card alone is that of a killed one."""
    try:
        end = json.loads((folder / ENDED_FILE).read_bytes())
        return end if isinstance(end, dict) else None
    except (OSError, ValueError):
        killed = {**_end("", None), "state": "stopped", "reason": KILLED}
        return killed if (folder / OWNER_FILE).exists() else None


def _traces(folder: Path) -> list[tuple[int, int, int]]:
    """What changes with the first thing that a command makes in its folder."""
    names = (METRICS_FILE, "ledger.sqlite", "metadata.jsonl", "samples.json", "summary.json")
    found = [path.stat() for path in map(folder.joinpath, names) if path.exists()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found]


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return f"`halation {owner['command']}`, process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError):
        return "another command"


def start_of(pid: int) -> int | None:
    """When a process began, in the machine's ticks: of two that had the same number in turn, each has its own; None where nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, start: object = None) -> bool:
    """Whether there is such a process here, and it is the one that began at `start`; one that only waits to be buried is none."""
    if not 0 < pid < 2**31 or (start is not None and start_of(pid) not in (None, start)):
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


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each setting that is not what it was, in a form a person can read."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, "(not there)"), new.get(key, "(not there)")
        if before != after:
            lines.append(f"  {key}: {_short(before)} -> {_short(after)}")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."


def read_record(run: Run) -> dict[str, Any]:
    """config.json as `begin` wrote it."""
    record = read_json(run.config)
    if not isinstance(record, dict) or not {"job", "fixed", "changes"} <= record.keys():
        raise InputError(
            f"{run.config} is not the record of a run",
            "the file as Halation wrote it",
            "restore it, or start in a new --output_dir",
        )
    return record


MAY_CHANGE = {
    "train": "steps, GPUs, cadence, prompts and trackers may change",
    "distill": "steps, epochs, GPUs, where the teacher is, cadence, prompts of samples and trackers may change",
    "generate": "more samples may be asked for, and GPUs, workers and progress may change",
    "watch": "GPUs, which steps, what decides the best and which pictures stay may change",
}


def refuse_changes(run: Run, old: Mapping[str, Any], new: Mapping[str, Any], job: str = "train") -> None:
    """Raise, with a diff, where a resumed run would not be the run it was."""
    lines = difference(old, new)
    if lines:
        raise InputError(
            f"{run.folder} was started with other settings:\n" + "\n".join(lines),
            f"the same settings as before ({MAY_CHANGE[job]})",
            "use the old settings, another --output_dir, or --accept_changes to go on and have the change recorded",
        )


def begin(
    run: Run,
    job: str,
    settings: Mapping[str, Any],
    fixed: Mapping[str, Any],
    accept_changes: bool,
    bound: bool | None = None,
) -> bool:
    """Write config.json of a new run, or check that this is the run that was begun; returns whether it is new.

    `settings` is everything as resolved, `fixed` the part (and the versions and device) that a resumed run must not change.
    `bound` says whether anything was made with the recorded settings; by default, whether a checkpoint was saved.
    """
    if not run.config.exists():
        publish_json(run.config, {"job": job, "settings": dict(settings), "fixed": dict(fixed), "changes": []})
        return True
    record = read_record(run)
    if record.get("job") != job:
        raise InputError(
            f"{run.folder} holds a `{record.get('job')}` run",
            f"a `{job}` run or an empty folder",
            "choose another --output_dir",
        )
    if not (
        run.has_saved() if bound is None else bound
    ):  # a first start that was refused or killed binds nobody to its settings
        publish_json(run.config, {"job": job, "settings": dict(settings), "fixed": dict(fixed), "changes": []})
        return True
    keys = [key for key in record["fixed"] if key in fixed] + [key for key in fixed if key not in record["fixed"]]
    _settle_changes(run, record, {key: record["fixed"].get(key) for key in keys}, fixed, accept_changes)
    record["settings"] = dict(settings)
    publish_json(run.config, record)
    return False


def confirm(run: Run, facts: Mapping[str, Any], accept_changes: bool) -> dict[str, Any]:
    """Record facts that are known only after the data was opened, or check that they are what they were; returns the record."""
    record = read_record(run)
    known = {key: record["fixed"][key] for key in facts if key in record["fixed"]}
    _settle_changes(run, record, known, {key: facts[key] for key in known}, accept_changes)
    record["fixed"] |= facts
    publish_json(run.config, record)
    return record


def _settle_changes(
    run: Run, record: dict[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], accept: bool
) -> None:
    lines = difference(old, new)
    if lines and not accept:
        refuse_changes(run, old, new, record["job"])
    if lines:
        record["changes"].append(
            {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": [line.strip() for line in lines]}
        )
        record["fixed"] |= new


@contextlib.contextmanager
def recorded_once_used(run: Run, accept_changes: bool) -> Iterator[None]:
    """Around a call that accepts changes: where it fails before anything was saved with them, the record is what it was."""
    before = run.config.read_bytes() if accept_changes and run.config.exists() else None

    def saved() -> list[str]:
        return sorted(path.name for path in run.checkpoints.glob("step_*"))

    known = saved()
    try:
        yield
    except BaseException:
        if before is not None and saved() == known:
            publish(run.config, before)
        raise


class Metrics:
    """metrics.jsonl: one JSON object a line, appended whole; on resume, what lies after the checkpoint is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines; a half-written last one, left by a kill, is not a line."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def rewind(self, step: int) -> None:
        """Forget everything after `step`, because it is about to happen again."""
        kept = [row for row in self.lines() if row.get("step", 0) <= step]
        publish(self.path, b"".join(_line(row) for row in kept))

    def append(self, row: Mapping[str, Any]) -> None:
        try:
            fault_point("metrics.append")
            with open(self.path, "ab") as file:
                file.write(_line(row))
        except OSError as error:
            raise HalationError(
                f"cannot write {self.path}: {error.strerror or error}; free some space and run the same command again"
            ) from error


def _line(row: Mapping[str, Any]) -> bytes:
    """One line of JSON; a number that is not finite, which JSON has no word for, becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return (json.dumps(plain, ensure_ascii=False) + "\n").encode()
