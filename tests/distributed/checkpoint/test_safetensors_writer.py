"""Files that we write ourselves are what the library reads, with the hash of every byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open

from halation.distributed.checkpoint import writer
from halation.distributed.checkpoint.writer import PinnedCopies


def test_the_library_reads_what_was_written_and_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "number": torch.tensor(7.5),
        "turned": torch.randn(4, 6).t(),
        "narrow": torch.randn(9).bfloat16(),
        "empty": torch.empty(0, 4),
        "counts": torch.arange(5),
        "odd": torch.tensor([True, False, True]),
        'name with "quotes" and ünicode': torch.randn(2),
    }
    path = tmp_path / "a.safetensors"
    assert (
        writer.write_safetensors(path, tensors, {"halation": '{"a": 1}'})
        == hashlib.sha256(path.read_bytes()).hexdigest()
    )
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"halation": '{"a": 1}'}
        assert torch.equal(file.get_slice("matrix")[1:2], tensors["matrix"][1:2])


def test_a_tensor_larger_than_one_write_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_CHUNK", 1000)
    tensor = torch.randn(777)
    digest = writer.write_safetensors(tmp_path / "b.safetensors", {"x": tensor}, {})
    assert digest == hashlib.sha256((tmp_path / "b.safetensors").read_bytes()).hexdigest()
    assert torch.equal(load_file(tmp_path / "b.safetensors")["x"], tensor)


def test_a_copy_reuses_its_memory_and_allocates_for_another_shape() -> None:
    """A host copy reuses its memory between saves and allocates new memory for another shape."""
    copies = PinnedCopies()
    first = copies.copy("a", torch.ones(4))
    again = copies.copy("a", torch.zeros(4))
    assert again is first
    assert not first.any()
    assert copies.copy("a", torch.ones(5)).shape == (5,)
