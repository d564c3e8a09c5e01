"""Prompt agreement: how much of what captions of street scenes say is found in their pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halation.data.streets.attributes import PLACES, TIMES, WEATHERS
from halation.data.streets.captions import Mentioned, mentioned
from halation.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Shares of mentioned attributes that are found; a caption's silence counts neither way."""

    value: float
    """Over all mentioned attributes of all pictures."""
    by_attribute: dict[str, float | None]
    """None for an attribute that no caption mentions."""
    num_mentioned: dict[str, int]
    """How many captions mention the attribute."""


# What a caption asks of the column that a head finds, or None where it does not ask.
_ASKED: dict[str, Callable[[Mentioned], Sequence[int] | None]] = {
    "place": lambda says: None if says["place"] is None else (PLACES.index(says["place"]),),
    "time": lambda says: None if says["time"] is None else (TIMES.index(says["time"]),),
    "weather": lambda says: None if says["weather"] is None else (WEATHERS.index(says["weather"]),),
    "cars": lambda says: says["cars"],
}


def says_something(captions: Sequence[str]) -> bool:
    """Whether any of these captions is in the words of the street scenes."""
    return any(asked_by(mentioned(caption)) is not None for caption in captions for asked_by in _ASKED.values())


def agreement(outputs: Mapping[str, npt.NDArray[Any]], captions: Sequence[str]) -> Agreement:
    """The agreement of pictures with their captions; `outputs` are the logits of the streets extractor, a row a picture."""
    found = {attribute: _found(outputs, attribute, len(captions)) for attribute in _ASKED}
    says = [mentioned(caption) for caption in captions]
    hits: dict[str, list[bool]] = {attribute: [] for attribute in _ASKED}
    for attribute, asked_by in _ASKED.items():
        for column, sayings in zip(found[attribute].tolist(), says, strict=True):
            asked = asked_by(sayings)
            if asked is not None:
                hits[attribute].append(column in asked)
    num_mentioned = {attribute: len(mine) for attribute, mine in hits.items()}
    if not any(num_mentioned.values()):
        example = f", such as {captions[0][:80]!r}" if captions else ""
        raise InputError(
            f"none of {len(captions)} captions names a place, a time, a weather or a number of cars{example}",
            'captions in the words of the embedded street scenes, such as "A rural road with dry roads and two cars at night"',
            "leave out the prompt agreement, which is for the embedded street captions; for other prompts ask for the CLIP score",
        )
    return Agreement(
        value=sum(map(sum, hits.values())) / sum(num_mentioned.values()),
        by_attribute={attribute: sum(mine) / len(mine) if mine else None for attribute, mine in hits.items()},
        num_mentioned=num_mentioned,
    )


def _found(outputs: Mapping[str, npt.NDArray[Any]], attribute: str, num_captions: int) -> npt.NDArray[np.intp]:
    """The column with the highest logit in each row."""
    if attribute not in outputs:
        raise InputError(
            f"features without logits for {attribute!r}, only {', '.join(sorted(outputs)) or 'nothing'}",
            "the outputs of the streets extractor, which alone finds attributes",
            "ask for the prompt agreement together with the streets extractor",
        )
    logits = outputs[attribute]
    if len(logits) != num_captions:
        raise InputError(
            f"{len(logits)} pictures and {num_captions} captions",
            "one caption for each picture, in the same order",
            "give the prompts that the pictures were drawn from",
        )
    if not np.isfinite(logits).all():
        broken = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
        raise InputError(
            f"logits for {attribute!r} that are not finite, the first of them of picture {broken}",
            "finite numbers for every picture",
            "look at that picture; if it is sound, evaluate on another device or in float32",
        )
    return np.argmax(logits, axis=1)
