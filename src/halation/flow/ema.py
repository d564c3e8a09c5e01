"""An exponential moving average (EMA) of parameters in float32, swappable with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

GROUP_SIZE = 64
"""Tensors that are updated together."""


def _local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or the tensor itself."""
    tensor = parameter.detach()
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local


class Ema:
    """The EMA of named parameters.

    The decay warms up as (1 + n) / (10 + n), so that the initial weights have little influence on early averages. With
    sharding, each rank averages its own shard. `swap` exchanges the contents of parameters and averages in place:
    modules, optimizers and hooks keep their tensors. A second `swap` restores every bit, also if a parameter is
    narrower than float32: the exact average is kept aside while the parameter holds its rounded copy.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor], decay: float = 0.9999) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"an EMA decay must be in [0, 1), not {decay}")
        pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
        self.decay = decay
        self.num_updates = 0
        self.is_swapped = False
        self._parameters = dict(pairs)
        self._averages = {
            name: _local_tensor(parameter).to(torch.float32, copy=True) for name, parameter in self._parameters.items()
        }
        self._saved_averages: dict[str, Tensor] = {}

    def current_decay(self) -> float:
        """Return the decay of the next update."""
        return min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters; call once after each optimizer step."""
        if self.is_swapped:
            raise RuntimeError("the EMA is swapped with the parameters: swap back before updating")
        if self._averages:
            weight = 1 - self.current_decay()
            names = list(self._parameters)
            for start in range(0, len(names), GROUP_SIZE):  # in groups: narrow weights are copied to float32
                group = names[start : start + GROUP_SIZE]
                targets = [_local_tensor(self._parameters[name]).to(torch.float32) for name in group]
                torch._foreach_lerp_([self._averages[name] for name in group], targets, weight)
        self.num_updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the contents of parameters and averages; calling it twice changes nothing."""
        for name, parameter in self._parameters.items():
            local, average = _local_tensor(parameter), self._averages[name]
            if local.dtype == torch.float32:
                saved = local.clone()
                local.copy_(average)
                average.copy_(saved)
            elif self.is_swapped:
                local.copy_(average)  # exact: the average holds a widened copy of the parameter
                average.copy_(self._saved_averages.pop(name))
            else:
                self._saved_averages[name] = average.clone()
                saved = local.clone()
                local.copy_(average)
                average.copy_(saved)
        self.is_swapped = not self.is_swapped

    @contextmanager
    def swap_during(self) -> Iterator[None]:
        """Swap inside the context; the parameters are restored even after an error."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by name for saving (this rank's shards); not copies."""
        if self.is_swapped:
            raise RuntimeError("the EMA is swapped with the parameters: swap back before saving")
        return dict(self._averages)

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Load averages from `tensors()` and their number of updates."""
        if self.is_swapped:
            raise RuntimeError("the EMA is swapped with the parameters: swap back before loading")
        if tensors.keys() != self._averages.keys():
            different = sorted(tensors.keys() ^ self._averages.keys())
            raise ValueError(f"the saved EMA belongs to another model: {', '.join(different[:5])}")
        for name, average in self._averages.items():
            if tensors[name].shape != average.shape:
                raise ValueError(f"{name} is {tuple(tensors[name].shape)}, expected {tuple(average.shape)}")
            average.copy_(tensors[name])
        self.num_updates = num_updates
