"""What a model family must offer so that training, sampling and export need not know which family it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from halation.errors import HalationError
from halation.flow.paths import NoisePath, TimeDistribution
from halation.sample_specs import SampleBatch

Condition = dict[str, Tensor]
"""What a prompt or label becomes: tensors by name, each with one row an image and a fixed length, so that an image's condition
does not depend on its neighbours'. Text has `tokens` (int64) and `mask` (bool, true where there is a token); classes `label`."""


GuidanceKind = Literal["pair", "embedded", "none"]
"""How a family does guidance: by a null branch, by a number that its module reads, or not at all."""

MIXED_PRECISION_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type that a dtype's name autocasts to; None for no autocast."""

PIPELINE_SCHEDULER = "own"
"""Instead of the name of a sampler: the pipeline's own scheduler."""


class NonFiniteRowsError(HalationError):
    """An image came out as NaN or infinity; `rows` says which images of the batch."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """How a batch is drawn, besides what its specs say. Sampler and shift are of models that are drawn by our own samplers."""

    sampler: str = "multistep"
    """One of ours, or OWN."""
    use_cfg: bool = True
    """Whether the null branch runs too. It comes from the whole plan: a batch whose own scales are all 1 then still makes the
    forwards of the others."""
    dtype: torch.dtype = torch.float32
    shift: float = 1.0
    truncate_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """Defaults of a model family."""

    guidance_scale: float = 3.0
    time_sampling: TimeDistribution = "logit_normal"
    time_shift: float = 1.0


class SamplingInputs(Protocol):
    """Everything that drawing one batch needs, on the device; what is in it is the family's own affair."""

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Which prompts are longer than the model reads."""

    @property
    def num_rows(self) -> int:
        """Images in it, fillers included."""

    def halves(self) -> tuple[SamplingInputs, SamplingInputs]:
        """The first and the second half of the rows."""


class Denoiser(Protocol):
    """A model family: the module that is trained, and everything around it that turns prompts and pixels into tensors and back."""

    name: str
    """The family in a word or two, for people."""
    module: nn.Module
    """What is trained: its parameters that require a gradient. Engines wrap it; `forward` is told what to call."""

    @property
    def noise_path(self) -> NoisePath:
        """How noise is mixed in, and what the module is asked for."""

    @property
    def defaults(self) -> FamilyDefaults:
        """Guidance of samples and times of training where nothing was asked for."""

    @property
    def guidance_kind(self) -> GuidanceKind:
        """How guidance comes into an answer of `forward`."""

    @property
    def downsample(self) -> int:
        """Pixels on a side of what the module sees as one place: 1, or the factor of an autoencoder."""

    @property
    def hidden(self) -> int:
        """Width of the module, for an estimate of its activations."""

    @property
    def depth(self) -> int:
        """Blocks of the module, for the same estimate."""

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """What `module`, bare or wrapped by an engine, answers to states at times `t`: a tensor like the path's target."""

    def set_guidance(self, scale: float) -> None:
        """What a module with embedded guidance reads in `forward` from now on; nothing for others."""

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        """The condition of training images of this size with what the family wants to know of their sizes; `original_sizes` are
        heights and widths of the files, one row an image."""

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        """The condition of each prompt, on the CPU."""

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        """The condition of training images, on the CPU: labels where the family knows classes, captions otherwise."""

    def truncation_flags(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the model reads."""

    def null_condition(self, num: int) -> Condition:
        """What captions are replaced by in training, `num` rows on the CPU."""

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(channels, height, width) of the tensor behind an image of this size; another size than the model's is an InputError."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        """uint8 NHWC images to the float32 NCHW tensors the module learns, on the device of the images."""

    def to_pixels(self, x: Tensor) -> Tensor:
        """The way back, to uint8 NHWC; NotFiniteError where an image is NaN."""

    def times(self, num_steps: int, height: int, width: int, shift: float) -> tuple[float, ...]:
        """The times, from 1 to 0 and one more than steps, that a sample of this size goes through. `shift` is that of models that
        are drawn by our own samplers."""

    def prepare(self, batch: SampleBatch, device: torch.device | str) -> Any:
        """`SamplingInputs` of a batch; everything that bad input can make fail happens here."""

    def dummy_inputs(self, batch: SampleBatch, device: torch.device | str) -> Any:
        """`SamplingInputs` of that batch's shapes that need no prompt, to keep the other ranks company."""

    def sample(self, inputs: Any, solver: SolverSettings, on_step: Callable[[], None]) -> Tensor:
        """Draw: float32 tensors for `to_pixels`. `on_step` is called after every step. Nothing else runs the module here."""

    def keep_text_encoders(self) -> None:
        """Keep what reads prompts ready, where they come one after the other and not all at once."""

    def enable_gradient_checkpointing(self) -> None:
        """Compute activations inside shard units again in the backward pass instead of keeping them."""

    def shard_units(self) -> list[nn.Module]:
        """Modules to shard one by one, innermost first; their submodules are called only from inside them."""

    def describe(self) -> dict[str, Any]:
        """JSON from which `models.load.build` makes the same denoiser again, without its weights."""

    def flops_per_image(self) -> int:
        """Floating-point operations of one forward of one image (a multiply-add is two)."""

    def to(self, device: torch.device | str, *, module: bool = True) -> Denoiser:
        """Move the module, unless an engine will, and what surrounds it, in place."""


class VelocityDenoiser(Denoiser, Protocol):
    """A family that our own samplers draw from."""

    def predict(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """The velocity at `x` and time `t` (one an image, 1 is noise), in float32."""
