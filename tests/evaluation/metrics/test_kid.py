"""Laws of the kernel distance: sum over pairs, torch-fidelity's number, 0 for equal sets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from halation.evaluation.metrics.kid import KernelDistance, kernel_distance
from halation.evaluation.metrics.moments import Features
from support import oracles


def features(num: int, dimensions: int, seed: int, shift: float = 0.0) -> Features:
    """Unlike each other but never below 0, as the features of a network after its last rectifier."""
    return np.abs(np.random.default_rng(seed).normal(shift, 1.0, size=(num, dimensions))).astype(np.float32)


def of_torch_fidelity(one: Features, other: Features, num_subsets: int, subset_size: int) -> tuple[float, float]:
    metric = oracles.torch_fidelity("metric_kid").kid_features_to_metric(
        torch.from_numpy(one).double(), torch.from_numpy(other).double(),
        kid_subsets=num_subsets, kid_subset_size=subset_size,
        rng_seed=2020, verbose=False,
    )  # fmt: skip
    return metric["kernel_inception_distance_mean"], metric["kernel_inception_distance_std"]


def test_the_distance_of_whole_sets_is_the_sum_over_pairs() -> None:
    one, other = features(7, 5, 8).astype(np.float64), features(7, 5, 9, shift=0.3).astype(np.float64)

    def kernel(x: Features, y: Features) -> float:
        return float((x @ y / 5 + 1) ** 3)

    pairs = list(itertools.permutations(range(7), 2))
    expected = sum(kernel(one[i], one[j]) + kernel(other[i], other[j]) for i, j in pairs) / len(pairs)
    expected -= 2 * np.mean([kernel(x, y) for x in one for y in other])
    found = kernel_distance(one, other, num_subsets=3, subset_size=7)
    assert found.mean == pytest.approx(expected, rel=1e-12)
    assert found.std == pytest.approx(0.0, abs=1e-12)
    assert (found.num_subsets, found.subset_size) == (3, 7)


@pytest.mark.parametrize(
    ("num_1", "num_2", "num_subsets", "subset_size"),
    [(1200, 1100, 30, 1000), (2500, 1300, 12, 1000), (3000, 3000, 5, 300), (700, 2100, 40, 251)],
)
def test_torch_fidelity_finds_the_same(num_1: int, num_2: int, num_subsets: int, subset_size: int) -> None:
    one, other = features(num_1, 32, 1), features(num_2, 32, 2, shift=0.2)
    found = kernel_distance(one, other, num_subsets=num_subsets, subset_size=subset_size)
    mean, std = of_torch_fidelity(one, other, num_subsets, subset_size)
    assert found.mean == pytest.approx(mean, rel=1e-9)
    assert found.std == pytest.approx(std, rel=1e-9)


def test_the_defaults_are_torch_fidelitys() -> None:
    one, other = features(1500, 8, 1), features(1500, 8, 2, shift=0.2)
    found = kernel_distance(one, other)
    metric = oracles.torch_fidelity("metric_kid").kid_features_to_metric(
        torch.from_numpy(one).double(), torch.from_numpy(other).double(), verbose=False
    )
    assert found.mean == pytest.approx(metric["kernel_inception_distance_mean"], rel=1e-9)
    assert found.std == pytest.approx(metric["kernel_inception_distance_std"], rel=1e-9)


def test_the_distance_grows_and_repeats_itself() -> None:
    one = features(600, 16, 10)
    results = [
        kernel_distance(one, features(600, 16, 11, shift=shift), num_subsets=20, subset_size=300)
        for shift in (0.0, 0.7, 1.4)
    ]
    noise = results[0].std
    assert abs(results[0].mean) < 3 * noise
    assert 5 * noise < results[1].mean < results[2].mean
    assert results[1] == kernel_distance(one, features(600, 16, 11, shift=0.7), num_subsets=20, subset_size=300)


def test_another_seed_draws_other_subsets() -> None:
    one, other = features(300, 8, 1), features(300, 8, 2)
    found: set[KernelDistance] = {
        kernel_distance(one, other, num_subsets=4, subset_size=50, seed=seed) for seed in (1, 2, 3)
    }
    assert len({each.mean for each in found}) == 3


@pytest.mark.parametrize(("num_subsets", "subset_size"), [(100, 1000), (0, 10), (5, 1), (5, 301)])
def test_subsets_that_cannot_be_drawn_are_refused(num_subsets: int, subset_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_subsets} subsets of {subset_size} rows from 300 and 400"):
        kernel_distance(features(300, 4, 0), features(400, 4, 1), num_subsets=num_subsets, subset_size=subset_size)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_features_that_are_not_finite_have_no_distance(bad: float) -> None:
    one, other = features(30, 4, 0), features(30, 4, 1)
    other[29, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        kernel_distance(one, other, num_subsets=2, subset_size=10)


def test_features_too_large_to_be_cubed_have_no_distance() -> None:
    with pytest.raises(ValueError, match="kernel distance that is not finite"):
        kernel_distance(np.full((9, 2), 1e200), np.ones((9, 2)), num_subsets=1, subset_size=5)


def test_sets_of_other_dimensions_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"\(30, 4\) and \(30, 5\)"):
        kernel_distance(features(30, 4, 0), features(30, 5, 1), num_subsets=2, subset_size=10)


@pytest.mark.parametrize(("num_subsets", "subset_size"), [(20, 600), (2, 500)])
def test_the_number_of_threads_does_not_change_a_bit(num_subsets: int, subset_size: int) -> None:
    one, other = features(800, 64, 1), features(900, 64, 2)
    before = torch.get_num_threads()
    found = set()
    try:
        for num in (1, 2):
            torch.set_num_threads(num)
            found.add(kernel_distance(one, other, num_subsets=num_subsets, subset_size=subset_size))
            assert torch.get_num_threads() == num
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
