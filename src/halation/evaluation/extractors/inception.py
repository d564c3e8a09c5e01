"""The Inception network of FID as an extractor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halation.errors import InputError
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.extractors.resize import ResizeRule, SquareResize, describe_transform
from halation.evaluation.extractors.weights import FID_SHA256, fetch_fid_weights, read_state_dict
from halation.input_files import file_sha256
from halation.models.dtypes import DTYPES

INPUT_SIZE = 299
NUM_FEATURES = 2048
NUM_CLASSES = 1008
_PADDING_1X7, _PADDING_7X1 = (0, 3), (3, 0)  # padding of a 1x7 and of a 7x1 kernel
NORMALISATION: dict[ResizeRule, str] = {"clean": "(x-128)/128", "tf": "(x-128)/128", "torch": "2*(x/255)-1"}
"""Scaling of 0..255 for each resize rule: clean-fid and torch-fidelity scale as TensorFlow, pytorch-fid from 0..1."""


class BasicConv2d(nn.Module):
    """Convolution, batch normalisation, ReLU.

    `fold_batch_norm` merges the first two into one channels-last convolution.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, kernel, stride=stride, padding=padding, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(num_out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)

    @torch.no_grad()
    def fold_batch_norm(self) -> None:
        """Fold the normalisation into the weights, in float64 to round only once."""
        norm = self.bn
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        weight = self.conv.weight.double() * scale[:, None, None, None]
        bias = norm.bias.double() - norm.running_mean.double() * scale
        folded = weight.float().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(folded, requires_grad=False)
        self.conv.bias = nn.Parameter(bias.float(), requires_grad=False)
        self.bn = nn.Identity()


def _avg_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class InceptionA(nn.Module):
    """35 x 35: branches of one, two and three convolutions, and average pooling."""

    def __init__(self, num_in: int, num_pooled: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(num_in, 64, 1)
        self.branch5x5_1 = BasicConv2d(num_in, 48, 1)
        self.branch5x5_2 = BasicConv2d(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = BasicConv2d(num_in, 64, 1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, padding=1)
        self.branch_pool = BasicConv2d(num_in, num_pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(_avg_pool(x))], 1)


class InceptionB(nn.Module):
    """35 x 35 to 17 x 17."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(num_in, 384, 3, stride=2)
        self.branch3x3dbl_1 = BasicConv2d(num_in, 64, 1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class InceptionC(nn.Module):
    """17 x 17: 7 x 7 convolutions, factorised into rows and columns."""

    def __init__(self, num_in: int, num_inner: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(num_in, 192, 1)
        self.branch7x7_1 = BasicConv2d(num_in, num_inner, 1)
        self.branch7x7_2 = BasicConv2d(num_inner, num_inner, (1, 7), padding=_PADDING_1X7)
        self.branch7x7_3 = BasicConv2d(num_inner, 192, (7, 1), padding=_PADDING_7X1)
        self.branch7x7dbl_1 = BasicConv2d(num_in, num_inner, 1)
        self.branch7x7dbl_2 = BasicConv2d(num_inner, num_inner, (7, 1), padding=_PADDING_7X1)
        self.branch7x7dbl_3 = BasicConv2d(num_inner, num_inner, (1, 7), padding=_PADDING_1X7)
        self.branch7x7dbl_4 = BasicConv2d(num_inner, num_inner, (7, 1), padding=_PADDING_7X1)
        self.branch7x7dbl_5 = BasicConv2d(num_inner, 192, (1, 7), padding=_PADDING_1X7)
        self.branch_pool = BasicConv2d(num_in, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(_avg_pool(x))], 1)


class InceptionD(nn.Module):
    """17 x 17 to 8 x 8."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.branch3x3_1 = BasicConv2d(num_in, 192, 1)
        self.branch3x3_2 = BasicConv2d(192, 320, 3, stride=2)
        self.branch7x7x3_1 = BasicConv2d(num_in, 192, 1)
        self.branch7x7x3_2 = BasicConv2d(192, 192, (1, 7), padding=_PADDING_1X7)
        self.branch7x7x3_3 = BasicConv2d(192, 192, (7, 1), padding=_PADDING_7X1)
        self.branch7x7x3_4 = BasicConv2d(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), self.branch7x7x3_4(seven), F.max_pool2d(x, 3, 2)], 1)


