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
def borrowed_world(rank: int, size: int, device: torch.device, timeout_s: float) -> Iterator[World]:
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
        control = _control(timeout_s)
    except RuntimeError as error:
        raise _missed(timeout_s, error) from error
    store = dist.distributed_c10d._get_default_store()
    local = device.index or 0
    world = World(
        rank=rank, size=size, local_rank=local, device=device, store=store, control=control, timeout_s=timeout_s
    )
    # Words of an earlier call must not pass for words of this one, and ranks need not have called equally often.
    try:
        corner = _Corner(f"halation/{world.from_first(uuid.uuid4().hex)}", store, set())
    except RuntimeError as error:
        _let_go(control)
        raise _missed(timeout_s, error) from error
    try:
        yield dataclasses.replace(world, store=corner)
        world.exchange("")  # everybody has read what others left
    except BaseException:
        _let_go(control)  # words of ranks that part ways must not meet later ones
        raise
    corner.clear()


class _Corner(dist.PrefixStore):
    """A part of the caller's store that is left empty: the store may live as long as a job, and calls are many."""

    def __init__(self, prefix: str, store: dist.Store, keys: set[str]) -> None:
        super().__init__(prefix, store)
        self._made_of = (prefix, store, keys)

    def set(self, key: str, value: Any) -> None:
        self._made_of[2].add(key)
        super().set(key, value)

    def clone(self) -> _Corner:
        prefix, store, keys = self._made_of
        own: Any = store  # a store's stubs lack what all of them have
        return _Corner(prefix, own.clone(), keys)

    def clear(self) -> None:
        """Of the keys of this rank."""
        for key in self._made_of[2]:
            self.delete_key(key)


_kept: dict[float, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
"""By patience: the caller's default group, and our group beside it, which lives for as long as torch knows it."""


def _control(timeout_s: float) -> dist.ProcessGroup:
    """A group of ours, the same one for as long as the caller's is the same: making one connects all ranks with all."""
    default, control = (known() for known in _kept.get(timeout_s, (lambda: None, lambda: None)))
    if control is not None and default is dist.group.WORLD:
        return control
    _kept.pop(timeout_s, None)
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert made is not None
    _kept[timeout_s] = (weakref.ref(dist.group.WORLD), weakref.ref(made))
    return made


def _let_go(control: dist.ProcessGroup) -> None:
    for timeout_s in [timeout_s for timeout_s, (_, kept) in _kept.items() if kept() is control]:
        del _kept[timeout_s]
    dist.destroy_process_group(control)


def _missed(timeout_s: float, error: RuntimeError) -> RankFailure:
    return RankFailure(f"not every rank called sampler(step) within {timeout_s:.0f} s, or one is gone: {error}")


def bare(model: nn.Module) -> nn.Module:
    """Without the wrapper of DDP, DataParallel or DeepSpeed; hooks that gather shards are on the modules inside."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_sharded(module: nn.Module) -> bool:
    """FSDP2's parameters are DTensors, those of ZeRO-3 carry an id: then every forward is a collective."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in module.parameters())


def wrapped_by_fsdp1(module: nn.Module) -> bool:
    """By the name, because importing it takes long and nearly nobody has it."""
    names = {base.__name__ for part in module.modules() for base in type(part).__mro__}
    return "FullyShardedDataParallel" in names


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
