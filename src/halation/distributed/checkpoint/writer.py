"""Checkpoints: copied to host memory in the step, written behind its back, and named only when every byte is there.

A save goes to a fresh hidden folder. Each rank writes its parts and a list of their SHA-256 sums; rank 0 waits for all lists,
writes COMMIT.json, renames the folder, and only then removes older ones. What has no valid COMMIT.json was never saved.
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

from halation.distributed.checkpoint import safetensors_writer
from halation.distributed.checkpoint.pinned_copies import HostCopies
from halation.distributed.checkpoint.reader import Piece
from halation.distributed.world import World
from halation.errors import HalationError, RankFailure
from halation.faults import fault_point
from halation.runs.folder import COMMIT, publish, publish_json, sync_folder

log = logging.getLogger(__name__)

POLL_S = 0.02
AGAIN_S = 0.2
HURRY_S = 3.0
Parts = Mapping[str, Mapping[str, Piece]]
Result = TypeVar("Result")


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(commit: Mapping[str, Any]) -> str:
    """The SHA-256 of a commit file's own words: a flipped bit there could otherwise move a step or hide a part."""
    words = {name: value for name, value in commit.items() if name != "seal"}
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def twice(action: Callable[[], Result]) -> Result:
    """Do it once more where the disk refuses the first time: a full quota or a network disk may have a short moment."""
    try:
        return action()
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk with an error of its own
        log.warning("the disk refused (%s); trying once more", error)
        time.sleep(AGAIN_S)
        return action()


@dataclass(frozen=True, kw_only=True)
class Found:
    """A committed checkpoint."""

    folder: Path
    step: int
    kind: str


