"""Solvers of dx/dt = velocity(x, t) from noise (t = 1) to an image (t = 0): tensors in, one state out after each step.

How often a solver calls the velocity depends on its name and the number of steps only (`num_forwards`): under sharding one call
fewer on one rank would leave all the others waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from halation.flow.paths import shift_times

Velocity = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[Velocity, Tensor, Sequence[float] | Tensor], Iterator[Tensor]]


def schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """`num_steps + 1` float64 times on the CPU, from exactly 1 to exactly 0."""
    if num_steps < 1:
        raise ValueError(f"sampling takes at least one step, not {num_steps}")
    return shift_times(torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64), shift)


def _step_pairs(times: Sequence[float] | Tensor) -> Iterator[tuple[float, float]]:
    yield from itertools.pairwise(float(t) for t in times)


def _scalar(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def euler(velocity: Velocity, x: Tensor, times: Sequence[float] | Tensor) -> Iterator[Tensor]:
    """First order, one forward a step; for rectified flow this is DDIM."""
    for t, next_t in _step_pairs(times):
        x = x + (next_t - t) * velocity(x, _scalar(t))
        yield x


def heun(velocity: Velocity, x: Tensor, times: Sequence[float] | Tensor) -> Iterator[Tensor]:
    """Second order, two forwards a step but one in the last (Karras et al. 2022, algorithm 1, without churn).

    The last step is Euler's: at t = 0 it lands on the predicted image, and the velocity is never asked at t = 0, where it is
    worst determined.
    """
    steps = list(_step_pairs(times))
    for index, (t, next_t) in enumerate(steps):
        slope = velocity(x, _scalar(t))
        if index < len(steps) - 1:
            next_slope = velocity(x + (next_t - t) * slope, _scalar(next_t))
            slope = (slope + next_slope) / 2
        x = x + (next_t - t) * slope
        yield x


def multistep(velocity: Velocity, x: Tensor, times: Sequence[float] | Tensor) -> Iterator[Tensor]:
    """Second order with one forward a step: Adams-Bashforth 2 for unequal steps, the first and the last step Euler's.

    One Euler step errs by O(h^2), so two of them leave the order at 2. A last step without extrapolation costs little on smooth
    data and halves the error at ten steps on data with sharp modes, which images are.
    """
    steps = list(_step_pairs(times))
    previous: Tensor | None = None
    previous_size = 0.0
    for index, (t, next_t) in enumerate(steps):
        size = next_t - t
        slope = velocity(x, _scalar(t))
        direction = slope
        if previous is not None and index < len(steps) - 1:
            direction = slope + size / (2 * previous_size) * (slope - previous)
        x = x + size * direction
        previous, previous_size = slope, size
        yield x


SAMPLERS: dict[str, Sampler] = {"euler": euler, "heun": heun, "multistep": multistep}


def num_forwards(name: str, num_steps: int) -> int:
    """How often the sampler calls the velocity."""
    if name not in SAMPLERS:
        raise ValueError(f"a sampler is one of {', '.join(SAMPLERS)}, not {name!r}")
    return 2 * num_steps - 1 if name == "heun" else num_steps
