"""Which extractor plays which part in an evaluation, and what its features of one side come to."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from halation.errors import InputError
from halation.evaluation import features
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.features import Desk
from halation.evaluation.metrics import measure
from halation.evaluation.saved_statistics import SUFFIXES, Statistics, read_statistics

FLAGS = {"main": "--weights", "inception": "--inception_weights", "clip": "--clip_model", "streets": "--extractor"}
"""By label, the flag that chooses its weights."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Which extractor plays which part; extractors are known by a label."""

    extractors: dict[str, tuple[str, str]]
    """By label: its name, and the weights it is given."""
    parts: dict[str, str]
    """By metric: the label."""

    @property
    def with_reference(self) -> tuple[str, ...]:
        """Labels whose metrics compare with a reference."""
        return tuple(dict.fromkeys(self.parts[name] for name in self.parts if name in measure.NEEDS_REFERENCE))


def cast(config: EvaluateConfig) -> Cast:
    """One extractor for each kind of features, shared by the metrics that want them."""
    usual = {"inception": config.inception_weights, "clip": config.clip_model}.get(config.extractor, "")
    main = (config.extractor, config.weights or usual)
    extractors: dict[str, tuple[str, str]] = {}
    parts: dict[str, str] = {}
    for metric in config.metrics:
        match metric:
            case "fd" | "kid" | "prdc":
                label, wanted = "main", main
            case "fid" | "is" if config.extractor == "inception":
                label, wanted = "main", main
            case "fid" | "is":
                label, wanted = "inception", ("inception", config.inception_weights)
            case "clip":
                label, wanted = "clip", ("clip", config.clip_model)
            case _:
                label, wanted = "streets", ("streets", "")
        if wanted == main:
            label = "main"
        extractors[label] = wanted
        parts[metric] = label
    if config.save_statistics is not None:
        extractors["main"] = main
    return Cast(extractors=extractors, parts=parts)


def facts_of(extractor: Extractor) -> dict[str, Any]:
    return {
        **extractor.facts,
        "num_features": extractor.num_features,
        "fd_title": extractor.fd_title,
        "kid_title": extractor.kid_title,
    }


def rules_of(config: EvaluateConfig, device: str) -> measure.Rules:
    return measure.Rules(
        allow_few=config.allow_few,
        kid_subsets=config.kid_subsets,
        kid_subset_size=config.kid_subset_size,
        nearest_k=config.nearest_k,
        bootstrap=config.bootstrap,
        device=device,
    )


def saved_reference(config: EvaluateConfig, parts: Cast, facts: Mapping[str, Mapping[str, Any]]) -> Statistics | None:
    """The statistics that --reference names, or None where it names pictures or nothing is compared."""
    paths = [Path(path) for path in config.reference if Path(path).suffix in SUFFIXES]
    labels = parts.with_reference
    if not paths or not labels:
        return None
    if len(labels) > 1:
        names = " and ".join(str(facts[label]["extractor"]) for label in labels)
        raise InputError(
            f"statistics as the reference of {names}", "one extractor, that of the statistics", "ask for fewer metrics"
        )
    return read_statistics(paths, facts[labels[0]])


def embedding(extractor: Extractor, captions: Sequence[str], order: np.ndarray | None) -> features.Texts:
    """Embeds the captions of positions."""
    from halation.evaluation.extractors.transformers import ClipExtractor

    assert isinstance(extractor, ClipExtractor)

    def embedded(positions: Sequence[int]) -> np.ndarray:
        rows = positions if order is None else order[np.asarray(positions)].tolist()
        return extractor.embed_texts([captions[row] for row in rows]).numpy()

    return embedded


def side_of(desk: Desk, back: np.ndarray | None) -> measure.Side:
    """What is in the store, by index."""
    store = desk.store
    if desk.moments_only:
        digests = np.concatenate(list(store.blocks("digests")))
        return measure.Side(
            num=store.num, hash=_hash(digests), moments=features.stored_moments(store, moments_only=True)
        )
    arrays = store.all()
    if back is not None:
        arrays = {name: array[back] for name, array in arrays.items()}
    found = features.moments(arrays["features"])
    return measure.Side(num=store.num, hash=_hash(arrays["digests"]), moments=found, arrays=arrays)


def _hash(digests: np.ndarray) -> str:
    return hashlib.sha256(digests.tobytes()).hexdigest()


def versions() -> dict[str, str]:
    names = ("halation", "torch", "diffusers", "transformers", "numpy", "pillow")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}
