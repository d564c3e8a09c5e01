"""Paths from images (t = 0) to noise (t = 1): rectified flow and DDPM; training times."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

TimeDistribution = Literal["uniform", "logit_normal"]
TIME_DISTRIBUTIONS: tuple[str, ...] = get_args(TimeDistribution)
PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")


def _broadcast_time(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x.dtype).reshape(-1, *([1] * (x.ndim - 1)))


def interpolate(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return the point at time `t` (one per image) on the straight line from `x0` to `noise`."""
    time = _broadcast_time(t, x0)
    return (1 - time) * x0 + time * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """Return the training target: the constant velocity along the line, dx/dt = noise - x0."""
    return noise - x0


def shift_times(t: Tensor, shift: float) -> Tensor:
    """Shift times towards noise (shift > 1), as larger images need; 0 and 1 are fixed points."""
    if shift <= 0:
        raise ValueError(f"a timestep shift must be positive, not {shift}")
    return shift * t / (1 + (shift - 1) * t)


def times_from_uniform(u: Tensor, kind: TimeDistribution = "uniform", shift: float = 1.0) -> Tensor:
    """Map uniform numbers to times in [0, 1] by the inverse CDF.

    A sample's time depends only on its own random number. `logit_normal` puts more weight on the middle of the path
    (Esser et al. 2024, eq. 19, with location 0 and scale 1).
    """
    if kind == "uniform":
        t = u
    elif kind == "logit_normal":
        t = torch.sigmoid(torch.special.ndtri(u))
    else:
        raise ValueError(f"a time distribution is one of {', '.join(TIME_DISTRIBUTIONS)}, not {kind!r}")
    return shift_times(t, shift)


class NoisePath(Protocol):
    """How a model family adds noise, and what its denoiser predicts.

    `t` has one number per image; 0 is the image and 1 is noise.
    """

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the input of the denoiser at `t`."""

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the target of the denoiser's output at `t`."""

    def predict_x0_and_noise(self, x: Tensor, model_output: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image and the noise that the denoiser's output at `x` and `t` implies."""

    def step(self, x: Tensor, model_output: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Return the state at `s` for this image and noise (Song et al. 2021, deterministic DDIM).

        There is one time per image, s <= t; at s = 0 the state is the image.
        """

    def output_leading_to(self, x: Tensor, t: Tensor, end: Tensor, s: Tensor) -> Tensor:
        """Return the output at `x` and `t` whose `step` to `s` gives `end`; s < t."""

    def step_sensitivity(self, t: Tensor, s: Tensor) -> Tensor:
        """Return how far an output error of 1 at `t` moves the end of a `step` to `s`, per image."""


class RectifiedFlowPath:
    """Rectified flow (Liu et al. 2022): a straight line and its velocity."""

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return interpolate(x0, noise, t)

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return velocity_target(x0, noise)

    def predict_x0_and_noise(self, x: Tensor, model_output: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        time = _broadcast_time(t, x)
        return x - time * model_output, x + (1 - time) * model_output

    def step(self, x: Tensor, model_output: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return x + _broadcast_time(s - t, x) * model_output

    def output_leading_to(self, x: Tensor, t: Tensor, end: Tensor, s: Tensor) -> Tensor:
        return (end - x) / _broadcast_time(s - t, x)

    def step_sensitivity(self, t: Tensor, s: Tensor) -> Tensor:
        return t - s


class DDPMPath:
    """DDPM (Ho et al. 2020), given by its table `alphas_cumprod`.

    The prediction is the noise, the image, or v (Salimans and Ho 2022).
    """

    def __init__(self, alphas_cumprod: Tensor, prediction_type: str) -> None:
        if prediction_type not in PREDICTION_TYPES:
            raise ValueError(f"a prediction type is one of {', '.join(PREDICTION_TYPES)}, not {prediction_type!r}")
        self.prediction_type = prediction_type
        self.num_timesteps = len(alphas_cumprod)
        self._signal_scales = alphas_cumprod.to(torch.float32).sqrt()
        self._noise_scales = (1 - alphas_cumprod.to(torch.float32)).sqrt()

    def timestep_index(self, t: Tensor) -> Tensor:
        """Return the timestep at `t`; uniform times give uniform timesteps."""
        return (t.double() * self.num_timesteps).long().clamp_(0, self.num_timesteps - 1)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        signal, noise_scale = self._scales(t, x0)
        return signal * x0 + noise_scale * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return x0
        signal, noise_scale = self._scales(t, x0)
        return signal * noise - noise_scale * x0

    def predict_x0_and_noise(self, x: Tensor, model_output: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, noise_scale = self._scales(t, x)
        if self.prediction_type == "epsilon":
            return (x - noise_scale * model_output) / signal, model_output
        if self.prediction_type == "sample":
            return model_output, (x - signal * model_output) / noise_scale
        return signal * x - noise_scale * model_output, noise_scale * x + signal * model_output

    def step(self, x: Tensor, model_output: Tensor, t: Tensor, s: Tensor) -> Tensor:
        x0, noise = self.predict_x0_and_noise(x, model_output, t)
        signal, noise_scale = self._end_scales(s, x)
        return signal * x0 + noise_scale * noise

    def output_leading_to(self, x: Tensor, t: Tensor, end: Tensor, s: Tensor) -> Tensor:
        """Solve `step`, which is linear in the output.

        This avoids the divisions by small scales in `predict_x0_and_noise`.
        """
        signal, noise_scale = self._scales(t, x)
        signal_after, noise_scale_after = self._end_scales(s, x)
        determinant = signal * noise_scale_after - signal_after * noise_scale
        if self.prediction_type == "epsilon":
            return (signal * end - signal_after * x) / determinant
        if self.prediction_type == "sample":
            return (noise_scale_after * x - noise_scale * end) / determinant
        return (end - (signal_after * signal + noise_scale_after * noise_scale) * x) / determinant

    def step_sensitivity(self, t: Tensor, s: Tensor) -> Tensor:
        signal, noise_scale = self._scales(t, t)
        signal_after, noise_scale_after = self._end_scales(s, s)
        determinant = (signal * noise_scale_after - signal_after * noise_scale).abs()
        if self.prediction_type == "v_prediction":
            return determinant
        return determinant / (signal if self.prediction_type == "epsilon" else noise_scale)

    def _end_scales(self, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales at the end of a step; at 0 there is no noise, unlike in the table."""
        signal, noise_scale = self._scales(s, x)
        at_end = _broadcast_time(s, x) == 0
        return torch.where(at_end, 1.0, signal), torch.where(at_end, 0.0, noise_scale)

    def _scales(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._signal_scales.device != x.device:  # once per device; the tables are small
            self._signal_scales, self._noise_scales = self._signal_scales.to(x.device), self._noise_scales.to(x.device)
        index = self.timestep_index(t)
        return _broadcast_time(self._signal_scales[index], x), _broadcast_time(self._noise_scales[index], x)
