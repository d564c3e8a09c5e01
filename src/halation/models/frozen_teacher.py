"""A frozen model that answers: guided, in its own precision, on its own device, in batches of its own size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halation.models.denoiser import Condition, Denoiser, null_condition


class Teacher:
    """What a denoiser says to a state, with guidance in it, without a gradient."""

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        guidance: float,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int = 0,
    ) -> None:
        """`device` is where it computes, which need not be where it is asked; `batch_size` 0 takes what comes at once."""
        self.denoiser = denoiser
        self.noise_path = denoiser.noise_path
        self.guidance = guidance
        self.device = device
        self.dtype = dtype
        self.batch_size = batch_size
        self.heartbeat: Callable[[], None] = lambda: None
        """Called after every forward: on a CPU one answer of a large model takes longer than others wait for a sign of life."""
        self._null: Condition = {}
        denoiser.module.requires_grad_(False).eval()
        denoiser.set_guidance(guidance)

    @torch.no_grad()
    def predict(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """The guided answer at states `x` and times `t`, in float32, where `x` is."""
        size = self.batch_size or len(x)
        pieces = [
            self._predict_guided(
                x[start : start + size],
                t[start : start + size],
                {name: value[start : start + size] for name, value in condition.items()},
            )
            for start in range(0, len(x), size)
        ]
        return torch.cat(pieces).to(x.device)

    @torch.no_grad()
    def forward_for_features(self, x: Tensor, t: Tensor, condition: Condition) -> None:
        """One forward of the prompt's branch at once, for whoever listens to features; the answer is known already."""
        condition = {name: value.to(self.device) for name, value in condition.items()}
        with self._mixed_precision():
            self._forward(x.to(self.device), t.to(self.device), condition)

    def _mixed_precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def _predict_guided(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        x, t = x.to(self.device), t.to(self.device)
        condition = {name: value.to(self.device) for name, value in condition.items()}
        use_cfg = self.denoiser.guidance_kind == "pair" and self.guidance != 1.0
        with self._mixed_precision():
            # One after the other: half the memory of a doubled batch. The prompt's comes last, for whoever listens to features.
            null_answer = self._forward(x, t, condition | self._null_condition(len(x))) if use_cfg else None
            answer = self._forward(x, t, condition)
        return answer if null_answer is None else null_answer + self.guidance * (answer - null_answer)

    def _forward(self, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        answer = self.denoiser.forward(self.denoiser.module, x, t, condition).float()
        self.heartbeat()
        return answer

    def _null_condition(self, num_rows: int) -> Condition:
        """The texts of the null branch; what a condition says of sizes is left as it is."""
        if not self._null:
            self._null = {name: value.to(self.device) for name, value in null_condition(self.denoiser, 1).items()}
        return {name: value.repeat(num_rows, *(1,) * (value.ndim - 1)) for name, value in self._null.items()}


def split_across_devices(module: nn.Module, blocks: list[nn.Module], devices: list[torch.device]) -> None:
    """Deal the units out over the devices, in order and by the number of their parameters; all else is on the first one.

    States travel with the forward; whoever calls the module sees the first device alone.
    """
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in blocks]
    total, before = sum(sizes), 0
    module.to(devices[0])
    for block, size in zip(blocks, sizes, strict=True):
        device = devices[min(before * len(devices) // max(1, total), len(devices) - 1)]
        before += size
        if device == devices[0]:
            continue
        block.to(device)
        block.register_forward_pre_hook(_make_input_hook(device), with_kwargs=True)
        block.register_forward_hook(
            _make_output_hook(devices[0])
        )  # whatever follows it, a unit or not, need not know of it


def _make_input_hook(device: torch.device) -> Callable[..., tuple[tuple[object, ...], dict[str, object]]]:
    def hook(
        _unit: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return _move_to(args, device), _move_to(kwargs, device)

    return hook


def _make_output_hook(device: torch.device) -> Callable[[nn.Module, object, object], object]:
    def hook(_unit: nn.Module, _args: object, output: object) -> object:
        return _move_to(output, device)

    return hook


def _move_to(value: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and dicts on another device; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_move_to(inner, device) for inner in value)
    if isinstance(value, dict):
        return {key: _move_to(inner, device) for key, inner in value.items()}
    return value
