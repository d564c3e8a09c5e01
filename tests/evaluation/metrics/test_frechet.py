"""Laws of the Frechet distance: the formula, other tools' numbers, singular covariances."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.linalg
import torch

from halation.evaluation.metrics.frechet import GaussianStatistics, frechet_distance, frechet_distance_from_features
from halation.evaluation.metrics.moments import Features, Gaussian, Moments, moments
from support import oracles


def features(num: int, dimensions: int, seed: int, shift: float = 0.0) -> Features:
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(dimensions, dimensions)) / np.sqrt(dimensions)
    return (generator.normal(size=(num, dimensions)) @ mixing + shift).astype(np.float32)


def by_matrix_root(one: GaussianStatistics, other: GaussianStatistics) -> float:
    """The textbook's way: a general root of the product."""
    root = scipy.linalg.sqrtm(one.covariance @ other.covariance).real
    means = np.square(one.mean - other.mean).sum()
    return float(means + np.trace(one.covariance) + np.trace(other.covariance) - 2 * np.trace(root))


def test_a_set_is_at_no_distance_from_itself() -> None:
    for num in (500, 40):
        one = moments(features(num, 64, 3))
        assert 0.0 <= frechet_distance(one, one) < 1e-9


def test_gaussians_along_the_axes_are_as_far_apart_as_the_formula_says() -> None:
    generator = np.random.default_rng(0)
    means, scales = generator.normal(size=(2, 12)), generator.uniform(0.1, 3.0, size=(2, 12))
    one, other = (Gaussian(mean=mean, covariance=np.diag(scale**2)) for mean, scale in zip(means, scales, strict=True))
    expected = np.square(means[0] - means[1]).sum() + np.square(scales[0] - scales[1]).sum()
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-12)


def test_turning_and_moving_both_gaussians_changes_nothing() -> None:
    generator = np.random.default_rng(1)
    turn = np.linalg.qr(generator.normal(size=(9, 9))).Q
    one, other = features(200, 9, 1).astype(np.float64), features(300, 9, 2, shift=0.4).astype(np.float64)
    expected = frechet_distance(moments(one), moments(other))
    assert frechet_distance(moments(one @ turn + 7), moments(other @ turn + 7)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("dimensions", "num"), [(64, 500), (64, 40), (256, 100), (257, 600), (768, 1500), (768, 500)])
def test_the_distance_is_that_of_the_matrix_root_also_where_covariances_are_singular(dimensions: int, num: int) -> None:
    one, other = moments(features(num, dimensions, 4)), moments(features(num + 11, dimensions, 5, shift=0.2))
    found = frechet_distance(one, other)
    assert found == pytest.approx(by_matrix_root(one, other), rel=1e-6)
    assert frechet_distance(other, one) == pytest.approx(found, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("num", [5000, 1000])
def test_the_distance_is_that_of_the_matrix_root_at_the_size_of_fid(num: int) -> None:
    one, other = moments(features(num, 2048, 4)), moments(features(num, 2048, 5, shift=0.2))
    assert frechet_distance(one, other) == pytest.approx(by_matrix_root(one, other), rel=1e-6)


def rotated_diagonals(dimensions: int, rank_1: int, rank_2: int) -> tuple[Gaussian, Gaussian, float]:
    """Two covariances with equal eigenvectors, one or both of lower rank, and their exact distance."""
    generator = np.random.default_rng(2)
    turn = np.linalg.qr(generator.normal(size=(dimensions, dimensions))).Q
    scales = generator.uniform(0.5, 2.0, size=(2, dimensions))
    scales[0, rank_1:], scales[1, rank_2:] = 0.0, 0.0
    one, other = (Gaussian(mean=np.zeros(dimensions), covariance=turn * scale**2 @ turn.T) for scale in scales)
    return one, other, float(np.square(scales[0] - scales[1]).sum())


@pytest.mark.parametrize(("rank_1", "rank_2"), [(300, 300), (300, 100), (100, 300), (100, 100), (80, 100), (1, 300)])
def test_a_null_space_adds_no_rounding_to_the_distance(rank_1: int, rank_2: int) -> None:
    one, other, expected = rotated_diagonals(300, rank_1, rank_2)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-11)


def test_features_that_never_move_are_at_the_distance_of_the_others() -> None:
    rows, others = features(400, 20, 6), features(300, 20, 7, shift=0.3)
    expected = frechet_distance(moments(rows), moments(others))
    still = [np.concatenate([each, np.ones((len(each), 3), np.float32)], axis=1) for each in (rows, others)]
    assert frechet_distance(moments(still[0]), moments(still[1])) == pytest.approx(expected, rel=1e-9)
    constant = moments(np.ones((5, 20)))
    assert frechet_distance(constant, constant) == 0.0
    apart = np.square(constant.mean - moments(rows).mean).sum() + np.trace(moments(rows).covariance)
    assert frechet_distance(constant, moments(rows)) == pytest.approx(apart, rel=1e-9)


