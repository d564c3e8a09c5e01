"""Which pictures a rank takes at each step: together always the same ones, however many ranks there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halation import plan
from halation.training.batches import positions


@given(
    global_batch=st.integers(1, 40),
    most=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    steps=st.integers(1, 3),
)
def test_every_position_is_taken_once_in_order_while_the_number_of_ranks_changes(
    global_batch: int, most: int, sizes: list[int], steps: int
) -> None:
    done = 0
    for number, size in enumerate(sizes):  # each size trains a few steps, then the run is resumed on the next
        first = number * steps
        rows = [list(positions(first, done, first + steps, global_batch, size, rank, most)) for rank in range(size)]
        for step in range(steps):
            taken = []
            for rank in range(size):
                at, mine = rows[rank][step]
                assert at == first + step
                taken.append(mine[: len(plan.share(global_batch, size, rank))])
            assert np.concatenate(taken).tolist() == list(range(done, done + global_batch))
            done += global_batch


@given(global_batch=st.integers(1, 40), most=st.integers(1, 9), size=st.integers(1, 5))
def test_all_ranks_make_the_same_forwards_of_at_most_the_batch_size(global_batch: int, most: int, size: int) -> None:
    number, rows = plan.micro_batches(global_batch, size, most)
    assert rows <= most
    for rank in range(size):
        ((_, mine),) = positions(0, 0, 1, global_batch, size, rank, most)
        assert len(mine) == number * rows
        assert mine.min() >= 0
        assert mine.max() < global_batch
