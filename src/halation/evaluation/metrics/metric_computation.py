"""Computes metrics, with their provenance, from generated and reference features."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from halation.errors import HalationError, InputError, format_count
from halation.evaluation.metrics.caption_agreement import caption_agreement
from halation.evaluation.metrics.frechet import frechet_distance, frechet_distance_from_features, frechet_interval
from halation.evaluation.metrics.kid import kernel_distance
from halation.evaluation.metrics.moments import Features, FloatArray, Gaussian, Moments, check_features, single_thread
from halation.evaluation.metrics.nearest_neighbors import prdc

NUM_SPLITS, SPLIT_SEED = 10, 2020
"""Splits and shuffle seed of the inception score."""
MIN_IMAGES_FID = 2048
MIN_IMAGES = 1000
LOWER_IS_BETTER = ("fid", "fd", "kid")
SUB_METRICS = {"prdc": ("precision", "recall", "density", "coverage")}
"""Metrics that consist of several scores."""
NEEDS_REFERENCE = ("fid", "fd", "kid", "prdc")
NEEDS_CAPTIONS = ("clip", "agreement")


@dataclass(kw_only=True, eq=False)
class FeatureSet:
    """The features of the generated or the reference images by one extractor."""

    num: int | None
    """Number of images; None if saved statistics do not have it."""
    hash: str
    moments: Moments | Gaussian | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """`features` and other outputs of the extractor; empty if only moments were kept."""

    @property
    def features(self) -> Features | None:
        return self.arrays.get("features")


@dataclass(frozen=True, kw_only=True)
class MetricSettings:
    """Settings of the metrics."""

    allow_few: bool = False
    kid_subsets: int = 100
    kid_subset_size: int = 1000
    nearest_k: int = 3
    bootstrap: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """The value of a metric, its standard deviation, and further details for the report."""

    value: float
    std: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MetricInputs:
    """The inputs of one metric: generated and reference features, and the extractor facts."""

    metric: str
    extractor: Mapping[str, Any]
    generated: FeatureSet
    reference: FeatureSet | None
    captions: Sequence[str] | None = None


def compute_metric(inputs: MetricInputs, settings: MetricSettings) -> dict[str, dict[str, Any]]:
    """Compute a metric; return its report entries by name (several for `prdc`)."""
    start_time = time.perf_counter()
    num_images = {"generated": inputs.generated.num}
    if inputs.reference is not None:
        num_images["reference"] = inputs.reference.num
    note = check_num_images(inputs.metric, inputs.extractor["num_features"], num_images, settings)
    try:
        with single_thread():
            values = _METRICS[inputs.metric](inputs, settings)
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise HalationError(f"{inputs.metric} cannot be computed: {error}") from error
    broken = [name for name, one in values.items() if not np.isfinite(one.value)]
    if broken:
        raise HalationError(f"{broken[0]} is {values[broken[0]].value}, which is not a finite number")
    seconds = round(time.perf_counter() - start_time, 3)
    return {name: _metric_record(name, one, inputs, note, seconds) for name, one in values.items()}


def _metric_record(key: str, value: MetricValue, inputs: MetricInputs, note: str, seconds: float) -> dict[str, Any]:
    """Return the report entry of a score, with everything needed to compare it with others.

    It is named FID or KID only if it matches the common definition.
    """
    extractor = inputs.extractor
    reference = inputs.reference
    titles = {
        "fid": extractor["fd_title"],
        "fd": extractor["fd_title"],
        "kid": extractor["kid_title"],
        "is": "Inception score",
        "clip": "CLIP score",
        "agreement": "prompt agreement",
    }
    return {
        "metric": key,
        "name": titles.get(key) or f"{key} ({extractor['extractor']})",
        "value": value.value,
        "std": value.std,
        "better": "lower" if key in LOWER_IS_BETTER else "higher",
        "extractor": extractor["extractor"],
        "weights": extractor["weights"],
        "weights_sha256": extractor["weights_sha256"],
        "resize": extractor["resize"],
        "precision": extractor["dtype"],
        "num_generated": inputs.generated.num,
        "num_reference": reference.num if reference else 0,
        "generated_hash": inputs.generated.hash,
        "reference_hash": reference.hash if reference else "",
        "few": bool(note),
        "note": note,
        "seconds": seconds,
        **value.details,
    }


def check_num_images(
    metric: str, num_features: int, num_images: Mapping[str, int | None], settings: MetricSettings
) -> str:
    """Return "", or the note for a score of too few images; raise without --allow_few.

    `num_images` has the number of generated and reference images, if known.
    """
    # With fewer images, the score depends more on their number than on the images.
    minimum = {
        "fid": MIN_IMAGES_FID,
        "fd": max(MIN_IMAGES, num_features),
        "kid": settings.kid_subset_size,
        "is": MIN_IMAGES,
        "prdc": MIN_IMAGES,
    }.get(metric, 1)
    too_few = {side: num for side, num in num_images.items() if num is not None and num < minimum}
    if not too_few:
        return ""
    words = " and ".join(format_count(num, f"{side} image") for side, num in too_few.items())
    if settings.allow_few and min(too_few.values()) < 2:
        raise InputError(f"{metric} of {words}", "at least 2 on each side", "generate or give more images")
    if not settings.allow_few:
        raise InputError(
            f"{metric} of {words}",
            f"at least {minimum} on each side: with fewer, the score is mostly bias",
            "generate or give more images, or pass --allow_few for a score flagged `few`",
        )
    # Part of the report; the wording must not change, because readers compare it with earlier reports.
    return f"few: {words.replace('image', 'picture')}, {minimum} are wanted"


# -- each metric


MetricFunction = Callable[["MetricInputs", "MetricSettings"], dict[str, "MetricValue"]]
_METRICS: dict[str, MetricFunction] = {}


def _register(*names: str) -> Callable[[MetricFunction], MetricFunction]:
    """Add a function to the metrics under these names."""

    def add(function: MetricFunction) -> MetricFunction:
        _METRICS.update(dict.fromkeys(names, function))
        return function

    return add


@_register("fid", "fd")
def _frechet(inputs: MetricInputs, settings: MetricSettings) -> dict[str, MetricValue]:
    one, other = inputs.generated, inputs.reference
    assert other is not None
    assert one.moments is not None
    assert other.moments is not None
    known = [features for features in (one.features, other.features) if features is not None]
    if len(known) == 2 and all(len(features) <= features.shape[1] for features in known):
        value = frechet_distance_from_features(*known, device=settings.device)
    else:
        value = frechet_distance(one.moments, other.moments, device=settings.device)
    # With so few images, a covariance is singular.
    num_features = len(one.moments.mean)
    is_deficient = any(side.num is not None and side.num <= num_features for side in (one, other))
    details: dict[str, Any] = {"rank_deficient": is_deficient}
    if settings.bootstrap:
        if one.features is None:
            raise InputError(
                "--bootstrap without features: there are more images than --keep_features",
                "features of the generated images",
                "raise --keep_features",
            )
        interval = frechet_interval(
            one.features, other.moments, num_draws=settings.bootstrap, seed=2020, device=settings.device
        )
        details["interval"] = list(interval.bias_corrected)
        details["bootstrap_bias"] = interval.bias
        details["bootstrap"] = settings.bootstrap
    return {inputs.metric: MetricValue(value=value, details=details)}


@_register("kid")
def _kid(inputs: MetricInputs, settings: MetricSettings) -> dict[str, MetricValue]:
    one, other = _require_features(inputs)
    least = min(len(one), len(other))
    # With fewer images than a subset needs, all subsets would be the same: use half of the images.
    size = settings.kid_subset_size if least >= settings.kid_subset_size else max(2, least // 2)
    found = kernel_distance(one, other, num_subsets=settings.kid_subsets, subset_size=size, device=settings.device)
    details = {"subsets": found.num_subsets, "subset_size": found.subset_size}
    return {"kid": MetricValue(value=found.mean, std=found.std, details=details)}


@_register("prdc")
def _prdc(inputs: MetricInputs, settings: MetricSettings) -> dict[str, MetricValue]:
    one, other = _require_features(inputs)
    if settings.nearest_k >= min(len(one), len(other)):
        raise InputError(
            f"--nearest_k {settings.nearest_k} with {format_count(min(len(one), len(other)), 'image')}",
            "fewer neighbours than images",
            "change --nearest_k, or give more images",
        )
    found = prdc(other, one, nearest_k=settings.nearest_k, device=settings.device)
    details = {"nearest_k": settings.nearest_k}
    return {name: MetricValue(value=float(getattr(found, name)), details=details) for name in SUB_METRICS["prdc"]}


def _require_features(inputs: MetricInputs) -> tuple[Features, Features]:
    one, other = inputs.generated.features, inputs.reference.features if inputs.reference else None
    if one is None:
        raise InputError(
            f"{inputs.metric} without features: there are more images than --keep_features",
            "features of every image",
            "raise --keep_features, or compute only fid or fd",
        )
    if other is None:
        raise InputError(
            f"{inputs.metric} against statistics without features",
            "features of every reference image",
            "give the folder of reference images, or statistics written by --save_statistics",
        )
    return one, other


@dataclass(frozen=True, kw_only=True)
class ScoreStatistics:
    """Mean and standard deviation of a set of values."""

    mean: float
    std: float
    num: int
    """Number of values: splits for the inception score, images for the CLIP score."""


def inception_score(logits: Features, *, num_splits: int = NUM_SPLITS, seed: int = SPLIT_SEED) -> ScoreStatistics:
    """Return the inception score (Salimans et al. 2016).

    It is exp of the mean KL divergence of the classes of an image from those of its split. Rows are shuffled first,
    with the generator and seed of torch-fidelity, because images are often sorted by class.
    """
    if not 1 <= num_splits <= len(logits):
        raise ValueError(f"{num_splits} splits of {len(logits)} rows")
    num = len(check_features(logits))
    order = np.random.RandomState(seed).permutation(num)
    cuts = [number * num // num_splits for number in range(num_splits + 1)]
    scores = []
    for start, end in itertools.pairwise(cuts):
        values = logits[order[start:end]].astype(np.float64)
        values -= values.max(axis=1, keepdims=True)
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
        probabilities = np.exp(values)
        # Skip classes that no image of the split has: they add nothing, and their logarithm is minus infinity.
        overall = probabilities.mean(axis=0)
        used = overall > 0
        divergences = (probabilities[:, used] * (values[:, used] - np.log(overall[used]))).sum(axis=1)
        scores.append(float(np.exp(divergences.mean())))
    return ScoreStatistics(mean=float(np.mean(scores)), std=float(np.std(scores)), num=num_splits)


def clip_score(images: Features, texts: Features) -> ScoreStatistics:
    """Return the CLIP score (Hessel et al. 2021).

    It is 100 times the cosine between the embeddings of image and caption, at least 0.
    """
    if images.shape != texts.shape:
        raise ValueError(f"embeddings of images of shape {images.shape} and of texts of shape {texts.shape}")
    if not len(images):
        raise ValueError("embeddings without rows")
    cosines = (_normalize_rows(images) * _normalize_rows(texts)).sum(axis=1)
    values = 100.0 * np.clip(cosines, 0.0, None)
    return ScoreStatistics(mean=float(np.mean(values)), std=float(np.std(values)), num=len(values))


def _normalize_rows(rows: Features) -> FloatArray:
    values: FloatArray = check_features(rows).astype(np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    if not lengths.all():
        raise ValueError("an embedding of length 0, which cannot be normalized")
    unit: FloatArray = values / lengths
    return unit


@_register("is")
def _inception_score(inputs: MetricInputs, _settings: MetricSettings) -> dict[str, MetricValue]:
    logits = _require_array(inputs, "logits")
    found = inception_score(logits, num_splits=min(NUM_SPLITS, len(logits)))
    return {"is": MetricValue(value=found.mean, std=found.std)}


@_register("clip")
def _clip_score(inputs: MetricInputs, _settings: MetricSettings) -> dict[str, MetricValue]:
    found = clip_score(_require_array(inputs, "features"), _require_array(inputs, "texts"))
    error = found.std / np.sqrt(max(1, inputs.generated.num or 1))
    return {"clip": MetricValue(value=found.mean, std=found.std, details={"standard_error": float(error)})}


@_register("agreement")
def _caption_agreement(inputs: MetricInputs, _settings: MetricSettings) -> dict[str, MetricValue]:
    assert inputs.captions is not None
    heads = {
        name: array for name, array in inputs.generated.arrays.items() if name in ("place", "time", "weather", "cars")
    }
    found = caption_agreement(heads, inputs.captions)
    details = {"by_attribute": found.by_attribute, "num_mentioned": found.num_mentioned}
    real_agreement = inputs.extractor.get("agreement_of_real_pictures")
    return {"agreement": MetricValue(value=found.value, details={**details, "of_real_pictures": real_agreement})}


def _require_array(inputs: MetricInputs, name: str) -> np.ndarray:
    array = inputs.generated.arrays.get(name)
    if array is None:
        raise InputError(
            f"{inputs.metric} without features: there are more images than --keep_features",
            "features of every image",
            "raise --keep_features",
        )
    return array
