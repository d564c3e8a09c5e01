"""How far a Frechet distance would move with other images from the same model: a bootstrap interval.

The distance of a resampled set needs its own covariance S1 each time, but the other side S2 = L L' stays. With centred rows X of the resampled
set the trace of the root of S1 S2 is the sum of the singular values of X L, scaled: features are turned into the coordinates X L once,
and a draw is then one Gram matrix, of rows or of columns, whichever is smaller, and its eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from halation.evaluation.metrics.frechet import GaussianStatistics, covariance_factor
from halation.evaluation.metrics.moments import Features, check_features, single_thread

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class BootstrapInterval:
    """Percentiles of the distance over resampled sets.

    A Frechet distance is biased upwards, the more so the fewer different rows a set has, and a resampled set has about 63 % of them. So all
    draws lie higher than the distance itself, by `bias` on average, and where rows are not many times the dimensions `low` may
    lie above `estimate`. The width is what to trust; `bias_corrected` is the interval with that bias taken off. Only one side is resampled: the
    interval says nothing about another reference.
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
    """Rows of `features` are drawn with replacement, as many as there are; a draw is a function of the seed and its number alone."""
    if num_draws < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"an interval of level {level} from {num_draws} draws")
    if len(features) < 2:
        raise ValueError(f"a covariance of {len(features)} rows")
    with single_thread():
        resampler = _FrechetResampler(check_features(features), other, device)
        estimate = resampler.distance(np.ones(len(features), dtype=np.int64))
        distances = [resampler.distance(_resample_counts(len(features), seed, number)) for number in range(num_draws)]
    tail = (1.0 - level) / 2.0
    low, high = (float(value) for value in np.quantile(distances, [tail, 1.0 - tail]))
    bias = float(np.mean(distances)) - estimate
    return BootstrapInterval(
        estimate=estimate, low=low, high=high, bias=bias, level=level, num_draws=num_draws, seed=seed
    )


def _resample_counts(num: int, seed: int, number: int) -> Counts:
    """How often each row is drawn."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, number], dtype=np.uint64)))
    return np.bincount(generator.integers(num, size=num), minlength=num)


class _FrechetResampler:
    """Rows relative to the other side's mean: as they are for the mean and the trace, and in coordinates in which the other is round."""

    def __init__(self, features: Features, other: GaussianStatistics, device: str) -> None:
        mean, covariance = (
            torch.from_numpy(np.ascontiguousarray(each, dtype=np.float64)).to(device)
            for each in (other.mean, other.covariance)
        )
        if features.shape[1] != len(mean):
            raise ValueError(f"features of {features.shape[1]} and statistics of {len(mean)} dimensions")
        self._rows = torch.from_numpy(features.astype(np.float64)).to(device) - mean
        self._squared_norms = self._rows.square().sum(dim=1)
        self._projected = self._rows @ covariance_factor(covariance)
        self._other_trace = float(covariance.diagonal().sum())

    def distance(self, counts: Counts) -> float:
        """Of the set in which each row is there so many times."""
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
