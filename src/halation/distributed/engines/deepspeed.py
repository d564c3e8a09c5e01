"""The DeepSpeed engine (ZeRO 1, 2 and 3); DeepSpeed is imported only on request.

ZeRO keeps the float32 weights and the optimizer's moments of a rank in flat partitions. The EMA and checkpoints use the
ranges of each parameter's elements in them, so that a checkpoint can be read on any number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halation.distributed.checkpoint.reader import CheckpointReader, TensorShard
from halation.distributed.engines import deepspeed_config
from halation.distributed.engines.ddp_fsdp import Engine, EngineSettings, build_adamw
from halation.distributed.world import World
from halation.errors import InputError, install_command

log = logging.getLogger(__name__)

SUPPORTED_OPTIMIZERS = {"DeepSpeedZeroOptimizer": (1, 2), "DeepSpeedZeroOptimizer_Stage3": (3,)}
MOMENTS = ("exp_avg", "exp_avg_sq")
INVALID_NORM = -1.0
"""DeepSpeed's value for a non-finite norm: a step with it discards the gradient."""


@dataclass(frozen=True, kw_only=True)
class PartitionFragment:
    """`num` elements of a parameter from `start`, stored in partition `group` from `offset`."""

    group: int
    offset: int
    start: int
    num: int


