"""PixArt Alpha and Sigma in training: T5, size conditions, noise prediction."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers.utils import is_bs4_available, is_ftfy_available
from torch import Tensor, nn

from halation.flow.paths import TimeDistribution
from halation.models.denoiser import Condition, GuidanceKind
from halation.models.pipelines.capabilities import call_parameters
from halation.models.pipelines.schedulers import ddpm_path


class PixArtFamily:
    """Implements TrainableFamily for PixArt."""

    pipelines: ClassVar[tuple[str, ...]] = ("PixArtAlphaPipeline", "PixArtSigmaPipeline")
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    guidance_kind: GuidanceKind = "pair"
    embedded_guidance = 1.0
    learning_rates: ClassVar[tuple[float, float]] = (1e-4, 2e-5)
    time_sampling: ClassVar[TimeDistribution] = "uniform"
    time_shift = 1.0

    def __init__(self, pipe: Any) -> None:
        self._config = pipe.transformer.config
        self.noise_path = ddpm_path(pipe.scheduler)
        self._max_sequence_length = int(call_parameters(type(pipe))["max_sequence_length"].default)
        self.token_lengths = {"tokenizer": self._max_sequence_length}
        self._has_size_condition = bool(pipe.transformer.use_additional_conditions)
        self._vae_scale_factor = int(pipe.vae_scale_factor)
        self._clean_captions = (
            is_bs4_available() and is_ftfy_available()
        )  # without them the pipeline does not clean either
        self._predicts_variance = pipe.transformer.out_channels // 2 == self._config.in_channels

    def zero_condition(self) -> Condition:
        return {
            "t5": torch.zeros(1, self._max_sequence_length, self._config.caption_channels),
            "t5_mask": torch.zeros(1, self._max_sequence_length, dtype=torch.bool),
        }

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        embeds, mask, _, _ = pipe.encode_prompt(
            [text],
            do_classifier_free_guidance=False,
            device=device,
            clean_caption=self._clean_captions,
            max_sequence_length=self._max_sequence_length,
        )
        return {"t5": embeds, "t5_mask": mask.bool()}

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        return condition

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer: Tensor = module(
            x,
            encoder_hidden_states=condition["t5"],
            encoder_attention_mask=condition["t5_mask"],
            timestep=self.noise_path.timestep_index(t),
            added_cond_kwargs=self._size_arguments(x),
            return_dict=False,
        )[0]
        return answer.chunk(2, dim=1)[0] if self._predicts_variance else answer

    def _size_arguments(self, x: Tensor) -> dict[str, Tensor | None]:
        """Return the image size as the pipeline passes it; the original size is not a condition."""
        if not self._has_size_condition:
            return {"resolution": None, "aspect_ratio": None}
        height, width = (side * self._vae_scale_factor for side in x.shape[-2:])
        return {
            "resolution": torch.tensor([[height, width]], dtype=x.dtype, device=x.device).repeat(len(x), 1),
            "aspect_ratio": torch.tensor([[height / width]], dtype=x.dtype, device=x.device).repeat(len(x), 1),
        }

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {
            "prompt_embeds": condition["t5"],
            "prompt_attention_mask": condition["t5_mask"].long(),
            "negative_prompt": None,
            "negative_prompt_embeds": null["t5"],
            "negative_prompt_attention_mask": null["t5_mask"].long(),
            "use_resolution_binning": False,
        }

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        blocks: nn.ModuleList = module.transformer_blocks  # type: ignore[assignment]
        return list(blocks)
