"""Compiling the blocks of a transformer one by one: seconds instead of minutes, and one graph for all that are alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_MAX_SHAPES = 64
"""Each size, batch and guidance pattern of a run is compiled once; torch's own limit of 8 falls back to eager, and stays there."""


def compile_units(units: Iterable[nn.Module]) -> None:
    """Compile each of these in place, at its first call with each shape."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_SHAPES)
    for unit in units:
        unit.compile(dynamic=False)
