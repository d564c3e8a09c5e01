"""A cache of pixels or latents in sharded safetensors: built by all ranks, resumable, fingerprinted, memory-mapped.

A folder holds `cache.json` (what was asked for), and for each shard `train-00000.safetensors` with one tensor "x" and
`train-00000.json` with captions, labels, original sizes, size and SHA-256. A shard holds samples of one shape: where the
source has buckets, the pictures of one of them, and its note says which.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from halation.data import row_shards
from halation.data.aspect_buckets import buckets_of
from halation.data.dataset import JSON, Picture, Pictures
from halation.data.process_pool import Stack, Workers, draw, joined

FORMAT = 2
PARTS = ("train", "heldout")
CHUNK = 32
"""Pictures a process makes at a time, and the size of every batch `encode` sees unless told otherwise."""
MOST_IN_A_SHARD, NUM_SHARDS = 1024, 64
_MANIFEST = "cache.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
}  # fmt: skip
_NUM_CAPTIONS = 100_000

Encode = Callable[[list[np.ndarray]], np.ndarray]


def build(
    source: Pictures,
    folder: str | Path,
    encode: Encode | None = None,
    *,
    fingerprint: dict[str, JSON],
    part: tuple[int, int] = (0, 1),
    shard_size: int | None = None,
    encode_size: int = CHUNK,
    num_workers: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the shards of rank `part[0]` of `part[1]` that are not there yet; the caller waits for the other ranks.

    Without `encode` pixels are kept (uint8, NHWC). `encode` always gets exactly `encode_size` pictures of one shape, a shard's
    last batch filled up by repetition, so that a latent does not depend on the number of ranks; it gives float16 or float32.
    A shard holds `shard_size` pictures; by default as many as in a cache that was begun, else by their number alone.
    `num_workers` processes make the pictures; 0 makes them here. `on_progress(done, total)` counts this rank's pictures.
    """
    folder = Path(folder)
    rank, world_size = part
    if shard_size is None:
        shard_size = _begun_with(folder) or usual_shard_size(source.num_train + source.num_heldout, encode_size)
    asked = _describe(source, fingerprint, shard_size)
    row_shards.claim(folder / _MANIFEST, asked)
    mine = [shard for shard in _shards(asked) if shard.number % world_size == rank]
    total = sum(shard.num for shard in mine)
    missing = [shard for shard in mine if _commit(folder, shard, verify=True) is None]
    done = total - sum(shard.num for shard in missing)
    if on_progress is not None:
        on_progress(done, total)
    workers = Workers(partial(draw, source), num_workers) if num_workers and missing else None
    try:
        for shard, indices, stack in _made(source, workers, missing):

            def tell(num: int, before: int = done) -> None:
                if on_progress is not None:
                    on_progress(before + num, total)

            _publish(folder, shard, indices, stack, _encoded(stack.pixels, encode, encode_size, tell))
            done += shard.num
            if on_progress is not None:
                on_progress(done, total)
    finally:
        if workers is not None:
            workers.close()


