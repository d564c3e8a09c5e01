"""Whether a training fits into memory, asked before it costs anything: a batch, the samples, the held-out loss."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from halation import plan
from halation.distributed.checkpoint.writer import Checkpoints
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.errors import InputError
from halation.models.denoiser import Denoiser
from halation.sampling.denoiser_sampler import SampleSettings
from halation.training import heldout, memory
from halation.training.config import TrainConfig
from halation.training.loop import MODEL, Part, autocast
from halation.training.objectives import denoising
from halation.training.task import Task

log = logging.getLogger(__name__)


def warm_up(
    task: Task,
    config: TrainConfig,
    parts: Mapping[str, Part],
    checkpoints: Checkpoints,
    global_batch: int,
    saved_bytes: Iterable[int],
) -> None:
    """One pass that is thrown away: it settles DDP's buckets, compiles, and finds a batch that does not fit before it costs anything.

    `saved_bytes` are the sizes of the tensors of a checkpoint.
    """
    world = task.world
    _, rows = plan.micro_batches(global_batch, world.size, config.batch_size)
    _refuse_hopeless(world, config, task.denoiser, rows)
    if config.compile and world.first:
        log.warning("compiling the blocks, which takes a minute or two before the first step")
    # While blocks are compiled: taking pinned memory makes a GPU wait, so it is done before the first step, or it would slow many.
    checkpoints.reserve(saved_bytes)
    try:
        for part in parts.values():
            if part.objective is not None:
                with autocast(world.device, config.dtype):
                    losses = part.objective(part.engine.trained, task.idle(rows))
                part.engine.settle(losses.float().sum())
        for part in parts.values():
            part.engine.zero_grad()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        raise InputError(
            f"a batch of {rows} pictures does not fit into the memory of {world.device}",
            "a batch that fits",
            memory.advice(max(1, rows // 2), 2 * config.accumulate),
        ) from error
    finally:
        checkpoints.copies.ready()


def refuse_weights(world: World, config: TrainConfig, denoiser: Denoiser) -> None:
    """A model that cannot be trained on these GPUs is told so before texts are encoded or a teacher is asked for hours."""
    device = world.device
    if device.type != "cuda" or config.engine == "deepspeed" or config.offload_optimizer:
        return
    sizes = Counter[bool]()
    for parameter in denoiser.module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    error = memory.refuse_weights(
        sizes[True],
        sizes[False],
        2 if config.weights_dtype == "bf16" else 4,
        world.size if config.engine == "fsdp" else 1,
        float(torch.cuda.get_device_properties(device).total_memory),
    )
    if error:
        raise error


def _refuse_hopeless(world: World, config: TrainConfig, denoiser: Denoiser, rows: int) -> None:
    cost = memory.PictureCost(
        flops=denoiser.flops_per_picture(),
        hidden=denoiser.hidden,
        depth=denoiser.depth,
        num_values=math.prod(denoiser.sample_shape(*config.image_size)),
        dtype=config.dtype,
        checkpointing=config.activation_checkpointing,
    )
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    free = min(world.exchange(memory.free_bytes(world.device, sharing)))
    error = memory.refuse_batch(rows, config.accumulate, cost, world.device, free)
    if error:
        raise error


def probe(task: Task, config: TrainConfig, parts: Mapping[str, Part], settings: SampleSettings) -> None:
    """Whether samples and the held-out loss fit beside everything else, asked once before it can cost a checkpoint's worth of work.

    What the optimizer will hold from its first step on is set aside meanwhile.
    """
    engines = [part.engine for part in parts.values()]
    taken = [] if config.sample_offload else [tensor for engine in engines for tensor in engine.reserve()]
    rows = 2 * config.sample_batch_size if config.sample and settings.prompts else 0
    checks = [(rows, f"try --sample_batch_size {max(1, config.sample_batch_size // 2)}, or --no_sample")]
    if min(config.heldout_pictures, task.source.num_heldout):
        checks.append((heldout.SHEET, "try --heldout_pictures 0"))
    if config.eval_every:
        checks.append((2 * config.eval_batch_size, f"try --eval_batch_size {max(1, config.eval_batch_size // 2)}"))
    with contextlib.ExitStack() as stack:
        for engine in engines if config.sample_offload else ():
            stack.enter_context(engine.parked())
        for num_rows, advice in checks:
            if num_rows:
                _refuse_forward(task, config, parts[MODEL].engine, num_rows, advice)
    del taken
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(task.world.device)


def _refuse_forward(task: Task, config: TrainConfig, engine: Engine, num_rows: int, advice: str) -> None:
    try:
        with torch.no_grad(), autocast(task.world.device, config.dtype):
            denoising(task.denoiser)(task.denoiser.module, Task.idle(task, num_rows))
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"no room on {task.world.device} for a forward of {num_rows} rows beside the training",
            "memory for it",
            advice,
        ) from error
    finally:
        engine.at_rest()
