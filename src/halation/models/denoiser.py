"""A model family behind three protocols: trained module, prompt encoding, sampling.

Sampling a batch has phases that a caller can survive one by one: prepare, sample, decode. Only `sample` runs the
module, and how often depends on the steps of the batch and on the solver alone. A rank whose `prepare` failed, or that
has no batch, goes on with `dummy_inputs` and makes exactly the forwards that the other ranks wait for.
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
"""What a prompt or label becomes: tensors by name, each with one row an image.

They have a fixed length, so that an image's condition does not depend on its neighbours'. Text has `tokens` (int64) and
`mask` (bool, true where there is a token); classes have `label`.
"""


GuidanceKind = Literal["pair", "embedded", "none"]
"""How a family does guidance: by a null branch, by a number that its module reads, or not at all."""

PIPELINE_SCHEDULER = "own"
"""Instead of the name of a sampler: the pipeline's own scheduler."""


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """How a batch is drawn, besides what its specs say.

    Sampler and shift are of models that are drawn by our own samplers.
    """

    sampler: str = "multistep"
    """A name of `flow.samplers`, or PIPELINE_SCHEDULER."""
    use_cfg: bool = True
    """Whether the null branch runs too. It comes from the whole plan: a batch whose own scales are all 1 then still
    makes the forwards of the others."""
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
    """An image came out as NaN or infinity; `rows` are its places in the batch."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


class ImageSpace(Protocol):
    """Images to tensors and back."""

    downsampling_factor: int
    channels: int

    def encode(self, pixels: Tensor) -> Tensor:
        """uint8 NHWC to float32 NCHW, on the device of the images."""

    def decode(self, x: Tensor) -> Tensor:
        """The way back, to uint8 NHWC; NonFiniteRowsError where an image is not finite."""

    def describe(self) -> dict[str, Any]:
        """JSON that says which space this is."""

    def fingerprint(self) -> str:
        """Equal where the same images become the same tensors."""

    def to(self, device: torch.device | str) -> ImageSpace:
        """Move what has weights, in place."""


def non_finite_rows(x: Tensor) -> tuple[int, ...]:
    """Which images of a batch hold a NaN or an infinity."""
    bad = ~torch.isfinite(x).flatten(1).all(dim=1)
    return tuple(bad.nonzero().flatten().tolist())


class SamplingInputs(Protocol):
    """Everything that sampling one batch needs, on the device; its fields are the family's own."""

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Which prompts are longer than the model reads."""

    @property
    def num_rows(self) -> int:
        """Images in it, fillers included."""

    def halves(self) -> tuple[SamplingInputs, SamplingInputs]:
        """The first and the second half of the rows."""


class TrainedModule(Protocol):
    """The module of a model family: what engines, objectives and checkpoints need."""

    name: str
    """The family in a word or two, for messages."""
    module: nn.Module
    """What is trained: its parameters that require a gradient. Engines wrap it; `forward` gets the one to call."""

    @property
    def noise_path(self) -> NoisePath:
        """How noise is mixed in, and what the module predicts."""

    @property
    def defaults(self) -> FamilyDefaults:
        """Guidance of samples and times of training where no setting gives them."""

    @property
    def guidance_kind(self) -> GuidanceKind:
        """How guidance comes into a prediction of `forward`."""

    @property
    def hidden_size(self) -> int:
        """Width of the module, for an estimate of its activations and for feature matching."""

    @property
    def num_blocks(self) -> int:
        """Transformer blocks of the module, for the same estimate."""

    def forward(self, module: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Prediction of `module`, bare or wrapped, for states at times `t`: a tensor like the path's target."""

    def set_guidance(self, scale: float) -> None:
        """Scale that a module with embedded guidance reads in `forward` from now on; no effect on others."""

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations inside shard units in the backward pass instead of storing them."""

    def shard_units(self) -> list[nn.Module]:
        """Modules to shard one by one, innermost first; their submodules are called only from inside them."""

    def describe(self) -> dict[str, Any]:
        """JSON from which `checkpoint_loading` builds the same denoiser again, without its weights."""

    def flops_per_image(self) -> int:
        """Floating-point operations of one forward of one image (a multiply-add is two)."""


class PromptEncoder(Protocol):
    """Texts, labels and sizes to the conditions that a module reads."""

    def encode_prompts(self, prompts: Sequence[str]) -> Condition:
        """The condition of each prompt, on the CPU."""

    def encode_captions(self, captions: Sequence[str], labels: Sequence[int]) -> Condition:
        """The condition of training images, on the CPU: labels where the family knows classes, captions otherwise."""

    def add_size_condition(self, condition: Condition, original_sizes: Tensor, height: int, width: int) -> Condition:
        """The condition of training images of this size, with their sizes where the family reads them.

        `original_sizes` are heights and widths of the files, one row an image.
        """

    def truncation_flags(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the model reads."""

    def keep_text_encoders(self) -> None:
        """Keep the text encoders loaded, where prompts come one after the other and not all at once."""


