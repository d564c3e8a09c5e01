"""Caches of tensors: a manifest, memory-mapped safetensors shards, rows by key.

The manifest has the fingerprint of the inputs. A shard is complete when its record, a JSON file with its size and
SHA-256, exists. Latents are in planned shards (`latent_cache`). A `RowFolder` holds rows by key in shards
`KIND-*.safetensors`, with the keys in the records, and may grow. This module is independent of the meaning of keys and
rows.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import save

from halation.data.dataset_protocol import JSON
from halation.errors import InputError, format_count
from halation.input_files import file_sha256, open_regular_file, read_json, read_safetensors_header
from halation.runs.run_folder import DIGEST_KEY, json_digest, write_atomic, writer_pid

_REBUILD_ADVICE = "delete the folder and build it again"
_log = logging.getLogger(__name__)
_MAX_SHARD_BYTES = 2**28
"""A shard is held in memory before it is written, on every rank."""
_LOG_ABOVE_BYTES = 2**30
_GIB = 2**30
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
Item = TypeVar("Item")
Result = TypeVar("Result")


def ensure_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest or check an existing one; all ranks write the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        existing = read_manifest(path, int(manifest["format"]))
        check_fingerprint(path.parent, existing["fingerprint"], manifest["fingerprint"])
        check_fingerprint(path.parent, {**existing, "name": None}, {**manifest, "name": None})
    else:
        content = {**manifest, DIGEST_KEY: json_digest(manifest)}
        write_atomic(path, json.dumps(content, indent=1, sort_keys=True).encode())
    remove_stale_temp_files(path.parent)


def read_manifest(path: Path, expected_format: int) -> dict[str, Any]:
    """Read the manifest of a cache of the expected format."""
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        raise InputError(
            f"no cache in {path.parent}", f"a folder with a {path.name}", "build the cache first"
        ) from None
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}", "JSON", _REBUILD_ADVICE) from None
    if not isinstance(manifest, dict) or manifest.get("format") != expected_format:
        raise InputError(f"{path} has another format", f"format {expected_format}", _REBUILD_ADVICE)
    if manifest.pop(DIGEST_KEY, None) not in (None, json_digest(manifest)):
        raise InputError(f"{path} is damaged: its digest does not match", "the manifest of a cache", _REBUILD_ADVICE)
    if not isinstance(manifest.get("fingerprint"), dict):
        raise InputError(f"{path} has no fingerprint", "the manifest of a cache", _REBUILD_ADVICE)
    return manifest


def check_fingerprint(folder: Path, cached: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise InputError with all differences between the cached and the expected fingerprint."""
    lines = [
        f"\n    {key}: {_shorten_hashes(first)} in the cache, {_shorten_hashes(second)} wanted"
        for key, first, second in _find_differences(dict(cached), json.loads(json.dumps(expected)))
    ]
    if lines:
        raise InputError(
            f"the cache {folder} was made for something else:{''.join(lines)}",
            "a cache made with exactly these settings",
            "delete the folder or choose another one; the cache is then rebuilt",
        )


