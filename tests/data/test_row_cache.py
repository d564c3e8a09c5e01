"""Laws of cached rows by key: entries of rows, and shards that are closed by time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from halation.data.row_cache import RowCacheWriter, RowFolder

ROWS = {
    "state": torch.arange(5 * 3 * 4, dtype=torch.float16).reshape(5, 3, 4),
    "t": torch.arange(15, dtype=torch.float32).reshape(5, 3),
}


def written(path: Path, shard_size: int = 2) -> RowFolder:
    folder = RowFolder(path, "things", 1)
    folder.ensure_manifest({"made": "here"})
    writer = RowCacheWriter(folder, shard_size)
    for number in range(5):
        writer.add([str(number)], {name: value[number : number + 1] for name, value in ROWS.items()})
    writer.flush()
    return folder


def test_an_entry_of_a_row_is_read_without_the_others(tmp_path: Path) -> None:
    cache = written(tmp_path).open({"made": "here"})
    assert len(list(tmp_path.glob("things-*.safetensors"))) == 3
    assert cache.shapes == {"state": (3, 4), "t": (3,)}
    whole = cache.read(["4", "0", "2"])
    some = cache.read(["4", "0", "2"], entry_indices=[2, 0, 1])
    for name, value in ROWS.items():
        assert torch.equal(whole[name], value[[4, 0, 2]])
        assert torch.equal(some[name], value[[4, 0, 2], [2, 0, 1]])
        assert some[name].dtype == value.dtype
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="3 entries"):
            cache.read(["1"], entry_indices=[wrong])


def test_rows_that_have_waited_long_enough_are_published(tmp_path: Path) -> None:
    folder = RowFolder(tmp_path, "things", 1)
    folder.ensure_manifest({})
    writer = RowCacheWriter(folder, 100, max_wait_s=0.05)
    writer.add(["0"], {"t": torch.zeros(1, 2)})
    assert folder.find_keys(set())[0] == set()
    time.sleep(0.06)
    writer.add(["1"], {"t": torch.ones(1, 2)})
    assert folder.find_keys(set())[0] == {"0", "1"}


def test_an_empty_folder_has_no_shapes(tmp_path: Path) -> None:
    folder = RowFolder(tmp_path, "things", 1)
    folder.ensure_manifest({})
    assert folder.open({}).shapes == {}
