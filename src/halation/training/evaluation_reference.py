"""What a training run's pictures are compared with: real pictures at the run's size, and the prompts they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from halation.data.dataset import Pictures
from halation.data.decode import decode
from halation.data.image_folder import ImageFolder
from halation.data.open import check_pictures, open_pictures
from halation.data.streets import caption, scene
from halation.errors import InputError
from halation.evaluation.image_sources import Loaded, Scenes, Source, hashed
from halation.evaluation.metrics.caption_agreement import says_something
from halation.evaluation.metrics.measure import NEEDS_CAPTIONS
from halation.runs import folder as runs
from halation.training.config import TrainConfig

FEWEST = 16
"""Real pictures below which no metric means anything."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The first pictures that a run trains on, as it sees them: cropped and at its size."""

    pictures: ImageFolder
    num: int

    @property
    def captions(self) -> tuple[str, ...] | None:
        return None  # a reference's captions are of no use to any number

    def __len__(self) -> int:
        return self.num

    @property
    def key(self) -> str:
        return hashed([self.pictures.fingerprint, "train", self.num])

    @property
    def facts(self) -> dict[str, Any]:
        size = [self.pictures.height, self.pictures.width]
        return {"kind": "training pictures", "path": self.pictures.name, "size": size}

    def name(self, index: int) -> str:
        return str(self.pictures.folder / self.pictures.file_name(index))

    @property
    def loader(self) -> Callable[[str], Loaded]:
        return partial(load_trained, self.pictures.height, self.pictures.width)

    def ticket(self, index: int) -> str:
        return self.name(index)

    def load(self, index: int) -> Loaded:
        return self.loader(self.ticket(index))


def load_trained(height: int, width: int, path: str) -> Loaded:
    """The picture of a file as a run at this size sees it."""
    pixels = decode(Path(path), height, width)
    return Loaded(pixels, hashlib.sha256(pixels.tobytes()).digest())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The reference of a run's evaluations and what is drawn to be compared with it."""

    reference: Source
    prompts: tuple[str, ...]


def comparison(config: TrainConfig, source: Pictures, run: runs.Run) -> Comparison:
    """Held-out scenes, or the training pictures of a folder; metrics that this data cannot serve are refused."""
    if config.data == "streets":
        height, _width = config.image_size
        reference: Source = Scenes(size=height, num=config.eval_reference)
        prompts = [
            caption(scene("heldout", index)) for index in range(min(config.eval_pictures, config.eval_reference))
        ]
    else:
        folder = _pixels_of(config, source, run)
        reference = Trained(pictures=folder, num=min(config.eval_reference, folder.num_train))
        prompts = [folder.prompt(index) for index in range(min(config.eval_pictures, len(reference)))]
        _refuse(config, folder, prompts)
    return Comparison(reference=reference, prompts=tuple(prompts))


def _pixels_of(config: TrainConfig, source: Pictures, run: runs.Run) -> ImageFolder:
    """The pictures themselves at one size, also where the run trains on what a cache made of them, or in buckets."""
    if isinstance(source, ImageFolder) and not config.aspect_buckets:
        return source
    height, width = config.image_size
    folder = open_pictures(config.data, height, width, config.heldout_pictures, max_pictures=config.max_pictures)
    check_pictures(folder, Path(config.cache_dir) if config.cache_dir else run.folder / "cache", quiet=True)
    assert isinstance(folder, ImageFolder)
    return folder


def _refuse(config: TrainConfig, folder: ImageFolder, prompts: list[str]) -> None:
    if folder.num_train < FEWEST:
        raise InputError(
            f"--eval_every with {folder.num_train} pictures in {folder.name}",
            f"at least {FEWEST} real pictures to compare with",
            "leave --eval_every out, or give more pictures",
        )
    worded = [metric for metric in config.eval_metrics if metric in NEEDS_CAPTIONS]
    if worded and folder.class_names:
        raise InputError(
            f"--eval_metrics {' '.join(worded)}, but {folder.name} has classes",
            "pictures with captions, for metrics that compare with words",
            "ask for other metrics",
        )
    if "agreement" in worded and not says_something(prompts):
        raise InputError(
            f"--eval_metrics agreement, but no caption of {folder.name} names what the streets network looks for",
            "captions in the words of the embedded street scenes",
            "ask for clip instead",
        )
