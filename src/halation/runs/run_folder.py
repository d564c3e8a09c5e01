"""Run folders: paths, atomic writes, the run record and the check for changes on resume."""

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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from halation import input_files
from halation.config import to_current_names
from halation.errors import HalationError, InputError
from halation.fault_injection import fault_point

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
COMMIT_FILE = "COMMIT.json"
"""Written last: a checkpoint without it is not committed."""
EXTERNAL_TRAINER = "own"
"""Value of the setting `trainer` in the record of a user's training loop (RankSampler)."""
DIGEST_KEY = "digest"
"""Key of the SHA-256 of the rest of a JSON object."""
SCRATCH_MARK = ".halation_scratch"


def cache_folder() -> Path:
    """Return the folder for reproducible files: `$HALATION_CACHE`, or `~/.cache/halation`."""
    return Path(os.environ.get("HALATION_CACHE") or Path.home() / ".cache" / "halation")


def temporary_path(path: Path) -> Path:
    """Return a temporary name next to `path`, unique among threads, processes and machines."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def writer_pid(temporary: Path) -> int:
    """Return the pid, on this machine, of the writer of a temporary path."""
    return int(temporary.name.removesuffix(".tmp").rsplit("-", 2)[1])


@contextlib.contextmanager
def atomic_path(path: Path, point: str = "publish", *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on exit.

    The steps are fsync, rename, fsync of the folder. `point` is the prefix of its fault points. Without `durable`, for
    files that can be recreated, nothing is synced.
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
    """Open an `atomic_path` for writing."""
    with (
        atomic_path(path, point, durable=durable) as temporary,
        open(temporary, "wb", buffering=1 << 20) as file,
    ):
        fault_point(f"{point}.write")
        yield file


def write_atomic(path: Path, data: bytes, point: str = "publish", *, durable: bool = True) -> None:
    """Write a file atomically: `path` never has partial content."""
    with open_atomic(path, point, durable=durable) as file:
        file.write(data)


def publish_folder(temporary: Path, folder: Path, point: str) -> None:
    """Sync a complete folder and rename it to `folder`; an existing `folder` is removed.

    Between the two renames neither exists; a partial folder never does.
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
    """Rename, then remove a folder if it exists: its name never refers to a partial folder."""
    trash = temporary_path(folder)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, trash)
    remove_path(trash)


