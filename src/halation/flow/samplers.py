"""Solvers from noise to an image, classifier-free guidance, segments of trajectories.

A solver of dx/dt = velocity(x, t) goes from noise (t = 1) to an image (t = 0): tensors in, one state out after each
step. How often a solver calls the velocity depends on its name and the number of steps only (`num_forwards`): under
sharding one call fewer on one rank would leave all the others waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halation.flow.paths import NoisePath, shift_times

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

    The last step is Euler's: at t = 0 it lands on the predicted image, and the velocity is never asked at t = 0, where
    it is worst determined.
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

    One Euler step errs by O(h^2), so two of them leave the order at 2. A last step without extrapolation costs little
    on smooth data and halves the error at ten steps on data with sharp modes, which images are.
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


Condition = Mapping[str, Tensor]
Predict = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


def _batched_time(t: Tensor, num_images: int, device: torch.device) -> Tensor:
    # `t` lives on the CPU, so reading it waits for no device; `full` is a kernel where a copy would be a transfer.
    return torch.full((num_images,), float(t), dtype=torch.float32, device=device)


def _broadcast_scale(scale: float | Tensor, x: Tensor) -> Tensor:
    values = torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    return values.reshape(-1, *([1] * (x.ndim - 1)))


def guided_velocity(
    predict: Predict,
    condition: Condition,
    null: Condition,
    scale: float | Tensor,
    *,
    truncate_from: int | None = None,
    times: Sequence[float] | Tensor | None = None,
) -> Velocity:
    """A velocity for the samplers from `predict(x, t, condition)`.

    A scale of exactly 1.0 runs the conditional branch only; a tensor (one scale an image) always runs the pair, so that
    the shape of a forward does not depend on the values in it. With `truncate_from=K` every evaluation at `times[K]`
    and later runs the conditional branch only: half the cost of those steps, and another distribution of images.
    """
    if truncate_from is not None and times is None:
        raise ValueError("truncate_from counts steps, so guided() needs the times of the steps")
    conditional_only = not isinstance(scale, Tensor) and scale == 1.0
    threshold = -1.0
    if truncate_from is not None and times is not None and truncate_from < len(times):
        if truncate_from < 0:
            raise ValueError(f"truncate_from counts steps from 0, not {truncate_from}")
        threshold = float(times[truncate_from])
    pair = {} if conditional_only else {name: torch.cat([condition[name], null[name]]) for name in condition}

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        num = x.shape[0]
        if conditional_only or float(t) <= threshold:
            return predict(x, _batched_time(t, num, x.device), dict(condition))
        predictions = predict(torch.cat([x, x]), _batched_time(t, 2 * num, x.device), pair)
        conditional, unconditional = predictions.chunk(2)
        # Written from the conditional side so that a row whose scale is 1 is the conditional prediction to the bit.
        return conditional + (_broadcast_scale(scale, x) - 1) * (conditional - unconditional)

    return velocity


def drop_conditions(condition: Condition, null: Condition, dropped: Tensor) -> dict[str, Tensor]:
    """The condition with the null condition in the rows where `dropped` (bool, one an image) is true."""
    result = {}
    for name, value in condition.items():
        rows = dropped.to(value.device).reshape(-1, *([1] * (value.ndim - 1)))
        result[name] = torch.where(rows, null[name].to(value.device), value)
    return result


ModelOutputFn = Callable[..., Tensor]
"""States and their times, one a row, to what a module predicts there."""


class TrajectoryStep(NamedTuple):
    """One step of a trajectory: at `x` and `t` the module predicted `model_output`, which led to `end` at `s`.

    Times are one a row, float32.
    """

    x: Tensor
    t: Tensor
    model_output: Tensor
    s: Tensor
    end: Tensor


def segments(times: Sequence[float], num_steps: int) -> list[list[float]]:
    """The stretches between neighbours of `times`, each cut into equal steps.

    `times` go from 1 down to 0; there are `num_steps` steps in all, at least one in each stretch. Every segment is
    given by the times it goes through, its two ends among them.
    """
    if len(times) < 2 or times[0] != 1 or times[-1] != 0 or any(t <= s for t, s in itertools.pairwise(times)):
        raise ValueError(f"a way goes down from 1 to 0, not through {', '.join(map(str, times)) or 'nothing'}")
    num = len(times) - 1
    pieces = []
    for number, (start, stop) in enumerate(itertools.pairwise(float(t) for t in times)):
        steps = max(1, num_steps * (number + 1) // num - num_steps * number // num)
        inner = [start + (stop - start) * step / steps for step in range(1, steps)]
        pieces.append([start, *inner, stop])
    return pieces


def solve(
    path: NoisePath, predict: ModelOutputFn, x: Tensor, times: Sequence[float], *conditions: object
) -> Iterator[TrajectoryStep]:
    """From `x` at `times[0]` down to `times[-1]`, one prediction a step; the last step's `end` is where it leads.

    `conditions` are handed to `predict`. First order, as a student's few steps are: Euler's method for rectified flow,
    DDIM for a table.
    """
    rows = torch.ones(len(x), dtype=torch.float32, device=x.device)
    for t, s in itertools.pairwise(times):
        now, next_time = rows * t, rows * s
        model_output = predict(x, now, *conditions)
        end = path.step(x, model_output, now, next_time)
        yield TrajectoryStep(x, now, model_output, next_time, end)
        x = end


def stratified_indices(num: int, num_wanted: int, u: float) -> list[int]:
    """`num_wanted` of `num` numbers in order, one from each of as many equal stretches.

    Over all `u` in [0, 1) every number is as likely. All of them where more are wanted than there are.
    """
    if not 0 <= u < 1:
        raise ValueError(f"a uniform number lies in [0, 1), not {u}")
    if num_wanted >= num:
        return list(range(num))
    return [min(num - 1, int((stratum + u) * num / num_wanted)) for stratum in range(num_wanted)]


def select_steps(pieces: Sequence[Sequence[float]], num_wanted: int, u: float) -> list[int]:
    """Which steps of a trajectory in segments are kept, by number and in order.

    The first of each segment, then others by `u`.
    """
    lengths = [len(piece) - 1 for piece in pieces]
    starts = list(itertools.accumulate(lengths[:-1], initial=0))
    if num_wanted < len(starts):
        raise ValueError(f"{num_wanted} states of {len(starts)} segments; expected one of each at least")
    others = sorted(set(range(sum(lengths))) - set(starts))
    chosen = [others[position] for position in stratified_indices(len(others), num_wanted - len(starts), u)]
    return sorted([*starts, *chosen])
