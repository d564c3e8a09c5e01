"""What a model is trained to do: a module and rows in, one loss a row out."""

from __future__ import annotations

from torch import Tensor, nn

from halation.flow.paths import interpolate, velocity_target
from halation.training.loop import Rows


def flow_matching(module: nn.Module, rows: Rows) -> Tensor:
    """Rectified flow (Liu et al. 2022): squared error of the velocity on the straight line from picture to noise."""
    x = interpolate(rows.x0, rows.noise, rows.t)
    velocity = module(x, rows.t, rows.condition)
    return (velocity.float() - velocity_target(rows.x0, rows.noise)).square().flatten(1).mean(1)
