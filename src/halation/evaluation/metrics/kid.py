"""Kernel Inception Distance: the squared MMD with a cubic kernel over random subsets.

Binkowski et al. 2018. The sum of a kernel matrix over a subset is s' K s with the subset's indicator s. In small sets,
a row is in many subsets, and the kernel of every pair is computed once for all of them, in blocks. In large sets, the
kernel is computed for the pairs of each subset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from halation.evaluation.metrics.moments import Features, check_features, single_thread

NUM_SUBSETS, SUBSET_SIZE, SEED = 100, 1000, 2020
BLOCK_SIZE, PANEL_SIZE = 1024, 250
"""Rows of a block, for all pairs and for the pairs of one subset."""


@dataclass(frozen=True, kw_only=True)
class KernelDistance:
    """Mean and standard deviation over subsets; a negative mean means no difference."""

    mean: float
    std: float
    num_subsets: int
    subset_size: int


def kernel_distance(
    one: Features,
    other: Features,
    *,
    num_subsets: int = NUM_SUBSETS,
    subset_size: int = SUBSET_SIZE,
    seed: int = SEED,
    device: str = "cpu",
) -> KernelDistance:
    """Return the KID of two sets.

    Subsets are drawn without replacement, with the generator, seed and order that other tools use.
    """
    if one.shape[1:] != other.shape[1:]:
        raise ValueError(f"features of shapes {one.shape} and {other.shape}")
    if num_subsets < 1 or not 2 <= subset_size <= min(len(one), len(other)):
        raise ValueError(f"{num_subsets} subsets of {subset_size} rows from {len(one)} and {len(other)}")
    rows_1, rows_2 = (torch.from_numpy(check_features(rows).astype(np.float64)).to(device) for rows in (one, other))
    generator = np.random.RandomState(seed)
    drawn = [
        [generator.choice(len(rows), subset_size, replace=False) for rows in (one, other)] for _ in range(num_subsets)
    ]
    chosen_1, chosen_2 = (torch.from_numpy(np.stack(chosen)) for chosen in zip(*drawn, strict=True))
    num_all_pairs = (len(one) + len(other)) ** 2 // 2  # a pair of one set counts once
    sum_kernels = _sums_over_all_pairs if num_all_pairs < num_subsets * 2 * subset_size**2 else _sums_per_subset
    with single_thread():
        within_1, between, within_2 = sum_kernels(rows_1, rows_2, chosen_1.to(device), chosen_2.to(device))
    values = (within_1 + within_2) / (subset_size * (subset_size - 1)) - 2.0 * between / subset_size**2
    found = values.cpu().numpy()
    if not np.isfinite(found).all():
        raise ValueError("a kernel distance that is not finite")
    return KernelDistance(
        mean=float(np.mean(found)), std=float(np.std(found)), num_subsets=num_subsets, subset_size=subset_size
    )


KernelSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Kernel sums of each subset: within the first set (without the diagonal), between the sets, within the second."""


def _sums_per_subset(
    rows_1: torch.Tensor, rows_2: torch.Tensor, chosen_1: torch.Tensor, chosen_2: torch.Tensor
) -> KernelSums:
    sums = []
    for mine, theirs in zip(chosen_1, chosen_2, strict=True):
        one, other = rows_1[mine], rows_2[theirs]
        sums.append(torch.stack([_sum_within(one), _cubic_kernel(one, other).sum(), _sum_within(other)]))
    first, between, second = torch.stack(sums, dim=1)
    return first, between, second


def _sum_within(rows: torch.Tensor) -> torch.Tensor:
    """Return the kernel sum over pairs of different rows; off-diagonal blocks count twice."""
    total = torch.zeros((), dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), PANEL_SIZE):
        block = _cubic_kernel(rows[start : start + PANEL_SIZE], rows[start:])
        size = len(block)
        inner = block[:, :size]
        total += inner.sum() - inner.diagonal().sum() + 2.0 * block[:, size:].sum()
    return total


def _sums_over_all_pairs(
    rows_1: torch.Tensor, rows_2: torch.Tensor, chosen_1: torch.Tensor, chosen_2: torch.Tensor
) -> KernelSums:
    one, other = _indicators(chosen_1, rows_1), _indicators(chosen_2, rows_2)
    between = torch.zeros(len(chosen_1), dtype=rows_1.dtype, device=rows_1.device)
    for start in range(0, len(rows_1), BLOCK_SIZE):
        end = start + BLOCK_SIZE
        between += (one[start:end] * (_cubic_kernel(rows_1[start:end], rows_2) @ other)).sum(dim=0)
    return _sum_within_subsets(rows_1, one), between, _sum_within_subsets(rows_2, other)


def _indicators(chosen: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a matrix with one column per subset: 1 for the rows in it, else 0."""
    result = torch.zeros(len(rows), len(chosen), dtype=rows.dtype, device=rows.device)
    return result.scatter_(0, chosen.T, 1.0)


def _sum_within_subsets(rows: torch.Tensor, membership: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(membership.shape[1], dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), BLOCK_SIZE):
        end = start + BLOCK_SIZE
        block = _cubic_kernel(rows[start:end], rows[start:])
        size = len(block)
        block.diagonal().zero_()
        block[:, size:] *= 2.0
        total += (membership[start:end] * (block @ membership[start:])).sum(dim=0)
    return total


def _cubic_kernel(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return (x y / d + 1)^3 for every pair, as a new matrix."""
    product = (one @ other.T).div_(one.shape[1]).add_(1.0)
    return product * product.square()