class Checkpoints:
    """The checkpoints of one run as its ranks write them."""

    def __init__(self, world: World, folder: Path, *, keep_last: int, sharded: bool) -> None:
        self.world = world
        self.folder = folder
        self.keep_last = keep_last
        self.sharded = sharded
        self.copies = HostCopies()
        self.pending: threading.Thread | None = None
        self.error: str | None = None
        self.blocked_s = 0.0
        self.queued_s = 0.0
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._latest_end = math.inf
        folder.mkdir(parents=True, exist_ok=True)
        if world.first:
            for leftover in (*folder.glob(".saving_*"), *folder.glob("*.removing")):
                shutil.rmtree(leftover, ignore_errors=True)
        # One word for all saves of this start, so that leftovers of a killed one cannot be taken for ours. Ranks get it when rank 0 has
        # tidied up: a quick one could otherwise begin a save that is taken for a leftover.
        self.token = str(world.from_first(os.urandom(6).hex()))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take the memory that saves of tensors of so many bytes will need while there is something else to do."""
        if self.world.device.type == "cuda" and (self.sharded or self.world.first):
            self.copies.reserve(sizes)

    def save(self, step: int, kind: str, parts: Parts, state: Mapping[str, Any], rank_state: Mapping[str, Any]) -> None:
        """Copy now, write later. A save that is still being written is waited for first: two never race for the disk."""
        began = time.perf_counter()
        self.wait()
        self.queued_s = time.perf_counter() - began
        began = time.perf_counter()
        fault_point("checkpoint.copy")
        copied: dict[str, dict[str, Piece]] = {}
        if self.sharded or self.world.first:
            with self._beside_the_step():
                for part, pieces in parts.items():
                    copied[part] = {
                        name: replace(p, local=self._copy(f"{part}/{name}", p)) for name, p in pieces.items()
                    }
        self.blocked_s = time.perf_counter() - began
        words = (step, kind, copied, dict(state), dict(rank_state), self._copied)
        self.pending = threading.Thread(target=self._write, args=words, name="halation-checkpoint", daemon=True)
        self.pending.start()

    @contextlib.contextmanager
    def _beside_the_step(self) -> Iterator[None]:
        """On a GPU, copies run on a stream of their own: they begin when what is computed now is done, and need not be waited for."""
        if self.world.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.world.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.world.device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _copy(self, name: str, piece: Piece) -> Tensor:
        source = piece.local.detach()
        if self._stream is not None and source.is_cuda:
            source.record_stream(self._stream)  # one that is made for this save alone stays until it is copied
        return self.copies.copy(name, source)

    def let_change(self) -> None:
        """Called before anything that was saved is written to again: the GPU, and not this thread, waits for the copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self.world.device).wait_event(self._copied)
            self._copied = None

    def wait(self, beat: Callable[[], None] | None = None) -> None:
        """Until this rank's part of the last save is on disk (and, on rank 0, committed); `beat` is called meanwhile."""
        if self.pending is not None:
            while self.pending.is_alive():
                self.pending.join(0.5)
                if beat:
                    beat()
            self.pending = None

    def hurry(self) -> None:
        """The run ends with an error: a save may still be finished, but not wait long for ranks that are perhaps gone."""
        self._latest_end = time.monotonic() + HURRY_S

    def raise_error(self) -> None:
        if self.error is not None:
            raise HalationError(self.error)

    def _write(
        self,
        step: int,
        kind: str,
        copied: Parts,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        is_copied: torch.cuda.Event | None,
    ) -> None:
        """Write this rank's files; then, on rank 0, commit. Whatever fails is kept for `raise_error`: nobody sees a thread die."""
        name = f"step_{step:07d}"
        place = self.folder / f".saving_{name}_{self.token}"
        word: dict[str, Any] = {"files": {}, "error": None}
        advice = "; free some space or mend the disk, then run the same command again"
        try:
            if is_copied is not None:
                is_copied.synchronize()
            word["files"] = twice(lambda: self._write_files(place, copied, state, rank_state))
        except Exception as error:  # noqa: BLE001
            word["error"] = f"cannot save checkpoint {name} in {self.folder}: {_reason(error)}"
        try:
            twice(lambda: publish_json(place / f"rank_{self.world.rank}.json", word))
            if self.world.first:
                self._commit(name, step, kind, place)
        except Exception as error:  # noqa: BLE001
            self.error = word["error"] or f"cannot commit checkpoint {name} in {self.folder}: {_reason(error)}"
            if isinstance(error, RankFailure) and not word["error"]:
                advice = ""  # no disk is at fault, and whoever looks after the ranks says what became of that one
        if word["error"] or self.error:
            self.error = f"{self.error or word['error']}{advice}"
            log.error("%s", self.error)
            if self.world.first:
                shutil.rmtree(place, ignore_errors=True)

    def _write_files(
        self, place: Path, copied: Parts, state: Mapping[str, Any], rank_state: Mapping[str, Any]
    ) -> dict[str, str]:
        files = {}
        place.mkdir(exist_ok=True)
        for part, pieces in copied.items():
            suffix = f"-{self.world.rank + 1:05d}-of-{self.world.size:05d}" if self.sharded else ""
            path = place / f"{part}{suffix}.safetensors"
            fault_point("checkpoint.part")
            layout = {name: {"start": p.start, "shape": p.shape, "flat": p.flat} for name, p in pieces.items()}
            tensors = {name: p.local for name, p in pieces.items()}
            files[path.name] = safetensors_writer.write(path, tensors, {"halation": json.dumps(layout)})
            fault_point("checkpoint.fsync")
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        written = {f"rank_state_{self.world.rank}.json": rank_state}
        if self.world.first:
            written["state.json"] = state
        for name, value in written.items():
            publish_json(place / name, value)
            files[name] = digest(place / name)
        return files

    def _commit(self, name: str, step: int, kind: str, place: Path) -> None:
        files = self._gathered(place)
        commit = {
            "step": step,
            "kind": kind,
            "world_size": self.world.size,
            "sharded": self.sharded,
            "sha256": files,
            "bytes": {file: (place / file).stat().st_size for file in files},
        }

        def publish_commit() -> None:
            fault_point("checkpoint.commit")
            publish_json(place / COMMIT, commit | {"seal": seal(commit)})

        twice(publish_commit)
        twice(lambda: _take_name(place, self.folder / name))
        try:  # the checkpoint stands; what follows may fail without harm to it
            twice(lambda: self._tell_latest(name))
            twice(lambda: self._rotate(step))
        except OSError as error:
            log.error("checkpoint %s is saved, but older ones could not be tidied up: %s", name, error)

    def _gathered(self, place: Path) -> dict[str, str]:
        """The files of all ranks with their sums, as soon as every rank has left its list, or the first error among them."""
        began = time.monotonic()
        deadline = began + self.world.timeout_s
        waiting = [place / f"rank_{rank}.json" for rank in range(self.world.size)]
        files: dict[str, str] = {}
        while waiting:
            for path in [path for path in waiting if path.exists()]:
                word = json.loads(path.read_bytes())
                if word["error"]:
                    raise HalationError(word["error"])
                files |= word["files"]
                path.unlink()
                waiting.remove(path)
            if waiting and time.monotonic() > min(deadline, self._latest_end):
                missing = ", ".join(path.stem.removeprefix("rank_") for path in waiting)
                raise RankFailure(f"no word from rank {missing} within {time.monotonic() - began:.0f} s")
            if waiting:
                time.sleep(POLL_S)
        return files

    def _tell_latest(self, name: str) -> None:
        fault_point("checkpoint.latest")
        publish(self.folder / "latest", f"{name}\n".encode())

    def _rotate(self, newest: int) -> None:
        """Remove what is no longer wanted; never the checkpoint that was just committed, nor one that came after."""
        fault_point("checkpoint.rotate")
        everything = committed(self.folder)
        found = [item for item in everything if item.step < newest]
        kept = [item for item in everything if item.kind == "kept"]
        surplus = kept[: -self.keep_last] if self.keep_last else []
        for item in found:
            if item.kind == "latest" or item in surplus:
                fault_point("checkpoint.remove")
                _remove(item.folder)


