"""A model family behind three protocols: trained module, prompt encoding, sampling.

Sampling a batch has three phases, and a caller can recover from a failure in each: prepare, sample, decode. Only
`sample` runs the module, and the number of forwards depends only on the steps of the batch and the solver. A rank whose
`prepare` failed, or that has no batch, continues with `dummy_inputs` and runs the same number of forwards as the other
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halation.errors import HalationError, InputError
from halation.flow.paths import NoisePath, TimeDistribution
from halation.flow.samplers import SAMPLERS
from halation.models.async_image_result import Frames, ImageError, PendingImages
from halation.models.dtypes import DTYPES
from halation.sample_specs import SampleBatch, SampleSpec

Condition = dict[str, Tensor]
"""An encoded prompt or label: tensors by name, each with one row per image.

They have a fixed length, so that the condition of an image does not depend on the other images of the batch. Text has
`tokens` (int64) and `mask` (bool, True for tokens, False for padding); classes have `label`.
"""


GuidanceKind = Literal["pair", "embedded", "none"]
"""How a family applies guidance: with a null branch, as an embedded input of its module, or not at all."""

PIPELINE_SCHEDULER = "own"
"""Used instead of a sampler name to select the pipeline's own scheduler."""


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """Sampling settings that are not part of the specs.

    `sampler` and `shift` apply only to models that use the samplers of `flow.samplers`.
    """

    sampler: str = "multistep"
    """A name of `flow.samplers`, or PIPELINE_SCHEDULER."""
    use_cfg: bool = True
    """True if the null branch runs too. It is decided for the whole plan, so that a batch whose own scales are all 1
    runs the same number of forwards as the others."""
    dtype: torch.dtype = torch.float32
    shift: float = 1.0
    truncate_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """Defaults of a model family."""

    guidance_scale: float = 3.0
    time_sampling: TimeDistribution = "logit_normal"
    time_shift: float = 1.0


class NonFiniteRowsError(HalationError):
    """Images contain NaN or infinity; `rows` are their indices in the batch."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


class ImageSpace(Protocol):
    """Encodes images to the tensors that a module works on, and decodes them."""

    downsampling_factor: int
    channels: int

    def encode(self, pixels: Tensor) -> Tensor:
        """Convert uint8 NHWC to float32 NCHW, on the device of the images."""

    def decode(self, x: Tensor) -> Tensor:
        """Convert back to uint8 NHWC; raise NonFiniteRowsError if an image is not finite."""

    def describe(self) -> dict[str, Any]:
        """Return a JSON description that identifies this space."""

    def fingerprint(self) -> str:
        """Return a string that is equal for spaces that encode images to the same tensors."""

    def to(self, device: torch.device | str) -> ImageSpace:
        """Move the weights, if any, in place."""


def non_finite_rows(x: Tensor) -> tuple[int, ...]:
    """Return the rows of a batch that contain NaN or infinity."""
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    return tuple(bad.nonzero().flatten().tolist())


class SamplingInputs(Protocol):
    """All inputs for sampling one batch, on the device; the fields depend on the family."""

    @property
    def truncated(self) -> tuple[bool, ...]:
        """For each row, True if the prompt is longer than the model reads."""

    @property
    def num_rows(self) -> int:
        """Number of images, including padding entries."""

    def halves(self) -> tuple[SamplingInputs, SamplingInputs]:
        """Split the rows into a first and a second half."""


class TrainedModule(Protocol):
    """The module of a model family, as used by engines, objectives and checkpoints."""

    name: str
    """Short name of the family, for messages."""
    module: nn.Module
    """The trained module: its parameters with `requires_grad`. Engines wrap it and pass the wrapper to `forward`."""

    @property
    def noise_path(self) -> NoisePath:
        """How noise is mixed in, and what the module predicts."""

    @property
    def defaults(self) -> FamilyDefaults:
        """Defaults for the guidance of samples and for the times of training."""

    @property
    def guidance_kind(self) -> GuidanceKind:
        """How guidance is applied to a prediction of `forward`."""

    @property
    def hidden_size(self) -> int:
        """Width of the module, for estimating activation memory and for feature matching."""

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks, for the same estimate."""

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Predict with `module`, bare or wrapped, for states at times `t`.

        The result has the shape of the path's target.
        """

    def set_guidance(self, scale: float) -> None:
        """Set the scale that a module with embedded guidance reads; others ignore it."""

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations of the shard units in the backward pass instead of storing them."""

    def shard_units(self) -> list[nn.Module]:
        """Return the modules to shard one by one, innermost first.

        Their submodules are called only from inside them.
        """

    def describe(self) -> dict[str, Any]:
        """Return JSON from which `checkpoint_loading` rebuilds the denoiser without weights."""

    def flops_per_image(self) -> int:
        """Floating-point operations of one forward of one image (a multiply-add counts as two)."""


