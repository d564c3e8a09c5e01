"""An exponential moving average of parameters in float32 that can be swapped with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def _local_tensor(parameter: Tensor) -> Tensor:
    """The memory this rank owns: a sharded tensor's own piece, or the tensor itself."""
    tensor = parameter.detach()
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local


class Ema:
    """Averages of named parameters.

    The decay warms up as (1 + n) / (10 + n), so that early averages are not the initial weights. Under sharding each
    rank averages its own piece. `swap` exchanges the contents of parameters and averages in place: modules, optimizers
    and hooks keep the tensors they hold. A second `swap` restores every bit, also where a parameter is narrower than
    float32: the average then waits outside while its rounded copy sits in the parameter.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor], decay: float = 0.9999) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"an EMA decay lies in [0, 1), not {decay}")
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
        """The decay the next update uses."""
        return min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters; call once after each optimizer step."""
        if self.is_swapped:
            raise RuntimeError("the averages sit in the parameters: swap back before updating")
        if self._averages:
            weight = 1 - self.current_decay()
            targets = [_local_tensor(parameter).to(torch.float32) for parameter in self._parameters.values()]
            torch._foreach_lerp_(list(self._averages.values()), targets, weight)
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
        """Within the context the parameters hold the averages; they come back whatever happens inside."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def tensors(self) -> dict[str, Tensor]:
        """The averages by name (each rank's own pieces under sharding), to be saved; not copies."""
        if self.is_swapped:
            raise RuntimeError("the averages sit in the parameters: swap back before saving")
        return dict(self._averages)

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor], num_updates: int) -> None:
        """Take averages saved by `tensors()` and the number of updates behind them."""
        if self.is_swapped:
            raise RuntimeError("the averages sit in the parameters: swap back before loading")
        if tensors.keys() != self._averages.keys():
            different = sorted(tensors.keys() ^ self._averages.keys())
            raise ValueError(f"the saved averages belong to another model: {', '.join(different[:5])}")
        for name, average in self._averages.items():
            if tensors[name].shape != average.shape:
                raise ValueError(f"{name} is {tuple(tensors[name].shape)}, expected {tuple(average.shape)}")
            average.copy_(tensors[name])
        self.num_updates = num_updates
