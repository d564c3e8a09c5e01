"""Wan in training, for images: one frame, UMT5 texts, rectified flow, one or two experts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halation.flow.paths import TimeDistribution
from halation.models.denoiser import Condition, GuidanceKind
from halation.models.pipelines.capabilities import call_parameters
from halation.models.pipelines.schedulers import rectified_flow_path, time_shift
from halation.models.pipelines.wan_experts import ExpertPair

_FRAME_AXIS = 2  # the frame axis in tensors of the transformer and the pipeline
_TOKEN_SIZE = 2  # latents on a side of a token, as the pipeline counts tokens if each one has its own time


class WanFamily:
    """Implements TrainableFamily for Wan 2.1 and 2.2, for videos of one frame.

    The frame axis is left out of states and predictions.
    """

    pipelines: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    guidance_kind: GuidanceKind = "pair"
    embedded_guidance = 1.0
    learning_rates: ClassVar[tuple[float, float]] = (1e-4, 1e-5)
    time_sampling: ClassVar[TimeDistribution] = "logit_normal"

    def __init__(self, pipe: Any) -> None:
        self._config = pipe.transformer.config
        self.noise_path = rectified_flow_path(pipe.scheduler)
        self.time_shift = time_shift(pipe.scheduler)
        self._num_timesteps = int(pipe.scheduler.config.num_train_timesteps)
        self._has_time_per_token = bool(pipe.config.get("expand_timesteps"))
        self._max_sequence_length = int(call_parameters(type(pipe))["max_sequence_length"].default)
        self.token_lengths = {"tokenizer": self._max_sequence_length}

    def zero_condition(self) -> Condition:
        return {"umt5": torch.zeros(1, self._max_sequence_length, self._config.text_dim)}

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        embeds, _ = pipe.encode_prompt(
            [text], do_classifier_free_guidance=False, max_sequence_length=self._max_sequence_length, device=device
        )
        return {"umt5": embeds}

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        return condition

    def predict(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        timestep = t.to(torch.float32) * self._num_timesteps  # embedded in float32 for any dtype of the weights
        if self._has_time_per_token:
            height, width = x.shape[-2:]
            timestep = timestep[:, None].expand(-1, -(-height // _TOKEN_SIZE) * -(-width // _TOKEN_SIZE))
        answer: Tensor = module(
            hidden_states=x.unsqueeze(_FRAME_AXIS),
            timestep=timestep,
            encoder_hidden_states=condition["umt5"],
            return_dict=False,
        )[0]
        return answer.squeeze(_FRAME_AXIS)

    def prompt_arguments(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {"prompt_embeds": condition["umt5"], "negative_prompt_embeds": null["umt5"], "num_frames": 1}

    def unpack_latents(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents.squeeze(_FRAME_AXIS)

    def shard_units(self, module: nn.Module) -> list[nn.Module]:
        if isinstance(module, ExpertPair):
            return [*self.shard_units(module.high), *self.shard_units(module.low)]
        blocks: nn.ModuleList = module.blocks  # type: ignore[assignment]
        return list(blocks)