class PromptEncoder(Protocol):
    """Encodes texts, labels and sizes to the conditions that a module reads."""

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        """Encode the prompts, on the CPU."""

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        """Encode the condition of training images, on the CPU.

        A class-conditional family uses the labels, others the captions.
        """

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        """Add the image sizes to the condition of training images, if the family reads them.

        `original_sizes` are heights and widths of the files, one row per image.
        """

    def truncation_flags(self, prompts: Sequence[str]) -> list[bool]:
        """For each prompt, True if it is longer than the model reads."""

    def keep_text_encoders(self) -> None:
        """Keep the text encoders loaded, for prompts that are encoded one after the other."""


class SamplingModel(Protocol):
    """A model that samples batches of specs."""

    module: nn.Module

    @property
    def space(self) -> ImageSpace:
        """The space of samples before decoding, and of the images that the module is trained on."""

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (channels, height, width) of the tensor for an image of this size.

        Raise InputError if the model does not support the size.
        """

    def check_spec(self, spec: SampleSpec) -> None:
        """Raise InputError if the model cannot sample the spec."""

    def times(self, num_steps: int, height: int, width: int, shift: float) -> tuple[float, ...]:
        """Return the `num_steps + 1` times, from 1 to 0, for a sample of this size.

        `shift` applies only to models that use the samplers of `flow.samplers`.
        """

    def prepare(self, batch: SampleBatch, device: torch.device | str) -> Any:
        """Build the `SamplingInputs` of a batch; bad input can only fail here."""

    def dummy_inputs(self, batch: SampleBatch, device: torch.device | str) -> Any:
        """Build `SamplingInputs` of the batch's shapes without prompts, to match other ranks."""

    def sample(self, inputs: Any, solver: SolverSettings, on_step: Callable[[], None]) -> Tensor:
        """Return float32 tensors in `space`; `on_step` is called after every step.

        No other method of this protocol runs the module.
        """


class Denoiser(TrainedModule, PromptEncoder, SamplingModel, Protocol):
    """A model family; training, sampling and export work with any of them."""

    def to(self, device: torch.device | str, *, module: bool = True) -> Denoiser:
        """Move everything in place; `module=False` leaves the module to the engine."""


def null_condition(encoder: PromptEncoder, num_rows: int) -> Condition:
    """Return the condition that replaces dropped captions in training, on the CPU."""
    return {name: row.repeat(num_rows, *(1,) * (row.ndim - 1)) for name, row in encoder.encode_prompts([""]).items()}


# Sampling


class SamplingError(HalationError):
    """One image of a batch could not be sampled; the message names its prompt."""


@dataclass(frozen=True, kw_only=True)
class DecodedImages:
    """The images of a batch (uint8 NHWC), and an error for each row without an image."""

    pixels: npt.NDArray[np.uint8]
    failures: dict[int, SamplingError]

    def pixels_or_raise(self) -> npt.NDArray[np.uint8]:
        """Return the images, or raise the first failure."""
        for row in sorted(self.failures):
            raise self.failures[row]
        return self.pixels


def needs_cfg(specs: Iterable[SampleSpec]) -> bool:
    """Return True if a plan runs the null branch beside the conditional one.

    Pass all specs of the plan, not only those of one rank.
    """
    return any(spec.guidance_scale != 1.0 for spec in specs)


@torch.no_grad()
def decode(space: ImageSpace, x: Tensor, batch: SampleBatch) -> DecodedImages:
    """Decode to pixels on the CPU; a row that is not finite fails alone, with its prompt."""
    failures: dict[int, SamplingError] = {}
    for row in non_finite_rows(x):
        failures[row] = _sampling_error(batch.specs[row], "the model's output is not finite")
    if failures:
        x = x.clone()
        x[sorted(failures)] = 0.0
    try:
        pixels = space.decode(x)
    except NonFiniteRowsError as error:
        for row in error.rows:
            failures.setdefault(
                row, _sampling_error(batch.specs[row], "the decoded image is not finite, in float32 too")
            )
        x = x.clone()
        x[sorted(failures)] = 0.0
        pixels = space.decode(x)
    return DecodedImages(pixels=pixels.cpu().numpy(), failures=failures)


def _sampling_error(spec: SampleSpec, reason: str) -> SamplingError:
    prompt = spec.prompt if len(spec.prompt) <= 80 else spec.prompt[:77] + "..."
    return SamplingError(f"image {spec.index} (prompt {prompt!r}, seed {spec.seed}): {reason}")


