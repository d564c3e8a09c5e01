"""Drawing one sheet, in phases that a caller can survive one by one: prepare, sample, decode.

Only `sample` runs the module, and how often depends on the sheet's steps and the solver alone. A rank whose `prepare` failed, or
that has no sheet, goes on with `filler` inputs and makes exactly the forwards the other ranks wait for. `prepare`, `filler` and
`denoise` here are those of a velocity model with our own samplers; other families bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halation.errors import HalationError
from halation.flow.guidance import guided
from halation.flow.noise import spec_noise
from halation.flow.samplers import SAMPLERS, schedule
from halation.models.autoencoder import not_finite_rows
from halation.models.denoiser import Condition, Denoiser, NotFiniteError, Solver, VelocityDenoiser
from halation.specs import Sheet, Spec


class PictureError(HalationError):
    """One picture of a sheet could not be made; the message names its prompt."""


@dataclass(frozen=True, kw_only=True)
class NoiseInputs:
    """Everything `denoise` needs for one sheet, on the device."""

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
        return self._rows(slice(None, middle)), self._rows(slice(middle, None))

    def _rows(self, cut: slice) -> NoiseInputs:
        return NoiseInputs(
            noise=self.noise[cut],
            condition={name: value[cut] for name, value in self.condition.items()},
            null={name: value[cut] for name, value in self.null.items()},
            scales=self.scales[cut],
            num_steps=self.num_steps,
            truncated=self.truncated[cut],
        )


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A sheet's pictures (uint8 NHWC), and why for each row that has none."""

    pixels: npt.NDArray[np.uint8]
    failures: dict[int, PictureError]

    def all(self) -> npt.NDArray[np.uint8]:
        """The pictures, or the first failure."""
        for row in sorted(self.failures):
            raise self.failures[row]
        return self.pixels


def needs_pair(specs: Iterable[Spec]) -> bool:
    """Whether a plan runs the conditional and the null branch together; asked once of all its specs, never of a rank's own."""
    return any(spec.guidance_scale != 1.0 for spec in specs)


def _on(condition: Condition, device: torch.device | str) -> Condition:
    return {name: tensor.to(device) for name, tensor in condition.items()}


def prepare(denoiser: VelocityDenoiser, sheet: Sheet, device: torch.device | str) -> NoiseInputs:
    """Prompts and noise of a sheet; everything that bad input can make fail happens here."""
    first = sheet.specs[0]
    if any(spec.shape != first.shape for spec in sheet.specs):
        raise ValueError("the specs of one sheet have one shape")
    shape = denoiser.sample_shape(first.height, first.width)
    prompts = [spec.prompt for spec in sheet.specs]
    noise = torch.stack([spec_noise(spec.seed, shape) for spec in sheet.specs])
    scales = torch.tensor([spec.guidance_scale for spec in sheet.specs], dtype=torch.float32)
    return NoiseInputs(
        noise=noise.to(device),
        condition=_on(denoiser.encode_prompts(prompts), device),
        null=_on(denoiser.encode_prompts([spec.negative_prompt for spec in sheet.specs]), device),
        scales=scales.to(device),
        num_steps=first.steps,
        truncated=tuple(denoiser.truncated(prompts)),
    )


def filler(denoiser: VelocityDenoiser, sheet: Sheet, device: torch.device | str) -> NoiseInputs:
    """Inputs of a sheet's shapes that need no prompt, to keep the other ranks company."""
    first, num_specs = sheet.specs[0], len(sheet.specs)
    shape = denoiser.sample_shape(first.height, first.width)
    null = _on(denoiser.null_condition(num_specs), device)
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
def denoise(denoiser: VelocityDenoiser, inputs: NoiseInputs, solver: Solver) -> Iterator[Tensor]:
    """The states of a sheet after each step, in float32; the model itself runs in the solver's dtype."""
    device_type = inputs.noise.device.type

    def predict(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        with torch.autocast(device_type, dtype=solver.dtype, enabled=solver.dtype != torch.float32):
            return denoiser.predict(x, t, condition)

    times = schedule(inputs.num_steps, solver.shift)
    scale = inputs.scales if solver.pair else 1.0
    truncate_from = solver.truncate_from
    velocity = guided(predict, inputs.condition, inputs.null, scale, truncate_from=truncate_from, times=times)
    yield from SAMPLERS[solver.sampler](velocity, inputs.noise, times)


@torch.no_grad()
def decode(denoiser: Denoiser, x: Tensor, sheet: Sheet) -> Decoded:
    """Pixels on the CPU; a row that is not finite fails alone and says whose prompt it was."""
    failures: dict[int, PictureError] = {}
    for row in not_finite_rows(x):
        failures[row] = _failure(sheet.specs[row], "the model's output is not finite")
    if failures:
        x = x.clone()
        x[sorted(failures)] = 0.0
    try:
        pixels = denoiser.to_pixels(x)
    except NotFiniteError as error:
        for row in error.rows:
            failures.setdefault(row, _failure(sheet.specs[row], "the decoded picture is not finite, in float32 too"))
        x = x.clone()
        x[sorted(failures)] = 0.0
        pixels = denoiser.to_pixels(x)
    return Decoded(pixels=pixels.cpu().numpy(), failures=failures)


def _failure(spec: Spec, reason: str) -> PictureError:
    prompt = spec.prompt if len(spec.prompt) <= 80 else spec.prompt[:77] + "..."
    return PictureError(f"picture {spec.index} (prompt {prompt!r}, seed {spec.seed}): {reason}")


def draw(
    denoiser: Denoiser,
    sheet: Sheet,
    solver: Solver | None = None,
    *,
    device: torch.device | str = "cpu",
    on_step: Callable[[], None] | None = None,
) -> Decoded:
    """All phases in a row, for a caller that draws alone; by default float32, with the null branch where this sheet needs it."""
    solver = Solver(pair=needs_pair(sheet.specs)) if solver is None else solver
    inputs = denoiser.prepare(sheet, device)
    return decode(denoiser, denoiser.sample(inputs, solver, on_step or (lambda: None)), sheet)
