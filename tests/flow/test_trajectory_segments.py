"""Laws of trajectories from noise to an image: their end, accuracy and kept states."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halation.flow.paths import PREDICTION_TYPES, DDPMPath, NoisePath, RectifiedFlowPath
from halation.flow.samplers import (
    ModelOutputFn,
    TrajectoryStep,
    euler,
    schedule,
    segments,
    select_steps,
    solve,
    stratified_indices,
)


def gaussian_table(prediction: str) -> DDPMPath:
    # Almost no noise in its first row, so that the last step, to nothing at all, is as short as the others.
    angles = torch.linspace(1e-4, 0.97, 4000, dtype=torch.float64) * math.pi / 2
    return DDPMPath(angles.cos() ** 2, prediction)


def told(path: NoisePath, spread_of_data: float) -> ModelOutputFn:
    """The output of a perfect module for images that are Gaussian around 0: the posterior mean."""

    def answer(x: Tensor, t: Tensor) -> Tensor:
        zero, one = torch.zeros_like(x), torch.ones_like(x)
        signal, noise = path.add_noise(one, zero, t), path.add_noise(zero, one, t)
        variance = (signal * spread_of_data) ** 2 + noise**2
        x0 = signal * spread_of_data**2 / variance * x
        return path.target(x0, noise / variance * x, t)

    return answer


def last(steps: Sequence[TrajectoryStep]) -> Tensor:
    return steps[-1].end


PATHS: dict[str, NoisePath] = {
    "straight": RectifiedFlowPath(),
    **{name: gaussian_table(name) for name in PREDICTION_TYPES},
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_a_linear_way_ends_where_its_equation_says_with_an_error_of_the_first_order(path: NoisePath) -> None:
    x = torch.tensor([[-1.5], [0.3], [2.0]], dtype=torch.float64)
    scale = 0.5
    one, zero = torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    top = torch.ones(3)
    signal, noise = path.add_noise(one, zero, top), path.add_noise(zero, one, top)
    # A Gaussian's ODE keeps the state's quantile: x / its spread.
    true = x * scale / ((signal * scale) ** 2 + noise**2).sqrt()
    errors = []
    for num in (10, 20, 40, 80):
        times = schedule(num).tolist()
        found = last(list(solve(path, told(path, scale), x, times)))
        errors.append(float((found - true).abs().max()))
    ratios = [first / second for first, second in itertools.pairwise(errors)]
    assert errors[-1] < 0.02
    assert all(1.7 < ratio < 2.4 for ratio in ratios), ratios


def test_a_straight_way_is_euler_s() -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    times = schedule(7, 3.0).tolist()
    steps = list(solve(RectifiedFlowPath(), lambda x, t: torch.sin(x) * t[:, None], x, times))
    *_, expected = euler(lambda x, t: torch.sin(x) * t.float(), x, times)
    assert torch.allclose(last(steps), expected, atol=1e-6)
    assert [float(step.t[0]) for step in steps] == pytest.approx(times[:-1])
    for before, after in itertools.pairwise(steps):
        assert torch.equal(before.end, after.x)
        assert torch.equal(before.s, after.t)


descending = st.lists(st.integers(1, 999), max_size=9, unique=True).map(
    lambda inner: [1.0, *(number / 1000 for number in sorted(inner, reverse=True)), 0.0]
)


@given(times=descending, num_steps=st.integers(1, 60))
def test_segments_meet_at_the_times_and_have_equal_steps_as_many_as_asked(times: list[float], num_steps: int) -> None:
    pieces = segments(times, num_steps)
    assert [piece[0] for piece in pieces] == times[:-1]
    assert [piece[-1] for piece in pieces] == times[1:]
    lengths = [len(piece) - 1 for piece in pieces]
    assert sum(lengths) == max(num_steps, len(pieces))
    assert max(lengths) - min(lengths) <= 1
    for piece in pieces:
        sizes = [t - s for t, s in itertools.pairwise(piece)]
        assert sizes == pytest.approx([(piece[0] - piece[-1]) / len(sizes)] * len(sizes))


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 0.5], [0.9, 0.0], [1.0, 0.5, 0.5, 0.0], [1.0, 0.3, 0.6, 0.0]])
def test_times_that_do_not_go_down_from_one_to_zero_are_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="from 1 to 0"):
        segments(times, 4)


@given(num=st.integers(1, 60), wanted=st.integers(1, 70), u=st.floats(0, 1, exclude_max=True, allow_subnormal=False))
def test_spread_numbers_are_different_in_order_and_in_range(num: int, wanted: int, u: float) -> None:
    chosen = stratified_indices(num, wanted, u)
    assert len(chosen) == min(num, wanted)
    assert chosen == sorted(set(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < num


def test_every_state_of_a_way_is_as_likely_to_be_kept_the_first_one_too() -> None:
    num, wanted, draws = 10, 4, 2000
    counts = Counter(place for draw in range(draws) for place in stratified_indices(num, wanted, draw / draws))
    assert {place: counts[place] / draws for place in range(num)} == pytest.approx(
        dict.fromkeys(range(num), wanted / num), abs=0.01
    )


@given(times=descending, num_steps=st.integers(1, 60), more=st.integers(0, 20), u=st.floats(0, 0.999))
def test_the_beginning_of_every_segment_is_kept(times: list[float], num_steps: int, more: int, u: float) -> None:
    pieces = segments(times, num_steps)
    kept = select_steps(pieces, len(pieces) + more, u)
    visited = [t for piece in pieces for t in piece[:-1]]
    assert {visited[number] for number in kept} >= set(times[:-1])
    assert kept == sorted(set(kept))
    assert len(kept) == min(len(pieces) + more, len(visited))


def test_fewer_states_than_segments_and_numbers_that_are_not_uniform_are_refused() -> None:
    with pytest.raises(ValueError, match="2 states of 3 segments"):
        select_steps(segments([1.0, 0.6, 0.3, 0.0], 3), 2, 0.5)
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        stratified_indices(3, 1, 1.0)