def _take_name(place: Path, final: Path) -> None:
    """Give a committed folder its name; a folder of that name (a damaged one, as a good one is never saved again) makes way."""
    if place.exists():  # not there where only the fsync below is tried again
        if final.exists():
            _remove(final)
        fault_point("checkpoint.rename")
        os.rename(place, final)
    sync_folder(final.parent)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, HalationError | SafetensorError) else f"{type(error).__name__}: {error}"


def _remove(folder: Path) -> None:
    """Take the name away first, so that a half-removed checkpoint is never one."""
    doomed = folder.with_name(f".{folder.name}.{os.urandom(3).hex()}.removing")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_commit(folder: Path) -> dict[str, Any]:
    """The commit file of a checkpoint; ValueError where it is not the one that was written."""
    try:
        commit: dict[str, Any] = json.loads((folder / COMMIT).read_bytes())
        if commit["seal"] != seal(commit):
            raise ValueError("its words do not have the seal they were written with")
        return commit
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{COMMIT} cannot be trusted ({type(error).__name__}: {error})") from error


def committed(folder: Path) -> list[Found]:
    """Checkpoints with a good commit file, oldest first; their parts are not looked at yet."""
    found = []
    for path in folder.glob("step_*"):
        with contextlib.suppress(ValueError):
            commit = read_commit(path)
            found.append(Found(folder=path, step=int(commit["step"]), kind=str(commit["kind"])))
    return sorted(found, key=lambda item: item.step)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None where every part has the bytes it was committed with."""
    try:
        sums: dict[str, str] = read_commit(folder)["sha256"]
    except ValueError as error:
        return str(error)
    if not sums:
        return f"{COMMIT} lists no files"
    missing = [name for name in sums if not (folder / name).is_file()]
    if missing:
        return f"{missing[0]} is missing"
    try:
        with ThreadPoolExecutor(max_workers=4) as pool:
            for name, found in zip(sums, pool.map(lambda name: digest(folder / name), sums), strict=True):
                if found != sums[name]:
                    return f"{name} does not have the SHA-256 it was saved with"
    except OSError as error:
        return f"a part cannot be read ({error})"
    return None


def newest_good(folder: Path, on_damage: Callable[[Found, str], None] | None = None) -> Found | None:
    """The newest checkpoint whose every byte checks; damaged ones are reported, and handed to `on_damage`."""
    named = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    for path in sorted(named, key=lambda path: int(path.name.removeprefix("step_")), reverse=True):
        problem = damage(path)
        if problem is None:
            return next(item for item in committed(folder) if item.folder == path)
        if not path.exists():  # a run that is still training has removed it meanwhile
            continue
        log.error("checkpoint %s is damaged: %s; looking for an older one", path, problem)
        if on_damage:
            on_damage(Found(folder=path, step=int(path.name.removeprefix("step_")), kind=""), problem)
    return None
