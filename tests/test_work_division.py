"""Every spec is drawn once, and every rank makes the same number of forwards."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halation import work_division
from halation.sample_specs import SampleSpec

WORLDS = st.integers(1, 17)


def spec(index: int, height: int, steps: int) -> SampleSpec:
    return SampleSpec(
        index=index, id=str(index), prompt="a", seed=index, height=height, width=64, steps=steps, guidance_scale=1.0
    )


@st.composite
def specs(draw: st.DrawFn) -> list[SampleSpec]:
    shapes = draw(st.lists(st.tuples(st.sampled_from([32, 64]), st.sampled_from([5, 10])), max_size=40))
    return draw(st.permutations([spec(index, *shape) for index, shape in enumerate(shapes)]))


@given(specs(), st.integers(1, 9))
def test_every_spec_stands_on_one_batch_and_batches_are_full_rows_of_one_shape(
    given: list[SampleSpec], size: int
) -> None:
    batches = work_division.make_batches(given, size)
    assert sorted(s.index for batch in batches for s in batch.real_specs) == list(range(len(given)))
    for batch in batches:
        assert len(batch.specs) == size
        assert 1 <= batch.num_real <= size
        assert len({s.shape for s in batch.specs}) == 1
        assert all(filler == batch.real_specs[-1] for filler in batch.specs[batch.num_real :])
        assert list(batch.real_specs) == sorted(batch.real_specs, key=lambda s: s.index)
    assert work_division.make_batches(sorted(given, key=lambda s: s.index), size) == batches, (
        "the order they were asked in is no matter"
    )


@given(specs(), st.integers(1, 9))
def test_only_the_last_batch_of_a_shape_has_fillers(given: list[SampleSpec], size: int) -> None:
    batches = work_division.make_batches(given, size)
    for before, after in itertools.pairwise(batches):
        if before.specs[0].shape == after.specs[0].shape:
            assert before.num_real == size


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_without_room_is_a_mistake(size: int) -> None:
    with pytest.raises(ValueError, match="at least one spec"):
        work_division.make_batches([], size)


def groups_of(given: list[SampleSpec]) -> list[npt.NDArray[np.int64]]:
    indices: dict[tuple[int, ...], list[int]] = {}
    for one in sorted(given, key=lambda s: s.index):
        indices.setdefault(one.shape, []).append(one.index)
    return [np.array(group, dtype=np.int64) for group in indices.values()]


def listed(batches: work_division.BatchPlan) -> list[list[int]]:
    return [batches.rows(number).tolist() for number in range(len(batches))]


@given(specs(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_rows_known_by_their_index_are_cut_as_their_specs_are(
    given: list[SampleSpec], size: int, random: Random
) -> None:
    groups = groups_of(given)
    random.shuffle(groups)
    by_specs = [[s.index for s in batch.real_specs] for batch in work_division.make_batches(given, size)]
    assert listed(work_division.plan_batches(groups, size)) == sorted(by_specs), (
        "the same batches, numbered by their first index"
    )


@given(specs(), st.integers(1, 9), st.data())
def test_the_batches_of_some_rows_are_found_each_once(given: list[SampleSpec], size: int, data: st.DataObject) -> None:
    batches = work_division.plan_batches(groups_of(given), size)
    some = data.draw(st.lists(st.integers(0, len(given) - 1))) if given else []
    wanted = [number for number, rows in enumerate(listed(batches)) if set(rows) & set(some)]
    assert batches.find_batches(np.array(some, dtype=np.int64)).tolist() == wanted


@given(specs(), st.integers(1, 9), st.data())
def test_more_rows_change_no_batch_that_was_full(given: list[SampleSpec], size: int, data: st.DataObject) -> None:
    num_before = data.draw(st.integers(0, len(given)))
    before = listed(work_division.plan_batches(groups_of([s for s in given if s.index < num_before]), size))
    after = listed(work_division.plan_batches(groups_of(given), size))
    for rows in before:
        assert rows in after if len(rows) == size else rows in [longer[: len(rows)] for longer in after]


def test_indices_may_have_gaps_and_a_row_on_no_batch_is_a_mistake() -> None:
    batches = work_division.plan_batches([np.array([3, 10**12]), np.array([7, 8])], 1)
    assert listed(batches) == [[3], [7], [8], [10**12]]
    assert batches.find_batches(np.array([10**12, 7, 7])).tolist() == [1, 3]
    for stranger in (0, 4, 10**13):
        with pytest.raises(ValueError, match="is in no batch"):
            batches.find_batches(np.array([7, stranger]))


@pytest.mark.parametrize(
    ("groups", "size", "message"),
    [([[1, 2]], 0, "at least one spec"), ([[2, 1]], 1, "not ascending"), ([[1, 2], [2]], 1, "in two groups")],
)
def test_rows_that_cannot_be_cut_are_a_mistake(groups: list[list[int]], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        work_division.plan_batches([np.array(group) for group in groups], size)


def test_a_million_rows_are_cut_at_once() -> None:
    shapes = np.arange(1_000_003) * 7919 % 1009 % 5
    batches = work_division.plan_batches([np.flatnonzero(shapes == shape) for shape in range(5)], 8)
    assert sum(len(batches.rows(number)) for number in range(len(batches))) == 1_000_003
    assert len(batches.find_batches(np.arange(1_000_003))) == len(batches)


@given(st.integers(0, 200), WORLDS)
def test_turns_are_round_robin_and_give_every_batch_once(num_batches: int, num_workers: int) -> None:
    given = [work_division.initial_batches(num_batches, num_workers, worker) for worker in range(num_workers)]
    assert sorted(itertools.chain(*given)) == list(range(num_batches))
    for worker, turns in enumerate(given):
        assert list(turns) == [batch for batch in range(num_batches) if batch % num_workers == worker]


@given(st.integers(0, 200), WORLDS)
def test_every_batch_is_drawn_once_in_rounds_that_are_equal_for_all_ranks(num_batches: int, world_size: int) -> None:
    num_rounds = work_division.num_rounds(num_batches, world_size)
    drawn = [
        work_division.round_robin_batch(number, rank, world_size, num_batches)
        for number in range(num_rounds)
        for rank in range(world_size)
    ]
    assert [batch for batch in drawn if batch is not None] == list(range(num_batches))
    assert drawn.count(None) < world_size, "no round is a round of fillers only"


@given(st.integers(0, 500), WORLDS)
def test_shares_follow_each_other_and_leave_nothing_out(total: int, world_size: int) -> None:
    shares = [work_division.rank_range(total, world_size, rank) for rank in range(world_size)]
    assert [row for share in shares for row in share] == list(range(total))
    assert max(map(len, shares)) == -(-total // world_size)


def test_six_on_four_are_two_two_two_and_none() -> None:
    assert [len(work_division.rank_range(6, 4, rank)) for rank in range(4)] == [2, 2, 2, 0]


@given(st.integers(0, 200), WORLDS)
def test_contiguous_shares_are_drawn_in_the_rounds_of_round_robin_each_batch_once(
    num_batches: int, world_size: int
) -> None:
    num_rounds = work_division.num_rounds(num_batches, world_size)
    drawn = [
        work_division.contiguous_batch(number, rank, world_size, num_batches)
        for rank in range(world_size)
        for number in range(num_rounds)
    ]
    assert [batch for batch in drawn if batch is not None] == list(range(num_batches))
    assert work_division.contiguous_batch(num_rounds, 0, world_size, num_batches) is None


@given(st.integers(1, 200), WORLDS)
def test_an_index_has_one_place_in_the_shares_and_is_what_stands_there(total: int, world_size: int) -> None:
    places = [work_division.rank_and_offset(index, total, world_size) for index in range(total)]
    assert [work_division.rank_range(total, world_size, rank)[number] for rank, number in places] == list(range(total))
    for stranger in (-1, total):
        with pytest.raises(ValueError, match=f"{stranger} is out of range for {total}"):
            work_division.rank_and_offset(stranger, total, world_size)


@pytest.mark.parametrize(
    ("left", "helped"), [([0, 2, 3, 3], 2), ([1, 0], 0), ([0, 0], None), ([-1, -4], None), ([], None)]
)
def test_who_has_most_left_is_helped_and_nobody_where_all_is_begun(left: list[int], helped: int | None) -> None:
    assert work_division.most_loaded_rank(left) == helped


@given(st.integers(1, 300), WORLDS, st.integers(1, 40))
def test_micro_batches_hold_every_share_with_as_few_forwards_as_can_be(total: int, world_size: int, most: int) -> None:
    number, rows = work_division.micro_batch_layout(total, world_size, most)
    longest = len(work_division.rank_range(total, world_size, 0))
    assert 1 <= rows <= most
    assert number * rows >= longest, "every rank's share fits"
    assert (number - 1) * most < longest, "no forward could be left out"
    assert number * (rows - 1) < longest, "no row could be left out of all of them"


@given(st.integers(1, 100), WORLDS, st.integers(1, 20))
def test_the_micro_batches_of_all_ranks_cover_the_batch_exactly_once(total: int, world_size: int, most: int) -> None:
    number, rows = work_division.micro_batch_layout(total, world_size, most)
    seen: list[int] = []
    for rank in range(world_size):
        share = work_division.rank_range(total, world_size, rank)
        for micro in range(number):
            seen += share[micro * rows : (micro + 1) * rows]
    assert seen == list(range(total))
