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
    """The properties of a family that training needs.

    It is created from a loaded pipeline and stores settings but no weights.
    """

    pipelines: ClassVar[tuple[str, ...]]
    lora_targets: ClassVar[tuple[str, ...]]
    """Name endings of the linear layers that get adapters by default: those of attention."""
    learning_rates: ClassVar[tuple[float, float]]
    """Default learning rates of adapters and of all weights."""
    time_sampling: ClassVar[paths.TimeDistribution]
    time_shift: float
    """Default shift of the training times."""
    guidance_kind: GuidanceKind
    embedded_guidance: float
    """The guidance scale that is passed to a module with embedded guidance."""
    token_lengths: Mapping[str, int]
    """Tokens of each tokenizer that reach the model."""

    @property
    def noise_path(self) -> paths.NoisePath:
        """How noise is mixed in, and what the transformer predicts."""

    def zero_condition(self) -> Condition:
        """Return one row of zeros with the names and shapes of `encode`."""

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        """Encode one text with the pipeline's text encoders, as one row."""

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        """Add the image sizes to the condition if the family reads them, on the CPU."""

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Predict with the transformer, bare or wrapped, for states in its dtype.

        The result is NCHW, to be compared with the path's target.
        """

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        """Return the encoded prompts as arguments of the pipeline's call."""

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Convert the pipeline's latents to NCHW; height and width are in latents."""

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks to shard, recompute and compile one by one."""


_TRAINABLE_CLASSES: tuple[type[Any], ...] = (HunyuanFamily, PixArtFamily, SD3Family, FluxFamily, WanFamily)
TRAINABLE_FAMILIES: Mapping[str, type[Any]] = {name: kind for kind in _TRAINABLE_CLASSES for name in kind.pipelines}


def get_trainable_family(class_name: str, folder: Path) -> type[Any]:
    """Return the family of a pipeline class; the error for others lists the supported ones."""
    if class_name not in TRAINABLE_FAMILIES:
        known = ", ".join(f"{FAMILIES[name].name} ({name})" for name in TRAINABLE_FAMILIES)
        raise InputError(
            f"{folder} contains a {class_name}, which cannot be trained",
            f"a pipeline of one of these families: {known}",
            "choose a model of one of them; the others work only with `halation generate`",
        )
    return TRAINABLE_FAMILIES[class_name]
