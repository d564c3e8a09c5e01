"""The embedded dataset as an ImageDataset; images are rendered from their number alone."""

from __future__ import annotations

from collections.abc import Iterable

from halation.data.dataset_protocol import JSON, CaptionedImage
from halation.data.streets.captions import caption
from halation.data.streets.scene_attributes import Split, scene
from halation.data.streets.scene_layouts import draw
from halation.errors import InputError

VERSION = 1
"""Incremented by every change that affects a pixel or a caption."""

MIN_SIZE, MAX_SIZE = 32, 512
NUM_TRAIN, NUM_VALIDATION = 50_000, 2_000
_MAX_CAPTIONS = 4_000


class Streets:
    """Street scenes; image k of a split is a pure function of the split, k and the size."""

    name = "streets"
    class_names: tuple[str, ...] = ()

    def __init__(
        self, height: int, width: int, num_train: int = NUM_TRAIN, num_validation: int = NUM_VALIDATION
    ) -> None:
        if height != width or not MIN_SIZE <= height <= MAX_SIZE:
            raise InputError(
                f"streets at {height} x {width} pixels",
                f"a square size from {MIN_SIZE} to {MAX_SIZE}",
                "pass --image_size 64 64, or another square size in that range",
            )
        if num_train < 1 or num_validation < 0:
            raise InputError(
                f"streets with {num_train} train and {num_validation} validation images",
                "at least 1 train image and 0 validation images",
                "request more images",
            )
        self.height = height
        self.width = width
        self.num_train = num_train
        self.num_validation = num_validation

    @property
    def fingerprint(self) -> dict[str, JSON]:
        return {
            "data": self.name,
            "version": VERSION,
            "height": self.height,
            "width": self.width,
            "num_train": self.num_train,
            "num_heldout": self.num_validation,
        }

    def train(self, index: int) -> CaptionedImage:
        return self._draw_image("train", index, self.num_train)

    def validation(self, index: int) -> CaptionedImage:
        return self._draw_image("heldout", index, self.num_validation)

    def captions(self) -> Iterable[str]:
        return (caption(scene("train", index)) for index in range(min(self.num_train, _MAX_CAPTIONS)))

    def all_captions(self) -> Iterable[str]:
        sizes: tuple[tuple[Split, int], ...] = (("train", self.num_train), ("heldout", self.num_validation))
        return (caption(scene(part, index)) for part, num in sizes for index in range(num))

    def _draw_image(self, split: Split, index: int, num: int) -> CaptionedImage:
        if not 0 <= index < num:
            raise IndexError(f"image {index} of the {split} split, which has {num}")
        attributes = scene(split, index)
        return CaptionedImage(pixels=draw(attributes, self.height), caption=caption(attributes))
