"""Somebody else's ranks and modules, used for a while and given back as they were: for functions that a training loop of one's own calls."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halation.errors import InputError
from halation.world.ranks import World


@contextmanager
def borrowed_world(rank: int, size: int, device: torch.device, timeout_s: float) -> Iterator[World]:
    """The caller's own ranks, with a group of ours for words while it lasts; or a world of one."""
    if not dist.is_initialized():
        if size != 1:
            raise InputError(
                f"world_size {size}, but torch.distributed is not initialised",
                "ranks that know each other",
                "call torch.distributed.init_process_group first, or pass world_size=1",
            )
        # No group is made, not even for a while: what the caller runs inside may ask whether there is one.
        yield World(
            rank=0, size=1, local_rank=0, device=device, store=dist.HashStore(), control=None, timeout_s=timeout_s
        )
        return
    if (rank, size) != (dist.get_rank(), dist.get_world_size()):
        raise InputError(
            f"rank {rank} of {size}",
            f"what torch.distributed says: {dist.get_rank()} of {dist.get_world_size()}",
            "pass dist.get_rank() and dist.get_world_size()",
        )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    store = dist.distributed_c10d._get_default_store()
    local = device.index or 0
    world = World(
        rank=rank, size=size, local_rank=local, device=device, store=store, control=control, timeout_s=timeout_s
    )
    # Words of an earlier call must not pass for words of this one, and ranks need not have called equally often.
    corner = world.from_first(uuid.uuid4().hex)
    try:
        yield dataclasses.replace(world, store=dist.PrefixStore(f"halation/{corner}", store))
    finally:
        dist.destroy_process_group(control)


def bare(model: nn.Module) -> nn.Module:
    """Without the wrapper of DDP, DataParallel or DeepSpeed; hooks that gather shards are on the modules inside."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_sharded(module: nn.Module) -> bool:
    """FSDP2's parameters are DTensors, those of ZeRO-3 carry an id: then every forward is a collective."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in module.parameters())


def reshard(module: nn.Module) -> None:
    """Give whole weights back where FSDP2 gathered them: after a forward without a backward nobody else does."""
    for part in module.modules():
        give_back: Any = getattr(part, "reshard", None)
        if give_back is not None:
            give_back()


@contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part's own mode, and every weight as trainable as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    trained = [(weight, weight.requires_grad) for module in modules for weight in module.parameters()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for weight, requires_grad in trained:
            weight.requires_grad_(requires_grad)
