"""The Frechet distance between two Gaussians, as FID reports it, and its bootstrap.

The formula is that of Dowson and Landau 1982:
d^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2). The product S1 S2 is not symmetric, but with S1 = L1 L1' and
S2 = L2 L2' its eigenvalues are those of the symmetric C'C with C = L1' L2. The trace of its root is therefore the sum
of the roots of the eigenvalues of C'C, or the sum of the singular values of C: two Cholesky factors and one `eigvalsh`
instead of a general matrix root.

An eigenvalue is accurate to about 1e-16 of the largest, but its root only to 1e-8. This is negligible for a few small
eigenvalues and too much for a thousand zeros. If a covariance is singular, its null space is therefore removed and
singular values are computed, which need no root.

The bootstrap resamples one side. Each resampled set has its own covariance S1, but the other side S2 = L L' is fixed.
With centred rows X of the resampled set, the trace of the root of S1 S2 is the sum of the singular values of X L,
scaled. The features are projected to X L once; each resampling then needs one Gram matrix, of rows or of columns,
whichever is smaller, and its eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from halation.evaluation.metrics.moments import Features, FloatArray, check_features, single_thread

Counts = npt.NDArray[np.int64]
PANEL_SIZE = 256
MIN_EIGENVALUE_RATIO = 1e-4
"""Limit for negative eigenvalues of a covariance, relative to the highest; rounding to float32 leaves 1e-7."""


class GaussianStatistics(Protocol):
    """A mean and a covariance: `Moments`, or `Gaussian` if another tool saved them."""

    @property
    def mean(self) -> FloatArray: ...

    @property
    def covariance(self) -> FloatArray: ...


def frechet_distance(one: GaussianStatistics, other: GaussianStatistics, *, device: str = "cpu") -> float:
    """Return the Frechet distance; covariances may be singular.

    Raises ValueError for values that are not finite and for matrices that are not covariances.
    """
    means = [_tensor(each.mean, device) for each in (one, other)]
    covariances = [_tensor(each.covariance, device) for each in (one, other)]
    for mean, covariance in zip(means, covariances, strict=True):
        if covariance.shape != (len(mean), len(mean)):
            raise ValueError(f"a covariance of shape {tuple(covariance.shape)} for a mean of {len(mean)} dimensions")
    if len(means[0]) != len(means[1]):
        raise ValueError(f"statistics of {len(means[0])} and of {len(means[1])} dimensions")
    with single_thread():
        traces = sum(float(covariance.diagonal().sum()) for covariance in covariances)
        return _distance(means[0], means[1], traces, _trace_sqrt_product(*covariances))


def frechet_distance_from_features(one: Features, other: Features, *, device: str = "cpu") -> float:
    """Return the Frechet distance of two sets with fewer rows than dimensions.

    No matrix is larger than the number of rows. With centred rows X and S = X'X / (n - 1), the trace of the root of
    S1 S2 is the sum of the singular values of X1 X2', scaled.
    """
    if one.shape[1:] != other.shape[1:]:
        raise ValueError(f"features of shapes {one.shape} and {other.shape}")
    (mean_1, rows_1), (mean_2, rows_2) = _center_rows(one, device), _center_rows(other, device)
    with single_thread():
        traces = float(rows_1.square().sum()) + float(rows_2.square().sum())
        return _distance(mean_1, mean_2, traces, float(torch.linalg.svdvals(rows_1 @ rows_2.T).sum()))


def _center_rows(features: Features, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean, and rows X such that X'X is the unbiased covariance."""
    if len(features) < 2:
        raise ValueError(f"a covariance of {len(features)} rows")
    values = check_features(features).astype(np.float64)
    mean = values.mean(axis=0)
    return _tensor(mean, device), _tensor((values - mean) / np.sqrt(len(values) - 1), device)


def _tensor(array: FloatArray, device: str) -> torch.Tensor:
    if not np.isfinite(array).all():
        raise ValueError("statistics that are not finite")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(device)