def test_statistics_that_were_saved_in_float32_are_near_their_distance() -> None:
    one, other = moments(features(60, 100, 8)), moments(features(80, 100, 9, shift=0.5))
    rounded = [
        Gaussian(mean=each.mean, covariance=each.covariance.astype(np.float32).astype(np.float64))
        for each in (one, other)
    ]
    assert frechet_distance(*rounded) == pytest.approx(frechet_distance(one, other), rel=1e-3)


def test_few_rows_give_the_distance_of_their_moments() -> None:
    one, other = features(30, 200, 6), features(45, 200, 7, shift=0.1)
    assert frechet_distance_from_features(one, other) == pytest.approx(
        frechet_distance(moments(one), moments(other)), rel=1e-9
    )


def test_the_number_of_threads_changes_nothing_and_stays() -> None:
    one, other = moments(features(800, 400, 1)), moments(features(800, 400, 2))
    few = features(100, 400, 3), features(120, 400, 4)
    before = torch.get_num_threads()
    found = []
    try:
        for num in (1, 2):
            torch.set_num_threads(num)
            found.append((frechet_distance(one, other), frechet_distance_from_features(*few)))
            assert torch.get_num_threads() == num
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_statistics_that_are_not_finite_are_refused(bad: float) -> None:
    good = moments(features(50, 8, 0))
    mean, covariance = good.mean.copy(), good.covariance
    mean[2] = bad
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(good, Gaussian(mean=mean, covariance=covariance))
    covariance[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(Gaussian(mean=good.mean, covariance=covariance), good)
    rows = features(5, 8, 0)
    rows[1, 1] = bad
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance_from_features(features(5, 8, 1), rows)


def test_a_distance_too_large_for_a_number_is_refused() -> None:
    far = Gaussian(mean=np.full(3, 1e200), covariance=np.eye(3))
    with pytest.raises(ValueError, match="Frechet distance of inf"):
        frechet_distance(far, Gaussian(mean=np.zeros(3), covariance=np.eye(3)))


def test_what_is_no_covariance_is_refused() -> None:
    good = Gaussian(mean=np.zeros(3), covariance=np.eye(3))
    for covariance, words in [
        (np.diag([1.0, 1.0, -0.5]), "eigenvalue -0.5"),
        (-np.eye(3), "eigenvalue -1"),
        (np.eye(4), r"shape \(4, 4\) for a mean of 3"),
        (np.ones((3, 2)), r"shape \(3, 2\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            frechet_distance(good, Gaussian(mean=np.zeros(3), covariance=covariance))


def test_sets_of_other_dimensions_have_no_distance() -> None:
    with pytest.raises(ValueError, match="3 and of 4 dimensions"):
        frechet_distance(moments(features(9, 3, 0)), moments(features(9, 4, 0)))
    with pytest.raises(ValueError, match=r"\(9, 3\) and \(9, 4\)"):
        frechet_distance_from_features(features(9, 3, 0), features(9, 4, 0))


def test_one_row_has_no_distance() -> None:
    with pytest.raises(ValueError, match="a covariance of 1 rows"):
        frechet_distance_from_features(features(1, 3, 0), features(9, 3, 0))
    with pytest.raises(ValueError, match="a covariance of 1 rows"):
        frechet_distance(Moments(num=1, mean=np.zeros(3), scatter=np.zeros((3, 3))), moments(features(9, 3, 0)))


@pytest.mark.parametrize("num", [600, 60])
def test_other_tools_find_the_same_distance(num: int) -> None:
    rows = [features(num, 128, seed, shift=0.1 * seed).astype(np.float64) for seed in (1, 2)]
    found = frechet_distance(moments(rows[0]), moments(rows[1]))
    means, covariances = [each.mean(axis=0) for each in rows], [np.cov(each, rowvar=False) for each in rows]
    fid_score, metric_fid = oracles.pytorch_fid("fid_score"), oracles.torch_fidelity("metric_fid")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pytorch-fid asks scipy for an argument that will go
        of_pytorch_fid = fid_score.calculate_frechet_distance(means[0], covariances[0], means[1], covariances[1])
    assert found == pytest.approx(of_pytorch_fid, rel=1e-6)
    statistics = [metric_fid.fid_features_to_statistics(torch.from_numpy(each)) for each in rows]
    of_fidelity = metric_fid.fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert found == pytest.approx(of_fidelity, rel=1e-6)


@pytest.mark.parametrize("num", [600, 60])
def test_torchmetrics_finds_the_same_distance(num: int) -> None:
    rows = [features(num, 64, seed, shift=0.1 * seed) for seed in (1, 2)]
    metric = oracles.torchmetrics("image.fid").FrechetInceptionDistance(
        feature=torch.nn.Identity(), input_img_size=(64,)
    )
    metric.set_dtype(torch.float64)
    for each, real in zip(rows, (True, False), strict=True):
        metric.update(torch.from_numpy(each).double(), real=real)
    assert frechet_distance(moments(rows[0]), moments(rows[1])) == pytest.approx(float(metric.compute()), rel=1e-5)
