"""What a feature extractor is, whatever its network, and how one is opened by name or folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from halation.errors import InputError
from halation.models.extractor_preparation import Preparation, Rule

NAMES = ("inception", "dinov2", "clip", "streets")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Extractor(ABC):
    """A frozen network on a device that turns prepared pictures into features.

    At a fixed batch shape the features of a picture do not depend on its neighbours or its place among them.
    """

    name: str
    """`inception`, `dinov2`, `clip`, `streets`, or the folder's name."""
    fd_title: str
    """What a Frechet distance of these features is called: `FID` for the pinned Inception weights and for nothing else."""
    kid_title: str
    """What a kernel distance of these features is called: `KID`, `KID-streets`, ..."""
    num_features: int
    facts: dict[str, Any]
    """JSON for the result's provenance: weights and their hash, dtype, resize rule, input size, library."""
    preparation: Preparation
    device: torch.device

    def __call__(self, batch: Tensor) -> dict[str, Tensor]:
        """Stacked results of `preparation`, on the device, to float32 `features` (B, D) and what else the network gives."""
        assert tuple(batch.shape[1:]) == self.preparation.shape, f"{tuple(batch.shape)} is no batch of {self.name}"
        with torch.inference_mode(), full_precision():
            return {name: output.float() for name, output in self._outputs(batch).items()}

    @abstractmethod
    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        """The outputs by name, in any float type."""


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 means float32, and the same kernels every time; the process's own settings come back afterwards.

    cuDNN rounds the inputs of float32 convolutions to 10 bits unless it is told otherwise, which moves features by 1e-3.
    """
    cudnn: Any = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)  # cuDNN wants its two to agree
    before = [switch.fp32_precision for switch in switches]
    benchmark, deterministic = cudnn.benchmark, cudnn.deterministic
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        cudnn.benchmark, cudnn.deterministic = False, True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
        cudnn.benchmark, cudnn.deterministic = benchmark, deterministic


def open_extractor(
    name: str,
    *,
    device: str,
    dtype: str = "fp32",
    resize: Rule = "clean",
    weights: str = "",
    flag: str = "--weights",
) -> Extractor:
    """The extractor of that name, or of the folder of a DINOv2 or CLIP model; `weights` replaces the default weights.

    `flag` is where a person gives those weights, for messages that tell them to.
    """
    _check(dtype, resize)
    if name == "inception":
        from halation.models.extractor_inception import InceptionExtractor

        return InceptionExtractor(weights, device=device, dtype=dtype, rule=resize, flag=flag)
    if name == "streets":
        from halation.models.extractor_streets import StreetsExtractor

        if weights:
            raise InputError(
                f"{flag} {weights} for the streets extractor",
                f"no {flag}: its network comes with Halation",
                "leave it out",
            )
        return StreetsExtractor(device=device, dtype=dtype)
    if name in NAMES or Path(name).is_dir():
        from halation.models.extractor_transformers import open_transformer

        return open_transformer(name, weights, device=device, dtype=dtype, rule=resize, flag=flag)
    raise InputError(
        f"the extractor {name!r} is neither a known name nor a folder",
        f"{', '.join(NAMES)}, or the folder of a DINOv2 or CLIP model",
        "check --extractor",
    )


def _check(dtype: str, resize: str) -> None:
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} for an extractor", ", ".join(DTYPES), "choose one of them")
    if resize not in get_args(Rule):
        raise InputError(f"the resize rule {resize!r}", ", ".join(get_args(Rule)), "choose one of them by --resize")
