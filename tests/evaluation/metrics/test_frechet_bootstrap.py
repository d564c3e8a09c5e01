"""Laws of the bootstrap: draws are distances, seeds repeat, the width is the true spread."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halation.evaluation.metrics.frechet import frechet_distance, frechet_interval
from halation.evaluation.metrics.moments import Features, Moments, moments


def features(num: int, dimensions: int, seed: int, shift: float = 0.0) -> Features:
    return np.random.default_rng(seed).normal(shift, 1.0, size=(num, dimensions)).astype(np.float32)


@pytest.fixture(scope="module")
def reference() -> Moments:
    return moments(features(5000, 8, 0))


@pytest.mark.parametrize(
    ("num", "dimensions", "num_reference"), [(300, 16, 500), (40, 64, 500), (60, 64, 50), (300, 64, 50), (90, 64, 500)]
)
def test_the_interval_is_that_of_distances_of_resampled_rows(num: int, dimensions: int, num_reference: int) -> None:
    rows, other = features(num, dimensions, 1, shift=0.2), moments(features(num_reference, dimensions, 2))
    found = frechet_interval(rows, other, num_draws=9, seed=5, level=0.5)
    distances = []
    for number in range(9):
        generator = np.random.Generator(np.random.Philox(key=np.array([5, number], dtype=np.uint64)))
        distances.append(frechet_distance(moments(rows[generator.integers(num, size=num)]), other))
    assert found.estimate == pytest.approx(frechet_distance(moments(rows), other), rel=1e-6)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(distances, [0.25, 0.75])), rel=1e-6)
    assert found.bias == pytest.approx(np.mean(distances) - found.estimate, rel=1e-4)


def test_the_same_seed_gives_the_same_interval_on_any_number_of_threads(reference: Moments) -> None:
    rows = features(400, 8, 3, shift=0.3)
    first = frechet_interval(rows, reference, num_draws=20, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert frechet_interval(rows, reference, num_draws=20, seed=1) == first
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert frechet_interval(rows, reference, num_draws=20, seed=2).low != first.low


def test_more_draws_begin_with_the_same_draws(reference: Moments) -> None:
    rows = features(200, 8, 3)
    one = frechet_interval(rows, reference, num_draws=1, seed=1)
    assert one.low == one.high
    two = frechet_interval(rows, reference, num_draws=2, seed=1, level=0.999999)
    assert one.low == pytest.approx(two.low, rel=1e-6) or one.low == pytest.approx(two.high, rel=1e-6)


def test_the_width_is_that_of_fresh_sets(reference: Moments) -> None:
    fresh = [frechet_distance(moments(features(500, 8, seed, shift=0.5)), reference) for seed in range(100, 200)]
    low, high = np.quantile(fresh, [0.025, 0.975])
    found = frechet_interval(features(500, 8, 7, shift=0.5), reference, num_draws=200, seed=0)
    assert found.high - found.low == pytest.approx(high - low, rel=0.35)


def test_draws_lie_above_the_estimate_and_the_bias_says_by_how_much() -> None:
    found = frechet_interval(features(100, 50, 1), moments(features(1000, 50, 2)), num_draws=30, seed=0)
    assert found.estimate < found.low < found.high
    assert found.bias > 0
    assert found.bias_corrected[0] < found.estimate < found.bias_corrected[1]


def test_an_interval_that_cannot_be_is_refused(reference: Moments) -> None:
    rows = features(100, 8, 1)
    for num_draws, level in [(0, 0.95), (10, 0.0), (10, 1.0)]:
        with pytest.raises(ValueError, match=f"level {level} from {num_draws} draws"):
            frechet_interval(rows, reference, num_draws=num_draws, seed=0, level=level)
    with pytest.raises(ValueError, match="covariance of 1 rows"):
        frechet_interval(rows[:1], reference, num_draws=5, seed=0)
    with pytest.raises(ValueError, match="7 and statistics of 8 dimensions"):
        frechet_interval(rows[:, :7], reference, num_draws=5, seed=0)
    rows[5, 5] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        frechet_interval(rows, reference, num_draws=5, seed=0)
