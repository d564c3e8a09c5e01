"""PixArt Alpha and Sigma in training: T5, sizes as conditions where the model has them, noise to be predicted."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers.utils import is_bs4_available, is_ftfy_available
from torch import Tensor, nn

from halation.flow.paths import TimeKind
from halation.models.denoiser import Condition, Guides
from halation.models.pipelines.arguments import call_parameters
from halation.models.pipelines.paths import table_path


class PixArtFamily:
    """What is particular to PixArt."""

    pipelines: ClassVar[tuple[str, ...]] = ("PixArtAlphaPipeline", "PixArtSigmaPipeline")
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    guides: Guides = "pair"
    told_guidance = 1.0
    time_sampling: ClassVar[TimeKind] = "uniform"
    time_shift = 1.0

    def __init__(self, pipe: Any) -> None:
        self._config = pipe.transformer.config
        self.path = table_path(pipe.scheduler)
        self._length = int(call_parameters(type(pipe))["max_sequence_length"].default)
        self.lengths = {"tokenizer": self._length}
        self._sized = bool(pipe.transformer.use_additional_conditions)
        self._factor = int(pipe.vae_scale_factor)
        self._clean = is_bs4_available() and is_ftfy_available()  # without them the pipeline does not clean either
        self._variance = pipe.transformer.out_channels // 2 == self._config.in_channels

    def blank(self) -> Condition:
        return {
            "t5": torch.zeros(1, self._length, self._config.caption_channels),
            "t5_mask": torch.zeros(1, self._length, dtype=torch.bool),
        }

    def encode(self, pipe: Any, text: str, device: torch.device) -> Condition:
        embeds, mask, _, _ = pipe.encode_prompt(
            [text],
            do_classifier_free_guidance=False,
            device=device,
            clean_caption=self._clean,
            max_sequence_length=self._length,
        )
        return {"t5": embeds, "t5_mask": mask.bool()}

    def placed(self, condition: Condition, originals: Tensor, height: int, width: int) -> Condition:
        return condition

    def answer(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer: Tensor = module(
            x,
            encoder_hidden_states=condition["t5"],
            encoder_attention_mask=condition["t5_mask"],
            timestep=self.path.index(t),
            added_cond_kwargs=self._sizes(x),
            return_dict=False,
        )[0]
        return answer.chunk(2, dim=1)[0] if self._variance else answer

    def _sizes(self, x: Tensor) -> dict[str, Tensor | None]:
        """The picture's own size, as the pipeline says it when it draws: what it was cut from is not among the conditions."""
        if not self._sized:
            return {"resolution": None, "aspect_ratio": None}
        height, width = (side * self._factor for side in x.shape[-2:])
        return {
            "resolution": torch.tensor([[height, width]], dtype=x.dtype, device=x.device).repeat(len(x), 1),
            "aspect_ratio": torch.tensor([[height / width]], dtype=x.dtype, device=x.device).repeat(len(x), 1),
        }

    def keywords(self, condition: Condition, null: Condition) -> dict[str, Any]:
        return {
            "prompt_embeds": condition["t5"],
            "prompt_attention_mask": condition["t5_mask"].long(),
            "negative_prompt": None,
            "negative_prompt_embeds": null["t5"],
            "negative_prompt_attention_mask": null["t5_mask"].long(),
            "use_resolution_binning": False,
        }

    def unpacked(self, latents: Tensor, height: int, width: int) -> Tensor:
        return latents

    def units(self, module: nn.Module) -> list[nn.Module]:
        blocks: nn.ModuleList = module.transformer_blocks  # type: ignore[assignment]
        return list(blocks)
