"""A cache of what text encoders make of captions and prompts: encoded once by all ranks, resumable, fingerprinted, memory-mapped.

A folder holds `texts.json` (which encoders), and shards of rows of tensors with the texts they belong to. It may grow: what
is there already is not encoded again, whoever asks for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from halation.data.dataset_protocol import JSON
from halation.data.tensor_row_cache import CachedRows, RowCacheWriter, RowFolder, Tensors, row_bytes

FORMAT = 1
CachedTexts = CachedRows
"""Rows by the texts themselves."""

Encode = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


def _row_folder(path: str | Path) -> RowFolder:
    return RowFolder(path, "texts", FORMAT)


def build(
    texts: Iterable[str],
    folder: str | Path,
    encode: Encode,
    *,
    fingerprint: JSON,
    rank_and_size: tuple[int, int] = (0, 1),
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
    row_folder = _row_folder(folder)
    row_folder.ensure_manifest(_as_mapping(fingerprint))
    free = row_folder.free_bytes
    unique = list(dict.fromkeys(texts))
    own_texts = {text for text in unique if _assigned_rank(text, rank_and_size[1]) == rank_and_size[0]}
    existing, damaged = row_folder.find_keys(own_texts)
    missing_texts = [text for text in unique if text not in existing]
    to_encode = [text for text in missing_texts if text in own_texts]
    done = len(own_texts) - len(to_encode)
    if on_progress is not None:
        on_progress(done, len(own_texts))
    writer = RowCacheWriter(row_folder, shard_size)
    for batch, rows in _encode_batches(to_encode, encode, encode_size):
        if done == len(own_texts) - len(to_encode):
            row_folder.check_disk_space(
                len(missing_texts),
                row_bytes(rows),
                free,
                name=f"the embeddings of {len(missing_texts)} texts",
                action="train on fewer images (--max_images)",
                log_size=rank_and_size[0] == 0,
            )
        writer.add(batch, rows)
        done += len(batch)
        if done == len(own_texts):
            writer.flush()
        if on_progress is not None:
            on_progress(done, len(own_texts))
    row_folder.remove_damaged(damaged)


def count_missing(texts: Iterable[str], folder: str | Path, fingerprint: JSON) -> int:
    """How many different texts are not encoded yet, and shards damaged; refused where the folder holds those of other encoders.

    What is there is read through, so that a damaged shard is found while it can still be made again.
    """
    row_folder = _row_folder(folder)
    unique = dict.fromkeys(texts)
    if not row_folder.has_manifest():
        return len(unique)
    row_folder.check_fingerprint(_as_mapping(fingerprint))
    existing, damaged = row_folder.find_keys(unique.keys())
    return sum(text not in existing for text in unique) + len(damaged)


def open_cache(folder: str | Path, fingerprint: JSON, verify: bool = True) -> CachedTexts:
    """Map a cache; refused if other encoders made it or a shard is damaged.

    `verify` reads everything once to compare the SHA-256s (one rank of a machine is enough); sizes are compared always.
    """
    row_folder = _row_folder(folder)
    row_folder.check_fingerprint(_as_mapping(fingerprint))
    return row_folder.open(verify)


def _as_mapping(fingerprint: JSON) -> dict[str, JSON]:
    return fingerprint if isinstance(fingerprint, dict) else {"encoders": fingerprint}


def _assigned_rank(text: str, size: int) -> int:
    """Who encodes a text: by the text alone, so that ranks which look at different moments still share without a gap."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % size


def _encode_batches(texts: Sequence[str], encode: Encode, size: int) -> Iterator[tuple[list[str], Tensors]]:
    for start in range(0, len(texts), size):
        batch = list(texts[start : start + size])
        rows = encode(batch + batch[-1:] * (size - len(batch)))
        wrong_shapes = {name: tuple(one.shape) for name, one in rows.items() if one.dim() < 1 or one.shape[0] != size}
        if wrong_shapes or not rows:
            raise ValueError(f"encode gave {wrong_shapes or 'nothing'}; expected tensors with {size} rows")
        yield batch, {name: rows[name][: len(batch)] for name in sorted(rows)}
