"""The families whose transformer can be trained, by the name of their pipeline class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from halation.errors import InputError
from halation.flow import paths
from halation.models.denoiser import Condition, GuidanceKind
from halation.models.pipelines.family_quirks import FAMILIES
from halation.models.pipelines.training.flux import FluxFamily
from halation.models.pipelines.training.hunyuan_dit import HunyuanFamily
from halation.models.pipelines.training.pixart import PixArtFamily
from halation.models.pipelines.training.sd3 import SD3Family
from halation.models.pipelines.training.wan import WanFamily


class TrainableFamily(Protocol):
    """What training must know about a family.

    It is made from an opened pipeline, of which it keeps numbers and no weights.
    """

    pipelines: ClassVar[tuple[str, ...]]
    lora_targets: ClassVar[tuple[str, ...]]
    """Endings of the names of the linear layers that get adapters by default: those of attention."""
    time_sampling: ClassVar[paths.TimeDistribution]
    time_shift: float
    """How its training times are spread, where no setting gives it."""
    guidance_kind: GuidanceKind
    embedded_guidance: float
    """What a module with embedded guidance is told."""
    token_lengths: Mapping[str, int]
    """Tokens of each tokenizer that reach the model."""

    @property
    def noise_path(self) -> paths.NoisePath:
        """How noise is mixed in, and what the transformer is asked for."""

    def zero_condition(self) -> Condition:
        """One row of zeros with the names and shapes that `encode` gives."""

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        """One text by the pipeline's own text encoders, as one row."""

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        """The condition with what the family wants to know of the images' sizes, on the CPU."""

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """What the transformer, bare or wrapped, predicts for states in its own dtype.

        NCHW, to be compared with the path's target.
        """

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        """The texts as arguments of the pipeline's call."""

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        """NCHW latents from what the pipeline gives; height and width are in latents."""

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        """The blocks to shard, recompute and compile one by one."""


_TRAINABLE_CLASSES: tuple[type[Any], ...] = (HunyuanFamily, PixArtFamily, SD3Family, FluxFamily, WanFamily)
TRAINABLE_FAMILIES: Mapping[str, type[Any]] = {name: kind for kind in _TRAINABLE_CLASSES for name in kind.pipelines}


def get_trainable_family(class_name: str, folder: Path) -> type[Any]:
    """The family of a pipeline class, or a refusal that lists those there are."""
    if class_name not in TRAINABLE_FAMILIES:
        known = ", ".join(f"{FAMILIES[name].name} ({name})" for name in TRAINABLE_FAMILIES)
        raise InputError(
            f"{folder} holds a {class_name}, which cannot be trained here",
            f"the pipeline of one of these families: {known}",
            "choose a model of one of them; `halation generate` draws from the others",
        )
    return TRAINABLE_FAMILIES[class_name]
