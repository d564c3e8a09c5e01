"""The bundled extractor: features and attributes of street scenes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.resize import SquareResize, describe_transform
from halation.input_files import file_sha256
from halation.models.dtypes import DTYPES

INPUT_SIZE: Final = 64
NUM_FEATURES: Final = 256
HEADS: Final[Mapping[str, int]] = {"place": 8, "time": 3, "weather": 2, "cars": 6}
"""Columns of each head: places, times and weathers in the order of the dataset, and 0 to 5 cars."""

_STORED_AS = {"num_trained_on": "num_pictures", "num_validated_on": "num_heldout"}
"""Names in the weights file that differ from those in the code."""
WEIGHTS_FILE: Final = Path(__file__).with_name("streets_net.safetensors")


@dataclass(frozen=True, kw_only=True)
class StreetsNetRecord:
    """How the weights were trained and their accuracy; stored in the weights file."""

    seed: int
    num_trained_on: int
    """Number of training scenes."""
    num_steps: int
    num_validated_on: int
    """Number of validation scenes for the accuracies below."""
    accuracy: dict[str, dict[str, float]]
    """Accuracy on validation scenes, by the size they are rendered at, then by attribute."""
    agreement: float
    """Caption agreement of real validation images at 64 pixels: the upper bound for a model."""
    agreement_by_attribute: dict[str, float | None]

    def as_json(self) -> dict[str, Any]:
        return {_STORED_AS.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> StreetsNetRecord:
        names = {key: name for name, key in _STORED_AS.items()}
        return cls(**{names.get(key, key): value for key, value in stored.items()})


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_conv_bn_relu(width, width, 3), nn.Conv2d(width, width, 3, padding=1, bias=False))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.inner(x)))


def _conv_bn_relu(width_in: int, width_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width_in, width_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width_out), nn.ReLU()
    )


class _RowwiseLinear(nn.Linear):
    """A linear layer whose result for a row does not depend on the row's place in the batch.

    Matrix products of some CPUs round the first and last rows of a batch differently if there are only two or three
    outputs. A product and a sum per row do not.
    """

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(1) * self.weight).sum(dim=-1) + self.bias


class StreetsNet(nn.Module):
    """Maps images (B, 64, 64, 3) of 0..255 to features (B, 256) and the logits of each head.

    Features are spatial means at three depths: the shallow ones respond to blur and noise, which the deepest one,
    trained for attributes, learns to ignore. Each feature is normalized to mean 0 and variance 1 over the training
    images, or the largest would dominate a distance. Norms use running statistics, so that in eval mode the result of
    an image does not depend on the other images of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(_conv_bn_relu(3, 32, 5, stride=2), _ResidualBlock(32)),
                nn.Sequential(_conv_bn_relu(32, 64, 3, stride=2), _ResidualBlock(64)),
                nn.Sequential(_conv_bn_relu(64, 128, 3, stride=2), _ResidualBlock(128), _conv_bn_relu(128, 160, 3)),
            ]
        )
        self.norm = nn.BatchNorm1d(NUM_FEATURES, affine=False)
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.ReLU(), _RowwiseLinear(64, num))
                for name, num in HEADS.items()
            }
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        assert images.shape[1:] == (INPUT_SIZE, INPUT_SIZE, 3), f"images of shape {tuple(images.shape)}"
        x = images.permute(0, 3, 1, 2) / 127.5 - 1.0
        means = []
        for stage in self.stages:
            x = stage(x)
            means.append(x.mean(dim=(2, 3)))
        features = self.norm(torch.cat(means, dim=1))
        return {"features": features} | {name: head(features) for name, head in self.heads.items()}


def save_network(net: StreetsNet, record: StreetsNetRecord, path: Path) -> None:
    """Save kernels and matrices in float16, which halves the file; norms and biases unchanged."""
    tensors = {
        name: (tensor.half() if tensor.dim() > 1 else tensor).detach().cpu().contiguous()
        for name, tensor in net.state_dict().items()
    }
    save_file(tensors, path, metadata={"record": json.dumps(record.as_json(), sort_keys=True)})


def load_network(path: Path = WEIGHTS_FILE) -> StreetsNet:
    """Load the network in float32 on the CPU, in eval mode."""
    net = StreetsNet()
    net.load_state_dict(load_file(path))
    return net.eval().requires_grad_(False)


def read_record(path: Path = WEIGHTS_FILE) -> StreetsNetRecord:
    with safe_open(path, framework="pt") as file:
        return StreetsNetRecord.from_json(json.loads(file.metadata()["record"]))


class StreetsExtractor(Extractor):
    """Features and logits of each attribute.

    Images are always resized by the `clean` rule, which the network was trained with.
    """

    def __init__(self, *, device: str, dtype: str) -> None:
        self.name = "streets"
        self.fd_title = "FD-streets"
        self.kid_title = "KID-streets"
        self.num_features = NUM_FEATURES
        self.transform = SquareResize(size=INPUT_SIZE, rule="clean")
        self.device = torch.device(device)
        self.facts = {
            "extractor": self.name,
            "weights": WEIGHTS_FILE.name,
            "weights_sha256": file_sha256(WEIGHTS_FILE),
            "dtype": dtype,
            "resize": "clean",
            "input_size": [INPUT_SIZE, INPUT_SIZE],
            "preparation": describe_transform(self.transform),
            "agreement_of_real_pictures": read_record().agreement,
            "library": f"halation on torch {torch.__version__}",
        }
        self._dtype = DTYPES[dtype]
        self._network = load_network().to(device=self.device, dtype=self._dtype)

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self._network(batch.to(self._dtype))
        return outputs
