"""DeepSpeed's ZeRO 1, 2 and 3 behind the face of an engine; DeepSpeed is imported only where it was asked for.

ZeRO keeps the float32 weights and the optimizer's moments of a rank in flat partitions. What is averaged, saved and restored are
the ranges of each parameter's elements in them, so that any number of ranks can read what another number wrote.
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

from halation.distributed.checkpoint.reader import Piece, Reader
from halation.distributed.engines import deepspeed_config
from halation.distributed.engines.ddp_fsdp import Engine, EngineSettings, adamw
from halation.distributed.world import World
from halation.errors import InputError

log = logging.getLogger(__name__)

KINDS = {"DeepSpeedZeroOptimizer": (1, 2), "DeepSpeedZeroOptimizer_Stage3": (3,)}
MOMENTS = ("exp_avg", "exp_avg_sq")
INVALID = -1.0
"""DeepSpeed's word for a norm that is not finite: a step with it throws the gradient away."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """`num` elements of a parameter from `start` on, which lie in partition `group` from `offset` on."""

    group: int
    offset: int
    start: int
    num: int


class DeepSpeed(Engine):
    """Optimizer (1), gradients too (2), weights too (3) live in partitions."""

    name = "deepspeed"
    saves_pieces = True

    def __init__(self, world: World, module: nn.Module, settings: EngineSettings) -> None:
        super().__init__(world, module)
        self.library = load(world)
        self.settings = settings
        self.given = deepspeed_config.read(settings.deepspeed_config)
        self.stage = deepspeed_config.stage(self.given, settings.zero_stage)
        self.sharded = self.stage == 3
        self._norm = torch.tensor(INVALID)
        self._has_gradient = False

    def prepare_optimizer(self, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        deepspeed_config.check_optimizer(self.given, lr=lr, betas=betas, weight_decay=weight_decay)
        parameters = [parameter for _, parameter in self.named_parameters()]
        bf16_weights = all(parameter.dtype == torch.bfloat16 for parameter in parameters)
        settings = replace(self.settings, bf16_weights=bf16_weights)
        config = config_of(self.given, settings, pin=self.world.device.type == "cuda")
        self.offloads = deepspeed_config.offloads(config)
        self.optimizer = adamw(parameters, lr, betas, weight_decay)
        with _quiet(), _as_local_rank(self.world):
            self.deepspeed, *_ = self.library.initialize(
                model=self.module, optimizer=self.optimizer, config=config, dist_init_required=False
            )
        self.trained = self.deepspeed
        self.zero = self.deepspeed.optimizer
        if self.stage not in KINDS.get(type(self.zero).__name__, ()):
            raise InputError(
                f"--deepspeed_config makes DeepSpeed use {type(self.zero).__name__}",
                "plain ZeRO 1, 2 or 3",
                "take what asks for it out of the file (Halation could not save its state)",
            )
        self._take_over()
        self.fragments = self._find_fragments()

    def _take_over(self) -> None:
        """What the loop decides is not decided a second time: precision, the norm, and whether a gradient counts."""
        wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.dtype)
        if wanted is not None:  # the engine would switch off an autocast that it was not told of
            self.deepspeed.torch_autocast_enabled = lambda: True
            self.deepspeed.torch_autocast_dtype = lambda: wanted
        self._global_norm = self.zero._get_norm_groups if self.sharded else self.zero.scaled_global_norm
        if self.sharded:
            self.zero._get_norm_groups = lambda: [self._norm]
        else:
            self.zero.scaled_global_norm = lambda norm_type=2: self._norm
            self.zero.check_grad_overflow = self.zero.dtype == torch.bfloat16
        self.deepspeed.set_gradient_accumulation_boundary(True)

    # -- a step

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        self.deepspeed.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._has_gradient = True
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def grad_norm(self, max_norm: float, scale: float = 1.0) -> Tensor:
        """The gradient itself is divided and clipped by the step."""
        self.zero.clip_grad = max_norm
        self.zero.custom_loss_scaler = scale != 1.0
        self.zero.external_loss_scale = scale
        found = self._global_norm()
        if self.sharded:
            found = torch.stack([torch.as_tensor(norm, device=self.world.device) for norm in found])
            found = torch.where((found < 0).any(), torch.full_like(found[0], INVALID), torch.linalg.vector_norm(found))
        self._norm = torch.as_tensor(found, dtype=torch.float32, device=self.world.device)
        return torch.where(self._norm < 0, torch.inf, self._norm / scale)

    def step(self) -> None:
        self.deepspeed.step()
        self._has_gradient = False

    def zero_grad(self) -> None:
        if self._has_gradient:
            self._norm = torch.tensor(INVALID, device=self.world.device)
            with _silent():  # whoever throws a gradient away says why
                self.step()
        self.zero.custom_loss_scaler = False

    # -- weights

    @functools.cached_property
    def _partitions(self) -> list[Tensor]:
        found = self.zero.fp32_partitioned_groups_flat if self.sharded else self.zero.single_partition_of_fp32_groups
        return list(found)

    def _find_fragments(self) -> dict[str, Fragment]:
        """Where this rank's elements of each parameter lie; a parameter of which it has none is left out."""
        found = {}
        for name, parameter in self.named_parameters():
            fragment = self._shard(parameter) if self.sharded else self._range(parameter)
            if fragment is not None:
                found[name] = fragment
        return found

    def _shard(self, parameter: Any) -> Fragment | None:
        group, offset, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start = self.world.rank * size
        num = min(parameter.ds_numel - start, size)
        return Fragment(group=group, offset=offset, start=start, num=num) if num > 0 else None

    def _range(self, parameter: Any) -> Fragment | None:
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        whole, mine = mapping.lp_fragment_address, mapping.hp_fragment_address
        group = next(i for i, group in enumerate(self.zero.bit16_groups) if any(p is parameter for p in group))
        fragment = Fragment(group=group, offset=mine.start, start=whole.start, num=whole.numel)
        values = self._partitions[group].detach()[mine.start : mine.start + mine.numel]
        expected = parameter.detach().flatten()[whole.start : whole.start + whole.numel]
        if not torch.equal(values.to(expected), expected):
            raise InputError(
                "--deepspeed_config lays weights out in an order of its own",
                "the usual order",
                "take round_robin_gradients out",
            )
        return fragment

    def masters(self) -> dict[str, Tensor]:
        """Averages are kept of this rank's elements alone, beside the partition that steps change."""
        return {name: _cut(self._partitions[f.group].detach(), f) for name, f in self.fragments.items()}

    @torch.no_grad()
    def weights_changed(self) -> None:
        if not self.sharded:
            self.zero.update_lp_params()
            return
        self.at_rest()
        for group in range(len(self._partitions)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)
        self.zero.invalidate_secondary_tensor()

    def at_rest(self) -> None:
        if self.sharded:
            self.zero._partition_all_parameters()

    def parameters_agree(self) -> Iterator[tuple[str, Tensor]]:
        return iter(()) if self.sharded else super().parameters_agree()

    # -- state

    def pieces(self) -> dict[str, dict[str, Piece]]:
        model, optimizer = {}, {}
        for name, fragment in self.fragments.items():
            shape, partition = self.shapes[name], self._partitions[fragment.group]
            model[name] = Piece(local=_cut(partition.detach(), fragment), start=fragment.start, shape=shape, flat=True)
            state = self.optimizer.state.get(partition, {})
            for key in MOMENTS if state else ():
                local = _cut(state[key], fragment)
                optimizer[f"{key}/{name}"] = Piece(local=local, start=fragment.start, shape=shape, flat=True)
            if state:
                optimizer[f"step/{name}"] = Piece(local=state["step"], start=0, shape=())
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def fill(self, reader: Reader) -> None:
        pieces = self.pieces()["model"]
        for name, piece in pieces.items():
            piece.local.copy_(reader.piece("model", name, piece))
        if reader.has("optimizer"):
            # Every partition gets a state, also one that holds nothing but padding.
            step = reader.read("optimizer", f"step/{next(iter(self.shapes))}")
            for partition in self._partitions:
                state = {key: torch.zeros_like(partition) for key in MOMENTS}
                self.optimizer.state[partition] = state | {"step": step.clone().to(partition.device)}
            for name, fragment in self.fragments.items():
                state = self.optimizer.state[self._partitions[fragment.group]]
                for key in MOMENTS:
                    _cut(state[key], fragment).copy_(reader.piece("optimizer", f"{key}/{name}", pieces[name]))
        self.weights_changed()

    def reserve(self) -> list[Tensor]:
        if self.optimizer.state or self.offloads:
            return []
        return [torch.empty_like(partition) for partition in self._partitions for _ in MOMENTS]

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        if self.offloads:
            log.info("--sample_offload has nothing to do: the optimizer's state lies in host memory already")
            yield
            return
        with super().parked():
            yield


