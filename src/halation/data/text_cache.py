"""A cache of text embeddings: encoded once by all ranks, resumable, memory-mapped.

A folder holds `texts.json` (the fingerprint of the encoders) and shards with a row of tensors per text. It may grow:
texts that it already has are not encoded again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from halation.data.dataset_protocol import JSON
from halation.data.row_cache import CachedRows, PlannedRows, RowCacheWriter, RowFolder

FORMAT = 1
CachedTexts = CachedRows
"""The keys of the rows are the texts."""

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
    """Encode the missing texts of this rank; the caller waits for the other ranks.

    `encode` always gets exactly `encode_size` texts (the last batch is padded by repetition) and returns tensors with a
    row per text, always of the same shapes and dtypes. A shard is closed with `shard_size` texts, or when it is large.
    `on_progress(done, total)` counts this rank's distinct texts.
    """
    if shard_size < 1 or encode_size < 1:
        raise ValueError(f"shards of {shard_size} and batches of {encode_size} texts; expected at least 1")
    row_folder = _row_folder(folder)
    row_folder.ensure_manifest(_as_mapping(fingerprint))
    unique = list(dict.fromkeys(texts))
    rank, world_size = rank_and_size
    # Assigned by the text alone, so that no text is missed if ranks list the folder at different times.
    own_texts = {text for text in unique if zlib.crc32(text.encode("utf-8", "surrogatepass")) % world_size == rank}
    present, damaged = row_folder.find_keys(own_texts)
    missing = [text for text in unique if text not in present]
    to_encode = [text for text in missing if text in own_texts]
    done = len(own_texts) - len(to_encode)
    if on_progress is not None:
        on_progress(done, len(own_texts))
    planned = PlannedRows(
        num_rows=len(missing),
        name=f"the embeddings of {len(missing)} texts",
        action="train on fewer images (--max_images)",
        log_size=rank == 0,
    )
    writer = RowCacheWriter(row_folder, shard_size, planned)
    for start in range(0, len(to_encode), encode_size):
        batch = to_encode[start : start + encode_size]
        rows = encode(batch + batch[-1:] * (encode_size - len(batch)))
        wrong = {name: tuple(one.shape) for name, one in rows.items() if one.dim() < 1 or one.shape[0] != encode_size}
        if wrong or not rows:
            raise ValueError(f"encode returned {wrong or 'nothing'}; expected tensors with {encode_size} rows")
        writer.add(batch, {name: rows[name][: len(batch)] for name in sorted(rows)})
        done += len(batch)
        if done == len(own_texts):
            writer.flush()
        if on_progress is not None:
            on_progress(done, len(own_texts))
    row_folder.remove_damaged(damaged)


def count_missing(texts: Iterable[str], folder: str | Path, fingerprint: JSON) -> int:
    """Return the number of distinct texts without embeddings, plus that of damaged shards.

    Existing shards are read completely, so that a damaged one is found while it can still be rebuilt. Raises InputError
    if other encoders made the folder.
    """
    missing, damaged = _row_folder(folder).find_missing(texts, _as_mapping(fingerprint))
    return len(missing) + len(damaged)


def open_cache(folder: str | Path, fingerprint: JSON, verify: bool = True) -> CachedTexts:
    """Map a cache; raises InputError if other encoders made it or a shard is damaged.

    For `verify` see `RowFolder.open`.
    """
    return _row_folder(folder).open(_as_mapping(fingerprint), verify)


def _as_mapping(fingerprint: JSON) -> dict[str, JSON]:
    return fingerprint if isinstance(fingerprint, dict) else {"encoders": fingerprint}
