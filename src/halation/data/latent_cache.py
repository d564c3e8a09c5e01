"""A cache of pixels or latents: built by all ranks, resumable, memory-mapped.

A folder holds `cache.json` (the manifest) and for each shard `train-00000.safetensors` with one tensor "x" and
`train-00000.json` with captions, labels, original sizes, size and SHA-256. A shard holds samples of one shape: if the
source has buckets, images of one bucket, whose indices are in the JSON file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from halation.data import row_cache
from halation.data.aspect_buckets import buckets_of
from halation.data.dataset_protocol import JSON, CaptionedImage, ImageBatch, ImageDataset, concat_batches, load_images
from halation.data.process_pool import ProcessPool

FORMAT = 2
SPLITS = ("train", "heldout")
CHUNK_SIZE = 32
"""Images that a process loads at a time, and the default batch size of `encode`."""
MAX_SHARD_SIZE, TARGET_NUM_SHARDS = 1024, 64
_MANIFEST = "cache.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
}  # fmt: skip
_MAX_CAPTIONS = 100_000

Encode = Callable[[list[np.ndarray]], np.ndarray]


def build(
    source: ImageDataset,
    folder: str | Path,
    encode: Encode | None = None,
    *,
    fingerprint: dict[str, JSON],
    rank_and_size: tuple[int, int] = (0, 1),
    shard_size: int | None = None,
    encode_size: int = CHUNK_SIZE,
    num_workers: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the missing shards of this rank; the caller waits for the other ranks.

    Without `encode` the cache holds pixels (uint8, NHWC). `encode` always gets exactly `encode_size` images of one
    shape (the last batch of a shard is padded by repetition), so that a latent does not depend on the number of ranks;
    it returns float16 or float32. A shard holds `shard_size` images; the default is that of a partial cache in the
    folder, else it depends only on the number of images. `num_workers` processes load the images; 0 loads them here.
    `on_progress(done, total)` counts this rank's images.
    """
    folder = Path(folder)
    rank, world_size = rank_and_size
    if shard_size is None and (folder / _MANIFEST).exists():
        begun_size = row_cache.read_manifest(folder / _MANIFEST, FORMAT).get("shard_size")
        shard_size = begun_size if isinstance(begun_size, int) and begun_size > 0 else None
    if shard_size is None:
        shard_size = default_shard_size(source.num_train + source.num_validation, encode_size)
    manifest = _make_manifest(source, fingerprint, shard_size)
    row_cache.ensure_manifest(folder / _MANIFEST, manifest)
    own_shards = [shard for shard in _plan_shards(manifest) if shard.number % world_size == rank]
    total = sum(shard.num_images for shard in own_shards)
    missing = [shard for shard in own_shards if _read_commit(folder, shard, verify=True) is None]
    done = total - sum(shard.num_images for shard in missing)
    report_progress = on_progress or (lambda done, total: None)
    report_progress(done, total)
    pool = ProcessPool(partial(load_images, source), num_workers) if num_workers and missing else None
    with contextlib.closing(pool) if pool is not None else contextlib.nullcontext():
        for shard, indices, batch in _load_shards(source, pool, missing):
            samples = batch.pixels
            if encode is not None:
                latents = []
                for start in range(0, len(samples), encode_size):
                    latents.append(_encode_batch(encode, samples[start : start + encode_size], encode_size))
                    report_progress(done + start + len(latents[-1]), total)
                samples = np.concatenate(latents)
            notes: dict[str, Any] = {
                "captions": batch.captions,
                "labels": batch.labels.tolist(),
                "originals": batch.originals.tolist(),
            }
            if shard.is_bucketed:
                notes["indices"] = indices
            row_cache.publish_shard(folder / shard.name, save({"x": np.ascontiguousarray(samples)}), notes)
            done += shard.num_images
            report_progress(done, total)


def _encode_batch(encode: Encode, pixels: np.ndarray, size: int) -> np.ndarray:
    """Encode images in a batch of exactly `size`, padded with the last image."""
    batch = list(pixels)
    latents = np.asarray(encode(batch + batch[-1:] * (size - len(batch))))
    if latents.shape[0] != size or latents.dtype not in (np.float16, np.float32):
        raise ValueError(
            f"encode returned {latents.dtype} {latents.shape}; expected float16 or float32 ({size}, C, h, w)"
        )
    return latents[: len(batch)]


