"""The numbers: from features of both sides to measurements that say what they are, of what, and whether to trust them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from halation.errors import HalationError, InputError
from halation.evaluation.metrics.bootstrap import frechet_interval
from halation.evaluation.metrics.caption_agreement import agreement
from halation.evaluation.metrics.frechet import frechet_distance, frechet_distance_of_few
from halation.evaluation.metrics.inception_clip_score import NUM_SPLITS, clip_score, inception_score
from halation.evaluation.metrics.kid import kernel_distance
from halation.evaluation.metrics.moments import Features, Gaussian, Moments
from halation.evaluation.metrics.prdc import coverage
from halation.evaluation.metrics.threads import one_thread

FEWEST_FID = 2048
FEWEST = 1000
LOWER_IS_BETTER = ("fid", "fd", "kid")
PARTS = {"prdc": ("precision", "recall", "density", "coverage")}
"""Metrics that are several numbers."""
NEEDS_REFERENCE = ("fid", "fd", "kid", "prdc")
NEEDS_CAPTIONS = ("clip", "agreement")


@dataclass(kw_only=True, eq=False)
class Side:
    """What one extractor made of one side."""

    num: int | None
    """None where saved statistics do not say."""
    hash: str
    moments: Moments | Gaussian | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """features, and what else the extractor gives; empty where there are moments alone."""

    @property
    def features(self) -> Features | None:
        return self.arrays.get("features")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How the numbers are made."""

    allow_few: bool = False
    kid_subsets: int = 100
    kid_subset_size: int = 1000
    nearest_k: int = 3
    bootstrap: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A number, its spread, and what else is to be said of it."""

    value: float
    std: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One metric to measure: both sides as its extractor sees them, and the facts of that extractor."""

    metric: str
    extractor: Mapping[str, Any]
    generated: Side
    reference: Side | None
    captions: Sequence[str] | None = None


def measure(subject: Subject, rules: Rules) -> dict[str, dict[str, Any]]:
    """The metric's measurements by key: one, or several where it is several numbers."""
    began = time.perf_counter()
    sides = {"generated": subject.generated.num}
    if subject.reference is not None:
        sides["reference"] = subject.reference.num
    note = few(subject.metric, subject.extractor["num_features"], sides, rules)
    try:
        with one_thread():
            found = _MEASURES[subject.metric](subject, rules)
    except (ValueError, torch.linalg.LinAlgError) as error:
        raise HalationError(f"{subject.metric} cannot be computed: {error}") from error
    broken = [name for name, one in found.items() if not np.isfinite(one.value)]
    if broken:
        raise HalationError(f"{broken[0]} came out as {found[broken[0]].value}, which is no measurement")
    seconds = round(time.perf_counter() - began, 3)
    return {name: _measurement(name, one, subject, note, seconds) for name, one in found.items()}


def _measurement(key: str, found: Found, subject: Subject, note: str, seconds: float) -> dict[str, Any]:
    """Everything a number needs to be compared with another one."""
    extractor = subject.extractor
    reference = subject.reference
    return {
        "metric": key,
        "name": name_of(key, extractor),
        "value": found.value,
        "std": found.std,
        "better": "lower" if key in LOWER_IS_BETTER else "higher",
        "extractor": extractor["extractor"],
        "weights": extractor["weights"],
        "weights_sha256": extractor["weights_sha256"],
        "resize": extractor["resize"],
        "precision": extractor["dtype"],
        "num_generated": subject.generated.num,
        "num_reference": reference.num if reference else 0,
        "generated_hash": subject.generated.hash,
        "reference_hash": reference.hash if reference else "",
        "few": bool(note),
        "note": note,
        "seconds": seconds,
        **found.details,
    }


def name_of(key: str, extractor: Mapping[str, Any]) -> str:
    """How the number is called: FID and KID only where they are what everybody means by these words."""
    titles = {
        "fid": extractor["fd_title"],
        "fd": extractor["fd_title"],
        "kid": extractor["kid_title"],
        "is": "Inception score",
        "clip": "CLIP score",
        "agreement": "prompt agreement",
    }
    return titles.get(key) or f"{key} ({extractor['extractor']})"


def fewest(metric: str, num_features: int, rules: Rules) -> int:
    """Pictures on each side below which the number says more about their count than about them."""
    match metric:
        case "fid":
            return FEWEST_FID
        case "fd":
            return max(FEWEST, num_features)
        case "kid":
            return rules.kid_subset_size
        case "is" | "prdc":
            return FEWEST
        case _:
            return 1


def few(metric: str, num_features: int, sides: Mapping[str, int | None], rules: Rules) -> str:
    """Empty, or why the number is marked; without --allow_few that is an error. `sides` are numbers of pictures, where they are known."""
    least = fewest(metric, num_features, rules)
    lacking = {side: num for side, num in sides.items() if num is not None and num < least}
    if not lacking:
        return ""
    words = " and ".join(f"{num} {side} picture{'s' if num != 1 else ''}" for side, num in lacking.items())
    if rules.allow_few and min(lacking.values()) < 2:
        raise InputError(f"{metric} of {words}", "at least 2 on each side", "draw or give more")
    if not rules.allow_few:
        raise InputError(
            f"{metric} of {words}",
            f"at least {least} on each side: with fewer the number is mostly bias",
            "draw or give more, or pass --allow_few to get a marked number",
        )
    return f"few: {words}, {least} are wanted"


