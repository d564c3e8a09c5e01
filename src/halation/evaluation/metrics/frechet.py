"""The Frechet distance between two Gaussians, which is what FID and its relatives report (Dowson and Landau 1982).

d^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2). The product S1 S2 is not symmetric, but with S1 = L1 L1' and S2 = L2 L2' its
eigenvalues are those of the symmetric C'C with C = L1' L2. The trace of its root is therefore the sum of the roots of the eigenvalues of
C'C, or the sum of the singular values of C: two Cholesky factors and one `eigvalsh` instead of a general matrix root.

An eigenvalue is known to about 1e-16 of the largest, its root to 1e-8 only. That is nothing for a few small ones and too much for a
thousand zeros, so where a covariance is singular its null space is cut off and singular values are taken, which have no such root.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from halation.evaluation.metrics.moments import Features, FloatArray, check_features, single_thread

PANEL_SIZE = 256
MIN_EIGENVALUE_RATIO = 1e-4
"""A covariance is told from no covariance at all by its lowest eigenvalue, as a share of the highest: rounding to float32 leaves 1e-7."""


class GaussianStatistics(Protocol):
    """A mean and a covariance: `Moments`, or `Gaussian` where somebody else saved them."""

    @property
    def mean(self) -> FloatArray: ...

    @property
    def covariance(self) -> FloatArray: ...


def frechet_distance(one: GaussianStatistics, other: GaussianStatistics, *, device: str = "cpu") -> float:
    """Singular covariances are fine; numbers that are not finite, and matrices that are no covariances, are a ValueError."""
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
    """From features that are fewer than their dimensions: no matrix larger than the number of rows is made.

    With centred rows X and S = X'X / (n - 1), the trace of the root of S1 S2 is the sum of the singular values of X1 X2', scaled.
    """
    if one.shape[1:] != other.shape[1:]:
        raise ValueError(f"features of shapes {one.shape} and {other.shape}")
    (mean_1, rows_1), (mean_2, rows_2) = _center_rows(one, device), _center_rows(other, device)
    with single_thread():
        traces = float(rows_1.square().sum()) + float(rows_2.square().sum())
        return _distance(mean_1, mean_2, traces, float(torch.linalg.svdvals(rows_1 @ rows_2.T).sum()))


def _center_rows(features: Features, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean, and rows whose products are the unbiased covariance."""
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
    """The trace of the root of the product."""
    triangles = _cholesky(one), _cholesky(other)
    if triangles[0] is None or triangles[1] is None:
        columns = [
            _low_rank_factor(matrix) if known is None else known
            for matrix, known in zip((one, other), triangles, strict=True)
        ]
        return float(torch.linalg.svdvals(columns[0].T @ columns[1]).sum())
    values = torch.linalg.eigvalsh(_lower_gram(_triangular_product(triangles[0], triangles[1])))
    return float(values.clamp(min=0.0).sqrt().sum())


def covariance_factor(covariance: torch.Tensor) -> torch.Tensor:
    """L with L L' = covariance, of as many columns as the matrix has rank."""
    triangle = _cholesky(covariance)
    return _low_rank_factor(covariance) if triangle is None else triangle


def _cholesky(covariance: torch.Tensor) -> torch.Tensor | None:
    """A lower triangle, or None where the matrix is singular: what is left of a column is then rounding, not a pivot."""
    triangle, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        return None
    rounding = len(covariance) * torch.finfo(covariance.dtype).eps * covariance.diagonal().max()
    return None if triangle.diagonal().square().min() <= rounding else triangle


def _low_rank_factor(covariance: torch.Tensor) -> torch.Tensor:
    """From eigenvectors, without those of the null space."""
    values, vectors = torch.linalg.eigh(covariance)
    lowest, highest = float(values[0]), float(values[-1])
    if lowest < -MIN_EIGENVALUE_RATIO * max(highest, 0.0) and lowest < 0:
        raise ValueError(f"a covariance with the eigenvalue {lowest:.3g}, the highest being {highest:.3g}")
    kept = values > len(values) * torch.finfo(values.dtype).eps * highest
    return vectors[:, kept] * values[kept].sqrt()


def _triangular_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """one' other for two lower triangles, without the products of their zeros: a third of the work."""
    product = torch.zeros_like(one)
    for start in range(0, len(one), PANEL_SIZE):
        end = min(start + PANEL_SIZE, len(one))
        product[:end, :end].addmm_(one[start:end, :end].T, other[start:end, :end])
    return product


def _lower_gram(factor: torch.Tensor) -> torch.Tensor:
    """The lower triangle of factor' factor, which is all that `eigvalsh` reads."""
    gram = torch.zeros_like(factor)
    for start in range(0, len(factor), PANEL_SIZE):
        end = min(start + PANEL_SIZE, len(factor))
        gram[start:end, :end] = factor[:, start:end].T @ factor[:, :end]
    return gram


def _distance(mean_1: torch.Tensor, mean_2: torch.Tensor, traces: float, root_trace: float) -> float:
    distance = float((mean_1 - mean_2).square().sum()) + traces - 2.0 * root_trace
    if not np.isfinite(distance):
        raise ValueError(f"a Frechet distance of {distance}")
    return max(0.0, distance)  # rounding may leave a set a hair below zero from itself
