"""A cache of what text encoders make of captions and prompts: encoded once by all ranks, resumable, fingerprinted, memory-mapped.

A folder holds `texts.json` (which encoders), and shards of rows of tensors with the texts they belong to. It may grow: what
is there already is not encoded again, whoever asks for it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from halation.data import shards
from halation.data.base import JSON
from halation.errors import InputError

_log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "texts.json"
_MAX_SHARD_BYTES = 2**28
"""A shard is held in memory before it is written, on every rank."""
_WORTH_TELLING = 2**30
_GIB = 2**30
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
Encode = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


def build(
    texts: Iterable[str],
    folder: str | Path,
    encode: Encode,
    *,
    fingerprint: JSON,
    part: tuple[int, int] = (0, 1),
    shard_size: int = 256,
    encode_size: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Encode those texts of rank `part[0]` of `part[1]` that are not there yet; the caller waits for the other ranks.

    `encode` always gets exactly `encode_size` texts, the last ones filled up by repetition, and gives tensors with a row for each,
    of the same shapes and kinds every time. A shard is closed with `shard_size` texts, or when it is large.
    `on_progress(done, total)` counts this rank's different texts.
    """
    if shard_size < 1 or encode_size < 1:
        raise ValueError(f"shards of {shard_size} and batches of {encode_size} texts; expected at least 1")
    folder = Path(folder)
    shards.claim(folder / MANIFEST, {"format": FORMAT, "fingerprint": _named(fingerprint)})
    free = shutil.disk_usage(folder).free
    unique = list(dict.fromkeys(texts))
    mine = {text for text in unique if _rank_of(text, part[1]) == part[0]}
    there, damaged = _there(folder, mine)
    absent = [text for text in unique if text not in there]
    coming = [text for text in absent if text in mine]
    done = len(mine) - len(coming)
    if on_progress is not None:
        on_progress(done, len(mine))
    gathered: list[tuple[list[str], Tensors]] = []
    for batch, rows in _encoded(coming, encode, encode_size):
        num_bytes = _row_bytes(rows)
        if done == len(mine) - len(coming):
            _check_room(folder, len(absent), num_bytes, free, tells=part[0] == 0)
        gathered.append((batch, {name: tensor.detach().cpu() for name, tensor in rows.items()}))
        done += len(batch)
        num = sum(len(names) for names, _ in gathered)
        if num >= shard_size or num * num_bytes >= _MAX_SHARD_BYTES or done == len(mine):
            _publish(folder, gathered)
            gathered.clear()
        if on_progress is not None:
            on_progress(done, len(mine))
    _remove_damaged(damaged)


def missing(texts: Iterable[str], folder: str | Path, fingerprint: JSON) -> int:
    """How many different texts are not encoded yet, and shards damaged; refused where the folder holds those of other encoders.

    What is there is read through, so that a damaged shard is found while it can still be made again.
    """
    folder = Path(folder)
    unique = dict.fromkeys(texts)
    if not (folder / MANIFEST).exists():
        return len(unique)
    _refuse_others(folder, fingerprint)
    there, damaged = _there(folder, set(unique))
    return sum(text not in there for text in unique) + len(damaged)


