"""Facts about pipeline families that cannot be read from the pipeline object itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GuidanceBranches = Literal["doubled", "two calls", "unknown"]
"""How guidance runs its unconditional branch: in one batch [negative, positive], in a second call per step, unknown."""


@dataclass(frozen=True, kw_only=True)
class PipelineFamily:
    name: str
    guidance_branches: GuidanceBranches = "unknown"
    size_multiple: int = 1  # beyond what the autoencoder and the patches need
    set_timesteps_arguments: tuple[str, ...] = ()  # arguments that the pipeline passes to the scheduler's set_timesteps
    reads_timesteps: bool = False  # its loop reads each timestep's value, which on a GPU is a synchronization
    one_step_needs_pred_original: bool = False  # with one step it reads the second value of scheduler.step
    token_limits: Mapping[str, int | str] = field(default_factory=dict)
    """How many tokens of each tokenizer reach the model: a number, `model_max_length`, or an argument of the call."""

    @property
    def pads_text_to_fixed_length(self) -> bool:
        """True for the families below, which are tested.

        Other families may pad to the longest prompt of the batch and are generated one image at a time.
        """
        return self.guidance_branches != "unknown"


_ONE_CLIP_LIMITS = {"tokenizer": "model_max_length"}
_TWO_CLIP_LIMITS = {**_ONE_CLIP_LIMITS, "tokenizer_2": "model_max_length"}
_T5_LIMITS = {"tokenizer": "max_sequence_length"}

FAMILIES: Mapping[str, PipelineFamily] = {
    "HunyuanDiTPipeline": PipelineFamily(
        name="HunyuanDiT",
        guidance_branches="doubled",
        size_multiple=16,
        reads_timesteps=True,
        token_limits={"tokenizer": 77, "tokenizer_2": 256},
    ),
    "PixArtAlphaPipeline": PipelineFamily(
        name="PixArt", guidance_branches="doubled", one_step_needs_pred_original=True, token_limits=_T5_LIMITS
    ),
    "PixArtSigmaPipeline": PipelineFamily(name="PixArt", guidance_branches="doubled", token_limits=_T5_LIMITS),
    "StableDiffusion3Pipeline": PipelineFamily(
        name="SD3",
        guidance_branches="doubled",
        size_multiple=16,
        token_limits={**_TWO_CLIP_LIMITS, "tokenizer_3": "max_sequence_length"},
    ),
    "FluxPipeline": PipelineFamily(
        name="FLUX",
        guidance_branches="two calls",
        set_timesteps_arguments=("mu", "sigmas"),
        token_limits={**_ONE_CLIP_LIMITS, "tokenizer_2": "max_sequence_length"},
    ),
    "SanaPipeline": PipelineFamily(name="Sana", guidance_branches="doubled", size_multiple=32, token_limits=_T5_LIMITS),
    "WanPipeline": PipelineFamily(name="Wan", guidance_branches="two calls", size_multiple=16, token_limits=_T5_LIMITS),
    "StableDiffusionPipeline": PipelineFamily(
        name="Stable Diffusion", guidance_branches="doubled", token_limits=_ONE_CLIP_LIMITS
    ),
    "StableDiffusionXLPipeline": PipelineFamily(
        name="Stable Diffusion XL", guidance_branches="doubled", token_limits=_TWO_CLIP_LIMITS
    ),
}


def get_family(class_name: str) -> PipelineFamily:
    return FAMILIES.get(class_name, PipelineFamily(name=class_name.removesuffix("Pipeline")))
