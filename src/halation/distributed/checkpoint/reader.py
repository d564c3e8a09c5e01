"""Reads a committed checkpoint on any number of ranks: tensors by part and name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from halation.input_files import parse_json, read_json, read_safetensors_header


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """This rank's rows of a tensor of shape `shape`, beginning at row `start`.

    A flat shard is a range of elements of the flattened tensor: `local` has one dimension and `start` counts elements.
    """

    local: Tensor
    start: int
    shape: tuple[int, ...]
    flat: bool = False


@dataclass(frozen=True, kw_only=True)
class _StoredShard:
    """A shard in a file; the fields are those of TensorShard."""

    start: int
    path: Path
    flat: bool
    shape: tuple[int, ...]


class CheckpointReader:
    """Tensors of a committed checkpoint by part and name, written by any number of ranks."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Open a checkpoint; with a `prefix`, the part `model` is the one saved as PREFIXmodel."""
        self.folder = folder
        self.prefix = prefix
        self.state: dict[str, Any] = read_json(folder / "state.json")
        self._layouts: dict[str, dict[str, list[_StoredShard]]] = {}

    def with_prefix(self, prefix: str) -> CheckpointReader:
        """Return a reader of the same checkpoint for the parts of a prefix."""
        return self if prefix == self.prefix else CheckpointReader(self.folder, prefix)

    def read_rank_state(self, rank: int) -> dict[str, Any] | None:
        path = self.folder / f"rank_state_{rank}.json"
        return read_json(path) if path.exists() else None

    def names(self, part: str) -> list[str]:
        return list(self._read_layout(part))

    def shapes(self, part: str) -> dict[str, tuple[int, ...]]:
        """Return the global shape of every tensor."""
        return {name: tuple(stored[0].shape) for name, stored in self._read_layout(part).items()}

    def has_part(self, part: str) -> bool:
        return bool(self._read_layout(part))

    def sampled_part(self, *, raw: bool = False) -> str:
        """Return the part to sample from: the EMA, or the weights with `raw` or if the run has no EMA."""
        return "model" if raw or not self.has_part("ema") else "ema"

    def read(self, part: str, name: str, start: int = 0, rows: int | None = None) -> Tensor:
        """Return rows [start, start + rows) of a tensor along its first dimension, or all of it."""
        stored = self._read_layout(part)[name]
        if stored[0].flat:
            shape = stored[0].shape
            row = math.prod(shape[1:])
            first, last = (0, math.prod(shape)) if rows is None else (start * row, (start + rows) * row)
            values = self.read_elements(part, name, first, last - first)
            return values.reshape(shape) if rows is None else values.reshape(rows, *shape[1:])
        pieces = []
        for shard in stored:
            with safe_open(shard.path, framework="pt") as file:
                part_slice = file.get_slice(name)
                shape = part_slice.get_shape()
                if not shape:
                    return file.get_tensor(name)
                low = max(start - shard.start, 0)
                high = shape[0] if rows is None else min(start + rows - shard.start, shape[0])
                if low < high:
                    pieces.append(part_slice[low:high])
                elif not pieces and (rows == 0 or 0 in shape):
                    empty = file.get_tensor(name)[:0]
        return torch.cat(pieces) if len(pieces) > 1 else (pieces[0] if pieces else empty)

    def read_elements(self, part: str, name: str, start: int, num: int) -> Tensor:
        """Return elements [start, start + num) of a flattened tensor; reads only their rows."""
        pieces = []
        for shard in self._read_layout(part)[name]:
            row = 1 if shard.flat else math.prod(shard.shape[1:])
            with safe_open(shard.path, framework="pt") as file:
                part_slice = file.get_slice(name)
                low, high = start - shard.start * row, start + num - shard.start * row
                high = min(high, math.prod(part_slice.get_shape()))
                low = max(low, 0)
                if low < high:
                    first, last = low // row, -(-high // row)
                    values = part_slice[first:last] if part_slice.get_shape() else file.get_tensor(name)
                    pieces.append(values.flatten()[low - first * row : high - first * row])
                elif not pieces:
                    pieces.append(file.get_tensor(name).flatten()[:0])
        return torch.cat(pieces)

    def read_shard(self, part: str, name: str, like: TensorShard) -> Tensor:
        """Return the values for the shard `like`."""
        if like.flat:
            return self.read_elements(part, name, like.start, like.local.numel())
        return self.read(part, name, like.start, like.local.shape[0] if like.local.ndim else None)

    def lazy_part(self, part: str) -> Mapping[str, Tensor]:
        """Return the tensors of a part by name, each read on access."""
        return _LazyPart(self, part)

    def read_part(self, part: str) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(part, name)) for name in self.names(part))

    def _read_layout(self, part: str) -> dict[str, list[_StoredShard]]:
        if part not in self._layouts:
            layout: dict[str, list[_StoredShard]] = {}
            saved = f"{self.prefix}{part}"
            paths = [self.folder / f"{saved}.safetensors", *sorted(self.folder.glob(f"{saved}-*-of-*.safetensors"))]
            for path in paths:
                if not path.exists():
                    continue
                read_safetensors_header(path)
                with safe_open(path, framework="pt") as file:
                    layouts = parse_json((file.metadata() or {}).get("halation", "{}").encode())
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        stored = layouts.get(name, {})
                        shape = stored.get("shape") or file.get_slice(name).get_shape()
                        layout.setdefault(name, []).append(
                            _StoredShard(
                                start=stored.get("start", 0),
                                path=path,
                                flat=stored.get("flat", False),
                                shape=tuple(shape),
                            )
                        )
            self._layouts[part] = {name: sorted(places, key=lambda s: s.start) for name, places in layout.items()}
        return self._layouts[part]


class _LazyPart(Mapping[str, Tensor]):
    def __init__(self, reader: CheckpointReader, part: str) -> None:
        self._reader, self._part = reader, part

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read(self._part, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.names(self._part))

    def __len__(self) -> int:
        return len(self._reader.names(self._part))
