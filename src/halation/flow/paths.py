"""The rectified-flow path from pictures (t = 0) to noise (t = 1), and how training picks a time on it."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

TimeKind = Literal["uniform", "logit_normal"]
TIME_KINDS: tuple[str, ...] = get_args(TimeKind)


def _per_picture(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x.dtype).reshape(-1, *([1] * (x.ndim - 1)))


def interpolate(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """The point at time `t` (one per picture) on the straight line from `x0` to `noise`."""
    time = _per_picture(t, x0)
    return (1 - time) * x0 + time * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """What the model learns: the constant velocity along the line, dx/dt = noise - x0."""
    return noise - x0


def data_from_velocity(x: Tensor, velocity: Tensor, t: Tensor) -> Tensor:
    """The clean picture a velocity at `t` (one per picture) points back to."""
    return x - _per_picture(t, x) * velocity


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
