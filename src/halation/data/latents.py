"""A cache of pixels or latents in sharded safetensors: built by all ranks, resumable, fingerprinted, memory-mapped.

A folder holds `cache.json` (what was asked for), and for each shard `train-00000.safetensors` with one tensor "x" and
`train-00000.json` with captions, labels, original sizes, size and SHA-256. The JSON is published last: a shard without it is not there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from halation.data.base import JSON, Picture, Pictures
from halation.data.workers import Stack, Workers, draw, joined
from halation.errors import InputError
from halation.runs import publish, writer_of

_log = logging.getLogger(__name__)

FORMAT = 2
PARTS = ("train", "heldout")
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype(np.uint8), "F16": np.dtype(np.float16)}
_NUM_CAPTIONS = 100_000
_CHUNK = 32
"""Pictures a process makes at a time, and the size of every batch `encode` sees unless told otherwise."""

Encode = Callable[[list[np.ndarray]], np.ndarray]


def build(
    source: Pictures,
    folder: str | Path,
    encode: Encode | None = None,
    *,
    fingerprint: dict[str, JSON],
    part: tuple[int, int] = (0, 1),
    shard_size: int = 1024,
    encode_size: int = _CHUNK,
    num_workers: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the shards of rank `part[0]` of `part[1]` that are not there yet; the caller waits for the other ranks.

    Without `encode` pixels are kept (uint8, NHWC). `encode` always gets exactly `encode_size` pictures, a shard's last
    batch filled up by repetition, so that a latent does not depend on the number of ranks. `num_workers` processes make
    the pictures; 0 makes them here. `on_progress(done, total)` counts this rank's pictures.
    """
    folder = Path(folder)
    rank, world_size = part
    asked = _describe(source, fingerprint, shard_size)
    _claim(folder, asked)
    mine = [shard for shard in _shards(asked) if shard.number % world_size == rank]
    total = sum(len(shard.indices) for shard in mine)
    missing = [shard for shard in mine if _commit(folder, shard, verify=True) is None]
    done = total - sum(len(shard.indices) for shard in missing)
    if on_progress is not None:
        on_progress(done, total)
    workers = Workers(partial(draw, source), num_workers) if num_workers and missing else None
    try:
        for shard, stack in _made(source, workers, missing):

            def tell(num: int, before: int = done) -> None:
                if on_progress is not None:
                    on_progress(before + num, total)

            _publish_shard(folder, shard, stack, _encoded(stack.pixels, encode, encode_size, tell))
            done += len(shard.indices)
            if on_progress is not None:
                on_progress(done, total)
    finally:
        if workers is not None:
            workers.close()


def open(folder: str | Path, fingerprint: dict[str, JSON], *, verify: bool = True) -> CachedPictures:
    """Map a finished cache; refused if it was made for something else, or if a shard is missing or damaged.

    `verify` reads everything once to compare the SHA-256s (one rank of a machine is enough); sizes are compared always.
    """
    folder = Path(folder)
    asked = _read_manifest(folder)
    _refuse_stale(folder, asked["fingerprint"], fingerprint)
    shards = list(_shards(asked))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        commits = list(threads.map(lambda shard: _commit(folder, shard, verify=verify), shards))
    bad = [shard.name for shard, commit in zip(shards, commits, strict=True) if commit is None]
    if bad:
        raise InputError(
            f"{len(bad)} of {len(shards)} shards of the cache {folder} are missing or damaged: {', '.join(bad[:10])}",
            "every shard with the size and SHA-256 written beside it",
            "build the cache again with the same settings; only these shards are made",
        )
    whole = [(shard, commit) for shard, commit in zip(shards, commits, strict=True) if commit is not None]
    return CachedPictures(folder, asked, whole)


