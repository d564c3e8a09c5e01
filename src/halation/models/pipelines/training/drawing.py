"""Drawing by a pipeline's own call with a transformer that is in training: its inputs, how it is seen, where it runs, who hears of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halation.models.denoiser import Condition
from halation.models.pipelines.arguments import call_parameters


@dataclass(frozen=True, kw_only=True)
class PipelineInputs:
    """Everything the pipeline's call needs for one sheet, on the device."""

    condition: Condition
    null: Condition
    seeds: tuple[int, ...]
    guidance_scale: float
    num_steps: int
    height: int
    width: int
    device: torch.device
    truncated: tuple[bool, ...]

    @property
    def num_rows(self) -> int:
        return len(self.seeds)

    def halves(self) -> tuple[PipelineInputs, PipelineInputs]:
        middle = -(-self.num_rows // 2)
        return self._rows(slice(None, middle)), self._rows(slice(middle, None))

    def _rows(self, cut: slice) -> PipelineInputs:
        return replace(
            self,
            condition={name: value[cut] for name, value in self.condition.items()},
            null={name: value[cut] for name, value in self.null.items()},
            seeds=self.seeds[cut],
            truncated=self.truncated[cut],
        )


class InPipeline:
    """The transformer as its pipeline sees it while a sheet is drawn: called in the solver's dtype, with inputs in float32.

    Only the transformer runs under autocast; the scheduler's own arithmetic keeps the precision of the latents.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._module = module
        self._narrow = dtype
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self._narrow != torch.float32 else weights_dtype_of(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device.type, dtype=self._narrow, enabled=self._narrow != torch.float32):
            return self._module(*args, **kwargs)


def weights_dtype_of(module: nn.Module) -> torch.dtype:
    """What the weights are in, but for those that a family keeps in float32 whatever the others are in."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return next(
        parameter.dtype
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and kept.isdisjoint(name.split("."))
    )


@contextmanager
def standing_in(pipe: Any, module: InPipeline) -> Iterator[None]:
    """This one in the place of the pipeline's transformer, or in the places of both where it has two."""
    names = [name for name in ("transformer", "transformer_2") if getattr(pipe, name, None) is not None]
    own = {name: getattr(pipe, name) for name in names}
    for name in names:
        setattr(pipe, name, module)
    try:
        yield
    finally:
        for name in names:
            setattr(pipe, name, own[name])


class OnOneDevice:
    """A pipeline that is told its device: that of its weights is another one where an engine keeps them in host memory."""

    drawing_on = torch.device("cpu")

    @property
    def _execution_device(self) -> torch.device:
        return self.drawing_on


def after_each_step(kind: type[Any], on_step: Callable[[], None]) -> dict[str, Any]:
    if "callback_on_step_end" not in call_parameters(kind):
        return {"callback": lambda _step, _time, _latents: on_step()}

    def beat(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return values

    return {"callback_on_step_end": beat}


def cast(condition: Condition, dtype: torch.dtype) -> Condition:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in condition.items()}