def remove_path(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link_once(source: Path, path: Path) -> bool:
    """Create a hard link; return False if `path` exists. Of several processes, one succeeds."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV):
            raise InputError(
                f"the file system of {path.parent} has no hard links ({error.strerror})",
                "one on which machines can create a file exclusively: NFS, Lustre, GPFS, a local disk",
                "choose an --output_dir there, or use --cluster ray",
            ) from error
        raise
    return True


def create_once(path: Path, data: bytes) -> bytes:
    """Write a file unless it exists; return its content, perhaps written by another process."""
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
    """Return the SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def json_digest(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its digest."""
    return hash_json(json.loads(json.dumps({key: part for key, part in value.items() if key != DIGEST_KEY})))


def json_with_digest(value: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file for `read_json_with_digest`."""
    return (json.dumps({**value, DIGEST_KEY: json_digest(value)}, indent=2, ensure_ascii=False) + "\n").encode()


def write_json_with_digest(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, json_with_digest(value))


def read_json_with_digest(path: Path) -> Any:
    """Read a file of `write_json_with_digest`; raises InputError if the digest does not match.

    Files of earlier versions have no digest and are not checked.
    """
    value = read_json(path)
    if isinstance(value, dict) and value.pop(DIGEST_KEY, None) not in (None, json_digest(value)):
        raise InputError(
            f"{path} is damaged: its digest does not match",
            "the file as Halation wrote it",
            f"restore it from a copy; if you changed it on purpose, remove its line {DIGEST_KEY!r}",
        )
    return value


def sync_path(path: Path) -> None:
    """Fsync a file or a folder, so that it survives a power failure."""
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
    """Remove temporary files of killed writers; call it only while holding the run's lock."""
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
        """Return True if there is a checkpoint, damaged ones included."""
        return any(path.name.startswith(("step_", "damaged_")) for path in self.checkpoints.glob("*"))

    def samples_at(self, step: int) -> Path:
        return self.samples / step_name(step)


def step_name(step: int) -> str:
    return f"step_{step:07d}"


def make_folder(folder: Path) -> None:
    """Create a run folder; raises InputError if it cannot be written."""
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
    """Create a folder `num_levels` deep in a run, but never a lost run folder itself."""
    for level in reversed([folder, *folder.parents][:num_levels]):
        level.mkdir(exist_ok=True)


def is_same_file(path: Path, descriptor: int) -> bool:
    """Return True if the path still is the open file, which another command may have removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder outside of any run; remove those left by killed commands."""
    _remove_stale_scratch(prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # another command may have removed it as stale before it was locked
            break
        os.close(lock)
    (folder / SCRATCH_MARK).touch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_stale_scratch(prefix: str) -> None:
    """Remove unlocked folders of `scratch_folder`: locks are released when their owner dies."""
    for mark in Path(tempfile.gettempdir()).glob(f"{prefix}*/{SCRATCH_MARK}"):
        folder = mark.parent
        with contextlib.suppress(OSError):  # locked, owned by another user, or already gone
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def diff_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one readable line for each changed setting.

    An earlier version did not record settings that were added since; None then means what it did.
    """
    lines = []
    for key in [*old, *(key for key in new if key not in old and new[key] is not None)]:
        before, after = old.get(key, "(not there)"), new.get(key, "(not there)")
        if before != after:
            lines.append(f"  {key}: {_shorten(before)} -> {_shorten(after)}")
    return lines


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else text[:97] + "..."


def read_record(run: RunFolder) -> dict[str, Any]:
    """Read the config.json that `create_or_resume_run` wrote."""
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
    "distill": "steps, epochs, GPUs, the teacher's path and placement, cadence, sample prompts and trackers may change",
    "generate": "the number of samples may grow, and GPUs, workers and progress may change",
    "watch": "GPUs, the steps, the metric that decides the best and which images are kept may change",
}


def check_unchanged(old: Mapping[str, Any], new: Mapping[str, Any], found: str, expected: str, action: str) -> None:
    """Raise InputError with a diff if fixed settings of a resumed run have changed."""
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
    *,
    missing: Collection[str] = (),
) -> bool:
    """Write config.json of a new run or check that of a resumed one; return True if it is new.

    `settings` are all resolved settings, `fixed` those (with versions and device) that a resumed run must not change.
    `has_outputs` is True if the run has outputs of the recorded settings; by default, if it has a checkpoint.
    The settings in `missing` were not given: a resumed run keeps their recorded values.
    """
    new_record = {"job": job, "settings": dict(settings), "fixed": dict(fixed), "changes": []}
    if not run.config.exists():
        write_json_with_digest(run.config, new_record)
        return True
    record = read_record(run)
    recorded_settings = record.get("settings")
    if isinstance(recorded_settings, dict) and recorded_settings.get("trainer") == EXTERNAL_TRAINER:
        raise InputError(
            f"{run.folder} holds the samples of another trainer (of a RankSampler)",
            f"a `{job}` run or an empty folder",
            "choose another --output_dir",
        )
    if record.get("job") != job:
        raise InputError(
            f"{run.folder} holds a `{record.get('job')}` run",
            f"a `{job}` run or an empty folder",
            "choose another --output_dir",
        )
    # A first start that was rejected or killed does not fix the settings of later ones.
    if not (run.has_checkpoints() if has_outputs is None else has_outputs):
        write_json_with_digest(run.config, new_record)
        return True
    keys = [key for key in record["fixed"] if key in fixed] + [key for key in fixed if key not in record["fixed"]]
    _check_or_record_changes(run, record, {key: record["fixed"].get(key) for key in keys}, fixed, accept_changes)
    kept = {name: (recorded_settings or {}).get(name) for name in missing}
    record["settings"] = {**settings, **kept}
    write_json_with_digest(run.config, record)
    return False


def record_facts(
    run: RunFolder, facts: Mapping[str, Any], accept_changes: bool, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Record or check facts that are known only after the data was opened; return the record.

    `settings` are resolved settings to record.
    """
    record = read_record(run)
    known = {key: record["fixed"][key] for key in facts if key in record["fixed"]}
    _check_or_record_changes(run, record, known, {key: facts[key] for key in known}, accept_changes)
    record["fixed"] |= facts
    record["settings"] = {**record.get("settings", {}), **(settings or {})}
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
            "use the old settings, another --output_dir, or --accept_changes to continue and record the change",
        )
    lines = diff_settings(old, new)
    if lines:
        record["changes"].append(
            {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": [line.strip() for line in lines]}
        )
        record["fixed"] |= new


@contextlib.contextmanager
def restore_record_on_failure(run: RunFolder, accept_changes: bool) -> Iterator[None]:
    """Restore the record if a call with --accept_changes fails before it saves a checkpoint."""
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
    """metrics.jsonl: one JSON object per line; a resume drops lines after the checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_rows(self) -> list[dict[str, Any]]:
        """Return all complete lines, without a partial last one left by a kill."""
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
        """Drop lines after `step`, which will be repeated."""
        kept = [row for row in self.read_rows() if row.get("step", 0) <= step]
        write_atomic(self.path, b"".join(_json_line(row) for row in kept))

    def append(self, row: Mapping[str, Any]) -> None:
        try:
            fault_point("metrics.append")
            # O_NONBLOCK: a pipe without a reader raises instead of blocking.
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
    """Return one line of JSON; NaN and infinities, which JSON does not have, become null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return (json.dumps(plain, ensure_ascii=False) + "\n").encode()
