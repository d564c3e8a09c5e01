"""Scores that need no reference: the inception score of logits, and how well images fit their captions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from halation.evaluation.metrics.moments import Features, FloatArray, check_features

NUM_SPLITS, SEED = 10, 2020


@dataclass(frozen=True, kw_only=True)
class ScoreStatistics:
    """A mean, and the standard deviation of what it is the mean of."""

    mean: float
    std: float
    num: int
    """How many values: splits for the inception score, images for the CLIP score."""


def inception_score(logits: Features, *, num_splits: int = NUM_SPLITS, seed: int = SEED) -> ScoreStatistics:
    """exp of the mean divergence of an image's classes from those of its split (Salimans et al. 2016).

    Rows are shuffled first by the generator and the seed that torch-fidelity uses, because images often come sorted by class.
    """
    if not 1 <= num_splits <= len(logits):
        raise ValueError(f"{num_splits} splits of {len(logits)} rows")
    num = len(check_features(logits))
    order = np.random.RandomState(seed).permutation(num)
    cuts = [number * num // num_splits for number in range(num_splits + 1)]
    scores = [_split_score(logits[order[start:end]]) for start, end in itertools.pairwise(cuts)]
    return ScoreStatistics(mean=float(np.mean(scores)), std=float(np.std(scores)), num=num_splits)


def _split_score(logits: Features) -> float:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    probabilities = np.exp(values)
    # A class that no image of the split has adds nothing; the logarithm of its share would be minus infinity.
    overall = probabilities.mean(axis=0)
    used = overall > 0
    divergences = (probabilities[:, used] * (values[:, used] - np.log(overall[used]))).sum(axis=1)
    return float(np.exp(divergences.mean()))


def clip_score(images: Features, texts: Features) -> ScoreStatistics:
    """100 times the cosine between an image's embedding and its caption's, 0 where they point apart (Hessel et al. 2021)."""
    if images.shape != texts.shape:
        raise ValueError(f"embeddings of images of shape {images.shape} and of texts of shape {texts.shape}")
    if not len(images):
        raise ValueError("embeddings of no rows")
    cosines = (_normalize_rows(images) * _normalize_rows(texts)).sum(axis=1)
    values = 100.0 * np.clip(cosines, 0.0, None)
    return ScoreStatistics(mean=float(np.mean(values)), std=float(np.std(values)), num=len(values))


def _normalize_rows(rows: Features) -> FloatArray:
    values: FloatArray = check_features(rows).astype(np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    if not lengths.all():
        raise ValueError("an embedding of length 0, which points nowhere")
    unit: FloatArray = values / lengths
    return unit
