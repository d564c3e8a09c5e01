"""Somebody else's ranks and modules, used for a while and given back as they were: for functions that a training loop of one's own calls."""

from __future__ import annotations

import dataclasses
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halation.distributed.world import World
from halation.errors import InputError, RankFailure


@contextmanager
def external_world(rank: int, size: int, device: torch.device, timeout_s: float) -> Iterator[World]:
    """The caller's own ranks, with a group of ours for words; or a world of one."""
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
    try:
        control = _get_control_group(timeout_s)
    except RuntimeError as error:
        raise _missing_rank_error(timeout_s, error) from error
    store = dist.distributed_c10d._get_default_store()
    local_rank = device.index or 0
    world = World(
        rank=rank, size=size, local_rank=local_rank, device=device, store=store, control=control, timeout_s=timeout_s
    )
    # Words of an earlier call must not pass for words of this one, and ranks need not have called equally often.
    try:
        scoped_store = _ScopedStore(f"halation/{world.broadcast_from_rank_zero(uuid.uuid4().hex)}", store, set())
    except RuntimeError as error:
        _destroy_control_group(control)
        raise _missing_rank_error(timeout_s, error) from error
    try:
        yield dataclasses.replace(world, store=scoped_store)
        world.all_gather_object("")  # everybody has read what others left
    except BaseException:
        _destroy_control_group(control)  # words of ranks that part ways must not meet later ones
        raise
    scoped_store.clear()


class _ScopedStore(dist.PrefixStore):
    """A part of the caller's store that is left empty: the store may live as long as a job, and calls are many."""

    def __init__(self, prefix: str, store: dist.Store, keys: set[str]) -> None:
        super().__init__(prefix, store)
        self._scope = (prefix, store, keys)

    def set(self, key: str, value: Any) -> None:
        self._scope[2].add(key)
        super().set(key, value)

    def clone(self) -> _ScopedStore:
        prefix, store, keys = self._scope
        base_store: Any = store  # a store's stubs lack what all of them have
        return _ScopedStore(prefix, base_store.clone(), keys)

    def clear(self) -> None:
        """Of the keys of this rank."""
        for key in self._scope[2]:
            self.delete_key(key)


_control_groups: dict[float, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
"""By patience: the caller's default group, and our group beside it, which lives for as long as torch knows it."""


def _get_control_group(timeout_s: float) -> dist.ProcessGroup:
    """A group of ours, the same one for as long as the caller's is the same: making one connects all ranks with all."""
    default, control = (known() for known in _control_groups.get(timeout_s, (lambda: None, lambda: None)))
    if control is not None and default is dist.group.WORLD:
        return control
    _control_groups.pop(timeout_s, None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert group is not None
    _control_groups[timeout_s] = (weakref.ref(dist.group.WORLD), weakref.ref(group))
    return group


def _destroy_control_group(control: dist.ProcessGroup) -> None:
    for timeout_s in [timeout_s for timeout_s, (_, kept) in _control_groups.items() if kept() is control]:
        del _control_groups[timeout_s]
    dist.destroy_process_group(control)


def _missing_rank_error(timeout_s: float, error: RuntimeError) -> RankFailure:
    return RankFailure(f"not every rank called sampler(step) within {timeout_s:.0f} s, or one is gone: {error}")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Without the wrapper of DDP, DataParallel or DeepSpeed; hooks that gather shards are on the modules inside."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_sharded(module: nn.Module) -> bool:
    """FSDP2's parameters are DTensors, those of ZeRO-3 carry an id: then every forward is a collective."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in module.parameters())


def is_fsdp1(module: nn.Module) -> bool:
    """By the name, because importing it takes long and nearly nobody has it."""
    names = {base.__name__ for part in module.modules() for base in type(part).__mro__}
    return "FullyShardedDataParallel" in names


def reshard(module: nn.Module) -> None:
    """Give whole weights back where FSDP2 gathered them: after a forward without a backward nobody else does."""
    for part in module.modules():
        reshard_part: Any = getattr(part, "reshard", None)
        if reshard_part is not None:
            reshard_part()


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every part's own mode, and every weight as trainable as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    grad_flags = [(weight, weight.requires_grad) for module in modules for weight in module.parameters()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for weight, requires_grad in grad_flags:
            weight.requires_grad_(requires_grad)
