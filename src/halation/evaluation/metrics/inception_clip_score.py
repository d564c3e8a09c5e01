"""Scores that need no reference: the inception score of logits, and how well pictures fit their captions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from halation.evaluation.metrics.moments import Features, Vector, checked

NUM_SPLITS, SEED = 10, 2020


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean, and the standard deviation of what it is the mean of."""

    mean: float
    std: float
    num: int
    """How many values: splits for the inception score, pictures for the CLIP score."""


def inception_score(logits: Features, *, num_splits: int = NUM_SPLITS, seed: int = SEED) -> Score:
    """exp of the mean divergence of a picture's classes from those of its split (Salimans et al. 2016).

    Rows are shuffled first by the generator and the seed that torch-fidelity uses, because pictures often come sorted by class.
    """
    if not 1 <= num_splits <= len(logits):
        raise ValueError(f"{num_splits} splits of {len(logits)} rows")
    num = len(checked(logits))
    order = np.random.RandomState(seed).permutation(num)
    cuts = [number * num // num_splits for number in range(num_splits + 1)]
    scores = [_score_of_split(logits[order[start:end]]) for start, end in itertools.pairwise(cuts)]
    return Score(mean=float(np.mean(scores)), std=float(np.std(scores)), num=num_splits)


def _score_of_split(logits: Features) -> float:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    shares = np.exp(values)
    # A class that no picture of the split has adds nothing; the logarithm of its share would be minus infinity.
    overall = shares.mean(axis=0)
    used = overall > 0
    divergences = (shares[:, used] * (values[:, used] - np.log(overall[used]))).sum(axis=1)
    return float(np.exp(divergences.mean()))


def clip_score(pictures: Features, texts: Features) -> Score:
    """100 times the cosine between a picture's embedding and its caption's, 0 where they point apart (Hessel et al. 2021)."""
    if pictures.shape != texts.shape:
        raise ValueError(f"embeddings of pictures of shape {pictures.shape} and of texts of shape {texts.shape}")
    if not len(pictures):
        raise ValueError("embeddings of no rows")
    cosines = (_unit(pictures) * _unit(texts)).sum(axis=1)
    values = 100.0 * np.clip(cosines, 0.0, None)
    return Score(mean=float(np.mean(values)), std=float(np.std(values)), num=len(values))


def _unit(rows: Features) -> Vector:
    values: Vector = checked(rows).astype(np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    if not lengths.all():
        raise ValueError("an embedding of length 0, which points nowhere")
    unit: Vector = values / lengths
    return unit
