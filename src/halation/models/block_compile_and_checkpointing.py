"""Compile or checkpoint the blocks of a transformer one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_MIN_RECOMPILE_LIMIT = 64
"""Each size, batch and guidance pattern of a run is compiled once; torch's own limit of 8 falls back to eager, and stays there."""
_CHECKPOINTED_CLASSES: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each of these in place, at its first call with each shape."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MIN_RECOMPILE_LIMIT)
    for block in blocks:
        block.compile(dynamic=False)


class _GradientCheckpointed:
    """A forward that keeps its inputs and nothing else where a gradient will be asked for."""

    has_dropout = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=self.has_dropout, **kwargs)


def apply_gradient_checkpointing(block: nn.Module) -> None:
    """Compute the block's activations again in the backward pass, from now on.

    By another class rather than a replaced `forward`: engines that change the class in turn, and copies of the block, keep it.
    """
    kind = type(block)
    if not issubclass(kind, _GradientCheckpointed):
        dropout = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in block.modules())
        # One class for all blocks of a kind: with a class for each, a compiler would compile each by itself, and give up.
        key = (kind, dropout)
        if key not in _CHECKPOINTED_CLASSES:
            _CHECKPOINTED_CLASSES[key] = type(kind.__name__, (_GradientCheckpointed, kind), {"has_dropout": dropout})
        block.__class__ = _CHECKPOINTED_CLASSES[key]
