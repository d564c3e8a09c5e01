"""A cache of what text encoders make of captions and prompts: encoded once by all ranks, resumable, fingerprinted, memory-mapped.

A folder holds `texts.json` (which encoders), and shards of rows of tensors with the texts they belong to. It may grow: what
is there already is not encoded again, whoever asks for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from halation.data.dataset import JSON
from halation.data.row_cache import CachedRows, RowFolder, Tensors, Writer, row_bytes

FORMAT = 1
CachedTexts = CachedRows
"""Rows by the texts themselves."""

Encode = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


def _folder(path: str | Path) -> RowFolder:
    return RowFolder(path, "texts", FORMAT)


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
    place = _folder(folder)
    place.claim(_named(fingerprint))
    free = place.free_bytes
    unique = list(dict.fromkeys(texts))
    mine = {text for text in unique if _rank_of(text, part[1]) == part[0]}
    there, damaged = place.there(mine)
    absent = [text for text in unique if text not in there]
    coming = [text for text in absent if text in mine]
    done = len(mine) - len(coming)
    if on_progress is not None:
        on_progress(done, len(mine))
    writer = Writer(place, shard_size)
    for batch, rows in _encoded(coming, encode, encode_size):
        if done == len(mine) - len(coming):
            place.check_room(
                len(absent),
                row_bytes(rows),
                free,
                name=f"the embeddings of {len(absent)} texts",
                action="train on fewer pictures (--max_pictures)",
                tells=part[0] == 0,
            )
        writer.add(batch, rows)
        done += len(batch)
        if done == len(mine):
            writer.flush()
        if on_progress is not None:
            on_progress(done, len(mine))
    place.remove_damaged(damaged)


def missing(texts: Iterable[str], folder: str | Path, fingerprint: JSON) -> int:
    """How many different texts are not encoded yet, and shards damaged; refused where the folder holds those of other encoders.

    What is there is read through, so that a damaged shard is found while it can still be made again.
    """
    place = _folder(folder)
    unique = dict.fromkeys(texts)
    if not place.is_claimed():
        return len(unique)
    place.refuse_others(_named(fingerprint))
    there, damaged = place.there(unique.keys())
    return sum(text not in there for text in unique) + len(damaged)


def open(folder: str | Path, fingerprint: JSON, verify: bool = True) -> CachedTexts:
    """Map a cache; refused if other encoders made it or a shard is damaged.

    `verify` reads everything once to compare the SHA-256s (one rank of a machine is enough); sizes are compared always.
    """
    place = _folder(folder)
    place.refuse_others(_named(fingerprint))
    return place.open(verify)


def _named(fingerprint: JSON) -> dict[str, JSON]:
    return fingerprint if isinstance(fingerprint, dict) else {"encoders": fingerprint}


def _rank_of(text: str, size: int) -> int:
    """Who encodes a text: by the text alone, so that ranks which look at different moments still share without a gap."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % size


def _encoded(texts: Sequence[str], encode: Encode, size: int) -> Iterator[tuple[list[str], Tensors]]:
    for start in range(0, len(texts), size):
        batch = list(texts[start : start + size])
        rows = encode(batch + batch[-1:] * (size - len(batch)))
        wrong = {name: tuple(one.shape) for name, one in rows.items() if one.dim() < 1 or one.shape[0] != size}
        if wrong or not rows:
            raise ValueError(f"encode gave {wrong or 'nothing'}; expected tensors with {size} rows")
        yield batch, {name: rows[name][: len(batch)] for name in sorted(rows)}