def default_shard_size(num: int, encode_size: int) -> int:
    """Return a shard size in whole batches, for about TARGET_NUM_SHARDS shards."""
    whole_batches = -(-num // (TARGET_NUM_SHARDS * encode_size)) * encode_size
    return min(MAX_SHARD_SIZE, max(encode_size, whole_batches))


def open_cache(folder: str | Path, fingerprint: dict[str, JSON], *, verify: bool = True) -> CachedImageDataset:
    """Map a complete cache; raises InputError on another fingerprint or a bad shard.

    `verify` reads everything once to check the SHA-256 sums (one rank per machine is enough); sizes are always checked.
    """
    folder = Path(folder)
    manifest = row_cache.read_manifest(folder / _MANIFEST, FORMAT)
    row_cache.check_fingerprint(folder, manifest["fingerprint"], fingerprint)
    shards = list(_plan_shards(manifest))
    found = row_cache.map_in_threads(lambda shard: _read_commit(folder, shard, verify=verify), shards)
    commits = row_cache.require_commits([folder / shard.name for shard in shards], found)
    return CachedImageDataset(folder, manifest, list(zip(shards, commits, strict=True)))


class CachedImageDataset:
    """A cache as a dataset; pixels (or latents) are views of the mapped files."""

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: Sequence[tuple[_Shard, dict[str, Any]]]) -> None:
        self.name = str(manifest["name"])
        self.folder = folder
        self.fingerprint: dict[str, JSON] = manifest["fingerprint"]
        self.num_train = int(manifest["num_train"])
        self.num_validation = int(manifest["num_heldout"])
        self.height = int(manifest["height"])
        self.width = int(manifest["width"])
        self.class_names: tuple[str, ...] = tuple(manifest["class_names"])
        self._splits = {
            name: _SplitArrays([pair for pair in shards if pair[0].split == name], folder) for name in SPLITS
        }
        arrays = [array for part in self._splits.values() for array in part.arrays]
        self.dtype: np.dtype[Any] = arrays[0].dtype if arrays else np.dtype(np.uint8)
        buckets = manifest.get("buckets")
        self.shapes: tuple[tuple[int, int], ...] = (
            tuple((high, wide) for high, wide in buckets["shapes"]) if buckets else ()
        )
        """Heights and widths in pixels of the train buckets; empty without buckets."""
        self.bucket_of: np.ndarray | None = self._splits["train"].buckets if buckets else None
        """The bucket of each train image; None without buckets."""

    @property
    def holds_latents(self) -> bool:
        """True if the samples are latents of an encoder: floats, channels first."""
        return self.dtype != np.uint8

    def train(self, index: int) -> CaptionedImage:
        """Return train image `index`; its pixels are a read-only view of the file."""
        return self._read_image("train", index, self.num_train)

    def validation(self, index: int) -> CaptionedImage:
        """Return validation image `index`."""
        return self._read_image("heldout", index, self.num_validation)

    def captions(self) -> Iterable[str]:
        """Return the first train captions, at most 100,000."""
        return self._splits["train"].captions[:_MAX_CAPTIONS]

    def all_captions(self) -> Iterable[str]:
        """Return the captions of both splits."""
        return [caption for part in self._splits.values() for caption in part.captions]

    def read(self, indices: Sequence[int] | np.ndarray, split: str = "train") -> ImageBatch:
        """Return a batch of samples of one shape, copied into one new array."""
        split_arrays = self._splits[split]
        wanted = np.asarray(indices, np.int64)
        num = len(split_arrays.captions)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= num):
            raise IndexError(f"the {split} split has {num} images; requested {wanted.min()} to {wanted.max()}")
        buckets = split_arrays.buckets[wanted]
        if len(wanted) and (buckets != buckets[0]).any():
            raise ValueError(f"images of {len(np.unique(buckets))} buckets were requested in one batch")
        files, rows = split_arrays.shard_indices[wanted].tolist(), split_arrays.row_indices[wanted].tolist()
        shape = (
            split_arrays.arrays[files[0] if files else 0].shape[1:]
            if split_arrays.arrays
            else (self.height, self.width, 3)
        )
        pixels = np.empty((len(wanted), *shape), self.dtype)
        targets = pixels.reshape(len(wanted), -1) if len(wanted) else pixels
        flat = split_arrays.flat
        for target, (file, row) in enumerate(zip(files, rows, strict=True)):
            targets[target] = flat[file][row]
        captions = [split_arrays.captions[index] for index in wanted.tolist()]
        return ImageBatch(pixels, captions, split_arrays.labels[wanted], split_arrays.originals[wanted])

    def _read_image(self, split: str, index: int, num: int) -> CaptionedImage:
        if not 0 <= index < num:
            raise IndexError(f"the {split} split has {num} images; requested {index}")
        split_arrays = self._splits[split]
        high, wide = split_arrays.originals[index].tolist()
        return CaptionedImage(
            pixels=split_arrays.arrays[split_arrays.shard_indices[index]][split_arrays.row_indices[index]],
            caption=split_arrays.captions[index],
            label=int(split_arrays.labels[index]),
            original_size=(high, wide),
        )


@dataclass(frozen=True, kw_only=True)
class _Shard:
    split: str
    number: int
    """Counted over both splits; rank `number % world_size` writes it."""
    index_in_split: int
    bucket: int
    start: int
    """Number of images of its split, or of its bucket, in earlier shards."""
    num_images: int
    is_bucketed: bool

    @property
    def name(self) -> str:
        return f"{self.split}-{self.index_in_split:05d}.safetensors"


