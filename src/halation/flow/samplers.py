"""ODE solvers from noise to an image, classifier-free guidance, segments of trajectories.

A solver integrates dx/dt = velocity(x, t) from noise (t = 1) to an image (t = 0) and yields the state after each step.
The number of velocity calls depends only on the solver and the number of steps (`num_forwards`): with sharding, a
missing call on one rank would block all others.
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
    """Return `num_steps + 1` float64 times on the CPU, from exactly 1 to exactly 0."""
    if num_steps < 1:
        raise ValueError(f"sampling takes at least one step, not {num_steps}")
    return shift_times(torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float64), shift)


def _step_pairs(times: Sequence[float] | Tensor) -> Iterator[tuple[float, float]]:
    yield from itertools.pairwise(float(t) for t in times)


def _scalar(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def euler(velocity: Velocity, x: Tensor, times: Sequence[float] | Tensor) -> Iterator[Tensor]:
    """Euler's method: first order, one forward per step; for rectified flow this is DDIM."""
    for t, next_t in _step_pairs(times):
        x = x + (next_t - t) * velocity(x, _scalar(t))
        yield x


def heun(velocity: Velocity, x: Tensor, times: Sequence[float] | Tensor) -> Iterator[Tensor]:
    """Heun's method: second order, two forwards per step (Karras et al. 2022, algorithm 1).

    Without churn. The last step is an Euler step with one forward: it ends at the predicted image, and the velocity is
    never evaluated at t = 0, where it is least well determined.
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
    """Adams-Bashforth 2 for unequal steps: second order, one forward per step.

    The first and the last step are Euler steps. One Euler step has an error of O(h^2), so two of them keep the order at
    2. A last step without extrapolation costs little on smooth data, and at ten steps it halves the error on data with
    sharp modes such as images.
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
    """Return how often the sampler calls the velocity."""
    if name not in SAMPLERS:
        raise ValueError(f"a sampler is one of {', '.join(SAMPLERS)}, not {name!r}")
    return 2 * num_steps - 1 if name == "heun" else num_steps


Condition = Mapping[str, Tensor]
Predict = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]


def _batched_time(t: Tensor, num_images: int, device: torch.device) -> Tensor:
    # `t` is on the CPU, so reading it needs no synchronisation; `full` is a kernel, while a copy would be a transfer.
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
    """Return a velocity with classifier-free guidance from `predict(x, t, condition)`.

    A scale of exactly 1.0 runs only the conditional branch; a tensor (one scale per image) always runs both, so that
    the shape of a forward does not depend on values. With `truncate_from=K` every evaluation at `times[K]` and later
    runs only the conditional branch: it halves the cost of those steps and changes the distribution of images.
    """
    if truncate_from is not None and times is None:
        raise ValueError("truncate_from counts steps, so guided_velocity() needs the times of the steps")
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
        # In this form a row with scale 1 is bit-identical to the conditional prediction.
        return conditional + (_broadcast_scale(scale, x) - 1) * (conditional - unconditional)

    return velocity


def drop_conditions(condition: Condition, null: Condition, dropped: Tensor) -> dict[str, Tensor]:
    """Use the null condition in the rows where `dropped` (one bool per image) is True."""
    result = {}
    for name, value in condition.items():
        rows = dropped.to(value.device).reshape(-1, *([1] * (value.ndim - 1)))
        result[name] = torch.where(rows, null[name].to(value.device), value)
    return result


ModelOutputFn = Callable[..., Tensor]
"""Maps states and their times (one per row) to the denoiser's output."""


class TrajectoryStep(NamedTuple):
    """One step of a trajectory: `model_output` at `x` and `t` led to `end` at `s`.

    Times are float32, one per row.
    """

    x: Tensor
    t: Tensor
    model_output: Tensor
    s: Tensor
    end: Tensor


def segments(times: Sequence[float], num_steps: int) -> list[list[float]]:
    """Return the segments between neighbours of `times`, each divided into equal steps.

    `times` decrease from 1 to 0. There are `num_steps` steps in total, at least one per segment. A segment is the list
    of its times, with both ends.
    """
    if len(times) < 2 or times[0] != 1 or times[-1] != 0 or any(t <= s for t, s in itertools.pairwise(times)):
        raise ValueError(f"times must decrease from 1 to 0, not {', '.join(map(str, times)) or 'nothing'}")
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
    """Yield the steps of a trajectory from `x` at `times[0]` to `times[-1]`, one forward each.

    `conditions` are passed to `predict`. The solver is first order, like the few steps of a student: Euler's method for
    rectified flow, DDIM for DDPM. The last step's `end` is the result.
    """
    rows = torch.ones(len(x), dtype=torch.float32, device=x.device)
    for t, s in itertools.pairwise(times):
        now, next_time = rows * t, rows * s
        model_output = predict(x, now, *conditions)
        end = path.step(x, model_output, now, next_time)
        yield TrajectoryStep(x, now, model_output, next_time, end)
        x = end


def stratified_indices(num: int, num_wanted: int, u: float) -> list[int]:
    """Select `num_wanted` of `num` indices in order, one from each of equal intervals.

    For uniform `u` in [0, 1) every index is equally likely. If `num_wanted >= num`, all are selected.
    """
    if not 0 <= u < 1:
        raise ValueError(f"a uniform number must be in [0, 1), not {u}")
    if num_wanted >= num:
        return list(range(num))
    return [min(num - 1, int((stratum + u) * num / num_wanted)) for stratum in range(num_wanted)]


def select_steps(pieces: Sequence[Sequence[float]], num_wanted: int, u: float) -> list[int]:
    """Return the indices of the steps of a trajectory to keep, in order.

    These are the first step of each segment, and others selected by `u`.
    """
    lengths = [len(piece) - 1 for piece in pieces]
    starts = list(itertools.accumulate(lengths[:-1], initial=0))
    if num_wanted < len(starts):
        raise ValueError(f"{num_wanted} states of {len(starts)} segments; expected at least one of each")
    others = sorted(set(range(sum(lengths))) - set(starts))
    chosen = [others[position] for position in stratified_indices(len(others), num_wanted - len(starts), u)]
    return sorted([*starts, *chosen])
