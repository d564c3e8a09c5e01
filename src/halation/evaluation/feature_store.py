"""Stores features on disk, one file per chunk; complete chunks are not computed again."""

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
"""Incremented when the content of chunks changes; part of every key."""
CHECKSUM_KEY = "seal"
Arrays = Mapping[str, np.ndarray]


class DamagedChunkError(Exception):
    """A damaged chunk; the message has the reason."""


class FeatureStore:
    """The features of one source by one extractor; `starts` has the first image of each chunk."""

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
        """Return the chunks without a file."""
        try:
            present = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            present = set()
        return [chunk for chunk in range(self.num_chunks) if self._chunk_path(chunk).name not in present]

    def clean_up(self) -> list[int]:
        """Remove damaged chunks and files of killed writers; return the missing chunks.

        One process calls it before the others start.
        """
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
        """Read a chunk and check its hash, because safetensors does not detect flipped bits."""
        try:
            arrays: dict[str, np.ndarray] = load(self._chunk_path(chunk).read_bytes())
        except SafetensorError as error:
            raise DamagedChunkError(f"it cannot be read ({error})") from error
        checksum = arrays.pop(CHECKSUM_KEY, None)
        if checksum is None or not np.array_equal(checksum, _checksum(arrays)):
            raise DamagedChunkError("its checksum does not match")
        num = len(self.chunk_rows(chunk))
        if "num" in arrays and int(arrays["num"][0]) != num:
            raise DamagedChunkError(f"it has the moments of {arrays['num'][0]} images instead of {num}")
        if "features" in arrays and {len(array) for array in arrays.values()} != {num}:
            raise DamagedChunkError(f"it has {len(arrays['features'])} rows instead of {num}")
        return arrays

    def iter_array(self, name: str) -> Iterator[np.ndarray]:
        """Yield one array chunk by chunk, in index order."""
        for chunk in range(self.num_chunks):
            yield self.read_chunk(chunk)[name]

    def read_all(self) -> dict[str, np.ndarray]:
        """Return all arrays, concatenated over the chunks."""
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