class CachedPictures:
    """A cache as a source: pictures whose pixels (or latents) are views of the mapped files."""

    def __init__(self, folder: Path, asked: dict[str, Any], shards: Sequence[tuple[_Shard, dict[str, Any]]]) -> None:
        self.name = str(asked["name"])
        self.folder = folder
        self.fingerprint: dict[str, JSON] = asked["fingerprint"]
        self.num_train = int(asked["num_train"])
        self.num_heldout = int(asked["num_heldout"])
        self.height = int(asked["height"])
        self.width = int(asked["width"])
        self.class_names: tuple[str, ...] = tuple(asked["class_names"])
        self._shard_size = int(asked["shard_size"])
        self._parts = {name: _Part([pair for pair in shards if pair[0].part == name], folder) for name in PARTS}
        samples = [part for part in self._parts.values() if part.arrays]
        self.sample_shape: tuple[int, ...] = samples[0].arrays[0].shape[1:] if samples else (self.height, self.width, 3)
        self.dtype: np.dtype[Any] = samples[0].arrays[0].dtype if samples else np.dtype(np.uint8)

    @property
    def holds_latents(self) -> bool:
        """True where an encoder made the samples: float16, channels first."""
        return self.dtype == np.float16

    def train(self, index: int) -> Picture:
        """Picture `index` of the train part; its pixels are a read-only view of the file."""
        return self._picture("train", index, self.num_train)

    def heldout(self, index: int) -> Picture:
        """Picture `index` of the held-out part."""
        return self._picture("heldout", index, self.num_heldout)

    def captions(self) -> Iterable[str]:
        """The first captions of the train part, at most a hundred thousand."""
        return self._parts["train"].captions[:_NUM_CAPTIONS]

    def read(self, indices: Sequence[int] | np.ndarray, part: str = "train") -> Stack:
        """Many samples at once, copied into one new array: the fast way for a batch."""
        where = self._parts[part]
        wanted = np.asarray(indices, np.int64)
        num = len(where.captions)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= num):
            raise IndexError(f"the {part} part holds {num} pictures; asked for {wanted.min()} to {wanted.max()}")
        pixels = np.empty((len(wanted), *self.sample_shape), self.dtype)
        rows = pixels.reshape(len(wanted), -1) if len(wanted) else pixels
        flat = where.flat
        shards, locals_ = np.divmod(wanted, self._shard_size)
        for row, (shard, local) in enumerate(zip(shards.tolist(), locals_.tolist(), strict=True)):
            rows[row] = flat[shard][local]
        captions = [where.captions[index] for index in wanted.tolist()]
        return Stack(pixels, captions, where.labels[wanted], where.originals[wanted])

    def _picture(self, part: str, index: int, num: int) -> Picture:
        if not 0 <= index < num:
            raise IndexError(f"the {part} part holds {num} pictures; asked for {index}")
        where = self._parts[part]
        shard, local = divmod(index, self._shard_size)
        high, wide = where.originals[index].tolist()
        return Picture(
            pixels=where.arrays[shard][local],
            caption=where.captions[index],
            label=int(where.labels[index]),
            original=(high, wide),
        )


@dataclass(frozen=True, kw_only=True)
class _Shard:
    part: str
    number: int
    """Counted over both parts: the rank that writes it is number % world_size."""
    within: int
    indices: range

    @property
    def name(self) -> str:
        return f"{self.part}-{self.within:05d}.safetensors"


class _Part:
    """The mapped arrays of one part, and their captions and labels in memory."""

    def __init__(self, shards: Sequence[tuple[_Shard, dict[str, Any]]], folder: Path) -> None:
        self.arrays = [_map(folder / shard.name) for shard, _ in shards]
        self.flat = [array.reshape(len(array), -1) for array in self.arrays]
        self.captions: list[str] = [caption for _, commit in shards for caption in commit["captions"]]
        self.labels = np.array([label for _, commit in shards for label in commit["labels"]], np.int64)
        sizes = [size for _, commit in shards for size in commit["originals"]]
        self.originals = np.array(sizes, np.int64).reshape(-1, 2)


def _describe(source: Pictures, fingerprint: dict[str, JSON], shard_size: int) -> dict[str, Any]:
    if shard_size < 1:
        raise ValueError(f"a shard holds at least one picture, not {shard_size}")
    return {
        "format": FORMAT,
        "name": source.name,
        "fingerprint": fingerprint,
        "num_train": source.num_train,
        "num_heldout": source.num_heldout,
        "height": source.height,
        "width": source.width,
        "class_names": list(source.class_names),
        "shard_size": shard_size,
    }


def _shards(asked: dict[str, Any]) -> Iterator[_Shard]:
    number = 0
    size = int(asked["shard_size"])
    for part in PARTS:
        num = int(asked[f"num_{part}"])
        for within, start in enumerate(range(0, num, size)):
            yield _Shard(part=part, number=number, within=within, indices=range(start, min(start + size, num)))
            number += 1


