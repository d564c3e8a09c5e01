"""Run folders: paths, atomic publish, the run record and what may change on resume."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from halation import input_files
from halation.config import to_current_names
from halation.errors import HalationError, InputError
from halation.fault_injection import fault_point

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
COMMIT_FILE = "COMMIT.json"
"""Written last into a checkpoint: without it there is none."""
EXTERNAL_TRAINER = "own"
"""What the record of a run says under `trainer` whose loop no command of Halation's is."""
DIGEST_KEY = "digest"
SCRATCH_MARK = ".halation_scratch"
"""Where a JSON object has the SHA-256 of everything else in it."""


def cache_folder() -> Path:
    """Where things are kept that can be made again: `$HALATION_CACHE`, or `~/.cache/halation`."""
    return Path(os.environ.get("HALATION_CACHE") or Path.home() / ".cache" / "halation")


def temporary_path(path: Path) -> Path:
    """A name beside `path` for what is not complete yet; no other thread, process or machine has it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def writer_pid(temporary: Path) -> int:
    """The process of this machine that a temporary path belongs to."""
    return int(temporary.name.removesuffix(".tmp").rsplit("-", 2)[1])


@contextlib.contextmanager
def atomic_path(path: Path, point: str = "publish", *, durable: bool = True) -> Iterator[Path]:
    """A temporary path for one file, which becomes `path` at the end: fsync, rename, fsync of the folder.

    `point` is the name of its fault points. What can be made again need not be `durable`: it is then not synced.
    """
    temporary = temporary_path(path)
    try:
        fault_point(f"{point}.open")
        yield temporary
        if durable:
            fault_point(f"{point}.fsync")
            sync_path(temporary)
        fault_point(f"{point}.rename")
        os.replace(temporary, path)
        fault_point(f"{point}.renamed")
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # write() on a full disk reports no name
        raise
    if durable:
        sync_path(path.parent)


@contextlib.contextmanager
def open_atomic(path: Path, point: str = "publish", *, durable: bool = True) -> Iterator[BinaryIO]:
    """`atomic_path`, opened for writing."""
    with (
        atomic_path(path, point, durable=durable) as temporary,
        open(temporary, "wb", buffering=1 << 20) as file,
    ):
        fault_point(f"{point}.write")
        yield file


def write_atomic(path: Path, data: bytes, point: str = "publish", *, durable: bool = True) -> None:
    """Write a whole file, so that its name never stands for half of it."""
    with open_atomic(path, point, durable=durable) as file:
        file.write(data)


def publish_folder(temporary: Path, folder: Path, point: str) -> None:
    """Sync a complete folder and give it its name; an older folder of that name is removed.

    Between two renames there is neither of them, and never a part of one.
    """
    for path in (*temporary.rglob("*"), temporary):
        if not path.is_symlink():
            sync_path(path)
    old = temporary_path(folder) if folder.is_dir() or folder.is_symlink() else None
    if old is not None:
        os.rename(folder, old)
    try:
        fault_point(f"{point}.rename")
        os.rename(temporary, folder)
    except BaseException:
        if old is not None:
            os.rename(old, folder)
        raise
    sync_path(folder.parent)
    if old is not None:
        remove_path(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there; it loses its name first, so that a part of it never has it."""
    trash = temporary_path(folder)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, trash)
    remove_path(trash)


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link_once(source: Path, path: Path) -> bool:
    """Give a file a second name; False where that name is taken: of several processes, one succeeds."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV):
            raise InputError(
                f"the file system of {path.parent} has no hard links ({error.strerror})",
                "one on which a name can be created once among all machines: NFS, Lustre, GPFS, a local disk",
                "choose an --output_dir there, or use --cluster ray",
            ) from error
        raise
    return True


def create_once(path: Path, data: bytes) -> bytes:
    """Write a file unless it exists; returns its content, whichever process wrote it."""
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(data)
        sync_path(temporary)
        link_once(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.read_bytes()


def write_json_atomic(path: Path, value: Any, point: str = "publish") -> None:
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), point)


def hash_json(value: Any) -> str:
    """The SHA-256 of a value as JSON; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def json_digest(value: Mapping[str, Any]) -> str:
    """The SHA-256 of a JSON object, leaving out the digest in it."""
    return hash_json(json.loads(json.dumps({key: part for key, part in value.items() if key != DIGEST_KEY})))


def json_with_digest(value: Mapping[str, Any]) -> bytes:
    """The bytes of a file that `read_json_with_digest` reads."""
    return (json.dumps({**value, DIGEST_KEY: json_digest(value)}, indent=2, ensure_ascii=False) + "\n").encode()


