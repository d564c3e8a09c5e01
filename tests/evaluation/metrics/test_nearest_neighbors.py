"""Laws of nearest and farthest rows: the definition for any tile size; a copy is at 0."""

from __future__ import annotations

import numpy as np
import pytest

from halation.evaluation.metrics.moments import Features
from halation.evaluation.metrics.nearest_neighbors import MAX_CPU_MULTIPLY_ADDS, find_extremes, nearest_distances


def features(num: int, seed: int, shift: float = 0.0) -> Features:
    return np.random.default_rng(seed).normal(shift, 1.0, size=(num, 12)).astype(np.float32)


@pytest.mark.parametrize("tile", [1, 7, 50, 2048])
def test_distances_are_those_of_the_definition_whatever_the_tile(tile: int) -> None:
    reference, generated = features(50, 1), features(31, 2, shift=0.5)
    differences = generated[:, None].astype(np.float64) - reference[None].astype(np.float64)
    expected = np.sqrt((differences**2).sum(axis=2)).min(axis=1)
    np.testing.assert_allclose(nearest_distances(reference, generated, tile=tile), expected, rtol=1e-12)
    assert (
        nearest_distances(reference, generated, tile=tile).tobytes()
        == nearest_distances(reference, generated).tobytes()
    )


def test_a_copy_far_from_the_origin_comes_first_and_an_outlier_last() -> None:
    """A copy far from the origin has distance 0 and comes first; an outlier comes last."""
    reference, generated = features(40, 3, shift=1000.0), features(30, 4, shift=1000.0)
    generated[17] = reference[33]
    generated[5] = 2000.0
    found = find_extremes(reference, generated, name=lambda index: f"{index}.png", captions=None, num_shown=4)
    assert found["nearest"][0] == {"index": 17, "name": "17.png", "caption": None, "distance": 0.0}
    assert found["farthest"][0]["index"] == 5
    assert [len(found[side]) for side in ("nearest", "farthest")] == [4, 4]
    distances = [row["distance"] for row in found["nearest"] + found["farthest"][::-1]]
    assert distances == sorted(distances)


def test_equal_distances_come_in_the_order_of_their_index_with_their_captions() -> None:
    reference = features(5, 5)
    found = find_extremes(reference, reference[[2, 2, 2]], name=str, captions=["a", "b", "c"])
    for side in ("nearest", "farthest"):
        assert [(row["index"], row["caption"], row["distance"]) for row in found[side]] == [
            (0, "a", 0.0),
            (1, "b", 0.0),
            (2, "c", 0.0),
        ]


def test_what_would_take_long_without_a_gpu_is_left_out_and_says_so() -> None:
    wide = np.broadcast_to(np.float32(0), (int(MAX_CPU_MULTIPLY_ADDS**0.5), 1000))
    assert "without a GPU" in find_extremes(wide, wide[:2000], name=str, captions=None)["left_out"]


def test_features_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        nearest_distances(features(5, 1), features(5, 2)[:, :3])
