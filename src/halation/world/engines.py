"""How a module is spread over the ranks: one process, DDP or FSDP2, behind one small face; knows nothing of what it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halation.errors import InputError
from halation.world.ranks import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """This rank's rows of a tensor: `start` is the first of them in the whole, whose shape is `shape`."""

    local: Tensor
    start: int
    shape: tuple[int, ...]


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Asked by its methods: importing DTensor and FSDP takes two seconds, which ranks that do not shard need not wait for."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The memory this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def piece(tensor: Tensor) -> Piece:
    if not is_sharded(tensor):
        return Piece(local=tensor, start=0, shape=tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(local=tensor.to_local(), start=offset[0] if offset else 0, shape=tuple(tensor.shape))


class Engine:
    """A module that trains on one rank; the base of those that train on several."""

    name = "single"
    sharded = False

    def __init__(self, world: World, module: nn.Module) -> None:
        self.world = world
        self.module = module
        self.trained: nn.Module = module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def settle(self, loss: Tensor) -> None:
        """Run one backward pass whose gradients are thrown away, before the first step.

        DDP orders its buckets anew after its first backward, which changes the order of additions on three ranks and more.
        This lets a fresh run and a resumed one both take their first step with the final buckets.
        """
        loss.backward()
        self.module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's forward and backward: gradients meet only after the last one."""
        yield

    def grad_norm(self, max_norm: float) -> Tensor:
        """Norm of the whole gradient, which is clipped to `max_norm` where that is positive."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if is_sharded(total):
            total = total.full_tensor()
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def at_rest(self) -> None:
        """Bring parameters back to where the optimizer and the EMA expect them after forwards without backward."""

    def parameters_agree(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that must hold the same bits on every rank."""
        return ((name, parameter.detach()) for name, parameter in self.module.named_parameters())


class Ddp(Engine):
    """Every rank holds everything; gradients are averaged while the backward pass still runs."""

    name = "ddp"

    def __init__(self, world: World, module: nn.Module) -> None:
        super().__init__(world, module)
        # Buffers are constants here; sending them before every forward would be work for nothing.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [name for name, _ in module.named_buffers()]
        )
        places = [world.device.index] if world.device.type == "cuda" else None
        self.trained = DistributedDataParallel(module, device_ids=places, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        assert isinstance(self.trained, DistributedDataParallel)
        with contextlib.nullcontext() if last else self.trained.no_sync():
            yield


class Fsdp(Engine):
    """Weights, gradients and what is derived from them live in shards; a unit is whole only while it computes."""

    name = "fsdp"
    sharded = True

    def __init__(self, world: World, module: nn.Module, units: Sequence[nn.Module]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(world, module)
        mesh = init_device_mesh(world.device.type, (world.size,))
        for unit in units:
            fully_shard(unit, mesh=mesh)
        fully_shard(module, mesh=mesh)

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        cast("FSDPModule", self.module).set_requires_gradient_sync(last)
        yield

    def at_rest(self) -> None:
        """After a forward without backward the root stays whole: the EMA would meet whole tensors instead of shards."""
        for submodule in self.module.modules():
            if hasattr(submodule, "reshard"):
                cast("FSDPModule", submodule).reshard()

    def parameters_agree(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def spread(name: str, world: World, module: nn.Module, units: Sequence[nn.Module]) -> Engine:
    """The engine of this name over this module; `auto` is ddp for several ranks and single for one."""
    if name == "auto":
        name = "ddp" if world.size > 1 else "single"
    if name == "single" and world.size > 1:
        raise InputError(
            f"--engine single with {world.size} ranks",
            "one rank",
            "use --engine ddp or fsdp, or --nproc 1 (ranks would never meet)",
        )
    if name == "single":
        return Engine(world, module)
    if name == "ddp":
        return Ddp(world, module) if dist.is_initialized() else Engine(world, module)
    return Fsdp(world, module, units)


def adamw(engine: Engine, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW; vectors (biases, norms, embeddings of one row) are not decayed."""
    matrices = [p for p in engine.module.parameters() if p.ndim > 1]
    vectors = [p for p in engine.module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


def optimizer_pieces(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Piece]:
    """The optimizer's state by parameter name: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`."""
    pieces = {}
    for name, parameter in engine.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            pieces[f"{key}/{name}"] = piece(value)
    return pieces


def fill_optimizer(engine: Engine, optimizer: torch.optim.Optimizer, read: Any) -> None:
    """Put state back: `read(name, start, rows)` gives the rows of a tensor, or all of it where rows is None."""
    for name, parameter in engine.named_parameters():
        mine = piece(parameter.detach())
        state: dict[str, Tensor] = {
            "step": read(f"step/{name}", 0, None).to(parameter.device if _fused_on_gpu(parameter) else "cpu")
        }
        for key in ("exp_avg", "exp_avg_sq"):
            rows = mine.local.shape[0] if mine.local.ndim else None
            values = read(f"{key}/{name}", mine.start, rows).to(device=mine.local.device, dtype=mine.local.dtype)
            state[key] = _like(parameter, values)
        optimizer.state[parameter] = state


def _fused_on_gpu(parameter: Tensor) -> bool:
    return local(parameter.detach()).is_cuda


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
