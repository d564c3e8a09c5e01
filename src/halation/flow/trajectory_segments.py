"""The way from noise (t = 1) to an image (t = 0) in steps of a path, cut into segments, and which of its states are kept; pure maths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halation.flow.paths import NoisePath

ModelOutputFn = Callable[..., Tensor]
"""States and their times, one a row, to what a module predicts there."""


class TrajectoryStep(NamedTuple):
    """One step of a trajectory: at `x` and `t` the module said `model_output`, which led to `end` at `s`. Times are one a row, float32."""

    x: Tensor
    t: Tensor
    model_output: Tensor
    s: Tensor
    end: Tensor


def segments(times: Sequence[float], num_steps: int) -> list[list[float]]:
    """The stretches between neighbours of `times` (from 1 down to 0), each cut into equal steps: `num_steps` in all, at least one each.

    Every segment is given by the times it goes through, its two ends among them.
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

    `conditions` are handed to `predict`. First order, as a student's few steps are: Euler's method for rectified flow, DDIM for
    a table.
    """
    rows = torch.ones(len(x), dtype=torch.float32, device=x.device)
    for t, s in itertools.pairwise(times):
        now, next_time = rows * t, rows * s
        model_output = predict(x, now, *conditions)
        end = path.step(x, model_output, now, next_time)
        yield TrajectoryStep(x, now, model_output, next_time, end)
        x = end


def stratified_indices(num: int, num_wanted: int, u: float) -> list[int]:
    """`num_wanted` of `num` numbers in order, one from each of as many equal stretches; over all `u` in [0, 1) every number is as likely.

    All of them where more are wanted than there are.
    """
    if not 0 <= u < 1:
        raise ValueError(f"a uniform number lies in [0, 1), not {u}")
    if num_wanted >= num:
        return list(range(num))
    return [min(num - 1, int((stratum + u) * num / num_wanted)) for stratum in range(num_wanted)]


def select_steps(pieces: Sequence[Sequence[float]], num_wanted: int, u: float) -> list[int]:
    """Which steps of a trajectory in segments are kept, by number and in order: the first of each segment, then others by `u`."""
    lengths = [len(piece) - 1 for piece in pieces]
    starts = list(itertools.accumulate(lengths[:-1], initial=0))
    if num_wanted < len(starts):
        raise ValueError(f"{num_wanted} states of {len(starts)} segments; expected one of each at least")
    others = sorted(set(range(sum(lengths))) - set(starts))
    chosen = [others[position] for position in stratified_indices(len(others), num_wanted - len(starts), u)]
    return sorted([*starts, *chosen])
