"""Nearest neighbours of features: precision and recall, most and least similar images.

Precision, recall, density and coverage are those of Kynkaanniemi et al. 2019 and Naeem et al. 2020. The ball of an
image has the distance to its k-th nearest neighbour in its own set as radius, and includes its border.

- Precision: the share of generated images in any ball of the reference.
- Recall: the share of reference images in any ball of the generated images.
- Density: the mean number of reference balls that a generated image is in, divided by k.
- Coverage: the share of reference balls that contain a generated image.

Distances are computed tile by tile in float64, so that memory does not grow with the square of the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halation.evaluation.metrics.moments import Features, FloatArray, check_features, single_thread

NEAREST_K = 3
TILE_SIZE = 2048
BORDER_TOLERANCE = 1e-12
"""Tolerance of the border of a ball, relative to the squared lengths of two rows.

Without it, rounding could put copies of reference images outside.
"""
NUM_SHOWN = 24
MAX_CPU_MULTIPLY_ADDS = 10**12
"""Limit of multiply-adds for the nearest and farthest images on a CPU, about a minute of one thread.

The limit exists because every report includes them by default.
"""


@dataclass(frozen=True, kw_only=True)
class PrdcScores:
    """Shares between 0 and 1, except density, which may be larger."""

    precision: float
    recall: float
    density: float
    coverage: float
    nearest_k: int


def prdc(
    reference: Features, generated: Features, *, nearest_k: int = NEAREST_K, device: str = "cpu", tile: int = TILE_SIZE
) -> PrdcScores:
    """Compare generated images with a reference; each set needs more than `nearest_k` rows."""
    if reference.shape[1:] != generated.shape[1:]:
        raise ValueError(f"features of shapes {reference.shape} and {generated.shape}")
    if not 1 <= nearest_k < min(len(reference), len(generated)):
        raise ValueError(f"{nearest_k} neighbours in sets of {len(reference)} and {len(generated)} rows")
    reference_tiles, generated_tiles = (
        TiledFeatures(check_features(features), device, tile) for features in (reference, generated)
    )
    reference_radius, generated_radius = (
        _squared_radii(reference_tiles, nearest_k),
        _squared_radii(generated_tiles, nearest_k),
    )
    generated_in_reference, reference_in_generated, is_covered = (
        torch.zeros(num, dtype=torch.bool, device=device)
        for num in (generated_tiles.num, reference_tiles.num, reference_tiles.num)
    )
    num_inside = 0
    for mine, rows, lengths in reference_tiles.tiles():
        for theirs, others, other_lengths in generated_tiles.tiles():
            distances = squared_distances(rows, others, lengths, other_lengths, 1.0 - BORDER_TOLERANCE)
            inside = distances <= reference_radius[mine, None]
            generated_in_reference[theirs] |= inside.any(dim=0)
            is_covered[mine] |= inside.any(dim=1)
            num_inside += int(inside.sum())
            reference_in_generated[mine] |= (distances <= generated_radius[theirs]).any(dim=1)
    return PrdcScores(
        precision=_fraction(generated_in_reference),
        recall=_fraction(reference_in_generated),
        density=num_inside / (nearest_k * generated_tiles.num),
        coverage=_fraction(is_covered),
        nearest_k=nearest_k,
    )


def _fraction(flags: torch.Tensor) -> float:
    return int(flags.sum()) / len(flags)


class TiledFeatures:
    """Features on a device in their original precision; tiles are converted to float64."""

    def __init__(self, features: Features, device: str, tile: int) -> None:
        self._rows = torch.from_numpy(features).to(device)
        self._tile = tile
        self.num = len(features)

    def tiles(self, first: int = 0) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the slice of each tile, its rows, and their squared lengths."""
        for start in range(first, self.num, self._tile):
            rows = self._rows[start : start + self._tile].double()
            yield slice(start, start + len(rows)), rows, rows.square().sum(dim=1)


