"""Paths from pictures (t = 0) to noise (t = 1), straight or by a table, and how training picks a time on them."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

TimeKind = Literal["uniform", "logit_normal"]
TIME_KINDS: tuple[str, ...] = get_args(TimeKind)
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def _per_picture(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x.dtype).reshape(-1, *([1] * (x.ndim - 1)))


def interpolate(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """The point at time `t` (one per picture) on the straight line from `x0` to `noise`."""
    time = _per_picture(t, x0)
    return (1 - time) * x0 + time * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """What the model learns: the constant velocity along the line, dx/dt = noise - x0."""
    return noise - x0


def shifted(t: Tensor, shift: float) -> Tensor:
    """Move times towards noise (shift > 1) as larger pictures need; 0 and 1 stay where they are."""
    if shift <= 0:
        raise ValueError(f"a timestep shift is positive, not {shift}")
    return shift * t / (1 + (shift - 1) * t)


def times_from_uniform(u: Tensor, kind: TimeKind = "uniform", shift: float = 1.0) -> Tensor:
    """Times in [0, 1] from uniform numbers by the inverse CDF, so that each sample's time is a function of its own draw.

    `logit_normal` puts more weight on the middle of the path (Esser et al. 2024, eq. 19, with location 0 and scale 1).
    """
    if kind == "uniform":
        t = u
    elif kind == "logit_normal":
        t = torch.sigmoid(torch.special.ndtri(u))
    else:
        raise ValueError(f"times are one of {', '.join(TIME_KINDS)}, not {kind!r}")
    return shifted(t, shift)


class Path(Protocol):
    """How a family mixes noise in, and what it asks of its module; `t` is one number a picture, 0 is the picture and 1 is noise."""

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The state at `t` that the module sees."""

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the module should answer there."""

    def split(self, x: Tensor, answer: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Picture and noise that the module's answer at `x` and `t` stands for."""

    def step(self, x: Tensor, answer: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """The state at `s` of those two (Song et al. 2021, DDIM without noise): one time a picture, s <= t, and the picture at s = 0."""

    def leading(self, x: Tensor, t: Tensor, end: Tensor, s: Tensor) -> Tensor:
        """The answer at `x` and `t` whose `step` to `s` lands on `end`; s < t."""

    def leverage(self, t: Tensor, s: Tensor) -> Tensor:
        """How far an error of 1 in the answer at `t` moves the end of a `step` to `s`; one number a picture."""


class Straight:
    """Rectified flow (Liu et al. 2022): a straight line, and its velocity."""

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return interpolate(x0, noise, t)

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return velocity_target(x0, noise)

    def split(self, x: Tensor, answer: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        time = _per_picture(t, x)
        return x - time * answer, x + (1 - time) * answer

    def step(self, x: Tensor, answer: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return x + _per_picture(s - t, x) * answer

    def leading(self, x: Tensor, t: Tensor, end: Tensor, s: Tensor) -> Tensor:
        return (end - x) / _per_picture(s - t, x)

    def leverage(self, t: Tensor, s: Tensor) -> Tensor:
        return t - s


class Discrete:
    """DDPM (Ho et al. 2020): a table of signal shares, and the noise, the picture or the v of Salimans and Ho (2022) to be predicted."""

    def __init__(self, alphas_cumprod: Tensor, prediction: str) -> None:
        if prediction not in PREDICTIONS:
            raise ValueError(f"a prediction is one of {', '.join(PREDICTIONS)}, not {prediction!r}")
        self.prediction = prediction
        self.num_timesteps = len(alphas_cumprod)
        self._signal = alphas_cumprod.to(torch.float32).sqrt()
        self._noise = (1 - alphas_cumprod.to(torch.float32)).sqrt()

    def index(self, t: Tensor) -> Tensor:
        """The timestep at `t`: uniform times are uniform timesteps."""
        return (t.double() * self.num_timesteps).long().clamp_(0, self.num_timesteps - 1)

    def noised(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        signal, spread = self._shares(t, x0)
        return signal * x0 + spread * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return x0
        signal, spread = self._shares(t, x0)
        return signal * noise - spread * x0

    def split(self, x: Tensor, answer: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self._shares(t, x)
        if self.prediction == "epsilon":
            return (x - spread * answer) / signal, answer
        if self.prediction == "sample":
            return answer, (x - signal * answer) / spread
        return signal * x - spread * answer, spread * x + signal * answer

    def step(self, x: Tensor, answer: Tensor, t: Tensor, s: Tensor) -> Tensor:
        x0, noise = self.split(x, answer, t)
        signal, spread = self._shares_after(s, x)
        return signal * x0 + spread * noise

    def leading(self, x: Tensor, t: Tensor, end: Tensor, s: Tensor) -> Tensor:
        """`step` is linear in the answer; this solves it, without the divisions that `split` needs where a share is small."""
        signal, spread = self._shares(t, x)
        signal_after, spread_after = self._shares_after(s, x)
        turn = signal * spread_after - signal_after * spread
        if self.prediction == "epsilon":
            return (signal * end - signal_after * x) / turn
        if self.prediction == "sample":
            return (spread_after * x - spread * end) / turn
        return (end - (signal_after * signal + spread_after * spread) * x) / turn

    def leverage(self, t: Tensor, s: Tensor) -> Tensor:
        signal, spread = self._shares(t, t)
        signal_after, spread_after = self._shares_after(s, s)
        turn = (signal * spread_after - signal_after * spread).abs()
        if self.prediction == "v_prediction":
            return turn
        return turn / (signal if self.prediction == "epsilon" else spread)

    def _shares_after(self, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares where a step ends: at 0 there is no noise left, though the table's first row has some."""
        signal, spread = self._shares(s, x)
        over = _per_picture(s, x) == 0
        return torch.where(over, 1.0, signal), torch.where(over, 0.0, spread)

    def _shares(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._signal.device != x.device:  # once a device; the tables are small
            self._signal, self._noise = self._signal.to(x.device), self._noise.to(x.device)
        index = self.index(t)
        return _per_picture(self._signal[index], x), _per_picture(self._noise[index], x)
