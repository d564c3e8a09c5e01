"""Estimate and probe memory before the first step.

`estimate_memory` counts weights, gradients, optimizer and EMA as the engine shards them, and the activations of a pass
on fake tensors. On a CPU, a process with an oversized batch would be killed by the system, or swap for hours.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halation import work_division
from halation.distributed.checkpoint.writer import CheckpointWriter
from halation.distributed.engines import deepspeed_config
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.errors import InputError, format_count
from halation.logging_setup import ON_CONSOLE
from halation.models.autoencoder import LatentSpace
from halation.models.denoiser import Denoiser
from halation.sampling.all_rank_sampler import SampleSettings
from halation.training import build_components, checkpoint_state, periodic_tasks, training_task
from halation.training.config import TrainConfig
from halation.training.loop import MODEL, MicroBatch, TrainedNetwork, denoising_objective, mixed_precision
from halation.training.training_task import TrainingTask

# Measured with saved-tensor hooks on the tiny and small DiT at 16 to 256 tokens: 1.9 to 2.5 saved values per output
# value of a matrix product; with gradient checkpointing those of one block and the inputs of all blocks.
SAVED_VALUES_PER_OUTPUT = 2.2
NUM_HOST_BATCHES = 5  # prefetched batches and the one in use
BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.6, "fp16": 2.6}  # autocast leaves norms and residuals in float32
GATHERED_UNITS = 3  # of FSDP: the running unit, the next one, and the buffer that it is copied from
ZERO_BUCKET_VALUES, ZERO_LIVE_VALUES = 500_000_000, 1_000_000_000  # DeepSpeed's defaults
NOT_ON_FAKE_TENSORS = (RuntimeError, TypeError, AssertionError)
"""What an operation raises that cannot run on fake tensors."""
TOLERANCE = 1.2  # activations are estimated, so a batch is refused only if it clearly does not fit

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImageCost:
    """Estimated cost of one image of a batch on a CPU, where running a pass on fake tensors would take seconds."""

    flops: int
    """Operations of one forward."""
    hidden_size: int
    num_blocks: int
    num_values: int
    """Values of one sample as the model sees it."""
    dtype: str
    gradient_checkpointing: bool

    def activation_bytes(self) -> float:
        kept = SAVED_VALUES_PER_OUTPUT * self.flops / (2 * self.hidden_size)
        return (
            kept
            * BYTES_PER_VALUE[self.dtype]
            * (min(1.0, 1.5 / self.num_blocks) if self.gradient_checkpointing else 1.0)
        )

    def bytes_on_host(self) -> float:
        """Estimated bytes per image on a CPU, with the prefetched batches."""
        return self.activation_bytes() + NUM_HOST_BATCHES * 5 * self.num_values


def free_bytes(device: torch.device, num_sharing: int) -> float:
    """Memory that this rank may still allocate if `num_sharing` ranks share the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil

    return min(float(psutil.virtual_memory().available), _cgroup_free_bytes()) / max(1, num_sharing)


