"""Open a feature extractor by its name or folder."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from halation.errors import InputError
from halation.evaluation.extractors.extractor import DTYPES, Extractor
from halation.evaluation.extractors.resize import ResizeRule

EXTRACTOR_NAMES = ("inception", "dinov2", "clip", "streets")


def open_extractor(
    name: str,
    *,
    device: str,
    dtype: str = "fp32",
    resize: ResizeRule = "clean",
    weights: str = "",
    flag: str = "--weights",
) -> Extractor:
    """The extractor of that name, or of the folder of a DINOv2 or CLIP model; `weights` replaces the default weights.

    `flag` is where a person gives those weights, for messages that tell them to.
    """
    _check_settings(dtype, resize)
    if name == "inception":
        from halation.evaluation.extractors.inception import InceptionExtractor

        return InceptionExtractor(weights, device=device, dtype=dtype, rule=resize, flag=flag)
    if name == "streets":
        from halation.evaluation.extractors.streets_classifier import StreetsExtractor

        if weights:
            raise InputError(
                f"{flag} {weights} for the streets extractor",
                f"no {flag}: its network comes with Halation",
                "leave it out",
            )
        return StreetsExtractor(device=device, dtype=dtype)
    if name in EXTRACTOR_NAMES or Path(name).is_dir():
        from halation.evaluation.extractors.transformers import open_transformers_extractor

        return open_transformers_extractor(name, weights, device=device, dtype=dtype, rule=resize, flag=flag)
    raise InputError(
        f"the extractor {name!r} is neither a known name nor a folder",
        f"{', '.join(EXTRACTOR_NAMES)}, or the folder of a DINOv2 or CLIP model",
        "check --extractor",
    )


def _check_settings(dtype: str, resize: str) -> None:
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} for an extractor", ", ".join(DTYPES), "choose one of them")
    if resize not in get_args(ResizeRule):
        raise InputError(
            f"the resize rule {resize!r}", ", ".join(get_args(ResizeRule)), "choose one of them by --resize"
        )