def write_json_with_digest(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, json_with_digest(value))


def read_json_with_digest(path: Path) -> Any:
    """What `write_json_with_digest` wrote, without the digest; raises where a bit of it is another.

    Files of earlier versions have no digest and are read as they are.
    """
    value = read_json(path)
    if isinstance(value, dict) and value.pop(DIGEST_KEY, None) not in (None, json_digest(value)):
        raise InputError(
            f"{path} is damaged: it is not what was written",
            "the file as Halation wrote it",
            f"restore it from a copy; if you changed it on purpose, remove its line {DIGEST_KEY!r}",
        )
    return value


def sync_path(path: Path) -> None:
    """Make what was written to a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    try:
        return input_files.read_json(path)
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from error
    except ValueError as error:
        raise InputError(
            f"{path} is not JSON ({error})",
            "the file as Halation wrote it",
            "restore it, or start in a new --output_dir",
        ) from error


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left behind; only while the run is held."""
    for path in list(folder.rglob(".*.tmp")):
        if path.relative_to(folder).parts[0] not in ("cache", "watch"):  # other commands may be writing there
            with contextlib.suppress(OSError):
                remove_path(path)


class RunFolder:
    """The paths of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / CONFIG_FILE
        self.metrics = folder / METRICS_FILE
        self.checkpoints = folder / "checkpoints"
        self.samples = folder / "samples"
        self.logs = folder / "logs"
        self.export = folder / "export"

    def has_checkpoints(self) -> bool:
        """Whether there ever was a checkpoint, a damaged one included."""
        return any(path.name.startswith(("step_", "damaged_")) for path in self.checkpoints.glob("*"))

    def samples_at(self, step: int) -> Path:
        return self.samples / step_name(step)


def step_name(step: int) -> str:
    return f"step_{step:07d}"


def make_folder(folder: Path) -> None:
    """Create the folder of a run, or raise why it cannot be written."""
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


def make_subfolder(folder: Path, num_levels: int = 1) -> None:
    """Create a folder `num_levels` deep in a run; never the run's own folder, whose loss a new one would hide."""
    for level in reversed([folder, *folder.parents][:num_levels]):
        level.mkdir(exist_ok=True)