class SamplingModel(Protocol):
    """A model that draws batches of specs."""

    module: nn.Module

    @property
    def space(self) -> ImageSpace:
        """Where samples lie before they are decoded, and the images that the module is trained on."""

    def sample_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(channels, height, width) of the tensor behind an image of this size.

        Another size than the model's is an InputError.
        """

    def times(self, num_steps: int, height: int, width: int, shift: float) -> tuple[float, ...]:
        """The times, from 1 to 0 and one more than steps, of a sample of this size.

        `shift` is that of models that are sampled by our own samplers.
        """

    def prepare(self, batch: SampleBatch, device: torch.device | str) -> Any:
        """`SamplingInputs` of a batch; everything that bad input can make fail happens here."""

    def dummy_inputs(self, batch: SampleBatch, device: torch.device | str) -> Any:
        """`SamplingInputs` of that batch's shapes that need no prompt, so that ranks make equal forwards."""

    def sample(self, inputs: Any, solver: SolverSettings, on_step: Callable[[], None]) -> Tensor:
        """Float32 tensors in `space`. `on_step` is called after every step. Nothing else runs the module here."""


class Denoiser(TrainedModule, PromptEncoder, SamplingModel, Protocol):
    """A whole model family, so that training, sampling and export need not know which family it is."""

    def to(self, device: torch.device | str, *, module: bool = True) -> Denoiser:
        """Move the module, unless an engine will, and what surrounds it, in place."""


def null_condition(encoder: PromptEncoder, num_rows: int) -> Condition:
    """The condition that captions are replaced by in training, on the CPU."""
    return {name: row.repeat(num_rows, *(1,) * (row.ndim - 1)) for name, row in encoder.encode_prompts([""]).items()}


# Sampling


class SamplingError(HalationError):
    """One image of a batch could not be made; the message names its prompt."""


@dataclass(frozen=True, kw_only=True)
class DecodedImages:
    """A batch's images (uint8 NHWC), and why for each row that has none."""

    pixels: npt.NDArray[np.uint8]
    failures: dict[int, SamplingError]

    def pixels_or_raise(self) -> npt.NDArray[np.uint8]:
        """The images, or the first failure."""
        for row in sorted(self.failures):
            raise self.failures[row]
        return self.pixels


def needs_cfg(specs: Iterable[SampleSpec]) -> bool:
    """Whether a plan runs the conditional and the null branch together.

    Asked once of all its specs, never of a rank's own.
    """
    return any(spec.guidance_scale != 1.0 for spec in specs)


@torch.no_grad()
def decode(space: ImageSpace, x: Tensor, batch: SampleBatch) -> DecodedImages:
    """Pixels on the CPU; a row that is not finite fails alone and says whose prompt it was."""
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
    """All phases in a row, for a caller that draws alone.

    By default in float32, with the null branch where this batch needs it.
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
                "draw from the run's export/ folder, which is a whole pipeline and takes every option",
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
            raise InputError(f"--num_frames {spec.num_frames}", "1: this model draws images", "leave --num_frames out")
        if self.truncate_from is not None and spec.guidance_scale == 1.0:
            raise InputError(
                "--cfg_truncation_step with --guidance_scale 1",
                "a second branch that could be left out",
                "leave --cfg_truncation_step out, or raise the guidance",
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
"""Each size, batch and guidance pattern of a run is compiled once; beyond torch's limit of 8 all runs eagerly."""
_CHECKPOINTED_CLASSES: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each of these in place, at its first call with each shape."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MIN_RECOMPILE_LIMIT)
    for block in blocks:
        block.compile(dynamic=False)


class _GradientCheckpointed:
    """A forward that keeps its inputs and nothing else where a gradient will be asked for."""

    has_dropout = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=self.has_dropout, **kwargs)


def apply_gradient_checkpointing(block: nn.Module) -> None:
    """Compute the block's activations again in the backward pass, from now on.

    By another class rather than a replaced `forward`: engines that change the class in turn, and copies of the block,
    keep it.
    """
    kind = type(block)
    if not issubclass(kind, _GradientCheckpointed):
        dropout = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in block.modules())
        # One class for all blocks of a kind: with a class each, a compiler would compile each by itself, and give up.
        key = (kind, dropout)
        if key not in _CHECKPOINTED_CLASSES:
            _CHECKPOINTED_CLASSES[key] = type(kind.__name__, (_GradientCheckpointed, kind), {"has_dropout": dropout})
        block.__class__ = _CHECKPOINTED_CLASSES[key]
