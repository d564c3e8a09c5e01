"""Features on disk, a file for each chunk of pictures: what is there need not be computed again, and is read back by index."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from halation.errors import InputError
from halation.runs import publish

Arrays = Mapping[str, np.ndarray]


class Store:
    """What one extractor made of one source; `starts` says with which picture each chunk begins."""

    def __init__(self, folder: Path, num: int, starts: Sequence[int]) -> None:
        self.folder = folder
        self.num = num
        self.starts = starts

    @property
    def num_chunks(self) -> int:
        return len(self.starts)

    def rows(self, chunk: int) -> range:
        return range(self.starts[chunk], self.starts[chunk + 1] if chunk + 1 < self.num_chunks else self.num)

    def chunk_of(self, index: int) -> int:
        return bisect_right(self.starts, index) - 1

    def missing(self) -> list[int]:
        try:
            there = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            there = set()
        return [chunk for chunk in range(self.num_chunks) if self._path(chunk).name not in there]

    def put(self, chunk: int, arrays: Arrays) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        publish(self._path(chunk), save({name: np.ascontiguousarray(array) for name, array in arrays.items()}), "chunk")

    def get(self, chunk: int) -> dict[str, np.ndarray]:
        path = self._path(chunk)
        try:
            arrays: dict[str, np.ndarray] = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise InputError(
                f"{path} cannot be read: {error}", "features as they were written", "run the same command again"
            ) from error
        return arrays

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """One array in index order, chunk by chunk."""
        for chunk in range(self.num_chunks):
            yield self.get(chunk)[name]

    def all(self) -> dict[str, np.ndarray]:
        """Every array, whole."""
        chunks = [self.get(chunk) for chunk in range(self.num_chunks)]
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _path(self, chunk: int) -> Path:
        return self.folder / f"chunk_{chunk:07d}.safetensors"
