"""Asynchronous checkpoints: copy to host, write in a thread, rename when complete.

A save goes to a fresh hidden folder. Each rank writes its parts and a list of their SHA-256 sums; rank 0 waits for
all lists, writes COMMIT.json, renames the folder, and only then removes older ones. What has no valid COMMIT.json was
never saved.
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

    The library's own writer copies every tensor first and holds the GIL; a hash taken afterwards reads everything
    again.
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
    encoded += b" " * (-len(encoded) % 8)  # numbers then lie where a mapped file can be read as numbers
    yield memoryview(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors.values():
        flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(flat), _CHUNK):
            yield flat[at : at + _CHUNK]


def commit_sha256(commit: Mapping[str, Any]) -> str:
    """The SHA-256 of a commit file's own words: a flipped bit there could otherwise move a step or hide a part."""
    return runs.hash_json({name: value for name, value in commit.items() if name != "seal"})


def retry_once(action: Callable[[], Result]) -> Result:
    """Do it once more where the disk refuses the first time: a full quota or a network disk may have a short moment."""
    try:
        return action()
    except FileNotFoundError:  # the folder is gone, and does not come back by itself
        raise
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk with an error of its own
        log.warning("the disk refused (%s); trying once more", error)
        time.sleep(RETRY_DELAY_S)
        return action()


@dataclass(frozen=True, kw_only=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    folder: Path
    step: int
    kind: str


class CheckpointWriter:
    """The checkpoints of one run as its ranks write them."""

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
            # The last ending is of earlier versions.
            for leftover in (*folder.glob(".saving_*"), *folder.glob(".*.tmp"), *folder.glob("*.removing")):
                runs.remove_path(leftover)
        # One token for all saves of this start, so that leftovers of a killed one cannot be taken for ours. Ranks get
        # it when rank 0 has removed them: a quick rank could otherwise begin a save that is taken for a leftover.
        self.token = str(world.broadcast_from_rank_zero(os.urandom(6).hex()))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take the memory that saves of tensors of so many bytes will need while there is something else to do."""
        if self.world.device.type == "cuda" and (self.sharded or self.world.is_rank_zero):
            self.copies.reserve(sizes)

    def save(
        self, step: int, kind: str, parts: ShardsByPart, state: Mapping[str, Any], rank_state: Mapping[str, Any]
    ) -> None:
        """Copy now, write later. Waits first for a save that is still being written: two never race for the disk."""
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
        """On a GPU, copies run on a stream of their own, after what is computed now; this thread does not wait."""
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
            source.record_stream(self._copy_stream)  # one that is made for this save alone stays until it is copied
        return self.copies.copy(name, source)

    def wait_for_copy(self) -> None:
        """Called before saved tensors are written to again: the GPU, not this thread, waits for the copy."""
        if self._copy_event is not None:
            torch.cuda.current_stream(self.world.device).wait_event(self._copy_event)
            self._copy_event = None

    def wait(self, heartbeat: Callable[[], None] | None = None) -> None:
        """Wait until this rank's part of the last save is on disk (on rank 0, committed), calling `heartbeat`."""
        if self.pending is not None:
            while self.pending.is_alive():
                self.pending.join(0.5)
                if heartbeat:
                    heartbeat()
            self.pending = None

    def shorten_timeout(self) -> None:
        """After an error: finish a pending save, without waiting long for ranks that may be gone."""
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
        """Write this rank's files; then, on rank 0, commit. Errors are kept for `raise_if_failed`: this is a thread."""
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
                advice = ""  # no disk is at fault, and the launcher reports what became of that rank
        if report["error"] or self.error:
            if not self.folder.is_dir():
                advice = "; put the folder back, then run the same command again"
            self.error = f"{self.error or report['error']}{advice}"
            log.info("%s", self.error)  # who trains raises it
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
            """A folder of that name is a damaged one: a good one is never saved again."""
            if temporary.exists():
                runs.publish_folder(temporary, self.folder / name, "checkpoint")
            else:  # the first try ended after the rename
                runs.sync_path(self.folder)

        retry_once(publish_commit)
        retry_once(publish_checkpoint)
        try:  # the checkpoint stands; what follows may fail without harm to it
            retry_once(lambda: self._write_latest(name))
            retry_once(lambda: self._rotate(step))
        except OSError as error:
            log.error("checkpoint %s is saved, but older ones could not be tidied up: %s", name, error)

    def _gather_files(self, temporary: Path) -> dict[str, str]:
        """The files of all ranks with their hashes, once every rank has written its list; raises the first error."""
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
                raise RankFailure(f"no word from rank {missing} within {time.monotonic() - began:.0f} s")
            if waiting:
                time.sleep(POLL_S)
        return dict(sorted(files.items()))  # ranks report in any order; COMMIT.json of equal runs has equal bytes

    def _write_latest(self, name: str) -> None:
        fault_point("checkpoint.latest")
        runs.write_atomic(self.folder / "latest", f"{name}\n".encode())

    def _rotate(self, newest: int) -> None:
        """Remove what is no longer wanted; never the checkpoint that was just committed, nor one that came after."""
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
    """The commit file of a checkpoint; ValueError where it is not the one that was written."""
    try:
        commit: dict[str, Any] = read_json(folder / runs.COMMIT_FILE)
        if commit["seal"] != commit_sha256(commit):
            raise ValueError("its words do not have the seal they were written with")
        return commit
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{runs.COMMIT_FILE} cannot be trusted ({type(error).__name__}: {error})") from error


def list_committed(folder: Path) -> list[CommittedCheckpoint]:
    """Checkpoints with a good commit file, oldest first; their parts are not looked at yet."""
    found = []
    for path in folder.glob("step_*"):
        with contextlib.suppress(ValueError):
            commit = read_commit(path)
            found.append(CommittedCheckpoint(folder=path, step=int(commit["step"]), kind=str(commit["kind"])))
    return sorted(found, key=lambda item: item.step)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None where every part has the bytes it was committed with."""
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
    """The newest checkpoint whose every byte checks; damaged ones are reported, and handed to `on_damage`."""
    named = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    for path in sorted(named, key=lambda path: int(path.name.removeprefix("step_")), reverse=True):
        problem = find_damage(path)
        if problem is None:
            return next(item for item in list_committed(folder) if item.folder == path)
        if not path.exists():  # a run that is still training has removed it meanwhile
            continue
        log.error("checkpoint %s is damaged: %s; looking for an older one", path, problem)
        if on_damage:
            on_damage(CommittedCheckpoint(folder=path, step=int(path.name.removeprefix("step_")), kind=""), problem)
    return None


_BLOCK_BYTES = 1 << 30  # torch rounds pinned memory up to a power of two
_ALIGNMENT_BYTES = 256


class PinnedCopies:
    """Copies by name, in memory that is kept; pinned where they come from a GPU, as pinning is slow."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._blocks: list[Tensor] = []
        self._used_bytes = 0
        self._reserve_thread: threading.Thread | None = None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate pinned memory for tensors of so many bytes in the background."""
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
            ) as error:  # the first save then takes what it needs itself, or says that it cannot
                log.warning("no pinned memory ahead of the first checkpoint: %s", str(error).splitlines()[0])

        self._reserve_thread = threading.Thread(target=allocate_blocks, name="halation-host-memory", daemon=True)
        self._reserve_thread.start()

    def wait_reserved(self) -> None:
        """Until the memory is there that was asked for."""
        if self._reserve_thread is not None:
            self._reserve_thread.join()
            self._reserve_thread = None

    def copy(self, name: str, source: Tensor) -> Tensor:
        """Begin to copy; a GPU's copy is there when its stream has come so far."""
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
