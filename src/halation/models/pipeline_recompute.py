"""Activation checkpointing of one block of any transformer, whether or not its class knows of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Recomputed:
    """A forward that keeps its inputs and nothing else where a gradient will be asked for."""

    has_dropout = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=self.has_dropout, **kwargs)


def recompute(block: nn.Module) -> None:
    """Compute the block's activations again in the backward pass, from now on.

    By another class rather than a replaced `forward`: engines that change the class in turn, and copies of the block, keep it.
    """
    kind = type(block)
    if not issubclass(kind, _Recomputed):
        dropout = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in block.modules())
        block.__class__ = _recomputed(kind, dropout)


@functools.cache
def _recomputed(kind: type[nn.Module], has_dropout: bool) -> type[nn.Module]:
    """One class for all blocks of a kind: with a class for each, a compiler would compile each by itself, and give up."""
    return type(kind.__name__, (_Recomputed, kind), {"has_dropout": has_dropout})
