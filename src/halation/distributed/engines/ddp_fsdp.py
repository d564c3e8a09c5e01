"""Engines single, DDP and FSDP2, with one interface."""

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
    """The training settings that engines need."""

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
    """Return True for a DTensor, without importing DTensor, which takes two seconds with FSDP."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded or not."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_shard(tensor: Tensor) -> TensorShard:
    if not is_dtensor(tensor):
        return TensorShard(local=tensor, start=0, shape=tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorShard(local=tensor.to_local(), start=offset[0] if offset else 0, shape=tuple(tensor.shape))


class Engine:
    """Trains a module on one rank; the base class of engines for several ranks.

    Only parameters that require a gradient are trained, averaged, compared and saved.
    """

    name = "single"
    sharded = False
    """True if every forward is a collective: a rank that runs fewer would block the others."""
    saves_shards = False
    """True if every rank saves its own shard; otherwise rank 0 saves everything."""
    optimizer: torch.optim.Optimizer

    def __init__(self, world: World, module: nn.Module) -> None:
        self.world = world
        self.module = module
        self.wrapped_module: nn.Module = module
        # Counted now: parameters that are sharded later may report zero elements.
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self.num_trainable = sum(parameter.numel() for _, parameter in self.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    def prepare_optimizer(self, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        """Create the optimizer; called once, before the first forward."""
        self.optimizer = build_adamw([parameter for _, parameter in self.named_parameters()], lr, betas, weight_decay)

    # -- a step

    def warm_up(self, loss: Tensor) -> None:
        """Run one backward pass before the first step and discard its gradients.

        DDP rebuilds its buckets after its first backward, which changes the order of additions on three or more ranks.
        With this pass, fresh and resumed runs both take their first step with the final buckets.
        """
        self.backward(loss)
        self.zero_grad()

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Wrap forward and backward of a micro-batch; only the last one synchronises gradients."""
        yield

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; gradients are averaged over ranks."""
        loss.backward()

    def clip_grad_norm(self, max_norm: float, scale: float = 1.0) -> Tensor:
        """Unscale gradients, clip them to `max_norm` if positive, and return their global norm."""
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
        """Update the weights with the gradients that `clip_grad_norm` has processed."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    # -- weights

    def master_weights(self) -> dict[str, Tensor]:
        """Return the tensors that steps update, by name: the EMA averages and swaps with these."""
        return dict(self.named_parameters())

    def sync_master_weights(self) -> None:
        """Copy `master_weights` to the module's weights after anything but a step changed them."""

    def reshard(self) -> None:
        """Reshard parameters, as optimizer and EMA expect, after forwards without backward."""

    def replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors that must be bit-identical on all ranks."""
        return ((name, parameter.detach()) for name, parameter in self.named_parameters())

    # -- state

    def state_shards(self) -> dict[str, dict[str, TensorShard]]:
        """Return this rank's shards to save, by part.

        The part `model` is laid out like `master_weights`; names in `optimizer` are KEY/NAME.
        """
        model = {name: local_shard(parameter.detach()) for name, parameter in self.named_parameters()}
        optimizer = {
            f"{key}/{name}": local_shard(value)
            for name, parameter in self.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def load_checkpoint(self, reader: CheckpointReader) -> None:
        """Load weights and optimizer from a checkpoint of any number of ranks."""
        has_optimizer = reader.has_part("optimizer")  # missing before the first effective step
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
        """Allocate the memory of the optimizer's first step now; the caller holds it."""
        if self.optimizer.state:
            return []
        return [torch.empty_like(local_tensor(p.detach())) for _, p in self.named_parameters() for _ in range(2)]

    @contextlib.contextmanager
    def offload_optimizer_state(self) -> Iterator[None]:
        """Move the optimizer state to host memory and back, bit-identical, into the same tensors."""
        tensors = [local_tensor(value) for state in self.optimizer.state.values() for value in state.values()]
        with offload_to_host([tensor for tensor in tensors if tensor.device.type == self.world.device.type]):
            yield


class DDPEngine(Engine):
    """DDP: every rank holds all weights; gradients are averaged during the backward pass."""

    name = "ddp"

    def __init__(self, world: World, module: nn.Module) -> None:
        super().__init__(world, module)
        # Buffers are constants, so broadcasting them before every forward is unnecessary.
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
    """FSDP2: weights, gradients and optimizer are sharded; units are gathered while they run."""

    name = "fsdp"
    sharded = True
    saves_shards = True

    def __init__(self, world: World, module: nn.Module, units: Sequence[nn.Module], offload: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        super().__init__(world, module)
        mesh = init_device_mesh(world.device.type, (world.size,))
        # Offloaded shards are copied to the device one unit at a time; on a CPU they are already there.
        policy = CPUOffloadPolicy() if offload and world.device.type == "cuda" else OffloadPolicy()
        # FSDP2 warns about blocks that return a view (FLUX), which must not be modified in place; it is not.
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
        # The process group of the GPUs cannot reduce tensors in host memory.
        return self.world.all_reduce_sum(local_norm.to(self.world.device) ** 2).sqrt().to(local_norm.device)

    def reshard(self) -> None:
        """Reshard the root, which stays gathered after a forward without backward.

        The EMA would otherwise use gathered tensors instead of shards.
        """
        for submodule in self.module.modules():
            if hasattr(submodule, "reshard"):
                cast("FSDPModule", submodule).reshard()

    def replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def build_adamw(
    parameters: Sequence[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Return fused AdamW without weight decay for vectors (biases, norms, one-row embeddings)."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


@contextlib.contextmanager
def offload_to_host(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Move tensors to host memory and free their storage; they must not be used meanwhile."""
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
