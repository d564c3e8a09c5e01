"""Laws of precision, recall, density and coverage: torch-fidelity and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halation.evaluation.metrics.moments import Features
from halation.evaluation.metrics.nearest_neighbors import PrdcScores, prdc
from support import oracles


def features(num: int, dimensions: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Features:
    return np.random.default_rng(seed).normal(shift, scale, size=(num, dimensions)).astype(np.float32)


def by_hand(reference: Features, generated: Features, nearest_k: int) -> PrdcScores:
    """The definitions, a pair at a time."""

    def distance(x: Features, y: Features) -> float:
        return float(np.linalg.norm(x.astype(np.float64) - y.astype(np.float64)))

    def radius(rows: Features, index: int) -> float:
        return sorted(distance(rows[index], row) for number, row in enumerate(rows) if number != index)[nearest_k - 1]

    real = [radius(reference, index) for index in range(len(reference))]
    made = [radius(generated, index) for index in range(len(generated))]
    inside = np.array([[distance(x, y) <= real[i] for y in generated] for i, x in enumerate(reference)])
    inside_made = np.array([[distance(x, y) <= made[j] for j, y in enumerate(generated)] for x in reference])
    return PrdcScores(
        precision=float(inside.any(axis=0).mean()),
        recall=float(inside_made.any(axis=1).mean()),
        density=float(inside.sum() / (nearest_k * len(generated))),
        coverage=float(inside.any(axis=1).mean()),
        nearest_k=nearest_k,
    )


def assert_equal(found: PrdcScores, expected: PrdcScores) -> None:
    for name in ("precision", "recall", "density", "coverage", "nearest_k"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name


@pytest.mark.parametrize("nearest_k", [1, 3, 5])
@pytest.mark.parametrize("tile", [4, 7, 30, 2048])
def test_the_numbers_are_those_of_the_definitions_whatever_the_tile(nearest_k: int, tile: int) -> None:
    reference, generated = features(61, 6, 1), features(47, 6, 2, scale=0.8, shift=0.3)
    assert_equal(prdc(reference, generated, nearest_k=nearest_k, tile=tile), by_hand(reference, generated, nearest_k))


@pytest.mark.parametrize(("num", "num_generated", "dimensions"), [(700, 500, 16), (300, 2500, 8), (400, 400, 300)])
@pytest.mark.parametrize("nearest_k", [3, 5])
def test_torch_fidelity_finds_the_same_precision_and_recall(
    num: int, num_generated: int, dimensions: int, nearest_k: int
) -> None:
    reference = features(num, dimensions, 3)
    generated = features(num_generated, dimensions, 4, scale=0.85, shift=0.2)
    metric = oracles.torch_fidelity("metric_prc").prc_features_to_metric(
        torch.from_numpy(generated).double(), torch.from_numpy(reference).double(),
        prc_neighborhood=nearest_k, verbose=False
    )  # fmt: skip
    found = prdc(reference, generated, nearest_k=nearest_k)
    assert 0.0 < found.precision <= 1.0
    assert 0.0 < found.recall < 1.0
    assert found.precision == pytest.approx(metric["precision"], rel=1e-6)
    assert found.recall == pytest.approx(metric["recall"], rel=1e-6)


@pytest.mark.parametrize("tile", [100, 333, 2048])
def test_copies_of_the_reference_are_all_inside(tile: int) -> None:
    reference = features(500, 64, 5, shift=3.0)
    copies = reference[np.random.default_rng(0).permutation(500)]
    found = prdc(reference, copies, nearest_k=4, tile=tile)
    # A ball holds its own image and the four nearest, the farthest of them on its border.
    assert found == PrdcScores(precision=1.0, recall=1.0, density=5 / 4, coverage=1.0, nearest_k=4)


def test_strangers_are_all_outside() -> None:
    found = prdc(features(100, 8, 1), features(120, 8, 2, shift=50.0))
    assert found == PrdcScores(precision=0.0, recall=0.0, density=0.0, coverage=0.0, nearest_k=3)


def test_one_image_again_and_again_is_precise_and_covers_nothing() -> None:
    reference = features(300, 4, 1)
    found = prdc(reference, np.repeat(reference[:1], 50, axis=0))
    assert found.precision == 1.0
    assert found.recall == pytest.approx(1 / 300)
    assert found.coverage < 0.1


def test_a_distant_row_does_not_blur_the_others() -> None:
    reference, generated = features(80, 5, 1), features(70, 5, 2, shift=0.5)
    far = np.concatenate([reference, np.full((1, 5), 1e5, np.float32)])
    assert_equal(prdc(far, generated, tile=32), by_hand(far, generated, 3))


@pytest.mark.parametrize(("nearest_k", "num"), [(0, 10), (10, 10), (3, 3)])
def test_more_neighbours_than_rows_are_refused(nearest_k: int, num: int) -> None:
    with pytest.raises(ValueError, match=f"{nearest_k} neighbours in sets of {num} and 20 rows"):
        prdc(features(num, 4, 0), features(20, 4, 1), nearest_k=nearest_k)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_features_that_are_not_finite_are_in_no_neighbourhood(bad: float) -> None:
    generated = features(20, 4, 1)
    generated[7, 1] = bad
    with pytest.raises(ValueError, match="not finite"):
        prdc(features(20, 4, 0), generated)


def test_sets_of_other_dimensions_are_in_no_neighbourhood() -> None:
    with pytest.raises(ValueError, match=r"\(20, 4\) and \(20, 5\)"):
        prdc(features(20, 4, 0), features(20, 5, 0))
