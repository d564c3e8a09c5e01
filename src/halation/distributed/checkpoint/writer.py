"""Asynchronous checkpoints: copy to host, write in a thread, rename when complete.

A save goes to a fresh hidden folder. Each rank writes its parts and a list of their SHA-256 sums. Rank 0 waits for all
lists, writes COMMIT.json, renames the folder, and only then removes older checkpoints. A folder without a valid
COMMIT.json is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from halation.distributed.checkpoint.reader import TensorShard
from halation.distributed.world import World
from halation.errors import HalationError, RankFailure
from halation.fault_injection import fault_point
from halation.input_files import file_sha256, read_json
from halation.runs import run_folder as runs

_CHUNK = 1 << 26
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

log = logging.getLogger(__name__)

POLL_S = 0.02
RETRY_DELAY_S = 0.2
ABORT_TIMEOUT_S = 3.0
ShardsByPart = Mapping[str, Mapping[str, TensorShard]]
Result = TypeVar("Result")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a safetensors file and return its SHA-256.

    The writer of the safetensors library copies every tensor first and holds the GIL; a hash taken afterwards reads
    everything again.
    """
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="halation-hash") as threads:
        for chunk in _safetensors_chunks(tensors, metadata):
            hashed = threads.submit(digest.update, chunk)
            rest = chunk
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
            hashed.result()
    return digest.hexdigest()


def _safetensors_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # align the data, so that a mapped file can be read as numbers
    yield memoryview(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors.values():
        flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(flat), _CHUNK):
            yield flat[at : at + _CHUNK]