# -- each metric


def _frechet(subject: Subject, rules: Rules) -> dict[str, Found]:
    one, other = subject.generated, subject.reference
    assert other is not None
    assert one.moments is not None
    assert other.moments is not None
    if one.features is not None and other.features is not None and _are_few(one.features, other.features):
        value = frechet_distance_of_few(one.features, other.features, device=rules.device)
    else:
        value = frechet_distance(one.moments, other.moments, device=rules.device)
    details: dict[str, Any] = {"rank_deficient": any(_is_deficient(side) for side in (one, other))}
    if rules.bootstrap:
        if one.features is None:
            raise InputError(
                "--bootstrap without features, of which there are too many to keep",
                "features of the generated pictures",
                "raise --keep_features",
            )
        interval = frechet_interval(
            one.features, other.moments, num_draws=rules.bootstrap, seed=2020, device=rules.device
        )
        details["interval"] = list(interval.centred)
        details["bootstrap_bias"] = interval.bias
        details["bootstrap"] = rules.bootstrap
    return {subject.metric: Found(value=value, details=details)}


def _is_deficient(side: Side) -> bool:
    """Whether there are so few pictures that the covariance has no inverse."""
    assert side.moments is not None
    return side.num is not None and side.num <= len(side.moments.mean)


def _are_few(*sides: Features) -> bool:
    return all(len(features) <= features.shape[1] for features in sides)


def _kernel(subject: Subject, rules: Rules) -> dict[str, Found]:
    one, other = _both(subject)
    least = min(len(one), len(other))
    size = (
        rules.kid_subset_size if least >= rules.kid_subset_size else max(2, least // 2)
    )  # subsets of all would not differ
    found = kernel_distance(one, other, num_subsets=rules.kid_subsets, subset_size=size, device=rules.device)
    details = {"subsets": found.num_subsets, "subset_size": found.subset_size}
    return {"kid": Found(value=found.mean, std=found.std, details=details)}


def _coverage(subject: Subject, rules: Rules) -> dict[str, Found]:
    one, other = _both(subject)
    if rules.nearest_k >= min(len(one), len(other)):
        raise InputError(
            f"--nearest_k {rules.nearest_k} with {min(len(one), len(other))} pictures",
            "fewer neighbours than pictures",
            "change --nearest_k, or give more pictures",
        )
    found = coverage(other, one, nearest_k=rules.nearest_k, device=rules.device)
    details = {"nearest_k": rules.nearest_k}
    return {name: Found(value=float(getattr(found, name)), details=details) for name in PARTS["prdc"]}


def _both(subject: Subject) -> tuple[Features, Features]:
    one, other = subject.generated.features, subject.reference.features if subject.reference else None
    if one is None:
        raise InputError(
            f"{subject.metric} without features, of which there are too many to keep",
            "features of every picture",
            "raise --keep_features, or ask for fid or fd alone",
        )
    if other is None:
        raise InputError(
            f"{subject.metric} against statistics without features",
            "features of every reference picture",
            "give the folder of reference pictures, or statistics that --save_statistics wrote",
        )
    return one, other


def _inception(subject: Subject, _rules: Rules) -> dict[str, Found]:
    logits = _kept(subject, "logits")
    found = inception_score(logits, num_splits=min(NUM_SPLITS, len(logits)))
    return {"is": Found(value=found.mean, std=found.std)}


def _clip(subject: Subject, _rules: Rules) -> dict[str, Found]:
    found = clip_score(_kept(subject, "features"), _kept(subject, "texts"))
    error = found.std / np.sqrt(max(1, subject.generated.num or 1))
    return {"clip": Found(value=found.mean, std=found.std, details={"standard_error": float(error)})}


def _agreement(subject: Subject, _rules: Rules) -> dict[str, Found]:
    assert subject.captions is not None
    heads = {
        name: array for name, array in subject.generated.arrays.items() if name in ("place", "time", "weather", "cars")
    }
    found = agreement(heads, subject.captions)
    details = {"by_attribute": found.by_attribute, "num_mentioned": found.num_mentioned}
    ceiling = subject.extractor.get("agreement_of_real_pictures")
    return {"agreement": Found(value=found.value, details={**details, "of_real_pictures": ceiling})}


def _kept(subject: Subject, name: str) -> np.ndarray:
    array = subject.generated.arrays.get(name)
    if array is None:
        raise InputError(
            f"{subject.metric} without features, of which there are too many to keep",
            "features of every picture",
            "raise --keep_features",
        )
    return array


_MEASURES: dict[str, Callable[[Subject, Rules], dict[str, Found]]] = {
    "fid": _frechet,
    "fd": _frechet,
    "kid": _kernel,
    "prdc": _coverage,
    "is": _inception,
    "clip": _clip,
    "agreement": _agreement,
}
