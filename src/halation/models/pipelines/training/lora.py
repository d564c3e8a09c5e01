"""LoRA adapters (Hu et al. 2021) with peft: target layers, initial weights, merging."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halation.errors import InputError, install_command

_ADAPTER = "default"  # the default adapter name of peft
_DOWN, _UP = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Settings of LoRA adapters: weight + alpha / rank * up @ down, with a frozen weight."""

    rank: int
    alpha: float = 0.0
    """0 means the rank, a scale of 1."""
    targets: tuple[str, ...] = ()
    """Endings of layer names; empty means the attention layers of the family."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(
                f"--lora_rank {self.rank}", "at least 1", "give a rank such as 16, or 0 to train all weights"
            )
        if not self.alpha >= 0:
            raise InputError(f"--lora_alpha {self.alpha}", "a positive number", "give the rank, or twice the rank")

    @property
    def scale(self) -> float:
        return (self.alpha or self.rank) / self.rank

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoraSettings:
        return cls(**{**value, "targets": tuple(value.get("targets", ()))})

    def merge(self, name: str, read_weight: Callable[[], Tensor], adapters: Mapping[str, Tensor]) -> Tensor:
        """Return a weight plus its adapter, in the weight's dtype; unchanged without an adapter."""
        weight, layer = read_weight(), name.removesuffix(".weight")
        down = adapters.get(f"{layer}{_DOWN}")
        up = adapters.get(f"{layer}{_UP}")
        if layer == name or down is None or up is None:
            return weight
        total = weight.to(torch.float32) + (up.to(torch.float32) @ down.to(torch.float32)) * self.scale
        return total.to(weight.dtype)

    def to_diffusers(self, adapters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return adapters and settings under the names that `pipe.load_lora_weights` reads."""
        tensors = {f"transformer.{name.replace(f'.{_ADAPTER}.', '.')}": tensor for name, tensor in adapters.items()}
        layers = sorted({name.removesuffix(_DOWN) for name in adapters if name.endswith(_DOWN)})
        settings = {"r": self.rank, "lora_alpha": self.rank * self.scale, "target_modules": layers, "bias": "none"}
        return tensors, {f"transformer.{name}": value for name, value in settings.items()}


def inject_lora(module: nn.Module, lora: LoraSettings, default_targets: Sequence[str], seed: int) -> None:
    """Add float32 adapters to `module` in place; no other parameter keeps `requires_grad`.

    The seed determines the initial `down` matrices. `up` starts at zero, so that training starts at the base model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise InputError(
            f"LoRA adapters, but {error.name} is not installed", "the package peft", install_command("train", "peft")
        ) from error

    names = _target_layers(module, lora.targets or tuple(default_targets), default_targets)
    settings: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.rank * lora.scale, "target_modules": names}
    config = LoraConfig(**settings, bias="none")
    with torch.random.fork_rng(devices=[]):  # peft initializes randomly; the values are replaced below
        inject_adapter_in_model(config, module, adapter_name=_ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        is_adapter = is_adapter_name(name)
        parameter.requires_grad_(is_adapter)
        if not is_adapter:
            continue
        parameter.data = parameter.data.float()
        if name.endswith(_DOWN):
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.data.uniform_(-bound, bound, generator=generator)
        else:
            parameter.data.zero_()


def _target_layers(module: nn.Module, targets: Sequence[str], usual: Sequence[str]) -> list[str]:
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    chosen: list[str] = []
    for target in targets:
        found = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not found:
            endings: set[str] = set()
            for name in linear:
                parts = name.split(".")
                first = -2 if parts[-1].isdigit() else -1  # name a layer in a list with its list
                endings |= {".".join(parts[first:]), ".".join(parts[first - 1 :])}
            near = list(dict.fromkeys([*difflib.get_close_matches(target, sorted(endings), n=3), *usual]))[:8]
            raise InputError(
                f"--lora_targets {target}: {type(module).__name__} has no linear layer of that name",
                f"endings of layer names, such as {', '.join(near)}",
                "use one of those, or leave --lora_targets out for the attention layers",
            )
        chosen += [name for name in found if name not in chosen]
    return chosen


def is_adapter_name(name: str) -> bool:
    return name.endswith((_DOWN, _UP))
