"""Any range of a tensor can be read, for any number of ranks that wrote the checkpoint."""

from __future__ import annotations

import json
import math
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from halation.distributed.checkpoint.reader import CheckpointReader, TensorShard


def written(folder: Path, whole: torch.Tensor, cuts: list[int], flat: bool) -> CheckpointReader:
    """The tensor as one file for each part between two cuts of its rows, or of its elements."""
    values = whole.flatten() if flat else whole
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    for rank, (low, high) in enumerate(pairwise(bounds)):
        layout = {"x": {"start": low, "shape": list(whole.shape), "flat": flat}}
        path = folder / f"model-{rank + 1:05d}-of-{len(bounds) - 1:05d}.safetensors"
        save_file({"x": values[low:high].contiguous()}, path, metadata={"halation": json.dumps(layout)})
    (folder / "state.json").write_text("{}")
    return CheckpointReader(folder)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=3),
    st.booleans(),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_rows_and_elements_are_read_from_row_pieces_and_from_flat_ones(
    shape: list[int], cuts: list[int], flat: bool, part: tuple[float, float]
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        reader = written(Path(folder), whole, cuts, flat)
        assert torch.equal(dict(reader.read_part("model"))["x"], whole)
        for num, is_flat in ((whole.numel(), True), (shape[0], False)):
            low, high = sorted(round(p * num) for p in part)
            values = (whole.flatten() if is_flat else whole)[low:high]
            like = TensorShard(local=torch.empty_like(values), start=low, shape=tuple(shape), flat=is_flat)
            found = reader.read_shard("model", "x", like)
            assert found.shape == values.shape
            assert torch.equal(found, values)