class DeepSpeedEngine(Engine):
    """ZeRO: partitions the optimizer (stage 1), also gradients (2), also weights (3)."""

    name = "deepspeed"
    saves_shards = True

    def __init__(self, world: World, module: nn.Module, settings: EngineSettings) -> None:
        super().__init__(world, module)
        self.library = import_deepspeed(world)
        self.settings = settings
        self.user_config = deepspeed_config.read_config(settings.deepspeed_config)
        self.stage = deepspeed_config.resolve_zero_stage(self.user_config, settings.zero_stage)
        self.sharded = self.stage == 3
        self._norm = torch.tensor(INVALID_NORM)
        self._has_gradient = False

    def prepare_optimizer(self, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        deepspeed_config.check_optimizer(self.user_config, lr=lr, betas=betas, weight_decay=weight_decay)
        parameters = [parameter for _, parameter in self.named_parameters()]
        bf16_weights = all(parameter.dtype == torch.bfloat16 for parameter in parameters)
        settings = replace(self.settings, bf16_weights=bf16_weights)
        config = build_config(self.user_config, settings, pin_memory=self.world.device.type == "cuda")
        self.offloads_optimizer = deepspeed_config.offloads_optimizer(config)
        self.optimizer = build_adamw(parameters, lr, betas, weight_decay)
        # DeepSpeed uses the GPU of this index, which is wrong if ranks share GPUs or skip some. It stays set: a forward
        # of ZeRO-3 reads it too, and a rank without a launcher has no such variable.
        device = self.world.device
        os.environ["LOCAL_RANK"] = str(self.world.local_rank if device.index is None else device.index)
        with _ignore_warnings():
            self.ds_engine, *_ = self.library.initialize(
                model=self.module, optimizer=self.optimizer, config=config, dist_init_required=False
            )
        self.wrapped_module = self.ds_engine
        self.zero_optimizer = self.ds_engine.optimizer
        if self.stage not in SUPPORTED_OPTIMIZERS.get(type(self.zero_optimizer).__name__, ()):
            raise InputError(
                f"--deepspeed_config makes DeepSpeed use {type(self.zero_optimizer).__name__}",
                "plain ZeRO 1, 2 or 3",
                "remove the setting that selects it from the file (Halation could not save its state)",
            )
        self._override_deepspeed()
        self.fragments = self._find_fragments()

    def _override_deepspeed(self) -> None:
        """Override what the training loop decides: precision, norm, and which gradients are used."""
        autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.dtype)
        if autocast_dtype is not None:  # DeepSpeed would disable an autocast that it does not know about
            self.ds_engine.torch_autocast_enabled = lambda: True
            self.ds_engine.torch_autocast_dtype = lambda: autocast_dtype
        self._compute_global_norm = (
            self.zero_optimizer._get_norm_groups if self.sharded else self.zero_optimizer.scaled_global_norm
        )
        if self.sharded:
            self.zero_optimizer._get_norm_groups = lambda: [self._norm]
        else:
            self.zero_optimizer.scaled_global_norm = lambda norm_type=2: self._norm
            self.zero_optimizer.check_grad_overflow = self.zero_optimizer.dtype == torch.bfloat16
        self.ds_engine.set_gradient_accumulation_boundary(True)

    # -- a step

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self.ds_engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._has_gradient = True
        self.ds_engine.backward(loss, scale_wrt_gas=False)

    def clip_grad_norm(self, max_norm: float, scale: float = 1.0) -> Tensor:
        """Return the global norm; gradients are unscaled and clipped in `step`."""
        self.zero_optimizer.clip_grad = max_norm
        self.zero_optimizer.custom_loss_scaler = scale != 1.0
        self.zero_optimizer.external_loss_scale = scale
        total = self._compute_global_norm()
        if self.sharded:
            total = torch.stack([torch.as_tensor(norm, device=self.world.device) for norm in total])
            total = torch.where(
                (total < 0).any(), torch.full_like(total[0], INVALID_NORM), torch.linalg.vector_norm(total)
            )
        self._norm = torch.as_tensor(total, dtype=torch.float32, device=self.world.device)
        return torch.where(self._norm < 0, torch.inf, self._norm / scale)

    def step(self) -> None:
        self.ds_engine.step()
        self._has_gradient = False

    def zero_grad(self) -> None:
        if self._has_gradient:
            self._norm = torch.tensor(INVALID_NORM, device=self.world.device)
            logger = logging.getLogger("DeepSpeed")
            logger.disabled = True  # a dropped gradient is logged by the caller
            try:
                self.step()
            finally:
                logger.disabled = False
        self.zero_optimizer.custom_loss_scaler = False

    # -- weights

    @functools.cached_property
    def _partitions(self) -> list[Tensor]:
        found = (
            self.zero_optimizer.fp32_partitioned_groups_flat
            if self.sharded
            else self.zero_optimizer.single_partition_of_fp32_groups
        )
        return list(found)

    def _find_fragments(self) -> dict[str, PartitionFragment]:
        """Return the fragments of this rank by parameter; parameters it has none of are left out."""
        found = {}
        for name, parameter in self.named_parameters():
            fragment = self._stage3_fragment(parameter) if self.sharded else self._stage12_fragment(parameter)
            if fragment is not None:
                found[name] = fragment
        return found

    def _stage3_fragment(self, parameter: Any) -> PartitionFragment | None:
        group, offset, size = self.zero_optimizer.grad_position[self.zero_optimizer.get_param_id(parameter)]
        start = self.world.rank * size
        num = min(parameter.ds_numel - start, size)
        return PartitionFragment(group=group, offset=offset, start=start, num=num) if num > 0 else None

    def _stage12_fragment(self, parameter: Any) -> PartitionFragment | None:
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        whole, mine = mapping.lp_fragment_address, mapping.hp_fragment_address
        group = next(
            i for i, group in enumerate(self.zero_optimizer.bit16_groups) if any(p is parameter for p in group)
        )
        fragment = PartitionFragment(group=group, offset=mine.start, start=whole.start, num=whole.numel)
        values = self._partitions[group].detach()[mine.start : mine.start + mine.numel]
        expected = parameter.detach().flatten()[whole.start : whole.start + whole.numel]
        if not torch.equal(values.to(expected), expected):
            raise InputError(
                "--deepspeed_config changes the order of weights in partitions",
                "the default order",
                "remove round_robin_gradients",
            )
        return fragment

    def master_weights(self) -> dict[str, Tensor]:
        """Return views of this rank's elements in the partitions that steps update."""
        return {name: _fragment_view(self._partitions[f.group].detach(), f) for name, f in self.fragments.items()}

    @torch.no_grad()
    def sync_master_weights(self) -> None:
        if not self.sharded:
            self.zero_optimizer.update_lp_params()
            return
        self.reshard()
        for group in range(len(self._partitions)):
            self.zero_optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if self.zero_optimizer.persistent_parameters:
            self.zero_optimizer.persistent_parameters[0].all_gather(self.zero_optimizer.persistent_parameters)
        self.zero_optimizer.invalidate_secondary_tensor()

    def reshard(self) -> None:
        if self.sharded:
            self.zero_optimizer._partition_all_parameters()

    def replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if self.sharded else super().replicated_parameters()

    # -- state

    def state_shards(self) -> dict[str, dict[str, TensorShard]]:
        model, optimizer = {}, {}
        for name, fragment in self.fragments.items():
            shape, partition = self.shapes[name], self._partitions[fragment.group]
            model[name] = TensorShard(
                local=_fragment_view(partition.detach(), fragment), start=fragment.start, shape=shape, flat=True
            )
            state = self.optimizer.state.get(partition, {})
            for key in MOMENTS if state else ():
                local = _fragment_view(state[key], fragment)
                optimizer[f"{key}/{name}"] = TensorShard(local=local, start=fragment.start, shape=shape, flat=True)
            if state:
                optimizer[f"step/{name}"] = TensorShard(local=state["step"], start=0, shape=())
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def load_checkpoint(self, reader: CheckpointReader) -> None:
        shards = self.state_shards()["model"]
        for name, shard in shards.items():
            shard.local.copy_(reader.read_shard("model", name, shard))
        if reader.has_part("optimizer"):
            # Every partition gets a state, even if it contains only padding.
            step = reader.read("optimizer", f"step/{next(iter(self.shapes))}")
            for partition in self._partitions:
                state = {key: torch.zeros_like(partition) for key in MOMENTS}
                self.optimizer.state[partition] = state | {"step": step.clone().to(partition.device)}
            for name, fragment in self.fragments.items():
                state = self.optimizer.state[self._partitions[fragment.group]]
                for key in MOMENTS:
                    _fragment_view(state[key], fragment).copy_(
                        reader.read_shard("optimizer", f"{key}/{name}", shards[name])
                    )
        self.sync_master_weights()

    def reserve_optimizer_memory(self) -> list[Tensor]:
        if self.optimizer.state or self.offloads_optimizer:
            return []
        return [torch.empty_like(partition) for partition in self._partitions for _ in MOMENTS]

    @contextlib.contextmanager
    def offload_optimizer_state(self) -> Iterator[None]:
        if self.offloads_optimizer:
            log.info("--sample_offload has no effect: the optimizer state is already in host memory")
            yield
            return
        with super().offload_optimizer_state():
            yield


