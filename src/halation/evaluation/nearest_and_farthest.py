"""Which generated images are most and least like the reference: by the distance of each to its nearest reference feature.

The nearest ones show what was copied, the farthest what went wrong. Distances are euclidean, between features as the extractor gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from halation.evaluation.metrics.moments import Features, FloatArray, check_features, single_thread
from halation.evaluation.metrics.prdc import TILE_SIZE, TiledFeatures, squared_distances

NUM_SHOWN = 24
MAX_CPU_MULTIPLY_ADDS = 10**12
"""Multiply-adds: about a minute of one thread. Nobody asked for this number, so nobody should wait for it long."""


def nearest_distances(
    reference: Features, generated: Features, *, device: str = "cpu", tile: int = TILE_SIZE
) -> FloatArray:
    """The distance of every generated row to the reference row that is nearest to it; 0 for a copy, to the bit."""
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
    """The nearest and the farthest generated images, each with its distance; equal ones in the order of their index."""
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