def open(folder: str | Path, fingerprint: JSON, verify: bool = True) -> CachedTexts:
    """Map a cache; refused if other encoders made it or a shard is damaged.

    `verify` reads everything once to compare the SHA-256s (one rank of a machine is enough); sizes are compared always.
    """
    folder = Path(folder)
    _refuse_others(folder, fingerprint)
    paths = _paths(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        commits = list(threads.map(lambda path: shards.committed(path, verify=verify), paths))
    shards.refuse_damaged(
        folder, [path.name for path, commit in zip(paths, commits, strict=True) if commit is None], len(paths)
    )
    return CachedTexts(folder, [(path, commit["texts"]) for path, commit in zip(paths, commits, strict=True) if commit])


class CachedTexts:
    """Encoded texts by the texts themselves; may be read from several threads."""

    def __init__(self, folder: Path, held: Sequence[tuple[Path, Sequence[str]]]) -> None:
        self.folder = folder
        self._paths = [path for path, _ in held]
        self._starts = list(itertools.accumulate((len(texts) for _, texts in held), initial=0))
        # One number a text, and not a pair: there may be millions.
        self._rows = {text: number for number, text in enumerate(text for _, texts in held for text in texts)}
        self._mapped: dict[int, _Mapped] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, text: object) -> bool:
        return text in self._rows

    def read(self, texts: Sequence[str]) -> Tensors:
        """The tensors of these texts, a row for each, copied; a text that is not there is a KeyError."""
        numbers = [self._rows[text] for text in texts]
        if not self._paths:
            return {}
        files = [bisect.bisect_right(self._starts, number) - 1 for number in numbers]
        layout = self._map(files[0] if files else 0).layout
        rows = {name: np.empty((len(numbers), one.num_bytes), np.uint8) for name, one in layout.items()}
        for row, (file, number) in enumerate(zip(files, numbers, strict=True)):
            mapped = self._map(file)
            for name, place in mapped.places.items():
                length = layout[name].num_bytes
                start = place + (number - self._starts[file]) * length
                rows[name][row] = mapped.content[start : start + length]
        return {
            name: torch.from_numpy(rows[name].reshape(-1)).view(one.dtype).reshape(len(numbers), *one.shape)
            for name, one in layout.items()
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
    """What one text's piece of a tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """One shard's bytes, and where each tensor begins in them."""

    content: np.ndarray
    layout: dict[str, _Row]
    places: dict[str, int]

    @classmethod
    def of(cls, path: Path) -> _Mapped:
        entries, start = shards.header(path)
        layout = {
            name: _Row(dtype=_DTYPES[entry["dtype"]], shape=tuple(entry["shape"][1:]))
            for name, entry in sorted(entries.items())
        }
        places = {name: start + int(entry["data_offsets"][0]) for name, entry in entries.items()}
        content = np.asarray(np.memmap(path, np.uint8, mode="r")).view(np.ndarray)
        return cls(content=content, layout=layout, places=places)


def _named(fingerprint: JSON) -> dict[str, JSON]:
    return fingerprint if isinstance(fingerprint, dict) else {"encoders": fingerprint}


def _refuse_others(folder: Path, fingerprint: JSON) -> None:
    there = shards.read_manifest(folder / MANIFEST, FORMAT)
    shards.refuse_stale(folder, there["fingerprint"], _named(fingerprint))


def _rank_of(text: str, size: int) -> int:
    """Who encodes a text: by the text alone, so that ranks which look at different moments still share without a gap."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % size


def _paths(folder: Path) -> list[Path]:
    """The shards that have a note."""
    return sorted(path.with_suffix(".safetensors") for path in folder.glob("texts-*.json"))


def _there(folder: Path, mine: set[str]) -> tuple[set[str], list[Path]]:
    """Texts in shards that look whole, those with texts of mine read through; and shards that are damaged."""
    there: set[str] = set()
    damaged = []
    for path in _paths(folder):
        commit = shards.committed(path, verify=False)
        if commit is None or (not mine.isdisjoint(commit["texts"]) and not shards.is_whole(path, commit)):
            damaged.append(path)
        else:
            there.update(commit["texts"])
    return there, damaged


def _remove_damaged(damaged: Sequence[Path]) -> None:
    """Their texts have been encoded again; one with the same texts has taken its predecessor's name by now."""
    for path in damaged:
        if shards.committed(path, verify=True) is None:
            _log.warning("%s was damaged and is removed; its texts were encoded again", path)
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def _encoded(texts: Sequence[str], encode: Encode, size: int) -> Iterator[tuple[list[str], Tensors]]:
    for start in range(0, len(texts), size):
        batch = list(texts[start : start + size])
        rows = encode(batch + batch[-1:] * (size - len(batch)))
        wrong = {name: tuple(one.shape) for name, one in rows.items() if one.dim() < 1 or one.shape[0] != size}
        if wrong or not rows:
            raise ValueError(f"encode gave {wrong or 'nothing'}; expected tensors with {size} rows")
        yield batch, {name: rows[name][: len(batch)] for name in sorted(rows)}


def _row_bytes(rows: Tensors) -> int:
    return sum(math.prod(tensor.shape[1:]) * tensor.dtype.itemsize for tensor in rows.values())


def _check_room(folder: Path, num_texts: int, num_bytes: int, free: int, *, tells: bool) -> None:
    needed = num_texts * num_bytes
    if needed > free:
        raise InputError(
            f"the embeddings of {num_texts} texts take {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free in {folder}",
            "room for all of them",
            "make room there, or name a folder on a larger disk by --cache_dir, or train on fewer pictures (--max_pictures)",
        )
    if tells and needed > _WORTH_TELLING:
        _log.info("the embeddings of %d texts take %.1f GiB in %s", num_texts, needed / _GIB, folder)


def _publish(folder: Path, gathered: Sequence[tuple[list[str], Tensors]]) -> None:
    texts = [text for names, _ in gathered for text in names]
    tensors = {name: torch.cat([rows[name] for _, rows in gathered]).contiguous() for name in gathered[0][1]}
    name = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:24]
    shards.publish_shard(folder / f"texts-{name}.safetensors", save(tensors), {"texts": texts})
