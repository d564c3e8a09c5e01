"""The dataset protocol: images with captions or classes, single and in batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


# eq=False: comparing arrays gives an array, so the generated == would raise.
@dataclass(frozen=True, kw_only=True, eq=False)
class CaptionedImage:
    """One image with its caption or class."""

    pixels: NDArray[np.uint8]
    """(height, width, 3), sRGB."""
    caption: str
    """Empty if the source has classes instead."""
    label: int = -1
    """The class, an index into the source's `class_names`; -1 without classes."""
    original_size: tuple[int, int] = (0, 0)
    """Height and width before cropping and resizing; by default those of `pixels`."""

    def __post_init__(self) -> None:
        if self.original_size == (0, 0):
            object.__setattr__(self, "original_size", (int(self.pixels.shape[0]), int(self.pixels.shape[1])))


class ImageDataset(Protocol):
    """A source of images in two disjoint splits; both are pure functions of the index."""

    @property
    def name(self) -> str:
        """The name of the source: `streets`, or the folder."""

    @property
    def fingerprint(self) -> dict[str, JSON]:
        """Everything that decides the pixels and captions; equal fingerprints mean equal images."""

    @property
    def num_train(self) -> int:
        """Number of train images."""

    @property
    def num_validation(self) -> int:
        """Number of validation images."""

    @property
    def height(self) -> int:
        """Height of every image."""

    @property
    def width(self) -> int:
        """Width of every image."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names that labels index; empty if there are captions."""

    def train(self, index: int) -> CaptionedImage:
        """Return train image `index`, 0 <= index < num_train."""

    def validation(self, index: int) -> CaptionedImage:
        """Return validation image `index`, 0 <= index < num_validation."""

    def captions(self) -> Iterable[str]:
        """Return a limited number of train captions, to build a tokenizer from."""

    def all_captions(self) -> Iterable[str]:
        """Return the captions of all images of both splits, with duplicates."""


class ImageBatch(NamedTuple):
    """Stacked images (or latents) with captions, labels and original sizes."""

    pixels: np.ndarray
    captions: list[str]
    labels: np.ndarray
    originals: np.ndarray
    """(n, 2) int64: original heights and widths."""


def stack_images(images: Sequence[CaptionedImage]) -> ImageBatch:
    """Stack images of one shape."""
    return ImageBatch(
        np.stack([image.pixels for image in images]),
        [image.caption for image in images],
        np.array([image.label for image in images], np.int64),
        np.array([image.original_size for image in images], np.int64).reshape(-1, 2),
    )


def unstack_images(batch: ImageBatch) -> list[CaptionedImage]:
    """Split a batch into single images; their pixels are views."""
    originals = [(height, width) for height, width in batch.originals.tolist()]
    rows = zip(batch.pixels, batch.captions, batch.labels.tolist(), originals, strict=True)
    return [
        CaptionedImage(pixels=pixels, caption=text, label=label, original_size=size)
        for pixels, text, label, size in rows
    ]


def concat_batches(batches: Sequence[ImageBatch]) -> ImageBatch:
    """Concatenate batches in order."""
    captions = [caption for one in batches for caption in one.captions]
    labels = np.concatenate([one.labels for one in batches])
    originals = np.concatenate([one.originals for one in batches])
    return ImageBatch(np.concatenate([one.pixels for one in batches]), captions, labels, originals)


def load_images(source: ImageDataset, split: str, indices: Sequence[int]) -> ImageBatch:
    """Load the images of `split` ("train" or "heldout") at these indices in this process."""
    load_image = source.train if split == "train" else source.validation
    return stack_images([load_image(int(index)) for index in indices])
