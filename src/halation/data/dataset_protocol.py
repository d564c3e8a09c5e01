"""The dataset protocol: images with captions or classes, one by one and in batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

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


class ImageBatch(NamedTuple):
    """Some images, stacked: pixels (or latents) first."""

    pixels: np.ndarray
    captions: list[str]
    labels: np.ndarray
    originals: np.ndarray
    """(n, 2) int64: heights and widths of the images as they were."""


def stack_images(images: Sequence[CaptionedImage]) -> ImageBatch:
    """Images of one shape as one array."""
    return ImageBatch(
        np.stack([image.pixels for image in images]),
        [image.caption for image in images],
        np.array([image.label for image in images], np.int64),
        np.array([image.original_size for image in images], np.int64).reshape(-1, 2),
    )


def unstack_images(batch: ImageBatch) -> list[CaptionedImage]:
    """The single images again; their pixels are views."""
    originals = [(height, width) for height, width in batch.originals.tolist()]
    rows = zip(batch.pixels, batch.captions, batch.labels.tolist(), originals, strict=True)
    return [
        CaptionedImage(pixels=pixels, caption=text, label=label, original_size=size)
        for pixels, text, label, size in rows
    ]


def concat_batches(batches: Sequence[ImageBatch]) -> ImageBatch:
    """Several stacks as one, in order."""
    captions = [caption for one in batches for caption in one.captions]
    labels = np.concatenate([one.labels for one in batches])
    originals = np.concatenate([one.originals for one in batches])
    return ImageBatch(np.concatenate([one.pixels for one in batches]), captions, labels, originals)


def load_images(source: ImageDataset, split: str, indices: Sequence[int]) -> ImageBatch:
    """The images of `split` ("train" or "heldout") at these indices, made in this process."""
    load_image = source.train if split == "train" else source.validation
    return stack_images([load_image(int(index)) for index in indices])
