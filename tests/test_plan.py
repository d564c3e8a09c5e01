"""Work is divided so that every spec is drawn once and every rank makes the same number of forwards."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halation import plan
from halation.specs import Spec

WORLDS = st.integers(1, 17)


def spec(index: int, height: int, steps: int) -> Spec:
    return Spec(
        index=index, id=str(index), prompt="a", seed=index, height=height, width=64, steps=steps, guidance_scale=1.0
    )


@st.composite
def specs(draw: st.DrawFn) -> list[Spec]:
    shapes = draw(st.lists(st.tuples(st.sampled_from([32, 64]), st.sampled_from([5, 10])), max_size=40))
    return draw(st.permutations([spec(index, *shape) for index, shape in enumerate(shapes)]))


@given(specs(), st.integers(1, 9))
def test_every_spec_stands_on_one_sheet_and_sheets_are_full_rows_of_one_shape(given: list[Spec], size: int) -> None:
    sheets = plan.cut(given, size)
    assert sorted(s.index for sheet in sheets for s in sheet.real) == list(range(len(given)))
    for sheet in sheets:
        assert len(sheet.specs) == size
        assert 1 <= sheet.num_real <= size
        assert len({s.shape for s in sheet.specs}) == 1
        assert all(filler == sheet.real[-1] for filler in sheet.specs[sheet.num_real :])
        assert list(sheet.real) == sorted(sheet.real, key=lambda s: s.index)
    assert plan.cut(sorted(given, key=lambda s: s.index), size) == sheets, "the order they were asked in is no matter"


@given(specs(), st.integers(1, 9))
def test_only_the_last_sheet_of_a_shape_has_fillers(given: list[Spec], size: int) -> None:
    sheets = plan.cut(given, size)
    for before, after in itertools.pairwise(sheets):
        if before.specs[0].shape == after.specs[0].shape:
            assert before.num_real == size


@pytest.mark.parametrize("size", [0, -1])
def test_a_sheet_without_room_is_a_mistake(size: int) -> None:
    with pytest.raises(ValueError, match="at least one spec"):
        plan.cut([], size)


def groups_of(given: list[Spec]) -> list[npt.NDArray[np.int64]]:
    indices: dict[tuple[int, ...], list[int]] = {}
    for one in sorted(given, key=lambda s: s.index):
        indices.setdefault(one.shape, []).append(one.index)
    return [np.array(group, dtype=np.int64) for group in indices.values()]


def listed(sheets: plan.Sheets) -> list[list[int]]:
    return [sheets.rows(number).tolist() for number in range(len(sheets))]


@given(specs(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_rows_known_by_their_index_are_cut_as_their_specs_are(given: list[Spec], size: int, random: Random) -> None:
    groups = groups_of(given)
    random.shuffle(groups)
    by_specs = [[s.index for s in sheet.real] for sheet in plan.cut(given, size)]
    assert listed(plan.sheets_of(groups, size)) == sorted(by_specs), "the same sheets, numbered by their first index"


@given(specs(), st.integers(1, 9), st.data())
def test_the_sheets_of_some_rows_are_found_each_once(given: list[Spec], size: int, data: st.DataObject) -> None:
    sheets = plan.sheets_of(groups_of(given), size)
    some = data.draw(st.lists(st.integers(0, len(given) - 1))) if given else []
    wanted = [number for number, rows in enumerate(listed(sheets)) if set(rows) & set(some)]
    assert sheets.containing(np.array(some, dtype=np.int64)).tolist() == wanted


@given(specs(), st.integers(1, 9), st.data())
def test_more_rows_change_no_sheet_that_was_full(given: list[Spec], size: int, data: st.DataObject) -> None:
    num_before = data.draw(st.integers(0, len(given)))
    before = listed(plan.sheets_of(groups_of([s for s in given if s.index < num_before]), size))
    after = listed(plan.sheets_of(groups_of(given), size))
    for rows in before:
        assert rows in after if len(rows) == size else rows in [longer[: len(rows)] for longer in after]


def test_indices_may_have_gaps_and_a_row_on_no_sheet_is_a_mistake() -> None:
    sheets = plan.sheets_of([np.array([3, 10**12]), np.array([7, 8])], 1)
    assert listed(sheets) == [[3], [7], [8], [10**12]]
    assert sheets.containing(np.array([10**12, 7, 7])).tolist() == [1, 3]
    for stranger in (0, 4, 10**13):
        with pytest.raises(ValueError, match="stands on no sheet"):
            sheets.containing(np.array([7, stranger]))


@pytest.mark.parametrize(
    ("groups", "size", "message"),
    [([[1, 2]], 0, "at least one spec"), ([[2, 1]], 1, "not ascending"), ([[1, 2], [2]], 1, "in two groups")],
)
def test_rows_that_cannot_be_cut_are_a_mistake(groups: list[list[int]], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.sheets_of([np.array(group) for group in groups], size)


def test_a_million_rows_are_cut_at_once() -> None:
    shapes = np.arange(1_000_003) * 7919 % 1009 % 5
    sheets = plan.sheets_of([np.flatnonzero(shapes == shape) for shape in range(5)], 8)
    assert sum(len(sheets.rows(number)) for number in range(len(sheets))) == 1_000_003
    assert len(sheets.containing(np.arange(1_000_003))) == len(sheets)


@given(st.integers(0, 200), WORLDS)
def test_turns_are_round_robin_and_give_every_sheet_once(num_sheets: int, num_workers: int) -> None:
    given = [plan.turns(num_sheets, num_workers, worker) for worker in range(num_workers)]
    assert sorted(itertools.chain(*given)) == list(range(num_sheets))
    for worker, turns in enumerate(given):
        assert list(turns) == [sheet for sheet in range(num_sheets) if sheet % num_workers == worker]


@given(st.integers(0, 200), WORLDS)
def test_every_sheet_is_drawn_once_in_rounds_that_are_equal_for_all_ranks(num_sheets: int, world_size: int) -> None:
    num_rounds = plan.rounds(num_sheets, world_size)
    drawn = [
        plan.sheet_for(number, rank, world_size, num_sheets)
        for number in range(num_rounds)
        for rank in range(world_size)
    ]
    assert [sheet for sheet in drawn if sheet is not None] == list(range(num_sheets))
    assert drawn.count(None) < world_size, "no round is a round of fillers only"


@given(st.integers(0, 500), WORLDS)
def test_shares_follow_each_other_and_leave_nothing_out(total: int, world_size: int) -> None:
    shares = [plan.share(total, world_size, rank) for rank in range(world_size)]
    assert [row for share in shares for row in share] == list(range(total))
    assert max(map(len, shares)) == -(-total // world_size)


def test_six_on_four_are_two_two_two_and_none() -> None:
    assert [len(plan.share(6, 4, rank)) for rank in range(4)] == [2, 2, 2, 0]


@given(st.integers(0, 200), WORLDS)
def test_contiguous_shares_are_drawn_in_the_rounds_of_round_robin_each_sheet_once(
    num_sheets: int, world_size: int
) -> None:
    num_rounds = plan.rounds(num_sheets, world_size)
    drawn = [
        plan.sheet_in_share(number, rank, world_size, num_sheets)
        for rank in range(world_size)
        for number in range(num_rounds)
    ]
    assert [sheet for sheet in drawn if sheet is not None] == list(range(num_sheets))
    assert plan.sheet_in_share(num_rounds, 0, world_size, num_sheets) is None


@given(st.integers(1, 200), WORLDS)
def test_an_index_has_one_place_in_the_shares_and_is_what_stands_there(total: int, world_size: int) -> None:
    places = [plan.place_in_shares(index, total, world_size) for index in range(total)]
    assert [plan.share(total, world_size, rank)[number] for rank, number in places] == list(range(total))
    for stranger in (-1, total):
        with pytest.raises(ValueError, match=f"{stranger} is none of {total}"):
            plan.place_in_shares(stranger, total, world_size)


@pytest.mark.parametrize(
    ("left", "helped"), [([0, 2, 3, 3], 2), ([1, 0], 0), ([0, 0], None), ([-1, -4], None), ([], None)]
)
def test_who_has_most_left_is_helped_and_nobody_where_all_is_begun(left: list[int], helped: int | None) -> None:
    assert plan.slowest(left) == helped


@given(st.integers(1, 300), WORLDS, st.integers(1, 40))
def test_micro_batches_hold_every_share_with_as_few_forwards_as_can_be(total: int, world_size: int, most: int) -> None:
    number, rows = plan.micro_batches(total, world_size, most)
    longest = len(plan.share(total, world_size, 0))
    assert 1 <= rows <= most
    assert number * rows >= longest, "every rank's share fits"
    assert (number - 1) * most < longest, "no forward could be left out"
    assert number * (rows - 1) < longest, "no row could be left out of all of them"


@given(st.integers(1, 100), WORLDS, st.integers(1, 20))
def test_the_micro_batches_of_all_ranks_cover_the_batch_exactly_once(total: int, world_size: int, most: int) -> None:
    number, rows = plan.micro_batches(total, world_size, most)
    seen: list[int] = []
    for rank in range(world_size):
        share = plan.share(total, world_size, rank)
        for micro in range(number):
            seen += share[micro * rows : (micro + 1) * rows]
    assert seen == list(range(total))
