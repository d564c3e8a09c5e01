"""The interface of feature extractors."""

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

    At a fixed batch shape, the features of an image do not depend on the other images or its position in the batch.
    """

    name: str
    """`inception`, `dinov2`, `clip`, `streets`, or the name of the model folder."""
    fd_title: str
    """Name of a Frechet distance of these features; `FID` only for the pinned Inception weights."""
    kid_title: str
    """Name of a kernel distance of these features: `KID`, `KID-streets`, ..."""
    num_features: int
    facts: dict[str, Any]
    """Provenance for the report, as JSON: weights and their hash, dtype, resize rule, input size, library."""
    transform: ImageTransform
    device: torch.device

    def __call__(self, batch: Tensor) -> dict[str, Tensor]:
        """Return float32 `features` (B, D) and other outputs by name.

        `batch` holds stacked results of `transform`, on the device.
        """
        assert tuple(batch.shape[1:]) == self.transform.shape, f"{tuple(batch.shape)} is not a batch of {self.name}"
        with torch.inference_mode(), full_precision():
            return {name: output.float() for name, output in self._outputs(batch).items()}

    @abstractmethod
    def _outputs(self, batch: Tensor) -> dict[str, Tensor]:
        """Return the outputs by name, in any float type."""

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return text embeddings (N, D), float32 on the CPU; only CLIP supports it."""
        raise NotImplementedError(f"{self.name} does not embed texts")

    def find_truncated(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of texts that exceed the token limit of the model."""
        raise NotImplementedError(f"{self.name} does not embed texts")


@contextmanager
def full_precision() -> Iterator[None]:
    """Use full float32 precision and deterministic kernels; restore the settings afterwards.

    By default cuDNN rounds the inputs of float32 convolutions to 10 bits (TF32), which changes features by 1e-3.
    """
    cudnn: Any = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)  # cuDNN requires its two to agree
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