def _cut(partition: Tensor, fragment: Fragment) -> Tensor:
    return partition.narrow(0, fragment.offset, fragment.num)


def config_of(given: deepspeed_config.Config, settings: EngineSettings, *, pin: bool) -> deepspeed_config.Config:
    """What DeepSpeed is told, from the user's file and the flags; contradictions are refused."""
    return deepspeed_config.merged(
        given,
        zero_stage=deepspeed_config.stage(given, settings.zero_stage),
        offload=settings.offload_optimizer,
        num_micro_batches=settings.num_micro_batches,
        rows=settings.rows,
        global_batch=settings.global_batch,
        grad_clip=settings.grad_clip,
        dtype=settings.dtype,
        bf16_weights=settings.bf16_weights,
        pin=pin,
    )


def load(world: World) -> Any:
    """Import DeepSpeed for this rank's device; it joins the process group that stands, and compiles nothing for it."""
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            "--engine deepspeed, but DeepSpeed is not installed",
            "the extra `deepspeed`",
            "pip install 'halation[deepspeed]', or use --engine fsdp",
        )
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    with _quiet():
        library = importlib.import_module("deepspeed")
    # DeepSpeed calls collectives by names that newer versions of torch are about to drop.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*is deprecated", category=FutureWarning)
    words = logging.getLogger("DeepSpeed")
    words.handlers.clear()
    words.parent = logging.getLogger("halation")
    words.propagate = True
    words.setLevel(logging.WARNING)
    # An extra road between ranks of one machine, which would have to be compiled: gloo and NCCL are there.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _forget_earlier(library)
    return library


def _forget_earlier(library: Any) -> None:
    """What an earlier engine of this process left: its groups are gone, and ranks compare numbers that count from the first one."""
    library.comm.comm.cdb = None
    library.utils.groups._release_process_group_references()
    zero = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    zero.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    zero.Init.param_id = 0


@contextlib.contextmanager
def _as_local_rank(world: World) -> Iterator[None]:
    """DeepSpeed takes the GPU that this variable counts, which is another one where ranks share GPUs or leave some out."""
    known = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(world.local_rank if world.device.index is None else world.device.index)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK")
        if known is not None:
            os.environ["LOCAL_RANK"] = known


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    words = logging.getLogger("DeepSpeed")
    words.disabled = True
    try:
        yield
    finally:
        words.disabled = False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
