"""FLUX in training: T5 and pooled CLIP, packed latents, embedded guidance, flow."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halation.flow.paths import TimeDistribution
from halation.models.denoiser import Condition, GuidanceKind
from halation.models.pipelines.capabilities import call_parameters
from halation.models.pipelines.schedulers import rectified_flow_path

_TRAINING_GUIDANCE = 3.5  # the value that the training scripts of diffusers pass to a guidance-distilled model


def pack_latents(x: Tensor) -> Tensor:
    """Convert NCHW to a sequence of 2 x 2 patches."""
    rows, channels, height, width = x.shape
    patches = x.reshape(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, (height // 2) * (width // 2), channels * 4)


def unpack_latents(patches: Tensor, height: int, width: int) -> Tensor:
    """Convert patches back to NCHW; height and width are in latents."""
    rows, _, channels = patches.shape
    grid = patches.reshape(rows, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(rows, channels // 4, height, width)


class FluxFamily:
    """Implements TrainableFamily for FLUX, guidance-distilled (dev) or not (schnell)."""

    pipelines: ClassVar[tuple[str, ...]] = ("FluxPipeline",)
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    learning_rates: ClassVar[tuple[float, float]] = (1e-4, 1e-5)
    time_sampling: ClassVar[TimeDistribution] = "logit_normal"
    time_shift = 1.0

    def __init__(self, pipe: Any) -> None:
        self._config = pipe.transformer.config
        self.guidance_kind: GuidanceKind = "embedded" if self._config.guidance_embeds else "none"
        self.embedded_guidance = _TRAINING_GUIDANCE
        self.noise_path = rectified_flow_path(pipe.scheduler)
        self._max_sequence_length = int(call_parameters(type(pipe))["max_sequence_length"].default)
        self.token_lengths = {"tokenizer": int(pipe.tokenizer_max_length), "tokenizer_2": self._max_sequence_length}
        self._positions: dict[tuple[int, int, torch.device], Tensor] = {}

    def zero_condition(self) -> Condition:
        return {
            "t5": torch.zeros(1, self._max_sequence_length, self._config.joint_attention_dim),
            "pooled": torch.zeros(1, self._config.pooled_projection_dim),
        }

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        embeds, pooled, _ = pipe.encode_prompt([text], device=device, max_sequence_length=self._max_sequence_length)
        return {"t5": embeds, "pooled": pooled}

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        return condition

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        guidance = None
        if self._config.guidance_embeds:
            guidance = torch.full((len(x),), self.embedded_guidance, device=x.device)
        height, width = x.shape[-2:]
        text = condition["t5"]
        answer: Tensor = module(
            hidden_states=pack_latents(x),
            timestep=t.to(x.dtype),
            guidance=guidance,
            pooled_projections=condition["pooled"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, dtype=x.dtype, device=x.device),
            img_ids=self._position_ids(height // 2, width // 2, x.device).to(x.dtype),
            return_dict=False,
        )[0]
        return unpack_latents(answer, height, width)

    def _position_ids(self, height: int, width: int, device: torch.device) -> Tensor:
        """Return row and column of each patch."""
        key = (height, width, device)
        if key not in self._positions:
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            places = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1)
            self._positions[key] = places.reshape(-1, 3).to(device, torch.float32)
        return self._positions[key]

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {"prompt_embeds": condition["t5"], "pooled_prompt_embeds": condition["pooled"]}

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        return unpack_latents(latents, height, width)

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        double: nn.ModuleList = module.transformer_blocks  # type: ignore[assignment]
        single: nn.ModuleList = module.single_transformer_blocks  # type: ignore[assignment]
        return [*double, *single]
