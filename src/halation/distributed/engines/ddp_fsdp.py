"""Engines: one process, DDP or FSDP2 behind one interface."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halation.distributed.checkpoint.reader import CheckpointReader, TensorShard
from halation.distributed.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine has to know of a training besides its module."""

    offload_optimizer: bool = False
    zero_stage: int = 2
    deepspeed_config: str = ""
    global_batch: int = 1
    num_micro_batches: int = 1
    micro_batch_size: int = 1
    grad_clip: float = 0.0
    dtype: str = "fp32"
    bf16_weights: bool = False


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Asked by its methods: importing DTensor and FSDP takes two seconds, which only sharding ranks need."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory this rank holds of a tensor, sharded or not."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_shard(tensor: Tensor) -> TensorShard:
    if not is_dtensor(tensor):
        return TensorShard(local=tensor, start=0, shape=tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorShard(local=tensor.to_local(), start=offset[0] if offset else 0, shape=tuple(tensor.shape))


class Engine:
    """A module that trains on one rank; the base of those that train on several.

    Only parameters that require a gradient are trained, averaged, compared and saved.
    """

    name = "single"
    sharded = False
    """Every forward is a collective: one rank that runs fewer of them leaves the others hanging."""
    saves_shards = False
    """Every rank has something of its own to save; otherwise rank 0 has everything."""
    optimizer: torch.optim.Optimizer

    def __init__(self, world: World, module: nn.Module) -> None:
        self.world = world
        self.module = module
        self.wrapped_module: nn.Module = module
        # Counted now: what is sharded later may say that it is empty.
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self.num_trainable = sum(parameter.numel() for _, parameter in self.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    def prepare_optimizer(self, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        """Called once, before the first pass; the optimizer is the engine's own from then on."""
        self.optimizer = build_adamw([parameter for _, parameter in self.named_parameters()], lr, betas, weight_decay)

    # -- a step

    def warm_up(self, loss: Tensor) -> None:
        """Run one backward pass whose gradients are thrown away, before the first step.

        DDP orders its buckets anew after its first backward, which changes the order of additions on three ranks and
        more. This lets a fresh run and a resumed one both take their first step with the final buckets.
        """
        self.backward(loss)
        self.zero_grad()

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's forward and backward: gradients meet only after the last one."""
        yield

    def backward(self, loss: Tensor) -> None:
        """Gradients become the mean over ranks."""
        loss.backward()

    def clip_grad_norm(self, max_norm: float, scale: float = 1.0) -> Tensor:
        """Norm of the whole gradient, divided by the loss scale; clipped to `max_norm` where that is positive."""
        gradients = [parameter.grad for _, parameter in self.named_parameters() if parameter.grad is not None]
        if scale != 1.0:  # a power of two, so dividing is exact
            torch._foreach_div_(gradients, scale)
        total = self._total_norm(gradients)
        if max_norm > 0:
            parameters = [parameter for _, parameter in self.named_parameters() if parameter.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """Move the weights by the gradient that `clip_grad_norm` has looked at."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradient, stepped with or not."""
        self.optimizer.zero_grad(set_to_none=True)

    # -- weights

    def master_weights(self) -> dict[str, Tensor]:
        """What steps change, by name: the tensors an average is kept of, and the ones it changes places with."""
        return dict(self.named_parameters())

    def sync_master_weights(self) -> None:
        """Called after something other than a step wrote to `master_weights`: copies them to the module's weights."""

    def reshard(self) -> None:
        """Bring parameters back to where the optimizer and the EMA expect them after forwards without backward."""

    def replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that must hold the same bits on every rank."""
        return ((name, parameter.detach()) for name, parameter in self.named_parameters())

    # -- state

    def state_shards(self) -> dict[str, dict[str, TensorShard]]:
        """This rank's part of what is saved: `model`, laid out like `master_weights`, and `optimizer`, as KEY/NAME."""
        model = {name: local_shard(parameter.detach()) for name, parameter in self.named_parameters()}
        optimizer = {
            f"{key}/{name}": local_shard(value)
            for name, parameter in self.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def load_checkpoint(self, reader: CheckpointReader) -> None:
        """Take weights and optimizer from a checkpoint, whatever number of ranks wrote it."""
        has_optimizer = reader.has_part("optimizer")  # none before the first step that counted
        for name, parameter in self.named_parameters():
            shard = local_shard(parameter.detach())
            shard.local.copy_(reader.read_shard("model", name, shard))
            if not has_optimizer:
                continue
            device = shard.local.device
            state: dict[str, Tensor] = {"step": reader.read("optimizer", f"step/{name}").to(device)}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.empty_like(parameter)
                local_tensor(state[key]).copy_(reader.read_shard("optimizer", f"{key}/{name}", shard))
            self.optimizer.state[parameter] = state

    def reserve_optimizer_memory(self) -> list[Tensor]:
        """Memory the optimizer will take at its first step, taken now, for as long as the caller holds it."""
        if self.optimizer.state:
            return []
        return [torch.empty_like(local_tensor(p.detach())) for _, p in self.named_parameters() for _ in range(2)]

    @contextlib.contextmanager
    def offload_optimizer_state(self) -> Iterator[None]:
        """The optimizer's state waits in host memory meanwhile; every bit comes back, into the same tensors."""
        tensors = [local_tensor(value) for state in self.optimizer.state.values() for value in state.values()]
        with offload_to_host([tensor for tensor in tensors if tensor.device.type == self.world.device.type]):
            yield


class DDPEngine(Engine):
    """Every rank holds everything; gradients are averaged while the backward pass still runs."""

    name = "ddp"

    def __init__(self, world: World, module: nn.Module) -> None:
        super().__init__(world, module)
        # Buffers are constants here; sending them before every forward would be work for nothing.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, [name for name, _ in module.named_buffers()]
        )
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        self.wrapped_module = DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        assert isinstance(self.wrapped_module, DistributedDataParallel)
        with contextlib.nullcontext() if last else self.wrapped_module.no_sync():
            yield


class FSDPEngine(Engine):
    """Weights, gradients and what is derived from them live in shards; a unit is whole only while it computes."""

    name = "fsdp"
    sharded = True
    saves_shards = True

    def __init__(self, world: World, module: nn.Module, units: Sequence[nn.Module], offload: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        super().__init__(world, module)
        mesh = init_device_mesh(world.device.type, (world.size,))
        # Shards in host memory come to the device for their unit alone; on the CPU they are there already.
        policy = CPUOffloadPolicy() if offload and world.device.type == "cuda" else OffloadPolicy()
        # It warns of blocks whose result is a view (FLUX's), which must not be written to, and is not.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        for unit in units:
            fully_shard(unit, mesh=mesh, offload_policy=policy)
        fully_shard(module, mesh=mesh, offload_policy=policy)

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        cast("FSDPModule", self.module).set_requires_gradient_sync(last)
        yield

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        total = super()._total_norm(gradients)
        if not is_dtensor(total):
            return total
        local_norm = total.to_local()
        if local_norm.device == self.world.device:
            return total.full_tensor()
        # The group of the GPUs cannot add up what lies in host memory.
        return self.world.all_reduce_sum(local_norm.to(self.world.device) ** 2).sqrt().to(local_norm.device)

    def reshard(self) -> None:
        """After a forward without backward the root stays whole: the EMA would meet whole tensors instead of shards."""
        for submodule in self.module.modules():
            if hasattr(submodule, "reshard"):
                cast("FSDPModule", submodule).reshard()

    def replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def build_adamw(
    parameters: Sequence[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW; vectors (biases, norms, embeddings of one row) are not decayed."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


@contextlib.contextmanager
def offload_to_host(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Keep the contents of these tensors in host memory and free their storage; they must not be used meanwhile."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    copies = []
    for storage in storages.values():
        if not storage.resizable():  # another tensor shares this memory
            continue
        copies.append((storage, torch.UntypedStorage(storage.size()).copy_(storage)))
        storage.resize_(0)
    try:
        yield
    finally:
        for storage, copy in copies:
            storage.resize_(copy.size())
            storage.copy_(copy)
