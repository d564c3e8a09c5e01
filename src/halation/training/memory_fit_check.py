"""Estimate and probe memory before the first step.

On a CPU, a process with an oversized batch would be killed by the system, or swap for hours.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from halation import work_division
from halation.distributed.checkpoint.writer import CheckpointWriter
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.errors import InputError, format_count
from halation.logging_setup import ON_CONSOLE
from halation.models.denoiser import Denoiser, TrainedModule
from halation.sampling.all_rank_sampler import SampleSettings
from halation.training import checkpoint_state, periodic_tasks
from halation.training.config import TrainConfig
from halation.training.loop import MODEL, TrainedNetwork, denoising_objective, mixed_precision
from halation.training.training_task import TrainingTask

# Measured with saved-tensor hooks on the tiny and small DiT at 16 to 256 tokens: 1.9 to 2.5 saved values per output
# value of a matrix product; with gradient checkpointing those of one block and the inputs of all blocks.
SAVED_VALUES_PER_OUTPUT = 2.2
NUM_HOST_BATCHES = 5  # prefetched batches and the one in use
BYTES_PER_VALUE = {"fp32": 4.0, "bf16": 2.6, "fp16": 2.6}  # autocast leaves norms and residuals in float32

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ImageCost:
    """Estimated cost of one image of a batch."""

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

    def bytes_on(self, device: torch.device) -> float:
        """Estimated bytes per image; half of that on a GPU.

        On a GPU an oversized batch is a clean error, so only hopeless ones need to be rejected early.
        """
        if device.type == "cuda":
            return self.activation_bytes() / 2
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


def weights_error(
    num_trained: int, num_frozen: int, weight_bytes: int, num_shards: int, capacity: float
) -> InputError | None:
    """Return an error if training needs more than `capacity` bytes per device for any batch.

    It needs the weights, their gradients, two moments, and an EMA in float32.
    """
    needed = num_trained * (4 * weight_bytes + 4) / num_shards + num_frozen * weight_bytes
    if needed <= capacity:
        return None
    return InputError(
        f"training {num_trained / 1e9:.1f} billion parameters takes {needed / 2**30:.0f} GiB on each device "
        "without any image",
        f"at most {capacity / 2**30:.0f} GiB, the memory of one device",
        "shard the model with --engine fsdp or deepspeed on more GPUs, train adapters (--lora_rank 16), "
        "use --weights_dtype bf16, or a smaller model",
    )


def batch_error(rows: int, accumulate: int, cost: ImageCost, device: torch.device, free: float) -> InputError | None:
    """Return an error that suggests a smaller batch if this one cannot fit into `free` bytes."""
    bytes_per_image = cost.bytes_on(device)
    if rows * bytes_per_image <= free:
        return None
    needed = _format_bytes(rows * bytes_per_image)
    found = f"--batch_size {rows} would take about {needed}, and {_format_bytes(free)} are free on {device}"
    if 0.8 * free < bytes_per_image:
        return InputError(found, "a batch that fits", "try a smaller --model or --image_size; not even one image fits")
    fits = 1 << (int(0.8 * free / bytes_per_image).bit_length() - 1)
    return InputError(found, "a batch that fits", batch_size_hint(fits, accumulate * -(-rows // fits)))


def batch_size_hint(batch_size: int, accumulate: int) -> str:
    return (
        f"try --batch_size {batch_size} (with --accumulate {accumulate} for the same global batch), "
        "--gradient_checkpointing or --dtype bf16"
    )


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
    _check_batch_fits(world, config, task.denoiser, rows)
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
            batch_size_hint(max(1, rows // 2), 2 * config.accumulate),
        ) from error
    finally:
        checkpoints.copies.wait_reserved()


def check_weights_fit(world: World, config: TrainConfig, denoiser: TrainedModule) -> None:
    """Raise if the model cannot be trained on these GPUs.

    Checked before texts or teacher targets are computed, which may take hours.
    """
    device = world.device
    if device.type != "cuda" or config.engine == "deepspeed" or config.offload_optimizer:
        return
    sizes = Counter[bool]()
    for parameter in denoiser.module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    error = weights_error(
        sizes[True],
        sizes[False],
        2 if config.weights_dtype == "bf16" else 4,
        world.size if config.engine == "fsdp" else 1,
        float(torch.cuda.get_device_properties(device).total_memory),
    )
    if error:
        raise error


def _check_batch_fits(world: World, config: TrainConfig, denoiser: Denoiser, rows: int) -> None:
    cost = ImageCost(
        flops=denoiser.flops_per_image(),
        hidden_size=denoiser.hidden_size,
        num_blocks=denoiser.num_blocks,
        num_values=math.prod(denoiser.sample_shape(*config.image_size)),
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    free = min(world.all_gather_object(free_bytes(world.device, num_sharing)))
    error = batch_error(rows, config.accumulate, cost, world.device, free)
    if error:
        raise error


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
