"""Wan in training, for pictures: one frame of a video model, UMT5 texts, rectified flow, one transformer or two experts by noise."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halation.flow.paths import TimeKind
from halation.models.denoiser import Condition, Guides
from halation.models.pipelines.arguments import call_parameters
from halation.models.pipelines.experts import Experts
from halation.models.pipelines.paths import straight_path
from halation.models.pipelines.schedulers import shift_of

_FRAME = 2  # the axis of frames in what the transformer and the pipeline see
_TOKEN = 2  # latents on a side of what the pipeline counts as one token where each token has a time


class WanFamily:
    """What is particular to Wan 2.1 and 2.2 where every video is one frame long; here that axis is left out."""

    pipelines: ClassVar[tuple[str, ...]] = ("WanPipeline",)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    guides: Guides = "pair"
    told_guidance = 1.0
    time_sampling: ClassVar[TimeKind] = "logit_normal"

    def __init__(self, pipe: Any) -> None:
        self._config = pipe.transformer.config
        self.path = straight_path(pipe.scheduler)
        self.time_shift = shift_of(pipe.scheduler)
        self._num_timesteps = int(pipe.scheduler.config.num_train_timesteps)
        self._time_for_each_token = bool(pipe.config.get("expand_timesteps"))
        self._length = int(call_parameters(type(pipe))["max_sequence_length"].default)
        self.lengths = {"tokenizer": self._length}

    def blank(self) -> Condition:
        return {"umt5": torch.zeros(1, self._length, self._config.text_dim)}

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        embeds, _ = pipe.encode_prompt(
            [text], do_classifier_free_guidance=False, max_sequence_length=self._length, device=device
        )
        return {"umt5": embeds}

    def placed(self, condition: Condition, originals: Tensor, height: int, width: int) -> Condition:
        return condition

    def answer(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        timestep = t.to(torch.float32) * self._num_timesteps  # embedded in float32 whatever the weights are in
        if self._time_for_each_token:
            height, width = x.shape[-2:]
            timestep = timestep[:, None].expand(-1, -(-height // _TOKEN) * -(-width // _TOKEN))
        answer: Tensor = module(
            hidden_states=x.unsqueeze(_FRAME),
            timestep=timestep,
            encoder_hidden_states=condition["umt5"],
            return_dict=False,
        )[0]
        return answer.squeeze(_FRAME)

    def keywords(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {"prompt_embeds": condition["umt5"], "negative_prompt_embeds": null["umt5"], "num_frames": 1}

    def unpacked(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents.squeeze(_FRAME)

    def units(self, module: nn.Module) -> list[nn.Module]:
        if isinstance(module, Experts):
            return [*self.units(module.high), *self.units(module.low)]
        blocks: nn.ModuleList = module.blocks  # type: ignore[assignment]
        return list(blocks)
