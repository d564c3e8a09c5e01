"""Networks that turn images into features: Inception, DINOv2, CLIP, street scenes.

Decoder processes import `resize` from here, so torch and the networks are imported only when an extractor is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from halation.errors import InputError
from halation.evaluation.extractors.resize import RESIZE_RULES, ResizeRule

if TYPE_CHECKING:
    from halation.evaluation.extractors.extractor import Extractor

EXTRACTOR_NAMES = ("inception", "dinov2", "clip", "streets")
DTYPE_NAMES = ("fp32", "bf16", "fp16")


def open_extractor(
    name: str,
    *,
    device: str,
    dtype: str = "fp32",
    resize: ResizeRule = "clean",
    weights: str = "",
    flag: str = "--weights",
) -> Extractor:
    """Open an extractor by name, or from the folder of a DINOv2 or CLIP model.

    `weights` replaces the default weights; `flag` is the flag for them, for messages.
    """
    if dtype not in DTYPE_NAMES:
        raise InputError(f"dtype {dtype!r} for an extractor", ", ".join(DTYPE_NAMES), "choose one of them")
    if resize not in RESIZE_RULES:
        raise InputError(f"the resize rule {resize!r}", ", ".join(RESIZE_RULES), "choose one of them by --resize")
    if name == "inception":
        from halation.evaluation.extractors.inception import InceptionExtractor

        return InceptionExtractor(weights, device=device, dtype=dtype, rule=resize, flag=flag)
    if name == "streets":
        from halation.evaluation.extractors.streets_classifier import StreetsExtractor

        if weights:
            raise InputError(
                f"{flag} {weights} for the streets extractor",
                f"no {flag}: its network is part of Halation",
                "omit it",
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
