"""The model and data of all examples: rectified flow on street scenes, with prompts.

It does not depend on Halation's sampler and takes the place of your model and data.
"""

from __future__ import annotations

import argparse
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from halation.data.streets import Streets

SIZE = 32
PROMPTS = (
    "A sunny highway with two cars",
    "A rainy street at night",
    "A snowy village road",
    "A red car in a city at dusk",
    "A forest road in the fog",
)


class TinyFlow(nn.Module):
    """Predicts the image from a mix of noise (t = 0) and the image (t = 1).

    `forward` returns the loss of a batch.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(512, width)
        self.time = nn.Linear(2, width)
        self.enter = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, kernel_size=3, padding=1) for _ in range(4))
        self.leave = nn.ConvTranspose2d(width, 3, kernel_size=4, stride=4)
        self.place = nn.Parameter(torch.zeros(1, width, SIZE // 4, SIZE // 4))

    def forward(self, images: Tensor, words: Tensor) -> dict[str, Tensor]:
        noise, t = torch.randn_like(images), torch.rand(len(images), device=images.device)
        mix = t[:, None, None, None]
        guess = self.guess(mix * images + (1 - mix) * noise, t, words)
        return {"loss": functional.mse_loss(guess, images)}

    def guess(self, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        angle = torch.stack([torch.sin(3 * t), torch.cos(3 * t)], dim=-1)
        h = self.enter(x) + self.place + (self.words(words) + self.time(angle))[:, :, None, None]
        for block in self.blocks:
            h = h + block(functional.silu(functional.group_norm(h, 8)))
        return self.leave(functional.silu(h))

    def draw(self, prompt: str, generator: torch.Generator, num_steps: int = 16) -> Tensor:
        """Generate one image, (3, height, width) from 0 to 1.

        All randomness comes from `generator`, a CPU generator, so the image is the same on every rank.
        """
        device = next(self.parameters()).device
        x = torch.randn(1, 3, SIZE, SIZE, generator=generator).to(device)
        words = word_numbers(prompt)[None].to(device)
        for step in range(num_steps):
            guess = self.guess(x, torch.full((1,), step / num_steps, device=device), words)
            x = x + (guess - x) / (num_steps - step)  # an Euler step towards the prediction
        return (x[0] + 1) / 2


def word_numbers(text: str) -> Tensor:
    """Return twelve ids for the first words of a text, padded with 0."""
    words = [1 + zlib.crc32(word.encode()) % 511 for word in text.lower().split()[:12]]
    return torch.tensor(words + [0] * (12 - len(words)))


class Scenes(Dataset[dict[str, Tensor]]):
    """Street scenes with captions; pixels are from -1 to 1."""

    def __init__(self, num: int) -> None:
        self.streets = Streets(SIZE, SIZE, num_train=num)

    def __len__(self) -> int:
        return self.streets.num_train

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.streets.train(index)
        pixels = torch.from_numpy(image.pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1
        return {"images": pixels, "words": word_numbers(image.caption)}


def arguments(out: str) -> dict[str, Any]:
    """Parse the command-line arguments, which are the same for all examples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", dest="out", default=out)
    parser.add_argument("--num_steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50)
    return vars(parser.parse_args())
