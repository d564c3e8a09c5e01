"""Features on disk, a file for each chunk of images; whole chunks are not computed again."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from halation.data.row_cache import remove_stale_temp_files
from halation.errors import InputError
from halation.runs.run_folder import make_subfolder, write_atomic

FORMAT_VERSION = 1
"""Counts changes of what a chunk holds; part of every key."""
CHECKSUM_KEY = "seal"
Arrays = Mapping[str, np.ndarray]


class DamagedChunkError(Exception):
    """A chunk that is not what was written; the text says why."""


class FeatureStore:
    """What one extractor made of one source; `starts` says with which image each chunk begins."""

    def __init__(self, folder: Path, num: int, starts: Sequence[int]) -> None:
        self.folder = folder
        self.num = num
        self.starts = starts

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    def chunk_rows(self, chunk: int) -> range:
        return range(self.starts[chunk], self.starts[chunk + 1] if chunk + 1 < self.num_chunks else self.num)

    def chunk_index(self, index: int) -> int:
        return bisect_right(self.starts, index) - 1

    def missing_chunks(self) -> list[int]:
        """Chunks without a file."""
        try:
            present = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            present = set()
        return [chunk for chunk in range(self.num_chunks) if self._chunk_path(chunk).name not in present]

    def clean_up(self) -> list[int]:
        """Remove damaged chunks and what killed writers left; returns the missing ones. One process does it first."""
        missing = self.missing_chunks()
        for chunk in sorted(set(range(self.num_chunks)) - set(missing)):
            try:
                self._read_checked(chunk)
            except DamagedChunkError:
                self._chunk_path(chunk).unlink(missing_ok=True)
        remove_stale_temp_files(self.folder)
        return self.missing_chunks()

    def write_chunk(self, chunk: int, arrays: Arrays) -> None:
        make_subfolder(self.folder, 2)
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_atomic(self._chunk_path(chunk), save(contiguous | {CHECKSUM_KEY: _checksum(contiguous)}), "chunk")

    def read_chunk(self, chunk: int) -> dict[str, np.ndarray]:
        try:
            return self._read_checked(chunk)
        except (DamagedChunkError, FileNotFoundError) as error:
            raise InputError(
                f"{self._chunk_path(chunk)}: {error}", "features as they were written", "run the same command again"
            ) from error

    def _read_checked(self, chunk: int) -> dict[str, np.ndarray]:
        """safetensors does not notice a flipped bit, so the arrays are sealed with their hash."""
        try:
            arrays: dict[str, np.ndarray] = load(self._chunk_path(chunk).read_bytes())
        except SafetensorError as error:
            raise DamagedChunkError(f"it cannot be read ({error})") from error
        checksum = arrays.pop(CHECKSUM_KEY, None)
        if checksum is None or not np.array_equal(checksum, _checksum(arrays)):
            raise DamagedChunkError("its bytes are not those that were written")
        num = len(self.chunk_rows(chunk))
        if "num" in arrays and int(arrays["num"][0]) != num:
            raise DamagedChunkError(f"it stands for {arrays['num'][0]} images instead of {num}")
        if "features" in arrays and {len(array) for array in arrays.values()} != {num}:
            raise DamagedChunkError(f"it holds {len(arrays['features'])} rows instead of {num}")
        return arrays

    def iter_array(self, name: str) -> Iterator[np.ndarray]:
        """One array in index order, chunk by chunk."""
        for chunk in range(self.num_chunks):
            yield self.read_chunk(chunk)[name]

    def read_all(self) -> dict[str, np.ndarray]:
        """Every array, whole."""
        chunks = [self.read_chunk(chunk) for chunk in range(self.num_chunks)]
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _chunk_path(self, chunk: int) -> Path:
        return self.folder / f"chunk_{chunk:07d}.safetensors"


def _checksum(arrays: Arrays) -> np.ndarray:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return np.frombuffer(digest.digest(), np.uint8)
