"""The embedded data set: little street scenes with captions, drawn on the fly from their number, without files or torch."""

from __future__ import annotations

from collections.abc import Iterable

from halation.data.dataset import JSON, Picture
from halation.data.streets.attributes import Part, scene
from halation.data.streets.captions import caption
from halation.data.streets.places import draw
from halation.errors import InputError

VERSION = 1
"""Goes up with every change that changes a pixel or a caption."""

SMALLEST, LARGEST = 32, 512
NUM_TRAIN, NUM_HELDOUT = 50_000, 2_000
_NUM_SAMPLE_CAPTIONS = 4_000


class Streets:
    """Street scenes as a source of pictures; picture k of a part is a pure function of the part, k and the size."""

    name = "streets"
    class_names: tuple[str, ...] = ()

    def __init__(self, height: int, width: int, num_train: int = NUM_TRAIN, num_heldout: int = NUM_HELDOUT) -> None:
        if height != width or not SMALLEST <= height <= LARGEST:
            raise InputError(
                f"streets at {height} x {width} pixels",
                f"a square size from {SMALLEST} to {LARGEST}",
                "pass --image_size 64 64, or another square size in that range",
            )
        if num_train < 1 or num_heldout < 0:
            raise InputError(
                f"streets with {num_train} train and {num_heldout} held-out pictures",
                "at least 1 to train on and 0 held out",
                "ask for more pictures",
            )
        self.height = height
        self.width = width
        self.num_train = num_train
        self.num_heldout = num_heldout

    @property
    def fingerprint(self) -> dict[str, JSON]:
        return {
            "data": self.name,
            "version": VERSION,
            "height": self.height,
            "width": self.width,
            "num_train": self.num_train,
            "num_heldout": self.num_heldout,
        }

    def train(self, index: int) -> Picture:
        return self._picture("train", index, self.num_train)

    def heldout(self, index: int) -> Picture:
        return self._picture("heldout", index, self.num_heldout)

    def captions(self) -> Iterable[str]:
        return (caption(scene("train", index)) for index in range(min(self.num_train, _NUM_SAMPLE_CAPTIONS)))

    def every_caption(self) -> Iterable[str]:
        sizes: tuple[tuple[Part, int], ...] = (("train", self.num_train), ("heldout", self.num_heldout))
        return (caption(scene(part, index)) for part, num in sizes for index in range(num))

    def _picture(self, part: Part, index: int, num: int) -> Picture:
        if not 0 <= index < num:
            raise IndexError(f"picture {index} of the {part} part, which has {num}")
        attributes = scene(part, index)
        return Picture(pixels=draw(attributes, self.height), caption=caption(attributes))
