"""Synthetic inputs: small images in class folders, and autoencoders with random weights."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

NUM_CLASSES = 8


@contextlib.contextmanager
def workplace(asked: Path | None) -> Iterator[Path]:
    """Yield the given folder, which is kept, or a temporary one, which is removed."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked
        return
    folder = Path(tempfile.mkdtemp(prefix="halation_benchmark_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def class_folder(folder: Path, num_images: int) -> Path:
    """Write small, different, noisy PNGs in class folders; content does not affect speed."""
    from PIL import Image

    def write(number: int) -> None:
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        path = folder / f"class_{number % NUM_CLASSES}" / f"{number:06d}.png"
        Image.fromarray(pixels).save(path, compress_level=0)

    for number in range(NUM_CLASSES):
        (folder / f"class_{number}").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(num_images)))
    return folder


def random_vae(channels: tuple[int, ...], layers: int) -> Any:
    """Create an AutoencoderKL with factor 8 and random weights.

    Channels (128, 256, 512, 512) and 2 layers is the architecture of Stable Diffusion.
    """
    import torch
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoencoderKL(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=channels,
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            layers_per_block=layers,
            norm_num_groups=min(32, channels[0]),
            sample_size=256,
        )


def vae_folder(folder: Path) -> Path:
    """Save a minimal autoencoder; its speed does not matter, as training reads cached latents."""
    random_vae((8, 8, 8, 8), 1).save_pretrained(str(folder), safe_serialization=True)
    return folder
