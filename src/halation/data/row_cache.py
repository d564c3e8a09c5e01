"""Rows of tensors by key, in shards that are memory-mapped: what caches are made of whose rows are asked for by name.

A folder holds `KIND.json` (what made the rows), and shards `KIND-*.safetensors` with their keys in the notes beside them. It may
grow. Nothing here knows what a key or a row stands for.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from halation.data import row_shards
from halation.data.dataset import JSON
from halation.errors import InputError

_log = logging.getLogger(__name__)

_MAX_SHARD_BYTES = 2**28
"""A shard is held in memory before it is written, on every rank."""
_WORTH_TELLING = 2**30
_GIB = 2**30
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


class RowFolder:
    """The folder of one such cache. `kind` is what its files and their keys are called: a word in the plural."""

    def __init__(self, folder: str | Path, kind: str, format: int) -> None:
        self.path = Path(folder)
        self.kind = kind
        self.format = format

    def claim(self, fingerprint: Mapping[str, JSON]) -> None:
        """Make the folder ours, or refuse it: every rank does this and writes the same bytes."""
        row_shards.claim(self._manifest, {"format": self.format, "fingerprint": fingerprint})

    def is_claimed(self) -> bool:
        return self._manifest.exists()

    def refuse_others(self, fingerprint: Mapping[str, JSON]) -> None:
        """Raise where the rows were made by something else, or the folder is none of these."""
        there = row_shards.read_manifest(self._manifest, self.format)
        row_shards.refuse_stale(self.path, there["fingerprint"], fingerprint)

    def there(self, mine: AbstractSet[str]) -> tuple[set[str], list[Path]]:
        """Keys in shards that look whole, those with keys of mine read through; and shards that are damaged."""
        paths = self._paths()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            found = list(threads.map(lambda path: self._keys(path, mine), paths))
        there = {key for keys in found if keys is not None for key in keys}
        return there, [path for path, keys in zip(paths, found, strict=True) if keys is None]

    def _keys(self, path: Path, mine: AbstractSet[str]) -> list[str] | None:
        commit = row_shards.committed(path, verify=False)
        if commit is None or (not mine.isdisjoint(commit[self.kind]) and not row_shards.is_whole(path, commit)):
            return None
        keys: list[str] = commit[self.kind]
        return keys

    def remove_damaged(self, damaged: Sequence[Path]) -> None:
        """Those that are damaged still: one with the same keys has taken its predecessor's name."""
        for path in damaged:
            if row_shards.committed(path, verify=True) is None:
                _log.warning("%s was damaged and is removed; its %s are made again", path, self.kind)
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def publish(self, gathered: Sequence[tuple[list[str], Tensors]]) -> None:
        """A shard of these keys and their rows."""
        keys = [key for names, _ in gathered for key in names]
        tensors = {name: torch.cat([rows[name] for _, rows in gathered]).contiguous() for name in gathered[0][1]}
        name = hashlib.sha256("\0".join(keys).encode("utf-8", "surrogatepass")).hexdigest()[:24]
        row_shards.publish_shard(self.path / f"{self.kind}-{name}.safetensors", save(tensors), {self.kind: keys})

    def open(self, verify: bool) -> CachedRows:
        """Map all shards, none of which may be damaged; sizes are compared always, and SHA-256s where `verify` is true."""
        paths = self._paths()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            commits = list(threads.map(lambda path: row_shards.committed(path, verify=verify), paths))
        held = list(zip(paths, commits, strict=True))
        row_shards.refuse_damaged(self.path, [path.name for path, commit in held if commit is None], len(paths))
        return CachedRows(self.path, [(path, commit[self.kind]) for path, commit in held if commit])

    def check_room(self, num: int, num_bytes: int, free: int, *, name: str, action: str, tells: bool) -> None:
        """Refuse before anything is written what would fill the disk; `num` rows of `num_bytes`, which people call `name`."""
        needed = num * num_bytes
        if needed > free:
            raise InputError(
                f"{name} take {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free in {self.path}",
                "room for all of them",
                f"make room there, or name a folder on a larger disk by --cache_dir, or {action}",
            )
        if tells and needed > _WORTH_TELLING:
            _log.info("%s take %.1f GiB in %s", name, needed / _GIB, self.path)

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    @property
    def _manifest(self) -> Path:
        return self.path / f"{self.kind}.json"

    def _paths(self) -> list[Path]:
        """The shards that have a note."""
        return sorted(path.with_suffix(".safetensors") for path in self.path.glob(f"{self.kind}-*.json"))


