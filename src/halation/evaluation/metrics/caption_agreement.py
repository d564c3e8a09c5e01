"""Prompt agreement: the share of attributes in street captions that the images show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halation.data.streets.captions import Mentioned, mentioned
from halation.data.streets.scene_attributes import PLACES, TIMES, WEATHERS
from halation.errors import InputError, format_count


@dataclass(frozen=True, kw_only=True)
class CaptionAgreement:
    """Shares of mentioned attributes that are found; unmentioned attributes do not count."""

    value: float
    """Over all mentioned attributes of all images."""
    by_attribute: dict[str, float | None]
    """None for an attribute that no caption mentions."""
    num_mentioned: dict[str, int]
    """How many captions mention the attribute."""


# The columns of a head that a caption accepts, or None if it does not mention the attribute.
_EXPECTED_COLUMNS: dict[str, Callable[[Mentioned], Sequence[int] | None]] = {
    "place": lambda says: None if says["place"] is None else (PLACES.index(says["place"]),),
    "time": lambda says: None if says["time"] is None else (TIMES.index(says["time"]),),
    "weather": lambda says: None if says["weather"] is None else (WEATHERS.index(says["weather"]),),
    "cars": lambda says: says["cars"],
}


def has_street_captions(captions: Sequence[str]) -> bool:
    """Return True if any caption mentions an attribute of the street scenes."""
    return any(
        asked_by(mentioned(caption)) is not None for caption in captions for asked_by in _EXPECTED_COLUMNS.values()
    )


def caption_agreement(outputs: Mapping[str, npt.NDArray[Any]], captions: Sequence[str]) -> CaptionAgreement:
    """Return the agreement of images with their captions.

    `outputs` are logits of the streets extractor, one row per image.
    """
    predicted = {attribute: _predicted_columns(outputs, attribute, len(captions)) for attribute in _EXPECTED_COLUMNS}
    mentions = [mentioned(caption) for caption in captions]
    hits: dict[str, list[bool]] = {attribute: [] for attribute in _EXPECTED_COLUMNS}
    for attribute, expected_columns in _EXPECTED_COLUMNS.items():
        for column, mention in zip(predicted[attribute].tolist(), mentions, strict=True):
            expected = expected_columns(mention)
            if expected is not None:
                hits[attribute].append(column in expected)
    num_mentioned = {attribute: len(mine) for attribute, mine in hits.items()}
    if not any(num_mentioned.values()):
        example = f", such as {captions[0][:80]!r}" if captions else ""
        raise InputError(
            f"none of {format_count(len(captions), 'caption')} names a place, a time, a weather or a number "
            f"of cars{example}",
            "captions in the vocabulary of the embedded street scenes, "
            'such as "A rural road with dry roads and two cars at night"',
            "omit the prompt agreement, which only supports the embedded street captions; "
            "for other prompts use the CLIP score",
        )
    return CaptionAgreement(
        value=sum(map(sum, hits.values())) / sum(num_mentioned.values()),
        by_attribute={attribute: sum(mine) / len(mine) if mine else None for attribute, mine in hits.items()},
        num_mentioned=num_mentioned,
    )


def _predicted_columns(
    outputs: Mapping[str, npt.NDArray[Any]], attribute: str, num_captions: int
) -> npt.NDArray[np.intp]:
    """Return the column with the highest logit in each row."""
    if attribute not in outputs:
        raise InputError(
            f"features without logits for {attribute!r}, only {', '.join(sorted(outputs)) or 'nothing'}",
            "the outputs of the streets extractor, the only one that classifies attributes",
            "use the prompt agreement together with the streets extractor",
        )
    logits = outputs[attribute]
    if len(logits) != num_captions:
        raise InputError(
            f"{format_count(len(logits), 'image')} and {format_count(num_captions, 'caption')}",
            "one caption for each image, in the same order",
            "give the prompts that the images were generated for",
        )
    if not np.isfinite(logits).all():
        broken = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
        raise InputError(
            f"logits for {attribute!r} that are not finite, first for image {broken}",
            "finite numbers for every image",
            "check that image; if it is intact, evaluate on another device or in float32",
        )
    return np.argmax(logits, axis=1)
