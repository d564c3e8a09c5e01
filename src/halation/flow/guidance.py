"""Classifier-free guidance: the conditional and the null branch in one batched forward, and the dropping of captions in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Condition = Mapping[str, Tensor]
Predict = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]
Velocity = Callable[[Tensor, Tensor], Tensor]


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

    A scale of exactly 1.0 runs the conditional branch only; a tensor (one scale an image) always runs the pair, so that the
    shape of a forward does not depend on the values in it. With `truncate_from=K` every evaluation at `times[K]` and later
    runs the conditional branch only: half the cost of those steps, and another distribution of images.
    """
    if truncate_from is not None and times is None:
        raise ValueError("truncate_from counts steps, so guided() needs the times of the steps")
    conditional_only = not isinstance(scale, Tensor) and scale == 1.0
    threshold = _truncation_time(truncate_from, times)
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


def _truncation_time(truncate_from: int | None, times: Sequence[float] | Tensor | None) -> float:
    if truncate_from is None or times is None or truncate_from >= len(times):
        return -1.0
    if truncate_from < 0:
        raise ValueError(f"truncate_from counts steps from 0, not {truncate_from}")
    return float(times[truncate_from])


def drop_conditions(condition: Condition, null: Condition, dropped: Tensor) -> dict[str, Tensor]:
    """The condition with the null condition in the rows where `dropped` (bool, one an image) is true."""
    result = {}
    for name, value in condition.items():
        rows = dropped.to(value.device).reshape(-1, *([1] * (value.ndim - 1)))
        result[name] = torch.where(rows, null[name].to(value.device), value)
    return result
