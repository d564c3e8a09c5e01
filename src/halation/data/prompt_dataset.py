"""A file of prompts as a dataset without images, for sampling from a teacher."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from halation.data.dataset_protocol import JSON, CaptionedImage, ImageBatch
from halation.prompt_files import iter_prompts

_MAX_CAPTIONS = 100_000


class PromptDataset:
    """Prompts of a TXT, CSV, JSONL or Parquet file, in file order, repeated up to `num_items`.

    `max_prompts` keeps only the first ones; 0 keeps all. There are no images: pixels are one black pixel, broadcast to
    the size, so that they take no memory.
    """

    class_names: tuple[str, ...] = ()
    num_validation = 0

    def __init__(self, file: str | Path, height: int, width: int, *, num_items: int = 0, max_prompts: int = 0) -> None:
        self.name = str(file)
        self.height = height
        self.width = width
        texts = [row.prompt for row in iter_prompts(file)]
        if max_prompts < 0 or num_items < 0:
            raise ValueError(f"{num_items} items of the first {max_prompts} prompts; expected numbers of at least 0")
        self.texts = tuple(texts[:max_prompts] if max_prompts else texts)
        self.num_train = max(len(self.texts), num_items)

    @property
    def fingerprint(self) -> dict[str, JSON]:
        """The texts and the number of items; independent of the file's name and format."""
        digest = hashlib.sha256()
        for text in self.texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return {
            "kind": "prompts",
            "texts": digest.hexdigest(),
            "num_train": self.num_train,
            "height": self.height,
            "width": self.width,
        }

    def caption(self, index: int) -> str:
        """Return the prompt of item `index`."""
        if not 0 <= index < self.num_train:
            raise IndexError(f"item {index} of {self.name}, which has {self.num_train}")
        return self.texts[index % len(self.texts)]

    def train(self, index: int) -> CaptionedImage:
        return CaptionedImage(pixels=self._blank_pixels(), caption=self.caption(index))

    def validation(self, index: int) -> CaptionedImage:
        raise IndexError(f"{self.name} holds prompts and has no validation images")

    def read(self, indices: Sequence[int] | np.ndarray) -> ImageBatch:
        """Return the items of a batch."""
        wanted = [int(index) for index in indices]
        num = len(wanted)
        return ImageBatch(
            self._blank_pixels(num),
            [self.caption(index) for index in wanted],
            np.full(num, -1, np.int64),
            np.full((num, 2), (self.height, self.width), np.int64),
        )

    def captions(self) -> Iterable[str]:
        return self.texts[:_MAX_CAPTIONS]

    def all_captions(self) -> Iterator[str]:
        return iter(self.texts)

    def _blank_pixels(self, *num: int) -> np.ndarray:
        return np.broadcast_to(np.uint8(0), (*num, self.height, self.width, 3))
