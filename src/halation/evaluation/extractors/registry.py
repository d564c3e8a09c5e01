"""Open a feature extractor by its name or folder."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from halation.errors import InputError
from halation.evaluation.extractors.extractor import DTYPES, Extractor
from halation.evaluation.extractors.preparation import Rule

NAMES = ("inception", "dinov2", "clip", "streets")


def open_extractor(
    name: str,
    *,
    device: str,
    dtype: str = "fp32",
    resize: Rule = "clean",
    weights: str = "",
    flag: str = "--weights",
) -> Extractor:
    """The extractor of that name, or of the folder of a DINOv2 or CLIP model; `weights` replaces the default weights.

    `flag` is where a person gives those weights, for messages that tell them to.
    """
    _check(dtype, resize)
    if name == "inception":
        from halation.evaluation.extractors.inception import InceptionExtractor

        return InceptionExtractor(weights, device=device, dtype=dtype, rule=resize, flag=flag)
    if name == "streets":
        from halation.evaluation.extractors.streets import StreetsExtractor

        if weights:
            raise InputError(
                f"{flag} {weights} for the streets extractor",
                f"no {flag}: its network comes with Halation",
                "leave it out",
            )
        return StreetsExtractor(device=device, dtype=dtype)
    if name in NAMES or Path(name).is_dir():
        from halation.evaluation.extractors.transformers import open_transformer

        return open_transformer(name, weights, device=device, dtype=dtype, rule=resize, flag=flag)
    raise InputError(
        f"the extractor {name!r} is neither a known name nor a folder",
        f"{', '.join(NAMES)}, or the folder of a DINOv2 or CLIP model",
        "check --extractor",
    )


def _check(dtype: str, resize: str) -> None:
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} for an extractor", ", ".join(DTYPES), "choose one of them")
    if resize not in get_args(Rule):
        raise InputError(f"the resize rule {resize!r}", ", ".join(get_args(Rule)), "choose one of them by --resize")