def _claim(folder: Path, asked: dict[str, Any]) -> None:
    """Make the folder ours, or refuse it: every rank does this and writes the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "cache.json").exists():
        there = _read_manifest(folder)
        _refuse_stale(folder, there["fingerprint"], asked["fingerprint"])
        same = json.loads(json.dumps(asked))
        _refuse_stale(folder, {**there, "name": None}, {**same, "name": None})
    else:
        publish(folder / "cache.json", json.dumps(asked, indent=1, sort_keys=True).encode())
    _remove_leftovers(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "cache.json"
    again = "delete the folder and build it again"
    try:
        asked = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"no cache in {folder}", "a folder with a cache.json", "build the cache first") from None
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}", "JSON", again) from None
    if not isinstance(asked, dict) or asked.get("format") != FORMAT:
        raise InputError(f"{path} is of another format", f"format {FORMAT}", again)
    return asked


def _refuse_stale(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(wanted))
    keys = [key for key in sorted(there.keys() | wanted.keys()) if there.get(key) != wanted.get(key)]
    if keys:
        lines = [f"\n    {key}: {there.get(key)!r} in the cache, {wanted.get(key)!r} wanted" for key in keys]
        raise InputError(
            f"the cache {folder} was made for something else:{''.join(lines)}",
            "a cache made with exactly these settings",
            "delete the folder or name another one, and the cache is built again",
        )


def _commit(folder: Path, shard: _Shard, *, verify: bool) -> dict[str, Any] | None:
    """What is written beside a shard, or None where shard or note are missing, cut or changed."""
    path = folder / shard.name
    try:
        commit = json.loads(path.with_suffix(".json").read_bytes())
        size = path.stat().st_size
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(commit, dict) or commit.get("digest") != _digest_of_notes(commit) or commit["num_bytes"] != size:
        return None
    if any(len(commit[key]) != len(shard.indices) for key in ("captions", "labels", "originals")):
        return None
    if verify:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != commit["sha256"]:
                return None
    return commit


def _digest_of_notes(commit: dict[str, Any]) -> str:
    """A damaged caption must be found like a damaged pixel."""
    body = {key: value for key, value in commit.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _made(source: Pictures, workers: Workers | None, shards: Sequence[_Shard]) -> Iterator[tuple[_Shard, Stack]]:
    """Shard after shard with its pictures; processes work one shard ahead of the one that is encoded and written."""
    if workers is None:
        for shard in shards:
            yield shard, draw(source, shard.part, shard.indices)
        return
    ahead: deque[tuple[_Shard, list[Future[Stack]]]] = deque()
    for shard in shards:
        cuts = [shard.indices[at : at + _CHUNK] for at in range(0, len(shard.indices), _CHUNK)]
        ahead.append((shard, [workers.ask(shard.part, cut) for cut in cuts]))
        if len(ahead) > 1:
            yield _collected(*ahead.popleft())
    while ahead:
        yield _collected(*ahead.popleft())


def _collected(shard: _Shard, pieces: list[Future[Stack]]) -> tuple[_Shard, Stack]:
    return shard, joined([piece.result() for piece in pieces])


def _encoded(pixels: np.ndarray, encode: Encode | None, size: int, tell: Callable[[int], None]) -> np.ndarray:
    if encode is None:
        return pixels
    batches = []
    for start in range(0, len(pixels), size):
        batch = list(pixels[start : start + size])
        num_real = len(batch)
        latents = np.asarray(encode(batch + batch[-1:] * (size - num_real)))
        if latents.shape[0] != size or latents.dtype != np.float16:
            raise ValueError(f"encode gave {latents.dtype} {latents.shape}; expected float16 ({size}, C, h, w)")
        batches.append(latents[:num_real])
        tell(start + num_real)
    return np.concatenate(batches)


def _publish_shard(folder: Path, shard: _Shard, stack: Stack, samples: np.ndarray) -> None:
    content = save({"x": np.ascontiguousarray(samples)})
    path = folder / shard.name
    commit: dict[str, Any] = {
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "captions": stack.captions,
        "labels": stack.labels.tolist(),
        "originals": stack.originals.tolist(),
    }
    commit["digest"] = _digest_of_notes(commit)
    publish(path, content, point="cache")
    publish(path.with_suffix(".json"), json.dumps(commit, sort_keys=True).encode(), point="cache")


def _remove_leftovers(folder: Path) -> None:
    """Temporary files of killed processes of this machine; those of living ones and of other machines are theirs."""
    for path in folder.glob(f".*.{socket.gethostname()}-*.tmp"):
        owner = writer_of(path)
        if owner != os.getpid() and not Path(f"/proc/{owner}").exists():
            path.unlink(missing_ok=True)


def _map(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))["x"]
    mapped = np.memmap(path, _DTYPES[entry["dtype"]], mode="r", offset=8 + length, shape=tuple(entry["shape"]))
    return np.asarray(mapped).view(np.ndarray)