class InceptionE(nn.Module):
    """8 x 8: convolutions that fork into a row and a column.

    The last block uses max pooling, as in TensorFlow.
    """

    def __init__(self, num_in: int, *, use_max_pool: bool) -> None:
        super().__init__()
        self.use_max_pool = use_max_pool
        self.branch1x1 = BasicConv2d(num_in, 320, 1)
        self.branch3x3_1 = BasicConv2d(num_in, 384, 1)
        self.branch3x3_2a = BasicConv2d(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = BasicConv2d(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = BasicConv2d(num_in, 448, 1)
        self.branch3x3dbl_2 = BasicConv2d(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = BasicConv2d(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = BasicConv2d(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = BasicConv2d(num_in, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.use_max_pool else _avg_pool(x)
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, 1)


class InceptionV3(nn.Module):
    """The Inception v3 of FID.

    Maps (B, 3, 299, 299) in -1..1 to float32 pooled features (B, 2048) and logits without bias (B, 1008).
    """

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = BasicConv2d(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(32, 32, 3)
        self.Conv2d_2b_3x3 = BasicConv2d(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = BasicConv2d(64, 80, 1)
        self.Conv2d_4a_3x3 = BasicConv2d(80, 192, 3)
        self.Mixed_5b = InceptionA(192, 32)
        self.Mixed_5c = InceptionA(256, 64)
        self.Mixed_5d = InceptionA(288, 64)
        self.Mixed_6a = InceptionB(288)
        self.Mixed_6b = InceptionC(768, 128)
        self.Mixed_6c = InceptionC(768, 160)
        self.Mixed_6d = InceptionC(768, 160)
        self.Mixed_6e = InceptionC(768, 192)
        self.Mixed_7a = InceptionD(768)
        self.Mixed_7b = InceptionE(1280, use_max_pool=False)
        self.Mixed_7c = InceptionE(2048, use_max_pool=True)
        self.fc = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features = x.float().mean((2, 3))
        return features, features @ self.fc.weight.float().T

    def fold_batch_norm(self) -> InceptionV3:
        """Fold the batch norm of every convolution; weight names then differ from the file."""
        for module in self.modules():
            if isinstance(module, BasicConv2d):
                module.fold_batch_norm()
        return self


def find_weight_mismatch(tensors: Mapping[str, Tensor]) -> str:
    """Return why these tensors are not the weights of the network, or "" if they are."""
    with torch.device("meta"):
        expected = {
            name: tuple(tensor.shape) for name, tensor in InceptionV3().state_dict().items() if _is_compared(name)
        }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if _is_compared(name)}
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not different:
        return ""
    name = different[0]
    wanted = expected.get(name, "nothing")
    return f"{len(different)} tensors differ, first {name}: {found.get(name, 'missing')}, expected {wanted}"


def build_inception(tensors: Mapping[str, Tensor]) -> InceptionV3:
    """Build the folded float32 network; `find_weight_mismatch` must have accepted the weights."""
    with torch.device("meta"):
        network = InceptionV3()
    network.to_empty(device="cpu")
    weights = {name: tensor.float() for name, tensor in tensors.items() if _is_compared(name)}
    network.load_state_dict(weights, strict=False)
    network.eval().requires_grad_(False)
    return network.fold_batch_norm()


def _is_compared(name: str) -> bool:
    """Return False for step counters of batch norms: unused, and missing in older files."""
    return not name.endswith("num_batches_tracked")


class InceptionExtractor(Extractor):
    """Features of the last average pooling (2048), and logits without bias (1008).

    The logits are for the inception score.
    """

    def __init__(self, weights: str, *, device: str, dtype: str, rule: ResizeRule, flag: str = "--weights") -> None:
        file = Path(weights) if weights else fetch_fid_weights(flag)
        tensors = read_state_dict(file, flag)
        if why := find_weight_mismatch(tensors):
            raise InputError(
                f"{file} does not hold FID's Inception: {why}",
                "the weights of pytorch-fid or torch-fidelity",
                f"check {flag}, or omit it to use the released file",
            )
        sha256 = file_sha256(file)
        is_pinned = sha256 == FID_SHA256
        self.name = "inception"
        self.fd_title = "FID" if is_pinned else "FD-inception"
        self.kid_title = "KID" if is_pinned else "KID-inception"
        self.num_features = NUM_FEATURES
        self.transform = SquareResize(size=INPUT_SIZE, rule=rule)
        self.device = torch.device(device)
        self.facts = {
            "extractor": self.name,
            "weights": str(file),
            "weights_sha256": sha256,
            "pinned": is_pinned,
            "dtype": dtype,
            "resize": rule,
            "input_size": [INPUT_SIZE, INPUT_SIZE],
            "normalisation": NORMALISATION[rule],
            "preparation": {**describe_transform(self.transform), "normalisation": NORMALISATION[rule]},
            "library": f"halation on torch {torch.__version__}",
        }
        self._rule = rule
        self._dtype = DTYPES[dtype]
        self._network = build_inception(tensors).to(device=self.device, dtype=self._dtype)

    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        x = batch.permute(0, 3, 1, 2)  # (B, H, W, 3) in memory is channels_last
        x = 2 * (x / 255) - 1 if self._rule == "torch" else (x - 128) / 128
        features, logits = self._network(x.to(self._dtype))
        return {"features": features, "logits": logits}
