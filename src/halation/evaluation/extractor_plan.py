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
from halation.evaluation import feature_extraction
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.feature_extraction import FeatureWriter
from halation.evaluation.metrics import metric_computation
from halation.evaluation.saved_statistics import SUFFIXES, SavedStatistics, read_statistics

WEIGHTS_FLAGS = {
    "main": "--weights",
    "inception": "--inception_weights",
    "clip": "--clip_model",
    "streets": "--extractor",
}
"""By label, the flag that chooses its weights."""


@dataclass(frozen=True, kw_only=True)
class ExtractorPlan:
    """Which extractor plays which part; extractors are known by a label."""

    extractors: dict[str, tuple[str, str]]
    """By label: its name, and the weights it is given."""
    metric_labels: dict[str, str]
    """By metric: the label."""

    @property
    def reference_labels(self) -> tuple[str, ...]:
        """Labels whose metrics compare with a reference."""
        return tuple(
            dict.fromkeys(
                self.metric_labels[name] for name in self.metric_labels if name in metric_computation.NEEDS_REFERENCE
            )
        )


def plan_extractors(config: EvaluateConfig) -> ExtractorPlan:
    """One extractor for each kind of features, shared by the metrics that want them."""
    default_weights = {"inception": config.inception_weights, "clip": config.clip_model}.get(config.extractor, "")
    main = (config.extractor, config.weights or default_weights)
    extractors: dict[str, tuple[str, str]] = {}
    metric_labels: dict[str, str] = {}
    for metric in config.metrics:
        match metric:
            case "fd" | "kid" | "prdc":
                label, extractor = "main", main
            case "fid" | "is" if config.extractor == "inception":
                label, extractor = "main", main
            case "fid" | "is":
                label, extractor = "inception", ("inception", config.inception_weights)
            case "clip":
                label, extractor = "clip", ("clip", config.clip_model)
            case _:
                label, extractor = "streets", ("streets", "")
        if extractor == main:
            label = "main"
        extractors[label] = extractor
        metric_labels[metric] = label
    if config.save_statistics is not None:
        extractors["main"] = main
    return ExtractorPlan(extractors=extractors, metric_labels=metric_labels)


def extractor_facts(extractor: Extractor) -> dict[str, Any]:
    return {
        **extractor.facts,
        "num_features": extractor.num_features,
        "fd_title": extractor.fd_title,
        "kid_title": extractor.kid_title,
    }


def metric_settings(config: EvaluateConfig, device: str) -> metric_computation.MetricSettings:
    return metric_computation.MetricSettings(
        allow_few=config.allow_few,
        kid_subsets=config.kid_subsets,
        kid_subset_size=config.kid_subset_size,
        nearest_k=config.nearest_k,
        bootstrap=config.bootstrap,
        device=device,
    )


def read_saved_reference(
    config: EvaluateConfig, plan: ExtractorPlan, facts: Mapping[str, Mapping[str, Any]]
) -> SavedStatistics | None:
    """The statistics that --reference names, or None where it names images or nothing is compared."""
    paths = [Path(path) for path in config.reference if Path(path).suffix in SUFFIXES]
    labels = plan.reference_labels
    if not paths or not labels:
        return None
    if len(labels) > 1:
        names = " and ".join(str(facts[label]["extractor"]) for label in labels)
        raise InputError(
            f"statistics as the reference of {names}", "one extractor, that of the statistics", "ask for fewer metrics"
        )
    return read_statistics(paths, facts[labels[0]])


def caption_embedder(
    extractor: Extractor, captions: Sequence[str], order: np.ndarray | None
) -> feature_extraction.EmbedTexts:
    """Embeds the captions of positions."""
    from halation.evaluation.extractors.transformers import ClipExtractor

    assert isinstance(extractor, ClipExtractor)

    def embed(positions: Sequence[int]) -> np.ndarray:
        rows = positions if order is None else order[np.asarray(positions)].tolist()
        return extractor.embed_texts([captions[row] for row in rows]).numpy()

    return embed


def load_feature_set(writer: FeatureWriter, inverse_order: np.ndarray | None) -> metric_computation.FeatureSet:
    """What is in the store, by index."""
    store = writer.store
    if writer.moments_only:
        digests = np.concatenate(list(store.iter_array("digests")))
        return metric_computation.FeatureSet(
            num=store.num,
            hash=_hash_digests(digests),
            moments=feature_extraction.read_moments(store, moments_only=True),
        )
    arrays = store.read_all()
    if inverse_order is not None:
        arrays = {name: array[inverse_order] for name, array in arrays.items()}
    all_moments = feature_extraction.moments(arrays["features"])
    return metric_computation.FeatureSet(
        num=store.num, hash=_hash_digests(arrays["digests"]), moments=all_moments, arrays=arrays
    )


def _hash_digests(digests: np.ndarray) -> str:
    return hashlib.sha256(digests.tobytes()).hexdigest()


def library_versions() -> dict[str, str]:
    names = ("halation", "torch", "diffusers", "transformers", "numpy", "pillow")
    return {**{name: version(name) for name in names}, "python": platform.python_version()}