def _fragment_view(partition: Tensor, fragment: PartitionFragment) -> Tensor:
    return partition.narrow(0, fragment.offset, fragment.num)


def build_config(
    user_config: deepspeed_config.ConfigDict, settings: EngineSettings, *, pin_memory: bool
) -> deepspeed_config.ConfigDict:
    """Build DeepSpeed's config from the user's file and the flags; conflicts raise InputError."""
    return deepspeed_config.merge_config(
        user_config,
        zero_stage=deepspeed_config.resolve_zero_stage(user_config, settings.zero_stage),
        offload=settings.offload_optimizer,
        num_micro_batches=settings.num_micro_batches,
        micro_batch_size=settings.micro_batch_size,
        global_batch=settings.global_batch,
        grad_clip=settings.grad_clip,
        dtype=settings.dtype,
        bf16_weights=settings.bf16_weights,
        pin_memory=pin_memory,
    )


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed for this rank's device; it uses the existing process group."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            "--engine deepspeed, but DeepSpeed is not installed",
            "the package deepspeed",
            f"{install_command('deepspeed')}, or use --engine fsdp",
        )
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    with _ignore_warnings():
        library = importlib.import_module("deepspeed")
    # DeepSpeed uses names of collectives that torch has deprecated.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*is deprecated", category=FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.parent = logging.getLogger("halation")
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    # A shared-memory backend that would have to be compiled; gloo and NCCL are sufficient.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Reset state of an earlier engine in this process: stale groups, and counters that ranks compare.
    library.comm.comm.cdb = None
    library.utils.groups._release_process_group_references()
    zero = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    zero.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    zero.Init.param_id = 0
    return library


@contextlib.contextmanager
def _ignore_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
