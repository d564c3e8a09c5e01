"""What a source of pictures is, whatever its kind; it knows no files, no tensors and no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


# eq=False: arrays do not compare to one truth value, so the generated == would raise.
@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """One picture with what is known about it."""

    pixels: NDArray[np.uint8]
    """(height, width, 3), sRGB."""
    caption: str
    """Empty where the source has classes instead."""
    label: int = -1
    """The class, an index into the source's `class_names`; -1 where there are no classes."""
    original: tuple[int, int] = (0, 0)
    """Height and width before it was cropped and resized; those of the pixels unless told otherwise."""

    def __post_init__(self) -> None:
        if self.original == (0, 0):
            object.__setattr__(self, "original", (int(self.pixels.shape[0]), int(self.pixels.shape[1])))


class Pictures(Protocol):
    """A source of pictures in two parts that do not meet; both are pure functions of the index."""

    @property
    def name(self) -> str:
        """The source in a word: `streets`, or the folder."""

    @property
    def fingerprint(self) -> dict[str, JSON]:
        """Everything that decides the pixels and captions; equal fingerprints mean equal pictures."""

    @property
    def num_train(self) -> int:
        """How many pictures there are to train on."""

    @property
    def num_heldout(self) -> int:
        """How many pictures are kept aside."""

    @property
    def height(self) -> int:
        """Rows of every picture."""

    @property
    def width(self) -> int:
        """Columns of every picture."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that labels count; empty where there are captions."""

    def train(self, index: int) -> Picture:
        """Picture `index` of the train part, 0 <= index < num_train."""

    def heldout(self, index: int) -> Picture:
        """Picture `index` of the held-out part, 0 <= index < num_heldout."""

    def captions(self) -> Iterable[str]:
        """A bounded sample of the train part's captions, to build a tokenizer from."""

    def every_caption(self) -> Iterable[str]:
        """The captions of all pictures of both parts, repeated ones too."""
