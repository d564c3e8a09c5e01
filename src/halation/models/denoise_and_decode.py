"""Drawing one batch, in phases that a caller can survive one by one: prepare, sample, decode.

Only `sample` runs the module, and how often depends in the batch's steps and the solver alone. A rank whose `prepare` failed, or
that has no batch, goes on with `dummy_inputs` inputs and makes exactly the forwards the other ranks wait for. `prepare`, `dummy_inputs` and
`denoise` here are those of a velocity model with our own samplers; other families bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halation.errors import HalationError, InputError
from halation.flow.guidance import guided_velocity
from halation.flow.samplers import SAMPLERS, schedule
from halation.flow.seeded_noise import noise_from_seed
from halation.models.async_image_result import Frames, ImageError, PendingImages
from halation.models.autoencoder import non_finite_rows
from halation.models.block_compile_and_checkpointing import compile_blocks
from halation.models.denoiser import (
    PIPELINE_SCHEDULER,
    Condition,
    Denoiser,
    NonFiniteRowsError,
    SolverSettings,
    VelocityDenoiser,
)
from halation.sample_specs import SampleBatch, SampleSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SamplingError(HalationError):
    """One image of a batch could not be made; the message names its prompt."""


@dataclass(frozen=True, kw_only=True)
class NoiseInputs:
    """Everything `denoise` needs for one batch, on the device."""

    noise: Tensor
    condition: Condition
    null: Condition
    scales: Tensor
    num_steps: int
    truncated: tuple[bool, ...]

    @property
    def num_rows(self) -> int:
        return len(self.noise)

    def halves(self) -> tuple[NoiseInputs, NoiseInputs]:
        middle = -(-self.num_rows // 2)
        return self._slice_rows(slice(None, middle)), self._slice_rows(slice(middle, None))

    def _slice_rows(self, rows: slice) -> NoiseInputs:
        return NoiseInputs(
            noise=self.noise[rows],
            condition={name: value[rows] for name, value in self.condition.items()},
            null={name: value[rows] for name, value in self.null.items()},
            scales=self.scales[rows],
            num_steps=self.num_steps,
            truncated=self.truncated[rows],
        )


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
    """Whether a plan runs the conditional and the null branch together; asked once of all its specs, never of a rank's own."""
    return any(spec.guidance_scale != 1.0 for spec in specs)


def _move_condition(condition: Condition, device: torch.device | str) -> Condition:
    return {name: tensor.to(device) for name, tensor in condition.items()}


def prepare(denoiser: VelocityDenoiser, batch: SampleBatch, device: torch.device | str) -> NoiseInputs:
    """Prompts and noise of a batch; everything that bad input can make fail happens here."""
    first = batch.specs[0]
    if any(spec.shape != first.shape for spec in batch.specs):
        raise ValueError("the specs of one batch have one shape")
    shape = denoiser.sample_shape(first.height, first.width)
    prompts = [spec.prompt for spec in batch.specs]
    noise = torch.stack([noise_from_seed(spec.seed, shape) for spec in batch.specs])
    scales = torch.tensor([spec.guidance_scale for spec in batch.specs], dtype=torch.float32)
    return NoiseInputs(
        noise=noise.to(device),
        condition=_move_condition(denoiser.encode_prompts(prompts), device),
        null=_move_condition(denoiser.encode_prompts([spec.negative_prompt for spec in batch.specs]), device),
        scales=scales.to(device),
        num_steps=first.steps,
        truncated=tuple(denoiser.truncation_flags(prompts)),
    )


def dummy_inputs(denoiser: VelocityDenoiser, batch: SampleBatch, device: torch.device | str) -> NoiseInputs:
    """Inputs of a batch's shapes that need no prompt, to keep the other ranks company."""
    first, num_specs = batch.specs[0], len(batch.specs)
    shape = denoiser.sample_shape(first.height, first.width)
    null = _move_condition(denoiser.null_condition(num_specs), device)
    return NoiseInputs(
        noise=torch.zeros((num_specs, *shape), device=device),
        condition=null,
        null=null,
        scales=torch.ones(num_specs, device=device),
        num_steps=first.steps,
        truncated=(False,) * num_specs,
    )


# The decorator, unlike a `with` in the body, leaves the caller's grad mode alone between two steps. Not inference_mode: the tensors
# it makes cannot be used by FSDP afterwards.
@torch.no_grad()
def denoise(denoiser: VelocityDenoiser, inputs: NoiseInputs, solver: SolverSettings) -> Iterator[Tensor]:
    """The states of a batch after each step, in float32; the model itself runs in the solver's dtype."""
    device_type = inputs.noise.device.type

    def predict(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        with torch.autocast(device_type, dtype=solver.dtype, enabled=solver.dtype != torch.float32):
            return denoiser.predict(x, t, condition)

    times = schedule(inputs.num_steps, solver.shift)
    scale = inputs.scales if solver.use_cfg else 1.0
    truncate_from = solver.truncate_from
    velocity = guided_velocity(predict, inputs.condition, inputs.null, scale, truncate_from=truncate_from, times=times)
    yield from SAMPLERS[solver.sampler](velocity, inputs.noise, times)


@torch.no_grad()
def decode(denoiser: Denoiser, x: Tensor, batch: SampleBatch) -> DecodedImages:
    """Pixels on the CPU; a row that is not finite fails alone and says whose prompt it was."""
    failures: dict[int, SamplingError] = {}
    for row in non_finite_rows(x):
        failures[row] = _sampling_error(batch.specs[row], "the model's output is not finite")
    if failures:
        x = x.clone()
        x[sorted(failures)] = 0.0
    try:
        pixels = denoiser.to_pixels(x)
    except NonFiniteRowsError as error:
        for row in error.rows:
            failures.setdefault(
                row, _sampling_error(batch.specs[row], "the decoded image is not finite, in float32 too")
            )
        x = x.clone()
        x[sorted(failures)] = 0.0
        pixels = denoiser.to_pixels(x)
    return DecodedImages(pixels=pixels.cpu().numpy(), failures=failures)


def _sampling_error(spec: SampleSpec, reason: str) -> SamplingError:
    prompt = spec.prompt if len(spec.prompt) <= 80 else spec.prompt[:77] + "..."
    return SamplingError(f"image {spec.index} (prompt {prompt!r}, seed {spec.seed}): {reason}")


def sample_batch(
    denoiser: Denoiser,
    batch: SampleBatch,
    solver: SolverSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    on_step: Callable[[], None] | None = None,
) -> DecodedImages:
    """All phases in a row, for a caller that draws alone; by default float32, with the null branch where this batch needs it."""
    solver = SolverSettings(use_cfg=needs_cfg(batch.specs)) if solver is None else solver
    inputs = denoiser.prepare(batch, device)
    return decode(denoiser, denoiser.sample(inputs, solver, on_step or (lambda: None)), batch)


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
            raise InputError(
                f"--{'scheduler' if sampler != PIPELINE_SCHEDULER else 'cfg_truncation_step'} with a checkpoint of a fine-tuned pipeline",
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