def peak_memory_gib(device: torch.device) -> float:
    """Memory of this rank: on a GPU the peak that torch allocated, on a CPU the resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return float(psutil.Process().memory_info().rss) / 2**30


def _cgroup_free_bytes() -> float:
    """Memory a container or batch job may still allocate (cgroup 2); infinite without a limit."""
    free = float("inf")
    try:
        name = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / name.lstrip("/")
        for cgroup in (folder, *folder.parents):
            limit = cgroup / "memory.max"
            if limit.exists() and (text := limit.read_text().strip()) != "max":
                free = min(free, float(text) - _used_bytes(cgroup))
    except (OSError, StopIteration, ValueError):
        pass
    return max(free, 0.0)


def _used_bytes(cgroup: Path) -> float:
    """Bytes in use without the file cache, which the system frees when memory is needed."""
    cached = 0.0
    for line in (cgroup / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("active_file", "inactive_file"):
            cached += float(value)
    return float((cgroup / "memory.current").read_text()) - cached


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Estimated bytes on the device of one rank in a training step, by part.

    Text encoders are not part of it: they are freed before the model is moved to the device.
    """

    frozen_weights: float = 0.0
    """Weights and buffers that are not trained, such as the base of adapters."""
    trained_weights: float = 0.0
    """With deepspeed, together with the float32 copy of this rank's part."""
    gradients: float = 0.0
    optimizer: float = 0.0
    ema: float = 0.0
    autoencoder: float = 0.0
    exchange_buffers: float = 0.0
    """Gathered weights of fsdp and ZeRO-3, and buckets of gradients."""
    activations: float = 0.0
    """What a forward and backward pass needs besides. Without accumulated gradients, that is what it needs more than
    the gradients, which are allocated while activations are freed."""
    num_parameters: int
    num_trained: int
    loading: float = 0.0
    """What moving the model to the device needs before the engine shards it; not a part of a step."""

    def parts(self) -> dict[str, float]:
        """Return the bytes by the name of the part."""
        others = ("num_parameters", "num_trained", "loading")
        names = [field.name for field in dataclasses.fields(self) if field.name not in others]
        return {name.replace("_", " "): float(getattr(self, name)) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {_format_bytes(size)}" for name, size in self.parts().items() if size >= 2**20)


def estimate_memory(
    config: TrainConfig,
    denoiser: Denoiser,
    num_ranks: int,
    batch: MicroBatch | None = None,
    device: torch.device | str = "cpu",
) -> MemoryEstimate:
    """Estimate the memory of a training step of this model, which may be on the meta device.

    Activations are those of `batch`, of which only the shapes are used, on `device`; without a batch they are left out.
    The model must not be wrapped by an engine yet.
    """
    module = denoiser.module
    parameters = list(module.parameters())
    engine = build_components.resolve_engine_name(config.engine, num_ranks)
    estimate = MemoryEstimate(
        autoencoder=denoiser.space.num_bytes if isinstance(denoiser.space, LatentSpace) else 0.0,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        loading=float(sum(parameter.nbytes for parameter in parameters)) if engine == "deepspeed" else 0.0,
        **(
            _zero_state_bytes(config, parameters, num_ranks)
            if engine == "deepspeed"
            else _state_bytes(config, parameters, num_ranks if engine == "fsdp" else 1)
        ),
    )
    buffers = float(sum(buffer.nbytes for buffer in module.buffers()))
    estimate = dataclasses.replace(estimate, frozen_weights=estimate.frozen_weights + buffers)
    if engine == "fsdp":
        estimate = dataclasses.replace(estimate, exchange_buffers=_gathered_bytes(module, denoiser.shard_units()))
    if batch is None:
        return estimate
    whole = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    # DDP's buckets and accumulated gradients exist during the whole pass.
    is_kept = config.accumulate > 1 or engine in ("ddp", "deepspeed") or whole == 0
    peak = _pass_bytes(denoiser, config, batch, device, 0.0 if is_kept else estimate.gradients / whole)
    return dataclasses.replace(estimate, activations=peak if is_kept else max(peak - estimate.gradients, 0.0))


def _state_bytes(config: TrainConfig, parameters: Sequence[nn.Parameter], num_shards: int) -> dict[str, float]:
    """Return the bytes of weights, gradients, optimizer and EMA of rank 0, which has the most rows of each tensor."""
    if config.engine == "fsdp" and config.offload_optimizer:
        return {}  # all of it is in host memory, and units are copied to the device while they run
    found = dict.fromkeys(("frozen_weights", "trained_weights", "gradients", "optimizer", "ema"), 0.0)
    for parameter in parameters:
        rows = parameter.shape[0] if parameter.ndim else 1
        num_values = -(-rows // num_shards) * (parameter.numel() // max(1, rows))
        size = num_values * parameter.element_size()
        if not parameter.requires_grad:
            found["frozen_weights"] += size
            continue
        found["trained_weights"] += size
        found["gradients"] += size
        found["optimizer"] += 2 * size + 4  # two moments, and a counter of steps
        found["ema"] += 4 * num_values if config.ema_decay else 0
    return found


def _zero_state_bytes(config: TrainConfig, parameters: Sequence[nn.Parameter], num_ranks: int) -> dict[str, float]:
    """Return the same for DeepSpeed, which partitions flat groups of matrices and vectors."""
    user_config = deepspeed_config.read_config(config.deepspeed_config)
    stage = deepspeed_config.resolve_zero_stage(user_config, config.zero_stage)
    zero = user_config.get("zero_optimization") or {}
    is_offloaded = config.offload_optimizer or deepspeed_config.offloads_optimizer(user_config)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    width = trained[0].element_size() if trained else 4
    groups = [group for group in ([p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]) if group]
    frozen, whole, share, own = 0.0, 0, 0, 0
    for parameter in parameters:
        if not parameter.requires_grad:
            size = -(-parameter.numel() // num_ranks) if stage == 3 else parameter.numel()
            frozen += size * parameter.element_size()
    for group in groups:
        num_values = sum(parameter.numel() for parameter in group)
        if stage == 3:
            num_local = sum(-(-parameter.numel() // num_ranks) for parameter in group)
            share, own, whole = share + num_local, own + num_local, whole + num_local
        else:
            padded = -(-num_values // (2 * num_ranks)) * 2 * num_ranks
            share += padded // num_ranks
            own += min(padded // num_ranks, num_values)
            whole += padded
    found = {"frozen_weights": frozen, "trained_weights": float(whole * width)}
    bucket = zero.get("reduce_bucket_size", deepspeed_config.AUTO)
    found["exchange_buffers"] = 4.0 * (ZERO_BUCKET_VALUES if bucket == deepspeed_config.AUTO else float(bucket))
    if stage == 3:
        gathered = min(1.0, ZERO_LIVE_VALUES / sum(parameter.numel() for parameter in parameters))
        found["exchange_buffers"] += gathered * sum(parameter.nbytes for parameter in parameters)
    if is_offloaded:
        return found
    found["trained_weights"] += 4.0 * share
    # Stage 1 keeps whole gradients only to accumulate them.
    found["gradients"] = float(width * (whole if stage == 1 and config.accumulate > 1 else share))
    found["optimizer"] = 8.0 * share + 4 * len(groups)
    found["ema"] = 4.0 * own if config.ema_decay else 0.0
    return found


def _gathered_bytes(module: nn.Module, units: Sequence[nn.Module]) -> float:
    """Return the bytes of the weights and gradients that FSDP has gathered at the same time."""

    def sizes(parameters: Iterable[nn.Parameter]) -> float:
        return sum(GATHERED_UNITS * p.nbytes + 2 * p.nbytes * p.requires_grad for p in parameters)

    in_units = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest = sum(parameter.nbytes for parameter in module.parameters() if id(parameter) not in in_units)
    return rest + max((sizes(unit.parameters()) for unit in units), default=0.0)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, as long as they exist."""

    def __init__(self, inputs: Iterable[Tensor], gradient_share: float) -> None:
        """Count a finished gradient with this share of its bytes, and `inputs` and their views not at all."""
        super().__init__()
        self.gradient_share = gradient_share
        self.live = self.peak = 0.0
        self._inputs = [tensor.untyped_storage() for tensor in inputs]
        self._sizes = {storage._cdata: 0.0 for storage in self._inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._remove, storage._cdata).atexit = False

    def _remove(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def on_gradient(self, parameter: Tensor) -> None:
        """Count the finished gradient of a parameter as sharded."""
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        size = self._sizes.get(key, 0.0)
        self.live -= size * (1 - self.gradient_share)
        if key in self._sizes:
            self._sizes[key] = size * self.gradient_share


def _pass_bytes(
    denoiser: Denoiser, config: TrainConfig, batch: MicroBatch, device: torch.device | str, gradient_share: float
) -> float:
    """Return the peak of the bytes that a forward and backward pass allocates, by running it on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy, which takes a second

    device, module = torch.device(device), denoiser.module
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        tensors = {name: fake(buffer) for name, buffer in module.named_buffers()}
        for name, parameter in module.named_parameters():
            tensors[name] = fake(parameter).requires_grad_(parameter.requires_grad)
        counter = _LiveBytes(tensors.values(), gradient_share)
        for tensor in tensors.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(counter.on_gradient)
        rows = _map_tensors(batch, fake)
        stack.enter_context(torch.nn.utils.stateless._reparametrize_module(module, tensors))
        objective = denoising_objective(_without_caches(denoiser))
        with counter:
            with mixed_precision(device, config.dtype):
                losses = objective(module, rows)
            losses.float().sum().backward()
    return counter.peak


def _map_tensors(batch: MicroBatch, change: Callable[[Tensor], Tensor]) -> MicroBatch:
    return dataclasses.replace(
        batch,
        x0=change(batch.x0),
        noise=change(batch.noise),
        t=change(batch.t),
        weight=change(batch.weight),
        condition={name: change(value) for name, value in batch.condition.items()},
    )


def _without_caches(denoiser: Denoiser) -> Denoiser:
    """Return a copy that keeps no tensors of the pass: the denoiser itself must not get fake ones."""
    copied: Any = copy.copy(denoiser)
    family = copied.family = copy.copy(getattr(denoiser, "family", None))
    if family is not None:
        family.noise_path = copy.copy(family.noise_path)
        vars(family).update({name: dict(value) for name, value in vars(family).items() if type(value) is dict})
    result: Denoiser = copied
    return result


def memory_error(estimate: MemoryEstimate, config: TrainConfig, num_ranks: int, capacity: float) -> InputError | None:
    """Return an error if a step does not fit into `capacity` bytes, with advice that these settings leave open."""
    fixed = estimate.total - estimate.activations
    if max(fixed + estimate.activations / TOLERANCE, estimate.loading) <= capacity:
        return None
    room = f"at most {_format_bytes(capacity)}, the memory of one device"
    if estimate.loading > capacity:
        return InputError(
            f"deepspeed loads the whole model, {_format_bytes(estimate.loading)}, on each device before it shards it",
            room,
            "use --engine fsdp, which loads and shards one block after the other",
        )
    if fixed > capacity:
        count = f"{_format_count(estimate.num_trained)} of {_format_count(estimate.num_parameters)} parameters"
        return InputError(
            f"training {count} takes {_format_bytes(fixed)} on each device without any image ({estimate})",
            room,
            "; ".join(_weights_advice(estimate, config, num_ranks)),
        )
    found = f"--batch_size {config.batch_size} would take about {_format_bytes(estimate.total)} ({estimate})"
    fits = int((capacity - fixed) / estimate.activations * config.batch_size)
    if fits < 1:
        advice = [*_pass_advice(config), *_weights_advice(estimate, config, num_ranks)]
        return InputError(found, room, "; ".join([*advice, "or a smaller --image_size: not even one image fits"]))
    return InputError(found, room, batch_size_hint(config, 1 << (fits.bit_length() - 1)))


def _weights_advice(estimate: MemoryEstimate, config: TrainConfig, num_ranks: int) -> list[str]:
    """Return what makes weights, gradients and optimizer smaller and is not done yet."""
    engine = build_components.resolve_engine_name(config.engine, num_ranks)
    is_pipeline = bool(config.model_path)
    stage = 3 if engine != "deepspeed" else config.zero_stage
    options = [
        (engine in ("single", "ddp"), "shard the model over more GPUs with --engine fsdp"),
        (engine == "deepspeed" and stage < 3, "shard the weights too with --zero_stage 3"),
        (engine in ("fsdp", "deepspeed") and not config.offload_optimizer, "--offload_optimizer"),
        (is_pipeline and not config.lora_rank, "train adapters (--lora_rank 16)"),
        (is_pipeline and not config.lora_rank and config.weights_dtype == "fp32", "--weights_dtype bf16"),
        (bool(config.lora_rank) and config.dtype == "fp32", "--dtype bf16, which halves the frozen weights"),
        (estimate.ema > 0.1 * estimate.total, "--ema_decay 0, which trains without an EMA"),
        (engine in ("fsdp", "deepspeed"), "more GPUs"),
    ]
    return [text for is_open, text in options if is_open] + ["a GPU with more memory, or a smaller model"]


def _pass_advice(config: TrainConfig) -> list[str]:
    """Return what makes activations smaller and is not done yet."""
    return [
        text
        for is_open, text in (
            (not config.gradient_checkpointing, "--gradient_checkpointing"),
            (config.dtype == "fp32", "--dtype bf16"),
        )
        if is_open
    ]


def batch_error(
    config: TrainConfig, cost: ImageCost, device: torch.device, rows: int, free: float
) -> InputError | None:
    """Return an error that suggests a smaller batch if this one cannot fit into `free` bytes of the host."""
    bytes_per_image = cost.bytes_on_host()
    if rows * bytes_per_image <= free:
        return None
    needed = _format_bytes(rows * bytes_per_image)
    found = f"--batch_size {rows} would take about {needed}, and {_format_bytes(free)} are free on {device}"
    if 0.8 * free < bytes_per_image:
        return InputError(found, "a batch that fits", "try a smaller --model or --image_size; not even one image fits")
    return InputError(
        found, "a batch that fits", batch_size_hint(config, 1 << (int(0.8 * free / bytes_per_image).bit_length() - 1))
    )


def batch_size_hint(config: TrainConfig, fits: int) -> str:
    """Suggest a batch size, and what else makes room."""
    accumulate = config.accumulate * -(-config.batch_size // fits)
    first = f"try --batch_size {fits} (with --accumulate {accumulate} for the same global batch)"
    return " or ".join([", ".join([first, *advice[:-1]]), *advice[-1:]]) if (advice := _pass_advice(config)) else first


def _format_count(number: int) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"


def _format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


def warm_up(
    task: TrainingTask,
    config: TrainConfig,
    networks: Mapping[str, TrainedNetwork],
    checkpoints: CheckpointWriter,
    global_batch: int,
) -> None:
    """Run one forward and backward pass and discard it.

    It fixes DDP's buckets, compiles the blocks, and fails early if the batch does not fit.
    """
    world = task.world
    _, rows = work_division.micro_batch_layout(global_batch, world.size, config.batch_size)
    if world.device.type != "cuda":
        _check_batch_fits_host(world, config, task.denoiser, rows)
    if config.compile and world.is_rank_zero:
        log.info("compiling the blocks, which takes a minute or two before the first step", extra=ON_CONSOLE)
    # Pinned memory is allocated while blocks are compiled: it stalls the GPU, so during training it would slow down
    # many steps.
    checkpoints.reserve(checkpoint_state.pinned_tensor_bytes(networks))
    try:
        for network in networks.values():
            if network.objective is not None:
                with mixed_precision(world.device, config.dtype):
                    losses = network.objective(network.engine.wrapped_module, task.dummy_batch(rows))
                network.engine.warm_up(losses.float().sum())
        for network in networks.values():
            network.engine.zero_grad()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        raise InputError(
            f"a batch of {format_count(rows, 'image')} does not fit into the memory of {world.device}",
            "a batch that fits",
            batch_size_hint(config, max(1, rows // 2)),
        ) from error
    finally:
        checkpoints.copies.wait_reserved()


def check_weights_fit(world: World, config: TrainConfig, denoiser: Denoiser, capacity: float | None = None) -> None:
    """Raise if the model cannot be trained on these GPUs.

    Checked before texts or teacher targets are computed, which may take hours. `capacity` replaces the memory of the
    device.
    """
    _raise_if_too_large(world, config, estimate_memory(config, denoiser, world.size), capacity)


def check_batch_fits(
    task: TrainingTask, config: TrainConfig, global_batch: int, capacity: float | None = None
) -> MemoryEstimate:
    """Raise if a micro-batch does not fit beside the model; checked before the engine wraps the model."""
    world, denoiser = task.world, task.denoiser
    _, rows = work_division.micro_batch_layout(global_batch, world.size, config.batch_size)
    try:
        estimate = estimate_memory(config, denoiser, world.size, _meta_batch(config, denoiser, rows), world.device)
    except NOT_ON_FAKE_TENSORS as error:
        log.warning("the memory of activations could not be estimated: %s", str(error).partition("\n")[0])
        estimate = estimate_memory(config, denoiser, world.size)
    _raise_if_too_large(world, config, estimate, capacity)
    return estimate


def _meta_batch(config: TrainConfig, denoiser: Denoiser, rows: int) -> MicroBatch:
    """Return the shapes of a batch: only one row is made, on the CPU, and expanded on the meta device."""
    height, width = config.image_size
    row = training_task.dummy_batch(denoiser, 1, (height, width), torch.device("cpu"))

    def expand(tensor: Tensor) -> Tensor:
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return _map_tensors(row, expand)


def _raise_if_too_large(world: World, config: TrainConfig, estimate: MemoryEstimate, capacity: float | None) -> None:
    if capacity is None:
        if world.device.type != "cuda":
            return
        capacity = float(torch.cuda.get_device_properties(world.device).total_memory)
    error = memory_error(estimate, config, world.size, min(world.all_gather_object(capacity)))
    if error:
        raise error


def _check_batch_fits_host(world: World, config: TrainConfig, denoiser: Denoiser, rows: int) -> None:
    error = batch_error(config, image_cost(config, denoiser), world.device, rows, _free_on_all_ranks(world))
    if error:
        raise error


def image_cost(config: TrainConfig, denoiser: Denoiser) -> ImageCost:
    """Return the estimated cost of one image of a batch on a CPU."""
    return ImageCost(
        flops=denoiser.flops_per_image(),
        hidden_size=denoiser.hidden_size,
        num_blocks=denoiser.num_blocks,
        num_values=math.prod(denoiser.sample_shape(*config.image_size)),
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _free_on_all_ranks(world: World) -> float:
    """Return the smallest number of bytes that a rank may still allocate; collective."""
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    return min(world.all_gather_object(free_bytes(world.device, num_sharing)))


def check_samples_fit(
    task: TrainingTask, config: TrainConfig, networks: Mapping[str, TrainedNetwork], settings: SampleSettings
) -> None:
    """Raise if samples, validation or evaluation do not fit into memory beside training.

    Checked once before the first step, so that the failure does not come at the first checkpoint. The memory that the
    optimizer will allocate in its first step is reserved meanwhile.
    """
    engines = [part.engine for part in networks.values()]
    reserved = (
        [] if config.sample_offload else [tensor for engine in engines for tensor in engine.reserve_optimizer_memory()]
    )
    rows = 2 * config.sample_batch_size if config.sample and settings.prompts else 0
    checks = [(rows, f"try --sample_batch_size {max(1, config.sample_batch_size // 2)}, or --no_sample")]
    if min(config.validation_images, task.source.num_validation):
        checks.append((periodic_tasks.VALIDATION_BATCH_SIZE, "try --validation_images 0"))
    if config.eval_every:
        checks.append((2 * config.eval_batch_size, f"try --eval_batch_size {max(1, config.eval_batch_size // 2)}"))
    with contextlib.ExitStack() as stack:
        for engine in engines if config.sample_offload else ():
            stack.enter_context(engine.offload_optimizer_state())
        for num_rows, hint in checks:
            if num_rows:
                _check_forward_fits(task, config, networks[MODEL].engine, num_rows, hint)
    del reserved
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(task.world.device)


def _check_forward_fits(task: TrainingTask, config: TrainConfig, engine: Engine, num_rows: int, hint: str) -> None:
    try:
        with torch.no_grad(), mixed_precision(task.world.device, config.dtype):
            denoising_objective(task.denoiser)(task.denoiser.module, TrainingTask.dummy_batch(task, num_rows))
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"a forward of {format_count(num_rows, 'row')} does not fit into the memory of {task.world.device} "
            "beside training",
            "enough free memory for it",
            hint,
        ) from error
    finally:
        engine.reshard()


def num_images_that_fit(world: World, config: TrainConfig, denoiser: Denoiser) -> int:
    """Estimate the images of a micro-batch that fit beside weights, gradients, optimizer and EMA; at least 1.

    The model is not on its device yet. `memory_error` and `batch_error` reject only hopeless batches; here no batch
    should be too large.
    """
    config = dataclasses.replace(config, accumulate=config.accumulate or 2)  # gradients exist during the whole pass
    state = estimate_memory(config, denoiser, world.size)
    if world.device.type != "cuda":
        missing = state.total - state.frozen_weights - state.trained_weights  # the weights are already there
        return max(1, int(0.8 * (_free_on_all_ranks(world) - missing) / image_cost(config, denoiser).bytes_on_host()))
    capacity = min(world.all_gather_object(float(torch.cuda.get_device_properties(world.device).total_memory)))
    try:
        one, two = (
            estimate_memory(config, denoiser, world.size, _meta_batch(config, denoiser, rows), world.device).activations
            for rows in (1, 2)
        )
    except NOT_ON_FAKE_TENSORS:
        one = image_cost(config, denoiser).activation_bytes()
        two = 2 * one
    return max(1, 1 + int((0.85 * capacity - state.total - one) / (two - one)))
