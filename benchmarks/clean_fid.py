"""What people do to score images: write a PNG folder, run clean-fid over it, then a CLIP script over the same files."""

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
"""clean-fid's own defaults; it gets no more processes than there are cores, which would only slow it down."""
CLIP_BATCH_SIZE = 8


def found() -> Any | None:
    """clean-fid's `fid`, or None where it is not installed."""
    return oracles.imported("cleanfid.fid")


def write_folder(images: Sequence[Pixels], folder: Path, *, num_threads: int) -> None:
    """By Pillow as it comes; scripts have one thread."""

    def write(number: int) -> None:
        Image.fromarray(images[number]).save(folder / f"{number:06d}.png")

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(write, range(len(images))))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Of the real images: what clean-fid keeps of a data set."""

    features: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


def reference_of(features: np.ndarray) -> Reference:
    return Reference(features=features, mean=np.mean(features, axis=0), covariance=np.cov(features, rowvar=False))


@dataclass(frozen=True, kw_only=True)
class CleanFid:
    """One pass over the folder serves both distances; clean-fid's `compute_fid` and `compute_kid` take a pass each."""

    fid: Any
    network: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    """Ours: clean-fid's is a download."""
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
            warnings.simplefilter("ignore")  # scipy's, about its next release and about singular matrices
            return float(self.fid.frechet_distance(mean, covariance, reference.mean, reference.covariance))

    def kernel(self, features: np.ndarray, reference: Reference, *, subset_size: int, seed: int) -> float:
        """It draws from numpy's global generator, the second set first: so are the subsets the same as ours."""
        np.random.seed(seed)
        return float(self.fid.kernel_distance(reference.features, features, max_subset_size=subset_size))


class ClipScript:
    """Files opened again, transformers' processor, a batch, cosines: as model cards and evaluation scripts show it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        images = transformers.CLIPImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        self._processor: Any = transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer)
        model: Any = transformers.CLIPModel.from_pretrained(str(folder), local_files_only=True)
        self._model = model.to(device).eval()
        self._device = device

    def scores(self, folder: Path, captions: Sequence[str]) -> np.ndarray:
        """One an image."""
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
