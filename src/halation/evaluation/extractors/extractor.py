"""The interface of a feature extractor, whatever its network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halation.evaluation.extractors.resize import ImageTransform


class Extractor(ABC):
    """A frozen network on a device that turns prepared images into features.

    At a fixed batch shape the features of an image do not depend on its neighbours or its place among them.
    """

    name: str
    """`inception`, `dinov2`, `clip`, `streets`, or the folder's name."""
    fd_title: str
    """What a Frechet distance of these features is called: `FID` for the pinned Inception weights alone."""
    kid_title: str
    """What a kernel distance of these features is called: `KID`, `KID-streets`, ..."""
    num_features: int
    facts: dict[str, Any]
    """JSON for the result's provenance: weights and their hash, dtype, resize rule, input size, library."""
    transform: ImageTransform
    device: torch.device

    def __call__(self, batch: Tensor) -> dict[str, Tensor]:
        """Stacked results of `transform`, on the device, to float32 `features` (B, D) and other outputs by name."""
        assert tuple(batch.shape[1:]) == self.transform.shape, f"{tuple(batch.shape)} is no batch of {self.name}"
        with torch.inference_mode(), full_precision():
            return {name: output.float() for name, output in self._outputs(batch).items()}

    @abstractmethod
    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        """The outputs by name, in any float type."""

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """(N, D) float32 on the CPU, to be compared with features; CLIP alone can do it."""
        raise NotImplementedError(f"{self.name} does not read texts")

    def find_truncated(self, texts: Sequence[str]) -> list[int]:
        """The indices of texts that are longer than the model reads."""
        raise NotImplementedError(f"{self.name} does not read texts")


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 means float32, and the same kernels every time; the process's own settings come back afterwards.

    cuDNN rounds the inputs of float32 convolutions to 10 bits by default, which moves features by 1e-3.
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
