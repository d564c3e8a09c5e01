"""The InceptionV3 that FID is defined by: TensorFlow's network of December 2015, as pytorch-fid and torch-fidelity port it.

It differs from the network of the paper: average pooling leaves the padding out of its count, the last block pools by maximum, and
there are 1008 classes. Names of weights are those of the released file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 299
NUM_FEATURES = 2048
NUM_CLASSES = 1008
_ROW, _COLUMN = (0, 3), (3, 0)  # padding of a 1x7 and of a 7x1 kernel


class Convolution(nn.Module):
    """Convolution, batch normalisation, ReLU; `fold` makes one operation of the first two, with channels last in memory."""

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
    def fold(self) -> None:
        """Put the normalisation into the weights, by float64 so that only the last rounding differs."""
        norm = self.bn
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        weight = self.conv.weight.double() * scale[:, None, None, None]
        bias = norm.bias.double() - norm.running_mean.double() * scale
        together = weight.float().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(together, requires_grad=False)
        self.conv.bias = nn.Parameter(bias.float(), requires_grad=False)
        self.bn = nn.Identity()


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35 x 35: branches of one, two and three convolutions, and the average of the surroundings."""

    def __init__(self, num_in: int, num_pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(num_in, 64, 1)
        self.branch5x5_1 = Convolution(num_in, 48, 1)
        self.branch5x5_2 = Convolution(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Convolution(num_in, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, padding=1)
        self.branch_pool = Convolution(num_in, num_pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(_average(x))], 1)


class BlockB(nn.Module):
    """35 x 35 to 17 x 17."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.branch3x3 = Convolution(num_in, 384, 3, stride=2)
        self.branch3x3dbl_1 = Convolution(num_in, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class BlockC(nn.Module):
    """17 x 17: 7 x 7 convolutions as rows and columns."""

    def __init__(self, num_in: int, num_inner: int) -> None:
        super().__init__()
        self.branch1x1 = Convolution(num_in, 192, 1)
        self.branch7x7_1 = Convolution(num_in, num_inner, 1)
        self.branch7x7_2 = Convolution(num_inner, num_inner, (1, 7), padding=_ROW)
        self.branch7x7_3 = Convolution(num_inner, 192, (7, 1), padding=_COLUMN)
        self.branch7x7dbl_1 = Convolution(num_in, num_inner, 1)
        self.branch7x7dbl_2 = Convolution(num_inner, num_inner, (7, 1), padding=_COLUMN)
        self.branch7x7dbl_3 = Convolution(num_inner, num_inner, (1, 7), padding=_ROW)
        self.branch7x7dbl_4 = Convolution(num_inner, num_inner, (7, 1), padding=_COLUMN)
        self.branch7x7dbl_5 = Convolution(num_inner, 192, (1, 7), padding=_ROW)
        self.branch_pool = Convolution(num_in, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(_average(x))], 1)


class BlockD(nn.Module):
    """17 x 17 to 8 x 8."""

    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.branch3x3_1 = Convolution(num_in, 192, 1)
        self.branch3x3_2 = Convolution(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Convolution(num_in, 192, 1)
        self.branch7x7x3_2 = Convolution(192, 192, (1, 7), padding=_ROW)
        self.branch7x7x3_3 = Convolution(192, 192, (7, 1), padding=_COLUMN)
        self.branch7x7x3_4 = Convolution(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), self.branch7x7x3_4(seven), F.max_pool2d(x, 3, 2)], 1)


class BlockE(nn.Module):
    """8 x 8: convolutions that fork into a row and a column; the last of the two pools by maximum, as the TensorFlow graph does."""

    def __init__(self, num_in: int, *, pools_by_maximum: bool) -> None:
        super().__init__()
        self.pools_by_maximum = pools_by_maximum
        self.branch1x1 = Convolution(num_in, 320, 1)
        self.branch3x3_1 = Convolution(num_in, 384, 1)
        self.branch3x3_2a = Convolution(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Convolution(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = Convolution(num_in, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = Convolution(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = Convolution(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = Convolution(num_in, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.pools_by_maximum else _average(x)
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return torch.cat(branches, 1)


class Inception(nn.Module):
    """(B, 3, 299, 299) between -1 and 1 to pooled features (B, 2048) and logits without bias (B, 1008), both float32."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3)
        self.Mixed_5b = BlockA(192, 32)
        self.Mixed_5c = BlockA(256, 64)
        self.Mixed_5d = BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b = BlockC(768, 128)
        self.Mixed_6c = BlockC(768, 160)
        self.Mixed_6d = BlockC(768, 160)
        self.Mixed_6e = BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b = BlockE(1280, pools_by_maximum=False)
        self.Mixed_7c = BlockE(2048, pools_by_maximum=True)
        self.fc = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, stride=2)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(F.max_pool2d(x, 3, stride=2))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features = x.float().mean((2, 3))
        return features, features @ self.fc.weight.float().T

    def fold(self) -> Inception:
        """One operation instead of two in every convolution; the names of the weights are then no longer the file's."""
        for module in self.modules():
            if isinstance(module, Convolution):
                module.fold()
        return self


def unfit(tensors: Mapping[str, Tensor]) -> str:
    """Why these are not the network's weights, in words; empty where they are."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Inception().state_dict().items() if _counts(name)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if _counts(name)}
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not different:
        return ""
    name = different[0]
    return f"{len(different)} tensors differ, first {name}: {found.get(name, 'missing')} where {expected.get(name, 'nothing')} is expected"


def inception_from(tensors: Mapping[str, Tensor]) -> Inception:
    """The network with these weights, in float32, folded, ready to infer; `unfit` says beforehand whether they fit."""
    with torch.device("meta"):
        network = Inception()
    network.to_empty(device="cpu")
    weights = {name: tensor.float() for name, tensor in tensors.items() if _counts(name)}
    network.load_state_dict(weights, strict=False)
    network.eval().requires_grad_(False)
    return network.fold()


def _counts(name: str) -> bool:
    """How often a normalisation was trained says nothing about its result, and older files do not hold it."""
    return not name.endswith("num_batches_tracked")