def _squared_radii(rows: TiledFeatures, nearest_k: int) -> torch.Tensor:
    """Return the squared radius of the ball of every row.

    Distances are symmetric, so that only half of the tiles are computed.
    """
    nearest: dict[int, torch.Tensor] = {}

    def update_nearest(start: int, distances: torch.Tensor) -> None:
        known = [nearest[start]] if start in nearest else []
        # A tile may have fewer columns than neighbours to keep; `_smallest` then returns fewer.
        candidates = torch.cat([*known, _smallest(distances, nearest_k)], dim=1)
        nearest[start] = _smallest(candidates, nearest_k)

    for mine, values, lengths in rows.tiles():
        for theirs, others, other_lengths in rows.tiles(mine.start):
            distances = squared_distances(values, others, lengths, other_lengths)
            if theirs.start == mine.start:
                distances.fill_diagonal_(torch.inf)  # a row is not its own neighbour
            else:
                update_nearest(theirs.start, distances.T)
            update_nearest(mine.start, distances)
    return torch.cat([nearest[start][:, -1] for start in sorted(nearest)])


def _smallest(values: torch.Tensor, num: int) -> torch.Tensor:
    """Return the `num` lowest values of every row, in order."""
    return values.topk(min(num, values.shape[1]), dim=1, largest=False, sorted=True).values


def squared_distances(
    one: torch.Tensor,
    other: torch.Tensor,
    one_lengths: torch.Tensor,
    other_lengths: torch.Tensor,
    length_scale: float = 1.0,
) -> torch.Tensor:
    """Return the squared distance of every pair of rows, at least 0.

    The error is that of rounding the squared lengths, so that the distance of equal rows is only close to 0.
    """
    lengths = (one_lengths[:, None] + other_lengths).mul_(length_scale)
    return lengths.addmm_(one, other.T, alpha=-2.0).clamp_(min=0.0)


def nearest_distances(
    reference: Features, generated: Features, *, device: str = "cpu", tile: int = TILE_SIZE
) -> FloatArray:
    """Return the Euclidean distance of every generated row to its nearest reference row.

    The distance of a copy is exactly 0.
    """
    if reference.shape[1:] != generated.shape[1:]:
        raise ValueError(f"features of shapes {reference.shape} and {generated.shape}")
    reference_tiles, generated_tiles = (
        TiledFeatures(check_features(features), device, tile) for features in (reference, generated)
    )
    nearest = np.empty(generated_tiles.num, np.int64)
    with single_thread():
        for mine, rows, lengths in generated_tiles.tiles():
            min_distance = torch.full((len(rows),), torch.inf, dtype=torch.float64, device=device)
            nearest_index = torch.zeros(len(rows), dtype=torch.int64, device=device)
            for theirs, others, other_lengths in reference_tiles.tiles():
                distances, places = squared_distances(rows, others, lengths, other_lengths).min(dim=1)
                nearer = distances < min_distance
                min_distance = torch.where(nearer, distances, min_distance)
                nearest_index = torch.where(nearer, places + theirs.start, nearest_index)
            nearest[mine] = nearest_index.cpu().numpy()
    # Distances from tiles have the rounding error of squared lengths: compute those of the nearest rows exactly.
    exact = np.empty(generated_tiles.num, np.float64)
    for start in range(0, generated_tiles.num, tile):
        block = slice(start, start + tile)
        difference = generated[block].astype(np.float64) - reference[nearest[block]].astype(np.float64)
        exact[block] = np.sqrt(np.square(difference).sum(axis=1))
    return exact


def find_extremes(
    reference: Features,
    generated: Features,
    *,
    name: Callable[[int], str],
    captions: Sequence[str] | None,
    device: str = "cpu",
    num_shown: int = NUM_SHOWN,
) -> dict[str, Any]:
    """Return the generated images nearest to and farthest from the reference, with distances.

    The nearest images show copies, the farthest show failures. Equal distances are sorted by index.
    """
    if device == "cpu" and reference.size * len(generated) > MAX_CPU_MULTIPLY_ADDS:
        return {"left_out": f"{len(generated)} images against {len(reference)} take too long without a GPU"}
    distances = nearest_distances(reference, generated, device=device)

    def describe_images(order: np.ndarray) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "name": name(index),
                "caption": None if captions is None else captions[index],
                "distance": float(distances[index]),
            }
            for index in order[:num_shown].tolist()
        ]

    return {
        "nearest": describe_images(np.argsort(distances, kind="stable")),
        "farthest": describe_images(np.argsort(-distances, kind="stable")),
    }