def usual_shard_size(num: int, encode_size: int) -> int:
    """Small enough that many ranks get a share of few pictures, in whole batches, and never too large to lose."""
    whole_batches = -(-num // (NUM_SHARDS * encode_size)) * encode_size
    return min(MOST_IN_A_SHARD, max(encode_size, whole_batches))


def _begun_with(folder: Path) -> int | None:
    """The shard size of a cache that is there already, whoever chose it."""
    if not (folder / _MANIFEST).exists():
        return None
    size = row_shards.read_manifest(folder / _MANIFEST, FORMAT).get("shard_size")
    return size if isinstance(size, int) and size > 0 else None


def open(folder: str | Path, fingerprint: dict[str, JSON], *, verify: bool = True) -> CachedPictures:
    """Map a finished cache; refused if it was made for something else, or if a shard is missing or damaged.

    `verify` reads everything once to compare the SHA-256s (one rank of a machine is enough); sizes are compared always.
    """
    folder = Path(folder)
    asked = row_shards.read_manifest(folder / _MANIFEST, FORMAT)
    row_shards.refuse_stale(folder, asked["fingerprint"], fingerprint)
    wanted = list(_shards(asked))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        commits = list(threads.map(lambda shard: _commit(folder, shard, verify=verify), wanted))
    bad = [shard.name for shard, commit in zip(wanted, commits, strict=True) if commit is None]
    row_shards.refuse_damaged(folder, bad, len(wanted))
    whole = [(shard, commit) for shard, commit in zip(wanted, commits, strict=True) if commit is not None]
    return CachedPictures(folder, asked, whole)


class CachedPictures:
    """A cache as a source: pictures whose pixels (or latents) are views of the mapped files."""

    def __init__(self, folder: Path, asked: dict[str, Any], held: Sequence[tuple[_Shard, dict[str, Any]]]) -> None:
        self.name = str(asked["name"])
        self.folder = folder
        self.fingerprint: dict[str, JSON] = asked["fingerprint"]
        self.num_train = int(asked["num_train"])
        self.num_heldout = int(asked["num_heldout"])
        self.height = int(asked["height"])
        self.width = int(asked["width"])
        self.class_names: tuple[str, ...] = tuple(asked["class_names"])
        self._parts = {name: _Part([pair for pair in held if pair[0].part == name], folder) for name in PARTS}
        arrays = [array for part in self._parts.values() for array in part.arrays]
        self.dtype: np.dtype[Any] = arrays[0].dtype if arrays else np.dtype(np.uint8)
        buckets = asked.get("buckets")
        self.shapes: tuple[tuple[int, int], ...] = (
            tuple((high, wide) for high, wide in buckets["shapes"]) if buckets else ()
        )
        """Heights and widths in pixels of the buckets of the train part; empty where there are none."""
        self.bucket_of: np.ndarray | None = self._parts["train"].buckets if buckets else None
        """The bucket of each train picture; None where there are none."""

    @property
    def holds_latents(self) -> bool:
        """True where an encoder made the samples: floats, channels first."""
        return self.dtype != np.uint8

    def train(self, index: int) -> Picture:
        """Picture `index` of the train part; its pixels are a read-only view of the file."""
        return self._picture("train", index, self.num_train)

    def heldout(self, index: int) -> Picture:
        """Picture `index` of the held-out part."""
        return self._picture("heldout", index, self.num_heldout)

    def captions(self) -> Iterable[str]:
        """The first captions of the train part, at most a hundred thousand."""
        return self._parts["train"].captions[:_NUM_CAPTIONS]

    def every_caption(self) -> Iterable[str]:
        """The captions of both parts."""
        return [caption for part in self._parts.values() for caption in part.captions]

    def read(self, indices: Sequence[int] | np.ndarray, part: str = "train") -> Stack:
        """Many samples of one shape at once, copied into one new array: the fast way for a batch."""
        where = self._parts[part]
        wanted = np.asarray(indices, np.int64)
        num = len(where.captions)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= num):
            raise IndexError(f"the {part} part holds {num} pictures; asked for {wanted.min()} to {wanted.max()}")
        buckets = where.buckets[wanted]
        if len(wanted) and (buckets != buckets[0]).any():
            raise ValueError(f"pictures of {len(np.unique(buckets))} buckets were asked for at once")
        files, rows = where.files[wanted].tolist(), where.rows[wanted].tolist()
        shape = where.arrays[files[0] if files else 0].shape[1:] if where.arrays else (self.height, self.width, 3)
        pixels = np.empty((len(wanted), *shape), self.dtype)
        targets = pixels.reshape(len(wanted), -1) if len(wanted) else pixels
        flat = where.flat
        for target, (file, row) in enumerate(zip(files, rows, strict=True)):
            targets[target] = flat[file][row]
        captions = [where.captions[index] for index in wanted.tolist()]
        return Stack(pixels, captions, where.labels[wanted], where.originals[wanted])

    def _picture(self, part: str, index: int, num: int) -> Picture:
        if not 0 <= index < num:
            raise IndexError(f"the {part} part holds {num} pictures; asked for {index}")
        where = self._parts[part]
        high, wide = where.originals[index].tolist()
        return Picture(
            pixels=where.arrays[where.files[index]][where.rows[index]],
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
    bucket: int
    start: int
    """How many pictures of its part, or of its bucket, lie in shards before it."""
    num: int
    bucketed: bool

    @property
    def name(self) -> str:
        return f"{self.part}-{self.within:05d}.safetensors"


class _Part:
    """The mapped arrays of one part, and by picture their place in them, captions, labels and original sizes in memory."""

    def __init__(self, held: Sequence[tuple[_Shard, dict[str, Any]]], folder: Path) -> None:
        self.arrays = [_map(folder / shard.name) for shard, _ in held]
        self.flat = [array.reshape(len(array), -1) for array in self.arrays]
        lengths = [shard.num for shard, _ in held]
        self.files = np.repeat(np.arange(len(held)), lengths)
        self.rows = np.concatenate([np.empty(0, np.int64), *(np.arange(num) for num in lengths)])
        self.buckets = np.repeat(np.array([shard.bucket for shard, _ in held], np.int64), lengths)
        self.captions: list[str] = [caption for _, commit in held for caption in commit["captions"]]
        self.labels = np.array([label for _, commit in held for label in commit["labels"]], np.int64)
        self.originals = np.array([size for _, commit in held for size in commit["originals"]], np.int64).reshape(-1, 2)
        if any(shard.bucketed for shard, _ in held):
            self._sort(np.argsort([index for _, commit in held for index in commit["indices"]]))

    def _sort(self, places: np.ndarray) -> None:
        """From the order of the shards, which is by bucket, to that of the pictures."""
        self.files, self.rows, self.buckets = self.files[places], self.rows[places], self.buckets[places]
        self.labels, self.originals = self.labels[places], self.originals[places]
        self.captions = [self.captions[place] for place in places.tolist()]


def _describe(source: Pictures, fingerprint: dict[str, JSON], shard_size: int) -> dict[str, Any]:
    if shard_size < 1:
        raise ValueError(f"a shard holds at least one picture, not {shard_size}")
    asked: dict[str, Any] = {
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
    buckets = buckets_of(source)
    if buckets is not None:
        asked["buckets"] = {
            "shapes": [list(shape) for shape in buckets.shapes],
            "counts": np.bincount(buckets.of).tolist(),
            "sha256": hashlib.sha256(np.asarray(buckets.of, "<i8").tobytes()).hexdigest(),
        }
    return asked


def _shards(asked: dict[str, Any]) -> Iterator[_Shard]:
    number = 0
    size = int(asked["shard_size"])
    for part in PARTS:
        bucketed = part == "train" and "buckets" in asked
        counts: list[int] = asked["buckets"]["counts"] if bucketed else [int(asked[f"num_{part}"])]
        cuts = [
            (bucket, start, min(size, num - start))
            for bucket, num in enumerate(counts)
            for start in range(0, num, size)
        ]
        for within, (bucket, start, num) in enumerate(cuts):
            yield _Shard(
                part=part, number=number, within=within, bucket=bucket, start=start, num=num, bucketed=bucketed
            )
            number += 1


def _commit(folder: Path, shard: _Shard, *, verify: bool) -> dict[str, Any] | None:
    """What is written beside a shard, or None where shard or note are missing, cut or changed."""
    commit = row_shards.committed(folder / shard.name, verify=verify)
    if commit is None or any(len(commit[key]) != shard.num for key in ("captions", "labels", "originals")):
        return None
    return commit


Made = tuple[_Shard, list[int], Stack]


def _made(source: Pictures, workers: Workers | None, wanted: Sequence[_Shard]) -> Iterator[Made]:
    """Shard after shard with its pictures; processes work a large shard ahead of the one that is encoded and written."""
    ahead: deque[tuple[_Shard, list[int], list[Future[Stack]]]] = deque()
    for shard in wanted:
        indices = _indices(source, shard)
        if workers is None:
            yield shard, indices, draw(source, shard.part, indices)
            continue
        cuts = [indices[at : at + CHUNK] for at in range(0, len(indices), CHUNK)]
        ahead.append((shard, indices, [workers.ask(shard.part, cut) for cut in cuts]))
        while len(ahead) > 1 and sum(later.num for later, _, _ in ahead) - ahead[0][0].num >= MOST_IN_A_SHARD:
            yield _collected(*ahead.popleft())
    while ahead:
        yield _collected(*ahead.popleft())


def _indices(source: Pictures, shard: _Shard) -> list[int]:
    stop = shard.start + shard.num
    buckets = buckets_of(source) if shard.bucketed else None
    if buckets is None:
        return list(range(shard.start, stop))
    return np.flatnonzero(buckets.of == shard.bucket)[shard.start : stop].tolist()


def _collected(shard: _Shard, indices: list[int], pieces: list[Future[Stack]]) -> Made:
    return shard, indices, joined([piece.result() for piece in pieces])


def _encoded(pixels: np.ndarray, encode: Encode | None, size: int, tell: Callable[[int], None]) -> np.ndarray:
    if encode is None:
        return pixels
    batches = []
    for start in range(0, len(pixels), size):
        batch = list(pixels[start : start + size])
        num_real = len(batch)
        latents = np.asarray(encode(batch + batch[-1:] * (size - num_real)))
        if latents.shape[0] != size or latents.dtype not in (np.float16, np.float32):
            raise ValueError(
                f"encode gave {latents.dtype} {latents.shape}; expected float16 or float32 ({size}, C, h, w)"
            )
        batches.append(latents[:num_real])
        tell(start + num_real)
    return np.concatenate(batches)


def _publish(folder: Path, shard: _Shard, indices: list[int], stack: Stack, samples: np.ndarray) -> None:
    notes: dict[str, Any] = {
        "captions": stack.captions,
        "labels": stack.labels.tolist(),
        "originals": stack.originals.tolist(),
    }
    if shard.bucketed:
        notes["indices"] = indices
    row_shards.publish_shard(folder / shard.name, save({"x": np.ascontiguousarray(samples)}), notes)


def _map(path: Path) -> np.ndarray:
    entries, start = row_shards.header(path)
    entry = entries["x"]
    mapped = np.memmap(path, _DTYPES[entry["dtype"]], mode="r", offset=start, shape=tuple(entry["shape"]))
    return np.asarray(mapped).view(np.ndarray)