def _find_differences(cached: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield names and both values of differences; compares nested objects recursively."""
    for key in sorted(cached.keys() | expected.keys()):
        first, second = cached.get(key), expected.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from ((f"{key}.{inner}", *values) for inner, *values in _find_differences(first, second))
        elif first != second:
            yield key, first, second


def _shorten_hashes(value: Any) -> str:
    """Format a value for a message, with shortened hashes."""
    return re.sub(r"\b[0-9a-f]{32,}\b", lambda found: f"{found[0][:12]}...", repr(value))


def publish_shard(path: Path, content: bytes, notes: Mapping[str, Any]) -> None:
    """Write a shard and, when it is complete, its record."""
    commit = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **notes}
    commit[DIGEST_KEY] = json_digest(commit)
    write_atomic(path, content, point="cache")
    write_atomic(path.with_suffix(".json"), json.dumps(commit, sort_keys=True).encode(), point="cache")


def read_commit(path: Path, *, verify: bool) -> dict[str, Any] | None:
    """Read the record of a shard; None if shard or record are missing, truncated or changed.

    `verify` reads the whole shard.
    """
    try:
        commit = read_json(path.with_suffix(".json"))
        size = path.stat().st_size
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(commit, dict) or commit.get(DIGEST_KEY) != json_digest(commit) or commit["num_bytes"] != size:
        return None
    return commit if not verify or has_valid_checksum(path, commit) else None


def has_valid_checksum(path: Path, commit: Mapping[str, Any]) -> bool:
    """Return True if the bytes of a shard match the SHA-256 in its record."""
    try:
        return bool(file_sha256(path) == commit["sha256"])
    except FileNotFoundError:
        return False


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Map a function in threads, for hashing files, which releases the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(function, items))


def require_commits(paths: Sequence[Path], commits: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the records of these shards; raises InputError if one is missing or damaged."""
    damaged = [path.name for path, commit in zip(paths, commits, strict=True) if commit is None]
    if damaged:
        raise InputError(
            f"{len(damaged)} of {format_count(len(paths), 'shard')} of the cache {paths[0].parent} missing or damaged: "
            f"{', '.join(damaged[:10])}",
            "every shard with the size and SHA-256 of its record",
            "build the cache again with the same settings; only these shards are rebuilt",
        )
    return [commit for commit in commits if commit is not None]


class MappedTensor(NamedTuple):
    """A tensor of a shard: safetensors dtype name, shape, and bytes in the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    content: np.ndarray


def map_shard(path: Path) -> dict[str, MappedTensor]:
    """Map the tensors of a shard, by name."""
    entries = read_safetensors_header(path)
    with open_regular_file(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    content = np.asarray(np.memmap(path, np.uint8, mode="r")).view(np.ndarray)
    tensors = {}
    for name, entry in sorted(entries.items()):
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            tensors[name] = MappedTensor(entry["dtype"], tuple(entry["shape"]), content[start + first : start + last])
    return tensors


def remove_stale_temp_files(folder: Path) -> None:
    """Remove temporary files of dead processes of this machine, but not of other machines."""
    for path in folder.glob(f".*.{socket.gethostname()}-*.tmp"):
        owner = writer_pid(path)
        if owner != os.getpid() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):  # a cache may be read-only
                path.unlink()


class RowFolder:
    """A folder of rows by key; `kind`, a plural such as `texts`, names its files and keys."""

    def __init__(self, folder: str | Path, kind: str, format: int) -> None:
        self.path = Path(folder)
        self.kind = kind
        self.format = format
        self._manifest_path = self.path / f"{kind}.json"

    def ensure_manifest(self, fingerprint: Mapping[str, JSON]) -> None:
        """Write the manifest, or check an existing one; every rank writes the same bytes."""
        ensure_manifest(self._manifest_path, {"format": self.format, "fingerprint": fingerprint})

    def check_fingerprint(self, fingerprint: Mapping[str, JSON]) -> None:
        """Raise InputError if the folder has another fingerprint or is not a cache."""
        existing = read_manifest(self._manifest_path, self.format)
        check_fingerprint(self.path, existing["fingerprint"], fingerprint)

    def find_missing(self, keys: Iterable[str], fingerprint: Mapping[str, JSON]) -> tuple[list[str], list[Path]]:
        """Return the distinct keys without a row, and the damaged shards.

        Existing shards with these keys are read completely. Raises InputError if the folder has another fingerprint.
        """
        unique = dict.fromkeys(keys)
        if not self._manifest_path.exists():
            return list(unique), []
        self.check_fingerprint(fingerprint)
        present, damaged = self.find_keys(unique.keys())
        return [key for key in unique if key not in present], damaged

    def find_keys(self, own_keys: AbstractSet[str]) -> tuple[set[str], list[Path]]:
        """Return the keys of undamaged shards, and the damaged shards.

        Shards with keys of `own_keys` are read completely; of the others only the size is checked.
        """

        def read_keys(path: Path) -> list[str] | None:
            commit = read_commit(path, verify=False)
            if commit is None or (not own_keys.isdisjoint(commit[self.kind]) and not has_valid_checksum(path, commit)):
                return None
            keys: list[str] = commit[self.kind]
            return keys

        paths = self._shard_paths()
        found = map_in_threads(read_keys, paths)
        present = {key for keys in found if keys is not None for key in keys}
        return present, [path for path, keys in zip(paths, found, strict=True) if keys is None]

    def remove_damaged(self, damaged: Sequence[Path]) -> None:
        """Remove shards that are still damaged; one rebuilt with the same keys has the same name."""
        for path in damaged:
            if read_commit(path, verify=True) is None:
                _log.warning("%s was damaged and is removed; its %s are rebuilt", path, self.kind)
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def open(self, fingerprint: Mapping[str, JSON], verify: bool = True) -> CachedRows:
        """Map all shards; raises InputError on another fingerprint or a damaged shard.

        `verify` reads everything once to check the SHA-256 sums (one rank per machine is enough); sizes are always
        checked.
        """
        self.check_fingerprint(fingerprint)
        paths = self._shard_paths()
        commits = require_commits(paths, map_in_threads(lambda path: read_commit(path, verify=verify), paths))
        return CachedRows(self.path, [(path, commit[self.kind]) for path, commit in zip(paths, commits, strict=True)])

    def _shard_paths(self) -> list[Path]:
        """Return the shards that have a record."""
        return sorted(path.with_suffix(".safetensors") for path in self.path.glob(f"{self.kind}-*.json"))


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """What all ranks together will write, to check the disk space with the first rows."""

    num_rows: int
    name: str
    """Name of the rows in messages."""
    action: str
    """What to do if the disk space is not sufficient."""
    log_size: bool


class RowCacheWriter:
    """Collects rows and writes a shard at `shard_size` rows, a size limit or `max_wait_s`."""

    def __init__(
        self, folder: RowFolder, shard_size: int, planned: PlannedRows | None = None, max_wait_s: float = math.inf
    ) -> None:
        self._folder = folder
        self._shard_size = shard_size
        self._planned = planned
        self._free_bytes = shutil.disk_usage(folder.path).free
        self._max_wait_s = max_wait_s
        self._pending: list[tuple[list[str], Tensors]] = []
        self._pending_since_s = 0.0

    def add(self, keys: list[str], rows: Mapping[str, torch.Tensor]) -> None:
        """Add rows, with a key for each."""
        row_bytes = sum(math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in rows.values())
        if self._planned is not None:
            self._check_disk_space(self._planned, row_bytes)
            self._planned = None
        if not self._pending:
            self._pending_since_s = time.monotonic()
        self._pending.append((keys, {name: tensor.detach().cpu() for name, tensor in rows.items()}))
        num = sum(len(names) for names, _ in self._pending)
        is_overdue = time.monotonic() - self._pending_since_s >= self._max_wait_s
        if num >= self._shard_size or num * row_bytes >= _MAX_SHARD_BYTES or is_overdue:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows."""
        if self._pending:
            keys = [key for names, _ in self._pending for key in names]
            names = self._pending[0][1]
            tensors = {name: torch.cat([rows[name] for _, rows in self._pending]).contiguous() for name in names}
            digest = hashlib.sha256("\0".join(keys).encode("utf-8", "surrogatepass")).hexdigest()[:24]
            path = self._folder.path / f"{self._folder.kind}-{digest}.safetensors"
            publish_shard(path, save(tensors), {self._folder.kind: keys})
            self._pending.clear()

    def _check_disk_space(self, planned: PlannedRows, row_bytes: int) -> None:
        needed, folder = planned.num_rows * row_bytes, self._folder.path
        if needed > self._free_bytes:
            raise InputError(
                f"{planned.name} take {needed / _GIB:.1f} GiB, "
                f"and {self._free_bytes / _GIB:.1f} GiB are free in {folder}",
                "enough free disk space",
                f"free some space, or choose a folder on a larger disk with --cache_dir, or {planned.action}",
            )
        if planned.log_size and needed > _LOG_ABOVE_BYTES:
            _log.info("%s take %.1f GiB in %s", planned.name, needed / _GIB, folder)


class CachedRows:
    """Rows by key; thread-safe."""

    def __init__(self, folder: Path, shards: Sequence[tuple[Path, Sequence[str]]]) -> None:
        self.folder = folder
        self._paths = [path for path, _ in shards]
        self._starts = list(itertools.accumulate((len(keys) for _, keys in shards), initial=0))
        # One number per key instead of a pair, to save memory: there may be millions.
        self._rows = {key: number for number, key in enumerate(key for _, keys in shards for key in keys)}
        self._mapped_shards: dict[int, dict[str, MappedTensor]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The row shape of each tensor; empty without rows."""
        return {name: tensor.shape[1:] for name, tensor in self._map_shard(0).items()} if self._paths else {}

    def read(self, keys: Sequence[str], entry_indices: Sequence[int] | None = None) -> Tensors:
        """Return copies of the tensors of these keys, a row for each; raises KeyError.

        With `entry_indices`, rows are lists of equal length, and only the entry of that index is read from each.
        """
        numbers = [self._rows[key] for key in keys]
        if not self._paths:
            return {}
        files = [bisect.bisect_right(self._starts, number) - 1 for number in numbers]
        rows = {}
        for name, (dtype_name, shape, _) in self._map_shard(files[0] if files else 0).items():
            dtype, row_shape = _DTYPES[dtype_name], shape[1:]
            row_bytes = math.prod(row_shape) * dtype.itemsize
            length = row_bytes
            if entry_indices is not None:
                if not row_shape or not all(0 <= number < row_shape[0] for number in entry_indices):
                    raise IndexError(f"entry index out of range: {row_shape[0] if row_shape else 'no'} entries per row")
                length, row_shape = row_bytes // row_shape[0], row_shape[1:]
            content = np.empty((len(numbers), length), np.uint8)
            for row, (file, number) in enumerate(zip(files, numbers, strict=True)):
                start = (number - self._starts[file]) * row_bytes
                start += 0 if entry_indices is None else entry_indices[row] * length
                content[row] = self._map_shard(file)[name].content[start : start + length]
            rows[name] = torch.from_numpy(content.reshape(-1)).view(dtype).reshape(len(numbers), *row_shape)
        return rows

    def _map_shard(self, shard: int) -> dict[str, MappedTensor]:
        """Map a shard once; two threads may both map it, which is harmless."""
        if shard not in self._mapped_shards:
            mapped = map_shard(self._paths[shard])
            other = next(iter(self._mapped_shards.values()), mapped)
            if _row_layouts(mapped) != _row_layouts(other):
                raise InputError(
                    f"{self._paths[shard]} holds other tensors than the other shards",
                    "the same names, shapes and types in every shard",
                    _REBUILD_ADVICE,
                )
            self._mapped_shards[shard] = mapped
        return self._mapped_shards[shard]


def _row_layouts(tensors: Mapping[str, MappedTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()}
