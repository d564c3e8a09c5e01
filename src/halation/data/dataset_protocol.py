"""What a source of images is, whatever its kind; it knows no files, no tensors and no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


# eq=False: arrays do not compare to one truth value, so the generated == would raise.
@dataclass(frozen=True, kw_only=True, eq=False)
class CaptionedImage:
    """One image with what is known about it."""

    pixels: NDArray[np.uint8]
    """(height, width, 3), sRGB."""
    caption: str
    """Empty where the source has classes instead."""
    label: int = -1
    """The class, an index into the source's `class_names`; -1 where there are no classes."""
    original_size: tuple[int, int] = (0, 0)
    """Height and width before it was cropped and resized; those of the pixels unless told otherwise."""

    def __post_init__(self) -> None:
        if self.original_size == (0, 0):
            object.__setattr__(self, "original_size", (int(self.pixels.shape[0]), int(self.pixels.shape[1])))


class ImageDataset(Protocol):
    """A source of images in two parts that do not meet; both are pure functions of the index."""

    @property
    def name(self) -> str:
        """The source in a word: `streets`, or the folder."""

    @property
    def fingerprint(self) -> dict[str, JSON]:
        """Everything that decides the pixels and captions; equal fingerprints mean equal images."""

    @property
    def num_train(self) -> int:
        """How many images there are to train on."""

    @property
    def num_validation(self) -> int:
        """How many images are kept aside."""

    @property
    def height(self) -> int:
        """Rows of every image."""

    @property
    def width(self) -> int:
        """Columns of every image."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that labels count; empty where there are captions."""

    def train(self, index: int) -> CaptionedImage:
        """Image `index` of the train part, 0 <= index < num_train."""

    def validation(self, index: int) -> CaptionedImage:
        """Image `index` of the validation part, 0 <= index < num_validation."""

    def captions(self) -> Iterable[str]:
        """A bounded sample of the train part's captions, to build a tokenizer from."""

    def all_captions(self) -> Iterable[str]:
        """The captions of all images of both parts, repeated ones too."""
