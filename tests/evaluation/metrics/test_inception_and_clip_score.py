"""Laws of scores without a reference: torch-fidelity's inception score, bounds, cosines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halation.evaluation.metrics.metric_computation import clip_score, inception_score
from halation.evaluation.metrics.moments import Features
from support import oracles


def logits(num: int, num_classes: int, seed: int, scale: float = 3.0) -> Features:
    return np.random.default_rng(seed).normal(0.0, scale, size=(num, num_classes)).astype(np.float32)


@pytest.mark.parametrize(("num", "num_splits"), [(1000, 10), (1003, 10), (57, 3), (12, 12)])
def test_torch_fidelity_finds_the_same_inception_score(num: int, num_splits: int) -> None:
    rows = logits(num, 1008, 1)
    metric = oracles.torch_fidelity("metric_isc").isc_features_to_metric(torch.from_numpy(rows), splits=num_splits)
    found = inception_score(rows, num_splits=num_splits)
    assert found.mean == pytest.approx(metric["inception_score_mean"], rel=1e-12)
    assert found.std == pytest.approx(metric["inception_score_std"], rel=1e-9, abs=1e-12)


def test_the_defaults_are_those_of_torch_fidelity() -> None:
    rows = logits(400, 20, 2)
    metric = oracles.torch_fidelity("metric_isc").isc_features_to_metric(torch.from_numpy(rows))
    assert inception_score(rows).mean == pytest.approx(metric["inception_score_mean"], rel=1e-12)


def test_sure_and_varied_images_score_the_number_of_classes() -> None:
    rows = 50.0 * np.eye(8)[np.arange(800) % 8]
    assert inception_score(rows, num_splits=1).mean == pytest.approx(8.0, rel=1e-9)


def test_images_of_one_class_score_one() -> None:
    assert inception_score(np.tile(logits(1, 8, 0), (50, 1))).mean == pytest.approx(1.0, rel=1e-12)


def test_a_class_that_no_image_has_adds_nothing() -> None:
    rows = logits(100, 8, 3).astype(np.float64)
    extended = np.concatenate([rows, np.full((100, 1), -1e5)], axis=1)
    assert inception_score(extended).mean == pytest.approx(inception_score(rows).mean, rel=1e-12)


def test_more_splits_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="10 splits of 9 rows"):
        inception_score(logits(9, 4, 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_have_no_score(bad: float) -> None:
    rows = logits(20, 4, 0)
    rows[3, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        inception_score(rows)
    with pytest.raises(ValueError, match="not finite"):
        clip_score(rows, logits(20, 4, 1))


def test_the_clip_score_is_the_mean_of_cosines_that_are_not_below_zero() -> None:
    images = np.array([[3.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    texts = np.array([[5.0, 0.0], [1.0, 0.0], [0.0, -7.0]])
    found = clip_score(images, texts)
    values = [100.0, 100.0 / np.sqrt(2.0), 0.0]
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert found.std == pytest.approx(np.std(values), rel=1e-12)
    assert found.num == 3


def test_the_clip_score_is_torchs_cosine() -> None:
    images, texts = logits(200, 512, 4), logits(200, 512, 5) + logits(200, 512, 4) * 0.2
    cosines = torch.nn.functional.cosine_similarity(torch.from_numpy(images), torch.from_numpy(texts))
    assert clip_score(images, texts).mean == pytest.approx(float(100 * cosines.clamp(min=0).mean()), rel=1e-5)


def test_captions_that_do_not_pair_with_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3\) and of texts of shape \(5, 3\)"):
        clip_score(np.ones((4, 3)), np.ones((5, 3)))
    with pytest.raises(ValueError, match="without rows"):
        clip_score(np.ones((0, 3)), np.ones((0, 3)))


def test_an_embedding_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="length 0"):
        clip_score(np.ones((4, 3)), np.zeros((4, 3)))
