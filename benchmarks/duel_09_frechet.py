"""Duel 9: the Frechet distance of two sets of moments, against general matrix methods.

pytorch-fid, clean-fid and edm2 call scipy's `sqrtm`; torchmetrics and torch-fidelity compute the general eigenvalues of
the product. All sides start from the same means and covariances in float64. The peers use all cores, ours uses one
thread on a CPU and also runs on a GPU if there is one. The limit is the reduction to tridiagonal form, 4/3 n^3
operations at the speed of a matrix product.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import scipy.linalg
import torch

from benchmarks import measure
from halation.evaluation.metrics.frechet import frechet_distance, frechet_distance_from_features
from halation.evaluation.metrics.moments import Features, Moments, moments

MOST_DIFFERENCE = 1e-6
"""Maximum relative difference between two sides."""


@dataclass(frozen=True, kw_only=True)
class Case:
    num: int
    """Images on each side; with fewer images than features, the covariances are singular."""
    num_features: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.num_features} features of {self.num} images"


FULL = (
    Case(num=5000, num_features=2048, rounds=5),
    Case(num=1000, num_features=2048, rounds=3),
    Case(num=5000, num_features=768, rounds=5),
    Case(num=1000, num_features=64, rounds=9),
)
SMALL = (Case(num=1000, num_features=512, rounds=3), Case(num=200, num_features=512, rounds=3))


def features(case: Case, seed: int) -> Features:
    """Return features like those of a network: non-negative, correlated, of decreasing scale."""
    generator = np.random.default_rng(seed)
    common = np.random.default_rng(0).normal(size=(case.num_features, case.num_features)) / np.sqrt(case.num_features)
    strength = np.geomspace(1.0, 0.02, case.num_features)
    rows = generator.normal(0.1 * seed, 1.0, size=(case.num, case.num_features)) @ common * strength
    return np.maximum(rows + 0.3, 0.0).astype(np.float32)


def by_scipy(one: Moments, other: Moments) -> float:
    return _distance(one, other, float(np.trace(scipy.linalg.sqrtm(one.covariance @ other.covariance).real)))


def by_general_eigenvalues(one: Moments, other: Moments) -> float:
    product = torch.from_numpy(one.covariance) @ torch.from_numpy(other.covariance)
    return _distance(one, other, float(torch.linalg.eigvals(product).sqrt().real.sum()))


def _distance(one: Moments, other: Moments, root_trace: float) -> float:
    means = float(np.square(one.mean - other.mean).sum())
    return means + float(np.trace(one.covariance) + np.trace(other.covariance)) - 2.0 * root_trace


def operations_per_s(device: str) -> float:
    """Return the operations per second of a float64 matrix product, on one thread of a CPU."""
    size = 4096 if device == "cuda" else 1024
    matrix = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return 2 * size**3 / statistics.median([measure.seconds(lambda: matrix @ matrix) for _ in range(5)])
    finally:
        torch.set_num_threads(before)


def compare(case: Case, devices: dict[str, float]) -> list[measure.Row]:
    """Compare all sides; `devices` maps each device to its operations per second."""
    rows = features(case, 1), features(case, 2)
    one, other = moments(rows[0]), moments(rows[1])
    peers: dict[str, Callable[[], float]] = {
        "scipy sqrtm": partial(by_scipy, one, other),
        "general eigenvalues": partial(by_general_eigenvalues, one, other),
    }
    ours: dict[str, Callable[[], float]] = {
        device: partial(frechet_distance, one, other, device=device) for device in devices
    }
    if case.num < case.num_features:
        ours["cpu, from the features"] = partial(frechet_distance_from_features, *rows)
    values = {name: work() for name, work in (ours | peers).items()}
    turns: dict[str, Callable[[], float]] = {
        name: partial(measure.seconds, work) for name, work in (ours | peers).items()
    }
    middle = measure.medians(measure.interleaved(turns, case.rounds))
    found = []
    for mine in ours:
        limit = 4 / 3 * case.num_features**3 / devices[mine] if case.num > case.num_features else None
        for peer in peers:
            difference = abs(values[mine] / values[peer] - 1.0)
            if difference > MOST_DIFFERENCE:
                raise SystemExit(f"{case.name}: {mine} finds {values[mine]!r}, {peer} {values[peer]!r}")
            found.append(
                measure.Row(
                    case=f"{case.name}, {mine} : {peer}", ours=middle[mine], peer=middle[peer], unit="s", limit=limit,
                    check=f"distance {values[mine]:.6g}, relative difference {difference:.1e}", equality="E1",
                )
            )  # fmt: skip
        measure.say(f"{case.name}, {mine}: {middle[mine]:.4g} s")
    return found


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    devices = {device: operations_per_s(device) for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))}
    rows = [row for case in (SMALL if asked.size == "small" else FULL) for row in compare(case, devices)]
    speeds = {f"{device}_float64_gflops": round(speed / 1e9, 1) for device, speed in devices.items()}
    report = measure.Report(name="duel_09_frechet", rows=tuple(rows), facts=measure.machine() | speeds)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    main()
