"""Stable Diffusion 3 in training: two CLIPs, optional T5, rectified flow."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halation.flow.paths import TimeDistribution
from halation.models.denoiser import Condition, GuidanceKind
from halation.models.pipelines.capabilities import call_parameters
from halation.models.pipelines.schedulers import rectified_flow_path


class SD3Family:
    """Implements TrainableFamily for Stable Diffusion 3 and 3.5."""

    pipelines: ClassVar[tuple[str, ...]] = ("StableDiffusion3Pipeline",)
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    guidance_kind: GuidanceKind = "pair"
    embedded_guidance = 1.0
    learning_rates: ClassVar[tuple[float, float]] = (1e-4, 1e-5)
    time_sampling: ClassVar[TimeDistribution] = "logit_normal"

    def __init__(self, pipe: Any) -> None:
        self._config = pipe.transformer.config
        self.noise_path = rectified_flow_path(pipe.scheduler)
        self.time_shift = float(pipe.scheduler.config.get("shift", 1.0))
        self._num_timesteps = int(pipe.scheduler.config.num_train_timesteps)
        self._max_sequence_length = int(call_parameters(type(pipe))["max_sequence_length"].default)
        self._clip_length = int(pipe.tokenizer_max_length)
        self.token_lengths = {
            "tokenizer": self._clip_length,
            "tokenizer_2": self._clip_length,
            "tokenizer_3": self._max_sequence_length,
        }

    def zero_condition(self) -> Condition:
        return {
            "text": torch.zeros(1, self._clip_length + self._max_sequence_length, self._config.joint_attention_dim),
            "pooled": torch.zeros(1, self._config.pooled_projection_dim),
        }

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        embeds, _, pooled, _ = pipe.encode_prompt(
            [text],
            None,
            None,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self._max_sequence_length,
        )
        return {"text": embeds, "pooled": pooled}

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        return condition

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer: Tensor = module(
            hidden_states=x,
            timestep=t.float() * self._num_timesteps,
            encoder_hidden_states=condition["text"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
        return answer

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {
            "prompt_embeds": condition["text"],
            "pooled_prompt_embeds": condition["pooled"],
            "negative_prompt_embeds": null["text"],
            "negative_pooled_prompt_embeds": null["pooled"],
        }

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        blocks: nn.ModuleList = module.transformer_blocks  # type: ignore[assignment]
        return list(blocks)
