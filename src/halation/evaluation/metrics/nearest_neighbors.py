"""Nearest neighbours of features: precision and recall, most and least similar images.

Precision, recall, density and coverage are those of Kynkaanniemi et al. 2019 and Naeem et al. 2020. An image's ball
reaches to its k-th nearest neighbour in its own set. Precision: the share of generated images in some ball of the
reference; recall: the share of the reference in some ball of the generated; density: how many balls of the reference a
generated image lies in, on average, divided by k; coverage: the share of reference balls with a generated image in
them. The border belongs to the ball.

Distances are made a tile at a time in float64, so that fifty thousand images need no more memory than a thousand.
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
"""Of the squared lengths of two rows: what lies beyond the border by less lies on it.

Without it copies of the reference would be outside by chance.
"""
NUM_SHOWN = 24
MAX_CPU_MULTIPLY_ADDS = 10**12
"""Multiply-adds of the search for similar images, about a minute of one thread: the report shows them unasked."""


@dataclass(frozen=True, kw_only=True)
class PrdcScores:
    """Shares between 0 and 1, but for density, which may be larger."""

    precision: float
    recall: float
    density: float
    coverage: float
    nearest_k: int


def prdc(
    reference: Features, generated: Features, *, nearest_k: int = NEAREST_K, device: str = "cpu", tile: int = TILE_SIZE
) -> PrdcScores:
    """Of generated images against a reference; each set needs more than `nearest_k` rows."""
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
    """Features on a device in the precision they came in; a tile of them in float64."""

    def __init__(self, features: Features, device: str, tile: int) -> None:
        self._rows = torch.from_numpy(features).to(device)
        self._tile = tile
        self.num = len(features)

    def tiles(self, first: int = 0) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Where a tile lies, its rows, and their squared lengths."""
        for start in range(first, self.num, self._tile):
            rows = self._rows[start : start + self._tile].double()
            yield slice(start, start + len(rows)), rows, rows.square().sum(dim=1)


def _squared_radii(rows: TiledFeatures, nearest_k: int) -> torch.Tensor:
    """Of every row's ball. A tile serves the rows on both of its sides, so half of them are made."""
    nearest: dict[int, torch.Tensor] = {}

    def update_nearest(start: int, distances: torch.Tensor) -> None:
        known = [nearest[start]] if start in nearest else []
        # A tile may have fewer columns than there are neighbours to keep: the smallest of all so far, however few.
        candidates = torch.cat([*known, _smallest(distances, nearest_k)], dim=1)
        nearest[start] = _smallest(candidates, nearest_k)

    for mine, values, lengths in rows.tiles():
        for theirs, others, other_lengths in rows.tiles(mine.start):
            distances = squared_distances(values, others, lengths, other_lengths)
            if theirs.start == mine.start:
                distances.fill_diagonal_(torch.inf)  # a row is no neighbour of itself
            else:
                update_nearest(theirs.start, distances.T)
            update_nearest(mine.start, distances)
    return torch.cat([nearest[start][:, -1] for start in sorted(nearest)])


def _smallest(values: torch.Tensor, num: int) -> torch.Tensor:
    """The lowest of every row, in order."""
    return values.topk(min(num, values.shape[1]), dim=1, largest=False, sorted=True).values


def squared_distances(
    one: torch.Tensor,
    other: torch.Tensor,
    one_lengths: torch.Tensor,
    other_lengths: torch.Tensor,
    length_scale: float = 1.0,
) -> torch.Tensor:
    """Of every pair of rows, never below 0; to rounding of the lengths, so those of equal rows are only nearly 0."""
    lengths = (one_lengths[:, None] + other_lengths).mul_(length_scale)
    return lengths.addmm_(one, other.T, alpha=-2.0).clamp_(min=0.0)


def nearest_distances(
    reference: Features, generated: Features, *, device: str = "cpu", tile: int = TILE_SIZE
) -> FloatArray:
    """The euclidean distance of every generated row to its nearest reference row; 0 for a copy, to the bit."""
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
    # Tiles say which row is nearest; how far it is they know only to the rounding of squared lengths.
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
    """The generated images nearest to the reference and farthest from it, each with its distance.

    The nearest show what was copied, the farthest what went wrong. Equal distances are in the order of the index.
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