def commit_sha256(commit: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a commit record: a flipped bit could change a step or hide a part."""
    return runs.hash_json({name: value for name, value in commit.items() if name != "seal"})


def retry_once(action: Callable[[], Result]) -> Result:
    """Run an action and retry it once after a disk error, which may be temporary."""
    try:
        return action()
    except FileNotFoundError:  # the folder is gone: a retry cannot succeed
        raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as SafetensorError
        log.warning("disk error (%s); retrying once", error)
        time.sleep(RETRY_DELAY_S)
        return action()


@dataclass(frozen=True, kw_only=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    folder: Path
    step: int
    kind: str


class CheckpointWriter:
    """Writes the checkpoints of one run, on all ranks."""

    def __init__(self, world: World, folder: Path, *, keep_last: int, sharded: bool) -> None:
        self.world = world
        self.folder = folder
        self.keep_last = keep_last
        self.sharded = sharded
        self.copies = PinnedCopies()
        self.pending: threading.Thread | None = None
        self.error: str | None = None
        self.blocked_s = 0.0
        self.queued_s = 0.0
        self._copy_stream: torch.cuda.Stream | None = None
        self._copy_event: torch.cuda.Event | None = None
        self._commit_deadline = math.inf
        folder.mkdir(exist_ok=True)
        if world.is_rank_zero:
            # Earlier versions used the suffix .removing.
            for leftover in (*folder.glob(".saving_*"), *folder.glob(".*.tmp"), *folder.glob("*.removing")):
                runs.remove_path(leftover)
        # One token for all saves of this start, so that leftovers of a killed one are not mistaken for ours. Ranks get
        # it after rank 0 has removed leftovers, or it could remove a save that a fast rank has just started.
        self.token = str(world.broadcast_from_rank_zero(os.urandom(6).hex()))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate memory for saving tensors of these sizes (bytes) in the background."""
        if self.world.device.type == "cuda" and (self.sharded or self.world.is_rank_zero):
            self.copies.reserve(sizes)

    def save(
        self, step: int, kind: str, parts: ShardsByPart, state: Mapping[str, Any], rank_state: Mapping[str, Any]
    ) -> None:
        """Copy now and write in the background, after waiting for a previous save to be written."""
        began = time.perf_counter()
        self.wait()
        self.queued_s = time.perf_counter() - began
        began = time.perf_counter()
        fault_point("checkpoint.copy")
        copied: dict[str, dict[str, TensorShard]] = {}
        if self.sharded or self.world.is_rank_zero:
            with self._use_copy_stream():
                for part, pieces in parts.items():
                    copied[part] = {
                        name: replace(p, local=self._copy_shard(f"{part}/{name}", p)) for name, p in pieces.items()
                    }
        self.blocked_s = time.perf_counter() - began
        arguments = (step, kind, copied, dict(state), dict(rank_state), self._copy_event)
        self.pending = threading.Thread(
            target=self._write_checkpoint, args=arguments, name="halation-checkpoint", daemon=True
        )
        self.pending.start()

    @contextlib.contextmanager
    def _use_copy_stream(self) -> Iterator[None]:
        """On a GPU, run copies on a separate stream after the current work, without blocking."""
        if self.world.device.type != "cuda":
            yield
            return
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.world.device)
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._copy_stream):
            yield
            self._copy_event = torch.cuda.Event()
            self._copy_event.record()

    def _copy_shard(self, name: str, shard: TensorShard) -> Tensor:
        source = shard.local.detach()
        if self._copy_stream is not None and source.is_cuda:
            source.record_stream(self._copy_stream)  # keep temporary tensors alive until they are copied
        return self.copies.copy(name, source)

    def wait_for_copy(self) -> None:
        """Call before saved tensors change: the GPU, not this thread, waits for the copy."""
        if self._copy_event is not None:
            torch.cuda.current_stream(self.world.device).wait_event(self._copy_event)
            self._copy_event = None

    def wait(self, heartbeat: Callable[[], None] | None = None) -> None:
        """Wait until this rank's part of the last save is on disk (on rank 0: committed)."""
        if self.pending is not None:
            while self.pending.is_alive():
                self.pending.join(0.5)
                if heartbeat:
                    heartbeat()
            self.pending = None

    def shorten_timeout(self) -> None:
        """After an error: finish a pending save without waiting long for lost ranks."""
        self._commit_deadline = time.monotonic() + ABORT_TIMEOUT_S

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise HalationError(self.error)

    def _write_checkpoint(
        self,
        step: int,
        kind: str,
        copied: ShardsByPart,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        copy_event: torch.cuda.Event | None,
    ) -> None:
        """Write this rank's files and, on rank 0, commit.

        This runs in a thread: errors are kept for `raise_if_failed`.
        """
        name = f"step_{step:07d}"
        temporary = self.folder / f".saving_{name}_{self.token}"
        report: dict[str, Any] = {"files": {}, "error": None}
        advice = "; free some space or fix the disk, then run the same command again"
        try:
            if copy_event is not None:
                copy_event.synchronize()
            report["files"] = retry_once(lambda: self._write_files(temporary, copied, state, rank_state))
        except Exception as error:  # noqa: BLE001
            report["error"] = f"cannot save checkpoint {name} in {self.folder}: {_describe_error(error)}"
        try:
            retry_once(lambda: runs.write_json_atomic(temporary / f"rank_{self.world.rank}.json", report))
            if self.world.is_rank_zero:
                self._commit(name, step, kind, temporary)
        except Exception as error:  # noqa: BLE001
            self.error = (
                report["error"] or f"cannot commit checkpoint {name} in {self.folder}: {_describe_error(error)}"
            )
            if isinstance(error, RankFailure) and not report["error"]:
                advice = ""  # not a disk error; the launcher reports what happened to that rank
        if report["error"] or self.error:
            if not self.folder.is_dir():
                advice = "; put the folder back, then run the same command again"
            self.error = f"{self.error or report['error']}{advice}"
            log.info("%s", self.error)  # the training loop raises it
            if self.world.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_files(
        self, temporary: Path, copied: ShardsByPart, state: Mapping[str, Any], rank_state: Mapping[str, Any]
    ) -> dict[str, str]:
        files = {}
        temporary.mkdir(exist_ok=True)
        for part, pieces in copied.items():
            suffix = f"-{self.world.rank + 1:05d}-of-{self.world.size:05d}" if self.sharded else ""
            path = temporary / f"{part}{suffix}.safetensors"
            fault_point("checkpoint.part")
            layout = {name: {"start": p.start, "shape": p.shape, "flat": p.flat} for name, p in pieces.items()}
            tensors = {name: p.local for name, p in pieces.items()}
            files[path.name] = write_safetensors(path, tensors, {"halation": json.dumps(layout)})
            fault_point("checkpoint.fsync")
            runs.sync_path(path)
        written = {f"rank_state_{self.world.rank}.json": rank_state}
        if self.world.is_rank_zero:
            written["state.json"] = state
        for name, value in written.items():
            runs.write_json_atomic(temporary / name, value)
            files[name] = file_sha256(temporary / name)
        return files

    def _commit(self, name: str, step: int, kind: str, temporary: Path) -> None:
        files = self._gather_files(temporary)
        commit = {
            "step": step,
            "kind": kind,
            "world_size": self.world.size,
            "sharded": self.sharded,
            "sha256": files,
            "bytes": {file: (temporary / file).stat().st_size for file in files},
        }

        def publish_commit() -> None:
            fault_point("checkpoint.commit")
            runs.write_json_atomic(temporary / runs.COMMIT_FILE, commit | {"seal": commit_sha256(commit)})

        def publish_checkpoint() -> None:
            """Rename the folder; an existing one is damaged, as valid ones are never saved again."""
            if temporary.exists():
                runs.publish_folder(temporary, self.folder / name, "checkpoint")
            else:  # the first attempt failed after the rename
                runs.sync_path(self.folder)

        retry_once(publish_commit)
        retry_once(publish_checkpoint)
        try:  # the checkpoint is committed; errors below do not affect it
            retry_once(lambda: self._write_latest(name))
            retry_once(lambda: self._rotate(step))
        except OSError as error:
            log.error("checkpoint %s is saved, but older ones could not be removed: %s", name, error)

    def _gather_files(self, temporary: Path) -> dict[str, str]:
        """Wait for the file lists of all ranks and return them with hashes; raise the first error."""
        began = time.monotonic()
        deadline = began + self.world.timeout_s
        waiting = [temporary / f"rank_{rank}.json" for rank in range(self.world.size)]
        files: dict[str, str] = {}
        while waiting:
            for path in [path for path in waiting if path.exists()]:
                report = json.loads(path.read_bytes())
                if report["error"]:
                    raise HalationError(report["error"])
                files |= report["files"]
                path.unlink()
                waiting.remove(path)
            if waiting and time.monotonic() > min(deadline, self._commit_deadline):
                missing = ", ".join(path.stem.removeprefix("rank_") for path in waiting)
                raise RankFailure(f"no file list from rank {missing} within {time.monotonic() - began:.0f} s")
            if waiting:
                time.sleep(POLL_S)
        return dict(sorted(files.items()))  # ranks report in any order; COMMIT.json of equal runs has equal bytes

    def _write_latest(self, name: str) -> None:
        fault_point("checkpoint.latest")
        runs.write_atomic(self.folder / "latest", f"{name}\n".encode())

    def _rotate(self, newest: int) -> None:
        """Remove surplus checkpoints before `newest`; never that one or later ones."""
        fault_point("checkpoint.rotate")
        everything = list_committed(self.folder)
        found = [item for item in everything if item.step < newest]
        kept = [item for item in everything if item.kind == "kept"]
        surplus = kept[: -self.keep_last] if self.keep_last else []
        for item in found:
            if item.kind == "latest" or item in surplus:
                fault_point("checkpoint.remove")
                runs.remove_folder(item.folder)


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, HalationError | SafetensorError) else f"{type(error).__name__}: {error}"


