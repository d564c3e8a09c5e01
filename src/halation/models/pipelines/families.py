"""What is particular to a pipeline family and cannot be asked of the pipeline object itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Branches = Literal["doubled", "two calls", "unknown"]
"""How guidance runs its unconditional branch: in one batch [negative, positive], in a second call a step, or we do not know."""


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    branches: Branches = "unknown"
    size_multiple: int = 1  # beyond what the autoencoder and the patches need
    guidance_argument: str = "guidance_scale"  # what switches the unconditional branch on when it is above 1
    timesteps_take: tuple[str, ...] = ()  # what the pipeline hands to the scheduler's set_timesteps
    reads_timesteps: bool = False  # its loop asks for each timestep's value, which on the GPU means waiting for it
    one_step_takes_second: bool = False  # with one step it reads the second value of scheduler.step
    reads_tokens: Mapping[str, int | str] = field(default_factory=dict)
    """How many tokens of each tokenizer reach the model: a number, the tokenizer's `model_max_length`, or an argument of the call."""

    @property
    def pads_text_to_one_length(self) -> bool:
        """Seen and tested for the families below; others may pad to the longest neighbour, and are drawn one by one."""
        return self.branches != "unknown"


_ONE_CLIP = {"tokenizer": "model_max_length"}
_TWO_CLIPS = {**_ONE_CLIP, "tokenizer_2": "model_max_length"}
_ARGUMENT = {"tokenizer": "max_sequence_length"}

FAMILIES: Mapping[str, Family] = {
    "HunyuanDiTPipeline": Family(
        name="HunyuanDiT",
        branches="doubled",
        size_multiple=16,
        reads_timesteps=True,
        reads_tokens={"tokenizer": 77, "tokenizer_2": 256},
    ),
    "PixArtAlphaPipeline": Family(
        name="PixArt", branches="doubled", one_step_takes_second=True, reads_tokens=_ARGUMENT
    ),
    "PixArtSigmaPipeline": Family(name="PixArt", branches="doubled", reads_tokens=_ARGUMENT),
    "StableDiffusion3Pipeline": Family(
        name="SD3",
        branches="doubled",
        size_multiple=16,
        reads_tokens={**_TWO_CLIPS, "tokenizer_3": "max_sequence_length"},
    ),
    "FluxPipeline": Family(
        name="FLUX",
        branches="two calls",
        guidance_argument="true_cfg_scale",
        timesteps_take=("mu", "sigmas"),
        reads_tokens={**_ONE_CLIP, "tokenizer_2": "max_sequence_length"},
    ),
    "SanaPipeline": Family(name="Sana", branches="doubled", size_multiple=32, reads_tokens=_ARGUMENT),
    "WanPipeline": Family(name="Wan", branches="two calls", size_multiple=16, reads_tokens=_ARGUMENT),
    "StableDiffusionPipeline": Family(name="Stable Diffusion", branches="doubled", reads_tokens=_ONE_CLIP),
    "StableDiffusionXLPipeline": Family(name="Stable Diffusion XL", branches="doubled", reads_tokens=_TWO_CLIPS),
}


def family_of(class_name: str) -> Family:
    return FAMILIES.get(class_name, Family(name=class_name.removesuffix("Pipeline")))