class _SplitArrays:
    """The mapped arrays of one split, and for each image its position and annotations."""

    def __init__(self, shards: Sequence[tuple[_Shard, dict[str, Any]]], folder: Path) -> None:
        self.arrays = []
        for shard, _ in shards:
            dtype, shape, content = row_cache.map_shard(folder / shard.name)["x"]
            self.arrays.append(content.view(_DTYPES[dtype]).reshape(shape))
        self.flat = [array.reshape(len(array), -1) for array in self.arrays]
        lengths = [shard.num_images for shard, _ in shards]
        self.shard_indices = np.repeat(np.arange(len(shards)), lengths)
        self.row_indices = np.concatenate([np.empty(0, np.int64), *(np.arange(num) for num in lengths)])
        self.buckets = np.repeat(np.array([shard.bucket for shard, _ in shards], np.int64), lengths)
        self.captions: list[str] = [caption for _, commit in shards for caption in commit["captions"]]
        self.labels = np.array([label for _, commit in shards for label in commit["labels"]], np.int64)
        self.originals = np.array([size for _, commit in shards for size in commit["originals"]], np.int64).reshape(
            -1, 2
        )
        if any(shard.is_bucketed for shard, _ in shards):
            # Shards are ordered by bucket; restore the order of the images.
            order = np.argsort([index for _, commit in shards for index in commit["indices"]])
            self.shard_indices, self.row_indices = self.shard_indices[order], self.row_indices[order]
            self.buckets, self.labels, self.originals = self.buckets[order], self.labels[order], self.originals[order]
            self.captions = [self.captions[place] for place in order.tolist()]


def _make_manifest(source: ImageDataset, fingerprint: dict[str, JSON], shard_size: int) -> dict[str, Any]:
    if shard_size < 1:
        raise ValueError(f"a shard holds at least one image, not {shard_size}")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "name": source.name,
        "fingerprint": fingerprint,
        "num_train": source.num_train,
        "num_heldout": source.num_validation,
        "height": source.height,
        "width": source.width,
        "class_names": list(source.class_names),
        "shard_size": shard_size,
    }
    buckets = buckets_of(source)
    if buckets is not None:
        manifest["buckets"] = {
            "shapes": [list(shape) for shape in buckets.shapes],
            "counts": np.bincount(buckets.bucket_indices).tolist(),
            "sha256": hashlib.sha256(np.asarray(buckets.bucket_indices, "<i8").tobytes()).hexdigest(),
        }
    return manifest


def _plan_shards(manifest: dict[str, Any]) -> Iterator[_Shard]:
    number = 0
    size = int(manifest["shard_size"])
    for split in SPLITS:
        is_bucketed = split == "train" and "buckets" in manifest
        counts: list[int] = manifest["buckets"]["counts"] if is_bucketed else [int(manifest[f"num_{split}"])]
        ranges = [
            (bucket, start, min(size, num - start))
            for bucket, num in enumerate(counts)
            for start in range(0, num, size)
        ]
        for index_in_split, (bucket, start, num) in enumerate(ranges):
            yield _Shard(
                split=split,
                number=number,
                index_in_split=index_in_split,
                bucket=bucket,
                start=start,
                num_images=num,
                is_bucketed=is_bucketed,
            )
            number += 1


def _read_commit(folder: Path, shard: _Shard, *, verify: bool) -> dict[str, Any] | None:
    """Read the record of a shard; None if shard or record are missing, truncated or changed."""
    commit = row_cache.read_commit(folder / shard.name, verify=verify)
    if commit is None or any(len(commit[key]) != shard.num_images for key in ("captions", "labels", "originals")):
        return None
    return commit


def _load_shards(
    source: ImageDataset, pool: ProcessPool[ImageBatch] | None, shards: Sequence[_Shard]
) -> Iterator[tuple[_Shard, list[int], ImageBatch]]:
    """Yield shards with their images; processes load up to MAX_SHARD_SIZE images ahead."""
    pending: deque[tuple[_Shard, list[int], list[Future[ImageBatch]]]] = deque()
    remaining = deque(shards)
    while remaining or pending:
        num_ahead = sum(shard.num_images for shard, _, _ in itertools.islice(pending, 1, None))
        if remaining and (not pending or num_ahead < MAX_SHARD_SIZE):
            shard = remaining.popleft()
            images = np.arange(shard.start, shard.start + shard.num_images)
            buckets = buckets_of(source) if shard.is_bucketed else None
            if buckets is not None:
                images = np.flatnonzero(buckets.bucket_indices == shard.bucket)[images]
            indices = images.tolist()
            if pool is None:
                yield shard, indices, load_images(source, shard.split, indices)
            else:
                chunks = [indices[at : at + CHUNK_SIZE] for at in range(0, len(indices), CHUNK_SIZE)]
                pending.append((shard, indices, [pool.submit(shard.split, chunk) for chunk in chunks]))
        else:
            shard, indices, futures = pending.popleft()
            yield shard, indices, concat_batches([piece.result() for piece in futures])
