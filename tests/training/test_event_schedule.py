"""When a run saves: a pure function of the step, including the first epoch and the end."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from halation.training.periodic_tasks import CheckpointSchedule

CADENCES = st.builds(
    CheckpointSchedule,
    n_steps=st.integers(1, 400),
    ckpt_every=st.integers(0, 100),
    ckpt_latest_every=st.integers(0, 100),
    num_images=st.integers(1, 2000),
    global_batch=st.integers(1, 300),
)


@given(CADENCES)
def test_the_last_step_is_always_kept(cadence: CheckpointSchedule) -> None:
    assert cadence.save_kind(cadence.n_steps) == "kept"


@given(CADENCES, st.integers(1, 400))
def test_a_date_is_a_function_of_the_step_alone(cadence: CheckpointSchedule, step: int) -> None:
    before = cadence.save_kind(step)
    for other in (step + 1, 1, cadence.n_steps):
        cadence.save_kind(other)
    assert cadence.save_kind(step) == before


@given(CADENCES)
def test_the_end_of_the_first_epoch_is_a_date_and_no_step_before_it_is_an_epochs_end(
    cadence: CheckpointSchedule,
) -> None:
    first = -(-cadence.num_images // cadence.global_batch)
    assert cadence.is_epoch_end(first)
    assert not any(cadence.is_epoch_end(step) for step in range(1, min(first, 400)))
    assert cadence.save_kind(first) is not None


@given(CADENCES, st.integers(1, 400))
def test_checkpoints_are_kept_at_multiples_and_at_the_end_alone(cadence: CheckpointSchedule, step: int) -> None:
    asked = step == cadence.n_steps or (cadence.ckpt_every > 0 and step % cadence.ckpt_every == 0)
    assert (cadence.save_kind(step) == "kept") == asked


@given(CADENCES, st.integers(1, 100))
def test_multiples_of_the_latest_interval_are_dates(cadence: CheckpointSchedule, number: int) -> None:
    if cadence.ckpt_latest_every:
        assert cadence.save_kind(number * cadence.ckpt_latest_every) is not None


@given(CADENCES)
def test_short_epochs_add_at_most_a_few_dates_to_an_interval(cadence: CheckpointSchedule) -> None:
    intervals = [every for every in (cadence.ckpt_every, cadence.ckpt_latest_every) if every]
    shortest = min(intervals, default=cadence.n_steps)
    for start in (1, 1 + shortest, 1 + 7 * shortest):
        assert (
            sum(cadence.is_epoch_end(step) for step in range(start, start + shortest)) <= 2
        )  # the first one's, and one


@given(CADENCES)
def test_where_epochs_are_long_every_one_of_them_ends_with_a_date(cadence: CheckpointSchedule) -> None:
    if cadence.default_epoch_interval == 1:
        for epoch in range(1, 4):
            assert cadence.save_kind(-(-epoch * cadence.num_images // cadence.global_batch)) is not None


def test_a_run_of_ten_thousand_steps_on_fifty_images_does_not_only_save() -> None:
    cadence = CheckpointSchedule(n_steps=10_000, ckpt_every=1000, ckpt_latest_every=0, num_images=50, global_batch=32)
    dates = [step for step in range(1, 10_001) if cadence.save_kind(step)]
    assert len(dates) <= 111
    assert dates[0] == 2


@given(CADENCES, st.integers(1, 4), st.integers(1, 50))
def test_counted_epochs_have_whole_steps_and_each_that_counts_ends_with_its_own_date(
    cadence: CheckpointSchedule, every: int, epoch: int
) -> None:
    counted = dataclasses.replace(cadence, epoch_interval=every)
    last = epoch * counted.steps_per_epoch
    assert (counted.steps_per_epoch - 1) * counted.global_batch < counted.num_images
    assert counted.steps_per_epoch * counted.global_batch >= counted.num_images
    assert counted.epoch(last) == epoch
    assert counted.epoch(last + 1) == epoch + 1
    assert counted.is_epoch_end(last) == (epoch % every == 0)
    assert not any(counted.is_epoch_end(step) for step in range(last + 1, last + counted.steps_per_epoch))


def test_a_batch_larger_than_the_data_is_an_epoch() -> None:
    cadence = CheckpointSchedule(
        n_steps=4, ckpt_every=0, ckpt_latest_every=0, num_images=5, global_batch=16, epoch_interval=1
    )
    assert [cadence.epoch(step) for step in range(1, 5)] == [1, 2, 3, 4]
    assert [cadence.save_kind(step) for step in range(1, 5)] == ["latest", "latest", "latest", "kept"]