def is_same_file(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file, which another command may have removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder outside of any run; what killed commands left of theirs with this prefix is removed."""
    _remove_stale_scratch(prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another command may have taken it for a stale one before it was locked
            break
        os.close(lock)
    (folder / SCRATCH_MARK).touch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_stale_scratch(prefix: str) -> None:
    """Only folders that `scratch_folder` made; the system drops the lock of one with its owner."""
    for mark in Path(tempfile.gettempdir()).glob(f"{prefix}*/{SCRATCH_MARK}"):
        folder = mark.parent
        with contextlib.suppress(OSError):  # held, another user's, or gone already
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def diff_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One readable line for each setting that changed."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, "(not there)"), new.get(key, "(not there)")
        if before != after:
            lines.append(f"  {key}: {_shorten(before)} -> {_shorten(after)}")
    return lines


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."


def read_record(run: RunFolder) -> dict[str, Any]:
    """config.json as `create_or_resume_run` wrote it."""
    record = read_json_with_digest(run.config)
    if not isinstance(record, dict) or not {"job", "fixed", "changes"} <= record.keys():
        raise InputError(
            f"{run.config} is not the record of a run",
            "the file as Halation wrote it",
            "restore it, or start in a new --output_dir",
        )
    return record


CHANGEABLE_SETTINGS = {
    "train": "steps, GPUs, cadence, prompts and trackers may change",
    "distill": "steps, epochs, GPUs, where the teacher is, cadence, prompts of samples and trackers may change",
    "generate": "more samples may be asked for, and GPUs, workers and progress may change",
    "watch": "GPUs, which steps, what decides the best and which images stay may change",
}


def check_unchanged(old: Mapping[str, Any], new: Mapping[str, Any], found: str, expected: str, action: str) -> None:
    """Raise, with a diff, where a resumed run would not be the run it was."""
    lines = diff_settings(old, new)
    if lines:
        raise InputError(f"{found}:\n" + "\n".join(lines), expected, action)


def create_or_resume_run(
    run: RunFolder,
    job: str,
    settings: Mapping[str, Any],
    fixed: Mapping[str, Any],
    accept_changes: bool,
    has_outputs: bool | None = None,
) -> bool:
    """Write config.json of a new run, or check that this is the run that was begun; returns whether it is new.

    `settings` are all settings as resolved, `fixed` those (with versions and device) that a resumed run must not
    change. `has_outputs` says whether anything was made with the recorded settings; by default, whether a checkpoint
    was saved.
    """
    new_record = {"job": job, "settings": dict(settings), "fixed": dict(fixed), "changes": []}
    if not run.config.exists():
        write_json_with_digest(run.config, new_record)
        return True
    record = read_record(run)
    recorded_settings = record.get("settings")
    if isinstance(recorded_settings, dict) and recorded_settings.get("trainer") == EXTERNAL_TRAINER:
        raise InputError(
            f"{run.folder} holds the samples of another trainer, drawn by a RankSampler",
            f"a `{job}` run or an empty folder",
            "choose another --output_dir",
        )
    if record.get("job") != job:
        raise InputError(
            f"{run.folder} holds a `{record.get('job')}` run",
            f"a `{job}` run or an empty folder",
            "choose another --output_dir",
        )
    # A first start that was refused or killed binds no later one to its settings.
    if not (run.has_checkpoints() if has_outputs is None else has_outputs):
        write_json_with_digest(run.config, new_record)
        return True
    keys = [key for key in record["fixed"] if key in fixed] + [key for key in fixed if key not in record["fixed"]]
    _check_or_record_changes(run, record, {key: record["fixed"].get(key) for key in keys}, fixed, accept_changes)
    record["settings"] = dict(settings)
    write_json_with_digest(run.config, record)
    return False


def record_facts(run: RunFolder, facts: Mapping[str, Any], accept_changes: bool) -> dict[str, Any]:
    """Record facts that are known only after the data was opened, or check them; returns the record."""
    record = read_record(run)
    known = {key: record["fixed"][key] for key in facts if key in record["fixed"]}
    _check_or_record_changes(run, record, known, {key: facts[key] for key in known}, accept_changes)
    record["fixed"] |= facts
    write_json_with_digest(run.config, record)
    return record


def _check_or_record_changes(
    run: RunFolder, record: dict[str, Any], old: Mapping[str, Any], new: Mapping[str, Any], accept: bool
) -> None:
    if not accept:
        check_unchanged(
            to_current_names(old),
            to_current_names(new),
            f"{run.folder} was started with other settings",
            f"the same settings as before ({CHANGEABLE_SETTINGS[record['job']]})",
            "use the old settings, another --output_dir, or --accept_changes to go on and have the change recorded",
        )
    lines = diff_settings(old, new)
    if lines:
        record["changes"].append(
            {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": [line.strip() for line in lines]}
        )
        record["fixed"] |= new


@contextlib.contextmanager
def restore_record_on_failure(run: RunFolder, accept_changes: bool) -> Iterator[None]:
    """Around a call that accepts changes: restore the record where the call fails before it saved anything."""
    record_before = None
    if accept_changes and run.config.exists():
        record_before = _read_regular_file(run.config)

    def checkpoint_names() -> list[str]:
        return sorted(path.name for path in run.checkpoints.glob("step_*"))

    names_before = checkpoint_names()
    try:
        yield
    except BaseException:
        if record_before is not None and checkpoint_names() == names_before:
            write_atomic(run.config, record_before)
        raise


class MetricsFile:
    """metrics.jsonl: one JSON object a line, appended whole; on resume, what lies after the checkpoint is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_rows(self) -> list[dict[str, Any]]:
        """All whole lines; a half-written last one, left by a kill, is not a line."""
        if not self.path.exists():
            return []
        rows = []
        for line in _read_regular_file(self.path).split(b"\n"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def truncate_after(self, step: int) -> None:
        """Forget everything after `step`, because it is about to happen again."""
        kept = [row for row in self.read_rows() if row.get("step", 0) <= step]
        write_atomic(self.path, b"".join(_json_line(row) for row in kept))

    def append(self, row: Mapping[str, Any]) -> None:
        try:
            fault_point("metrics.append")
            # O_NONBLOCK: a pipe without a reader is an error.
            descriptor = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
            )
            with open(descriptor, "ab") as file:
                file.write(_json_line(row))
        except OSError as error:
            raise HalationError(
                f"cannot write {self.path}: {error.strerror or error}; free some space and run the same command again"
            ) from error


def _read_regular_file(path: Path) -> bytes:
    try:
        with input_files.open_regular_file(path) as file:
            return file.read()
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from None


def _json_line(row: Mapping[str, Any]) -> bytes:
    """One line of JSON; a number that is not finite, which JSON has no word for, becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return (json.dumps(plain, ensure_ascii=False) + "\n").encode()
