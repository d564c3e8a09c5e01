"""The common way to score images: a PNG folder, clean-fid on it, then a CLIP script."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import measure, oracles
from halation.images.png_codec import Pixels

BATCH_SIZE, MOST_WORKERS = 32, 12
"""The defaults of clean-fid; it gets at most one process per core, since more would slow it down."""
CLIP_BATCH_SIZE = 8


def found() -> Any | None:
    """Return clean-fid's `fid` module, or None if it is not installed."""
    return oracles.imported("cleanfid.fid")


def write_folder(images: Sequence[Pixels], folder: Path, *, num_threads: int) -> None:
    """Write PNG files with Pillow's defaults; typical scripts use one thread."""

    def write(number: int) -> None:
        Image.fromarray(images[number]).save(folder / f"{number:06d}.png")

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(write, range(len(images))))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The statistics of the real images that clean-fid stores."""

    features: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


def reference_of(features: np.ndarray) -> Reference:
    return Reference(features=features, mean=np.mean(features, axis=0), covariance=np.cov(features, rowvar=False))


@dataclass(frozen=True, kw_only=True)
class CleanFid:
    """Computes FID and KID in one pass; clean-fid's `compute_fid` and `compute_kid` take two."""

    fid: Any
    network: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    """Halation's network: that of clean-fid is a download."""
    device: torch.device

    def features(self, folder: Path) -> np.ndarray:
        def model(batch: torch.Tensor) -> torch.Tensor:
            return self.network(batch.permute(0, 2, 3, 1).contiguous())["features"]

        workers = min(MOST_WORKERS, measure.num_cores())
        result: np.ndarray = self.fid.get_folder_features(
            str(folder),
            model,
            num_workers=workers,
            batch_size=BATCH_SIZE,
            device=self.device,
            mode="clean",
            verbose=False,
        )
        return result

    def frechet(self, features: np.ndarray, reference: Reference) -> float:
        mean, covariance = np.mean(features, axis=0), np.cov(features, rowvar=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns about its next release and about singular matrices
            return float(self.fid.frechet_distance(mean, covariance, reference.mean, reference.covariance))

    def kernel(self, features: np.ndarray, reference: Reference, *, subset_size: int, seed: int) -> float:
        """Return the KID; with this seed and order of arguments, the subsets are the same as ours.

        clean-fid uses numpy's global generator, and draws from the second set first.
        """
        np.random.seed(seed)
        return float(self.fid.kernel_distance(reference.features, features, max_subset_size=subset_size))


class ClipScript:
    """CLIP score as in model cards and scripts: open files, processor, batch, cosine."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        images = transformers.CLIPImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        self._processor: Any = transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer)
        model: Any = transformers.CLIPModel.from_pretrained(str(folder), local_files_only=True)
        self._model = model.to(device).eval()
        self._device = device

    def scores(self, folder: Path, captions: Sequence[str]) -> np.ndarray:
        """Return one score per image."""
        files = sorted(folder.glob("*.png"))
        found = []
        for start in range(0, len(files), CLIP_BATCH_SIZE):
            images = [Image.open(file).convert("RGB") for file in files[start : start + CLIP_BATCH_SIZE]]
            texts = list(captions[start : start + CLIP_BATCH_SIZE])
            inputs = self._processor(text=texts, images=images, return_tensors="pt", padding=True, truncation=True)
            inputs = inputs.to(self._device)
            with torch.no_grad():
                image = self._model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
                text = self._model.get_text_features(
                    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
                ).pooler_output
            cosines = torch.cosine_similarity(image, text)
            found.append((100 * cosines.clamp(min=0)).cpu().numpy())
        return np.concatenate(found)
