"""The network of the `streets` extractor: what is in a street scene, and the features that distances between sets of them use.

It ships with the package and was trained by `recipes/streets_net/train.py`. It knows the scenes' attributes as columns
of numbers, in the order of `HEADS`, and nothing of how scenes are drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

INPUT_SIZE: Final = 64
NUM_FEATURES: Final = 256
HEADS: Final[Mapping[str, int]] = {"place": 8, "time": 3, "weather": 2, "cars": 6}
"""Columns of each head: places, times and weathers in the order the data set lists them, and 0 to 5 cars."""

WEIGHTS: Final = Path(__file__).with_name("streets_net.safetensors")


@dataclass(frozen=True, kw_only=True)
class Record:
    """How the weights were made and what they reach; it travels in the weights' file."""

    seed: int
    num_pictures: int
    """Scenes of the train part it was trained on."""
    num_steps: int
    num_heldout: int
    """Scenes of the held-out part that the shares below were measured on."""
    accuracy: dict[str, dict[str, float]]
    """Share of held-out scenes an attribute is found in: by the size they are drawn at, then by attribute."""
    agreement: float
    """Share of what their own captions say that is found in real held-out pictures at 64 pixels: no picture can be asked for more."""
    agreement_by_attribute: dict[str, float | None]


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_convolution(width, width, 3), nn.Conv2d(width, width, 3, padding=1, bias=False))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.inner(x)))


def _convolution(width_in: int, width_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width_in, width_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width_out), nn.ReLU()
    )


class StreetsNet(nn.Module):
    """Pictures (B, 64, 64, 3) of 0..255 to features (B, 256) and the logits of each head.

    Features are the means of three depths over the picture: the shallow ones see blur and noise that the deep one, which
    is after attributes, learns to overlook. Each is put to mean 0 and variance 1 of the training pictures, or the largest
    would decide a distance alone. Norms keep running statistics, so in eval mode a picture's numbers do not depend on its
    neighbours.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(_convolution(3, 32, 5, stride=2), _Residual(32)),
                nn.Sequential(_convolution(32, 64, 3, stride=2), _Residual(64)),
                nn.Sequential(_convolution(64, 128, 3, stride=2), _Residual(128), _convolution(128, 160, 3)),
            ]
        )
        self.norm = nn.BatchNorm1d(NUM_FEATURES, affine=False)
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, num))
                for name, num in HEADS.items()
            }
        )

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        assert pictures.shape[1:] == (INPUT_SIZE, INPUT_SIZE, 3), f"pictures of shape {tuple(pictures.shape)}"
        x = pictures.permute(0, 3, 1, 2) / 127.5 - 1.0
        means = []
        for stage in self.stages:
            x = stage(x)
            means.append(x.mean(dim=(2, 3)))
        features = self.norm(torch.cat(means, dim=1))
        return {"features": features} | {name: head(features) for name, head in self.heads.items()}


def save(net: StreetsNet, record: Record, path: Path) -> None:
    """Kernels and matrices in float16, which halves the file; the few numbers of a norm or a bias as they are."""
    tensors = {
        name: (tensor.half() if tensor.dim() > 1 else tensor).detach().cpu().contiguous()
        for name, tensor in net.state_dict().items()
    }
    save_file(tensors, path, metadata={"record": json.dumps(asdict(record), sort_keys=True)})


def load(path: Path = WEIGHTS) -> StreetsNet:
    """The network in float32 on the CPU, ready to look at pictures."""
    net = StreetsNet()
    net.load_state_dict(load_file(path))
    return net.eval().requires_grad_(False)


def record(path: Path = WEIGHTS) -> Record:
    with safe_open(path, framework="pt") as file:
        return Record(**json.loads(file.metadata()["record"]))


def sha256(path: Path = WEIGHTS) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