class Writer:
    """Gathers rows and publishes them as a shard when there are `shard_size`, when they are large, or when they have waited long."""

    def __init__(self, folder: RowFolder, shard_size: int, patience_s: float = math.inf) -> None:
        self._folder = folder
        self._shard_size = shard_size
        self._patience_s = patience_s
        self._gathered: list[tuple[list[str], Tensors]] = []
        self._since = 0.0

    def add(self, keys: list[str], rows: Mapping[str, torch.Tensor]) -> None:
        """A key for each row."""
        if not self._gathered:
            self._since = time.monotonic()
        self._gathered.append((keys, {name: tensor.detach().cpu() for name, tensor in rows.items()}))
        num = sum(len(names) for names, _ in self._gathered)
        waited = time.monotonic() - self._since >= self._patience_s
        if num >= self._shard_size or num * row_bytes(rows) >= _MAX_SHARD_BYTES or waited:
            self.flush()

    def flush(self) -> None:
        """Publish what is gathered."""
        if self._gathered:
            self._folder.publish(self._gathered)
            self._gathered.clear()


def row_bytes(rows: Mapping[str, torch.Tensor]) -> int:
    """What one row of these tensors takes."""
    return sum(math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in rows.values())


class CachedRows:
    """Rows by their keys; may be read from several threads."""

    def __init__(self, folder: Path, held: Sequence[tuple[Path, Sequence[str]]]) -> None:
        self.folder = folder
        self._paths = [path for path, _ in held]
        self._starts = list(itertools.accumulate((len(keys) for _, keys in held), initial=0))
        # One number a key, and not a pair: there may be millions.
        self._rows = {key: number for number, key in enumerate(key for _, keys in held for key in keys)}
        self._mapped: dict[int, _Mapped] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a row of each tensor looks like; empty where there are no rows."""
        return {name: one.shape for name, one in self._map(0).layout.items()} if self._paths else {}

    def read(self, keys: Sequence[str], within: Sequence[int] | None = None) -> Tensors:
        """The tensors of these keys, a row for each, copied; a key that is not there is a KeyError.

        `within` reads of each row only the entry of that number, where all rows are lists of as many entries.
        """
        numbers = [self._rows[key] for key in keys]
        if not self._paths:
            return {}
        files = [bisect.bisect_right(self._starts, number) - 1 for number in numbers]
        layout = self._map(files[0] if files else 0).layout
        entries = layout if within is None else {name: one.entry(within) for name, one in layout.items()}
        rows = {name: np.empty((len(numbers), one.num_bytes), np.uint8) for name, one in entries.items()}
        for row, (file, number) in enumerate(zip(files, numbers, strict=True)):
            mapped = self._map(file)
            for name, place in mapped.places.items():
                length = entries[name].num_bytes
                start = place + (number - self._starts[file]) * layout[name].num_bytes
                start += 0 if within is None else within[row] * length
                rows[name][row] = mapped.content[start : start + length]
        return {
            name: torch.from_numpy(rows[name].reshape(-1)).view(one.dtype).reshape(len(numbers), *one.shape)
            for name, one in entries.items()
        }

    def _map(self, shard: int) -> _Mapped:
        """Two threads may both map it; either result will do."""
        if shard not in self._mapped:
            mapped = _Mapped.of(self._paths[shard])
            other = next(iter(self._mapped.values()), mapped)
            if mapped.layout != other.layout:
                raise InputError(
                    f"{self._paths[shard]} holds other tensors than the shards beside it",
                    "the same names, shapes and types in every shard",
                    "delete the folder and build it again",
                )
            self._mapped[shard] = mapped
        return self._mapped[shard]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What one key's piece of a tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def entry(self, within: Sequence[int]) -> _Row:
        """One of the entries that this is a list of."""
        if not self.shape or not all(0 <= number < self.shape[0] for number in within):
            raise IndexError(f"a row of {self.shape[0] if self.shape else 'no'} entries was asked for others")
        return _Row(dtype=self.dtype, shape=self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """One shard's bytes, and where each tensor begins in them."""

    content: np.ndarray
    layout: dict[str, _Row]
    places: dict[str, int]

    @classmethod
    def of(cls, path: Path) -> _Mapped:
        entries, start = row_shards.header(path)
        layout = {
            name: _Row(dtype=_DTYPES[entry["dtype"]], shape=tuple(entry["shape"][1:]))
            for name, entry in sorted(entries.items())
        }
        places = {name: start + int(entry["data_offsets"][0]) for name, entry in entries.items()}
        content = np.asarray(np.memmap(path, np.uint8, mode="r")).view(np.ndarray)
        return cls(content=content, layout=layout, places=places)