def sample_batch(
    model: SamplingModel,
    batch: SampleBatch,
    solver: SolverSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    on_step: Callable[[], None] | None = None,
) -> DecodedImages:
    """Prepare, sample and decode one batch, for a caller without other ranks.

    The default is float32, with the null branch if this batch needs it.
    """
    solver = SolverSettings(use_cfg=needs_cfg(batch.specs)) if solver is None else solver
    x = model.sample(model.prepare(batch, device), solver, on_step or (lambda: None))
    return decode(model.space, x, batch)


class DiTModel:
    """A denoiser with the sampler and the time shift it was trained for."""

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        device: str,
        dtype: str,
        sampler: str,
        time_shift: float,
        truncate_from: int | None,
        compile: bool,
        own_sampler: str,
    ) -> None:
        is_own_sampler = own_sampler == PIPELINE_SCHEDULER
        if is_own_sampler and (sampler != PIPELINE_SCHEDULER or truncate_from is not None):
            flag = "scheduler" if sampler != PIPELINE_SCHEDULER else "cfg_truncation_step"
            raise InputError(
                f"--{flag} with a checkpoint of a fine-tuned pipeline",
                "its own scheduler and guidance",
                "generate from the run's export/ folder, which is a whole pipeline and takes every option",
            )
        if not is_own_sampler and sampler not in SAMPLERS:
            raise InputError(
                f"--scheduler {sampler}",
                f"one of {', '.join(SAMPLERS)} for a Halation checkpoint",
                "choose one of these",
            )
        self.denoiser = denoiser
        self.device = device
        self.dtype = DTYPES[dtype]
        self.sampler = sampler
        self.time_shift = time_shift
        self.truncate_from = truncate_from
        denoiser.module.eval()
        if compile:
            compile_blocks(denoiser.shard_units())
        options = {"compile": "E1" if compile else "", "scheduler": "E2" if sampler != own_sampler else ""}
        options["cfg_truncation_step"] = "E2" if truncate_from is not None else ""
        self.facts: dict[str, Any] = {
            "pipeline": denoiser.name,
            "scheduler": sampler,
            "dtype": dtype,
            "options": {name: kind for name, kind in options.items() if kind},
        }

    def check(self, spec: SampleSpec) -> None:
        self.denoiser.sample_shape(spec.height, spec.width)
        if spec.num_frames != 1:
            raise InputError(
                f"--num_frames {spec.num_frames}", "1: this model generates images", "leave --num_frames out"
            )
        if self.truncate_from is not None and spec.guidance_scale == 1.0:
            raise InputError(
                "--cfg_truncation_step with --guidance_scale 1",
                "a guidance scale other than 1: without guidance there is no null branch to leave out",
                "leave --cfg_truncation_step out, or raise --guidance_scale",
            )

    def draw(self, specs: Sequence[SampleSpec], on_step: Callable[[], None]) -> PendingImages:
        batch = SampleBatch(specs=tuple(specs), num_real=len(specs))
        solver = SolverSettings(
            sampler=self.sampler,
            use_cfg=needs_cfg(specs),
            dtype=self.dtype,
            shift=self.time_shift,
            truncate_from=self.truncate_from,
        )
        decoded = sample_batch(self.denoiser, batch, solver, device=self.device, on_step=on_step)

        def collect() -> list[Frames | ImageError]:
            return [
                ImageError(str(decoded.failures[row])) if row in decoded.failures else decoded.pixels[row][None]
                for row in range(len(specs))
            ]

        return PendingImages(collect=collect)


# Transformer blocks

_MIN_RECOMPILE_LIMIT = 64
"""Each size, batch and guidance pattern of a run is compiled once. Beyond torch's limit of 8, blocks run eagerly."""
_CHECKPOINTED_CLASSES: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block in place, at its first call with each shape."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MIN_RECOMPILE_LIMIT)
    for block in blocks:
        block.compile(dynamic=False)


class _GradientCheckpointed:
    """Mixin whose forward stores only its inputs if gradients are enabled."""

    has_dropout = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=self.has_dropout, **kwargs)


def apply_gradient_checkpointing(block: nn.Module) -> None:
    """Make the block recompute its activations in the backward pass.

    This changes the class instead of replacing `forward`, so that it survives engines that change the class again and
    copies of the block.
    """
    kind = type(block)
    if not issubclass(kind, _GradientCheckpointed):
        dropout = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in block.modules())
        # One class for all blocks of a kind: with one class per block, torch.compile would compile each block
        # separately and hit the recompile limit.
        key = (kind, dropout)
        if key not in _CHECKPOINTED_CLASSES:
            _CHECKPOINTED_CLASSES[key] = type(kind.__name__, (_GradientCheckpointed, kind), {"has_dropout": dropout})
        block.__class__ = _CHECKPOINTED_CLASSES[key]
