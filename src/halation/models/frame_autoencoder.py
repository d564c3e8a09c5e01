"""Pictures as one frame of a video autoencoder, and which space the autoencoder of a pipeline is."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from halation.models.autoencoder import LatentSpace

_FRAME = 2


class FrameSpace(LatentSpace):
    """Mean latents of one frame by Wan's causal autoencoder, each channel normalised by the mean and deviation of its config."""

    kind: ClassVar[str] = "autoencoder_kl_wan"
    scaling: Tensor
    shift: Tensor

    def _read(self, config: Any) -> None:
        self.channels = config.z_dim
        self.downsample = config.scale_factor_spatial
        # Divided first and multiplied later, as the pipeline does: the other way round gives other bits.
        self.scaling = 1.0 / torch.tensor(config.latents_std).reshape(1, -1, 1, 1)
        self.shift = torch.tensor(config.latents_mean).reshape(1, -1, 1, 1)

    def _mean(self, pictures: Tensor) -> Tensor:
        return super()._mean(pictures.unsqueeze(_FRAME)).squeeze(_FRAME)

    def _decoded(self, vae: Any, latents: Tensor) -> Tensor:
        return super()._decoded(vae, latents.unsqueeze(_FRAME)).squeeze(_FRAME)

    def _numbers(self) -> str:
        return f"{self.scaling.flatten().tolist()} {self.shift.flatten().tolist()}"

    def to(self, device: torch.device | str) -> FrameSpace:
        super().to(device)
        self.scaling, self.shift = self.scaling.to(device), self.shift.to(device)
        return self


def space_of(vae: Any, path: str) -> LatentSpace:
    """The space of a pipeline's autoencoder."""
    return (FrameSpace if isinstance(vae, AutoencoderKLWan) else LatentSpace)(vae, path=path)