def read_commit(folder: Path) -> dict[str, Any]:
    """Read the commit file of a checkpoint; raises ValueError if it is missing or damaged."""
    try:
        commit: dict[str, Any] = read_json(folder / runs.COMMIT_FILE)
        if commit["seal"] != commit_sha256(commit):
            raise ValueError("its content does not match its seal")
        return commit
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{runs.COMMIT_FILE} is not valid ({type(error).__name__}: {error})") from error


def list_committed(folder: Path) -> list[CommittedCheckpoint]:
    """Return checkpoints with a valid commit file, oldest first; their parts are not checked."""
    found = []
    for path in folder.glob("step_*"):
        with contextlib.suppress(ValueError):
            commit = read_commit(path)
            found.append(CommittedCheckpoint(folder=path, step=int(commit["step"]), kind=str(commit["kind"])))
    return sorted(found, key=lambda item: item.step)


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if all parts match their hashes."""
    try:
        sums: dict[str, str] = read_commit(folder)["sha256"]
    except ValueError as error:
        return str(error)
    if not sums:
        return f"{runs.COMMIT_FILE} lists no files"
    missing = [name for name in sums if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    try:
        with ThreadPoolExecutor(max_workers=4) as pool:
            for name, found in zip(sums, pool.map(lambda name: file_sha256(folder / name), sums), strict=True):
                if found != sums[name]:
                    return f"{name} does not have the SHA-256 it was saved with"
    except OSError as error:
        return f"a part cannot be read ({error})"
    return None


def find_newest_valid(
    folder: Path, on_damage: Callable[[CommittedCheckpoint, str], None] | None = None
) -> CommittedCheckpoint | None:
    """Return the newest undamaged checkpoint; log damaged ones and pass them to `on_damage`."""
    named = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    for path in sorted(named, key=lambda path: int(path.name.removeprefix("step_")), reverse=True):
        problem = find_damage(path)
        if problem is None:
            return next(item for item in list_committed(folder) if item.folder == path)
        if not path.exists():  # a training that still runs has removed it meanwhile
            continue
        log.error("checkpoint %s is damaged: %s; looking for an older one", path, problem)
        if on_damage:
            on_damage(CommittedCheckpoint(folder=path, step=int(path.name.removeprefix("step_")), kind=""), problem)
    return None


_BLOCK_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two
_ALIGNMENT_BYTES = 256


class PinnedCopies:
    """Host copies by name; buffers of GPU tensors are pinned, and reused as pinning is slow."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._blocks: list[Tensor] = []
        self._used_bytes = 0
        self._reserve_thread: threading.Thread | None = None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate pinned memory for tensors of these sizes (bytes) in the background."""
        blocks, num_free = [], 0
        for size in sizes:
            size = _round_up(size)
            if size > num_free:
                blocks.append(max(_BLOCK_BYTES, size))
                num_free = blocks[-1]
            num_free -= size

        def allocate_blocks() -> None:
            try:
                for size in blocks:
                    self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except (
                RuntimeError,
                MemoryError,
            ) as error:  # the first save then allocates its memory itself, or fails
                log.warning("cannot reserve pinned memory for checkpoints: %s", str(error).splitlines()[0])

        self._reserve_thread = threading.Thread(target=allocate_blocks, name="halation-host-memory", daemon=True)
        self._reserve_thread.start()

    def wait_reserved(self) -> None:
        """Wait until the reserved memory is allocated."""
        if self._reserve_thread is not None:
            self._reserve_thread.join()
            self._reserve_thread = None

    def copy(self, name: str, source: Tensor) -> Tensor:
        """Start a copy and return its buffer; a GPU copy is complete when its stream is."""
        self.wait_reserved()
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self._allocate(source)
            self.buffers[name] = buffer
        buffer.copy_(source, non_blocking=True)
        return buffer

    def _allocate(self, source: Tensor) -> Tensor:
        size = source.numel() * source.element_size()
        while self._blocks and self._used_bytes + size > len(self._blocks[0]):
            self._blocks.pop(0)
            self._used_bytes = 0
        if not self._blocks or not source.is_cuda or not size:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        memory = self._blocks[0][self._used_bytes : self._used_bytes + size]
        self._used_bytes += _round_up(size)
        return memory.view(source.dtype).view(source.shape)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
