"""Laws of the moments: numpy's numbers, parts merge to the whole, and a stream has the bits of one array."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from halation.evaluation.metrics.moments import BLOCK_SIZE, Features, Moments, merge_moments, moments


def features(num: int, dimensions: int, seed: int, shift: float = 0.0) -> Features:
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(dimensions, dimensions)) / np.sqrt(dimensions)
    return (generator.normal(size=(num, dimensions)) @ mixing + shift).astype(np.float32)


def assert_same_bits(one: Moments, other: Moments) -> None:
    assert one.num == other.num
    np.testing.assert_array_equal(one.mean, other.mean)
    np.testing.assert_array_equal(one.scatter, other.scatter)


@pytest.mark.parametrize("num", [2, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 7])
def test_moments_are_numpys(num: int) -> None:
    rows = features(num, 8, 0, shift=100.0)
    found = moments(rows)
    np.testing.assert_allclose(found.mean, rows.astype(np.float64).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(rows.astype(np.float64), rowvar=False), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cuts", [(1,), (5, 2000), (1024, 2048), (17, 18, 2999)])
def test_parts_merge_to_the_whole(cuts: tuple[int, ...]) -> None:
    rows = features(3000, 16, 1, shift=3.0)
    whole = moments(rows)
    parts = merge_moments(moments(part) for part in np.split(rows, cuts))
    assert parts.num == whole.num
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-9)
    np.testing.assert_allclose(parts.scatter, whole.scatter, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 7, 1000, 1024, 1025, 5000])
def test_a_stream_of_arrays_of_any_size_has_the_bits_of_one_array(size: int) -> None:
    rows = features(2500, 16, 2)

    def stream() -> Iterator[Features]:
        yield from (rows[start : start + size] for start in range(0, len(rows), size))

    assert_same_bits(moments(stream()), moments(rows))


def test_the_bits_do_not_depend_on_how_the_array_lies_in_memory() -> None:
    rows = features(2500, 16, 2)
    assert_same_bits(moments(np.asfortranarray(rows)), moments(rows))
    assert_same_bits(moments(rows.astype(np.float64)), moments(rows))


def test_a_stream_may_have_parts_without_rows_and_may_be_written_over() -> None:
    rows = features(1500, 4, 3)
    reused = np.empty((300, 4), np.float32)

    def stream() -> Iterator[Features]:
        for start in range(0, 1500, 300):
            reused[:] = rows[start : start + 300]
            yield reused
            yield reused[:0]

    assert_same_bits(moments(stream()), moments(rows))


DIGEST = """
import hashlib
import numpy as np
from halation.evaluation.metrics.moments import moments
found = moments(np.random.default_rng(0).normal(1.0, 1.0, size=(1500, 400)).astype(np.float32))
print(hashlib.sha256(found.mean.tobytes() + found.scatter.tobytes()).hexdigest())
"""


def test_the_number_of_threads_changes_no_bit_of_the_moments() -> None:
    found = []
    for num in ("1", "2", "3"):
        environment = os.environ | {"OMP_NUM_THREADS": num, "OPENBLAS_NUM_THREADS": num, "MKL_NUM_THREADS": num}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        found.append(done.stdout)
    assert len(found[0]) == 65
    assert len(set(found)) == 1


def test_moments_leave_the_features_as_they_were() -> None:
    rows = features(100, 4, 0).astype(np.float64)
    before = rows.copy()
    moments(rows)
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [3, 1999])
def test_features_that_are_not_finite_are_refused(bad: float, row: int) -> None:
    rows = features(2000, 4, 0)
    rows[row, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        moments(rows)


@pytest.mark.parametrize("shape", [(0, 4), (5,), (2, 3, 4), (3, 0)])
def test_what_is_not_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"features (of shape|without rows)"):
        moments(np.zeros(shape))


def test_no_features_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        moments(iter([]))


def test_sets_of_other_dimensions_cannot_be_one() -> None:
    with pytest.raises(ValueError, match="4 and 5 dimensions"):
        moments([np.zeros((3, 4)), np.zeros((3, 5))])
    with pytest.raises(ValueError, match="4 and of 5 dimensions"):
        merge_moments([moments(np.zeros((3, 4))), moments(np.zeros((3, 5)))])


def test_one_row_has_a_mean_and_no_covariance() -> None:
    one = moments(np.array([[1.0, 2.0]]))
    np.testing.assert_array_equal(one.mean, [1.0, 2.0])
    with pytest.raises(ValueError, match="a covariance of 1 rows"):
        _ = one.covariance