def _trace_sqrt_product(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the trace of the square root of the product."""
    triangles = _cholesky(one), _cholesky(other)
    if triangles[0] is None or triangles[1] is None:
        columns = [
            _low_rank_factor(matrix) if known is None else known
            for matrix, known in zip((one, other), triangles, strict=True)
        ]
        return float(torch.linalg.svdvals(columns[0].T @ columns[1]).sum())
    values = torch.linalg.eigvalsh(_lower_gram(_triangular_product(triangles[0], triangles[1])))
    return float(values.clamp(min=0.0).sqrt().sum())


def _cholesky(covariance: torch.Tensor) -> torch.Tensor | None:
    """Return the lower Cholesky factor, or None if the matrix is numerically singular.

    A pivot at the level of rounding errors counts as zero.
    """
    triangle, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        return None
    rounding = len(covariance) * torch.finfo(covariance.dtype).eps * covariance.diagonal().max()
    return None if triangle.diagonal().square().min() <= rounding else triangle


def _low_rank_factor(covariance: torch.Tensor) -> torch.Tensor:
    """Return a factor from eigenvectors, without those of the null space."""
    values, vectors = torch.linalg.eigh(covariance)
    lowest, highest = float(values[0]), float(values[-1])
    if lowest < -MIN_EIGENVALUE_RATIO * max(highest, 0.0) and lowest < 0:
        raise ValueError(f"a covariance with the eigenvalue {lowest:.3g}, the highest being {highest:.3g}")
    kept = values > len(values) * torch.finfo(values.dtype).eps * highest
    return vectors[:, kept] * values[kept].sqrt()


def _triangular_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return one' other for two lower triangles, skipping their zeros: a third of the work."""
    product = torch.zeros_like(one)
    for start in range(0, len(one), PANEL_SIZE):
        end = min(start + PANEL_SIZE, len(one))
        product[:end, :end].addmm_(one[start:end, :end].T, other[start:end, :end])
    return product


def _lower_gram(factor: torch.Tensor) -> torch.Tensor:
    """Return the lower triangle of factor' factor, the only part that `eigvalsh` reads."""
    gram = torch.zeros_like(factor)
    for start in range(0, len(factor), PANEL_SIZE):
        end = min(start + PANEL_SIZE, len(factor))
        gram[start:end, :end] = factor[:, start:end].T @ factor[:, :end]
    return gram


def _distance(mean_1: torch.Tensor, mean_2: torch.Tensor, traces: float, root_trace: float) -> float:
    distance = float((mean_1 - mean_2).square().sum()) + traces - 2.0 * root_trace
    if not np.isfinite(distance):
        raise ValueError(f"a Frechet distance of {distance}")
    return max(0.0, distance)  # rounding may give slightly negative distances


@dataclass(frozen=True, kw_only=True)
class BootstrapInterval:
    """Percentiles of the distance over resampled sets.

    A Frechet distance is biased upwards, more so with fewer distinct rows, and a resampled set has about 63 % of them.
    All resampled distances are therefore higher than the distance itself, by `bias` on average, and `low` may be above
    `estimate` unless there are many more rows than dimensions. The width is reliable; `bias_corrected` is the interval
    without the bias. Only one side is resampled: the interval does not cover the choice of the reference.
    """

    estimate: float
    low: float
    high: float
    bias: float
    level: float
    num_draws: int
    seed: int

    @property
    def bias_corrected(self) -> tuple[float, float]:
        return self.low - self.bias, self.high - self.bias


def frechet_interval(
    features: Features,
    other: GaussianStatistics,
    *,
    num_draws: int,
    seed: int,
    level: float = 0.95,
    device: str = "cpu",
) -> BootstrapInterval:
    """Return a bootstrap interval of the Frechet distance.

    Each resampling draws len(features) rows with replacement; it depends only on the seed and its number.
    """
    if num_draws < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"an interval of level {level} from {num_draws} draws")
    if len(features) < 2:
        raise ValueError(f"a covariance of {len(features)} rows")
    with single_thread():
        resampler = _FrechetResampler(check_features(features), other, device)
        estimate = resampler.distance(np.ones(len(features), dtype=np.int64))
        distances = []
        num = len(features)
        for number in range(num_draws):
            generator = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
            counts = np.bincount(generator.integers(num, size=num), minlength=num)
            distances.append(resampler.distance(counts))
    tail = (1.0 - level) / 2.0
    low, high = (float(value) for value in np.quantile(distances, [tail, 1.0 - tail]))
    bias = float(np.mean(distances)) - estimate
    return BootstrapInterval(
        estimate=estimate, low=low, high=high, bias=bias, level=level, num_draws=num_draws, seed=seed
    )


class _FrechetResampler:
    """Computes distances of resampled rows.

    Holds the rows relative to the mean of the other side, and their projection by a factor of its covariance.
    """

    def __init__(self, features: Features, other: GaussianStatistics, device: str) -> None:
        mean, covariance = (
            torch.from_numpy(np.ascontiguousarray(each, dtype=np.float64)).to(device)
            for each in (other.mean, other.covariance)
        )
        if features.shape[1] != len(mean):
            raise ValueError(f"features of {features.shape[1]} and statistics of {len(mean)} dimensions")
        self._rows = torch.from_numpy(features.astype(np.float64)).to(device) - mean
        self._squared_norms = self._rows.square().sum(dim=1)
        triangle = _cholesky(covariance)
        self._projected = self._rows @ (_low_rank_factor(covariance) if triangle is None else triangle)
        self._other_trace = float(covariance.diagonal().sum())

    def distance(self, counts: Counts) -> float:
        """Return the distance of the set that contains each row `counts` times."""
        weights = torch.from_numpy(counts).to(self._rows)
        num = float(weights.sum())
        shift = (weights @ self._rows) / num
        between_means = float(shift.square().sum())
        trace = (float(weights @ self._squared_norms) - num * between_means) / (num - 1)
        is_drawn = weights > 0
        rows, weights = self._projected[is_drawn], weights[is_drawn]
        rows = (rows - (weights @ rows) / num) * (weights / (num - 1)).sqrt()[:, None]
        gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
        root_trace = float(torch.linalg.eigvalsh(gram).clamp(min=0.0).sqrt().sum())
        distance = between_means + trace + self._other_trace - 2.0 * root_trace
        if not np.isfinite(distance):
            raise ValueError(f"a Frechet distance of {distance}")
        return max(0.0, distance)
