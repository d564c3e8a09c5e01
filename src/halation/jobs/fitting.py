"""Whether a training fits into memory, asked before it costs anything: a batch, the samples, the held-out loss."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from typing import TYPE_CHECKING

import torch

from halation import plan
from halation.errors import InputError
from halation.jobs.task import Task
from halation.training import heldout, memory
from halation.training.loop import autocast
from halation.training.objectives import denoising

if TYPE_CHECKING:
    from halation.jobs.session import Session

log = logging.getLogger(__name__)


def warm_up(session: Session) -> None:
    """One pass that is thrown away: it settles DDP's buckets, compiles, and finds a batch that does not fit before it costs anything."""
    _, rows = plan.micro_batches(session.global_batch, session.world.size, session.config.batch_size)
    _refuse_hopeless(session, rows)
    if session.config.compile and session.world.first:
        log.warning("compiling the blocks, which takes a minute or two before the first step")
    # While blocks are compiled: taking pinned memory makes a GPU wait, so it is done before the first step, or it would slow many.
    session.checkpoints.reserve(session.saved_bytes())
    try:
        for part in session.parts.values():
            if part.objective is not None:
                with autocast(session.world.device, session.config.dtype):
                    losses = part.objective(part.engine.trained, session.task.idle(rows))
                part.engine.settle(losses.float().sum())
        for part in session.parts.values():
            part.engine.zero_grad()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        raise InputError(
            f"a batch of {rows} pictures does not fit into the memory of {session.world.device}",
            "a batch that fits",
            memory.advice(max(1, rows // 2), 2 * session.config.accumulate),
        ) from error
    finally:
        session.checkpoints.copies.ready()


def refuse_weights(session: Session) -> None:
    """A model that cannot be trained on these GPUs is told so before texts are encoded or a teacher is asked for hours."""
    config, device = session.config, session.world.device
    if device.type != "cuda" or config.engine == "deepspeed" or config.offload_optimizer:
        return
    sizes = Counter[bool]()
    for parameter in session.denoiser.module.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    error = memory.refuse_weights(
        sizes[True],
        sizes[False],
        2 if config.weights_dtype == "bf16" else 4,
        session.world.size if config.engine == "fsdp" else 1,
        float(torch.cuda.get_device_properties(device).total_memory),
    )
    if error:
        raise error


def _refuse_hopeless(session: Session, rows: int) -> None:
    config, denoiser = session.config, session.denoiser
    cost = memory.PictureCost(
        flops=denoiser.flops_per_picture(),
        hidden=denoiser.hidden,
        depth=denoiser.depth,
        num_values=math.prod(denoiser.sample_shape(*config.image_size)),
        dtype=config.dtype,
        checkpointing=config.activation_checkpointing,
    )
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    free = min(session.world.exchange(memory.free_bytes(session.world.device, sharing)))
    error = memory.refuse_batch(rows, config.accumulate, cost, session.world.device, free)
    if error:
        raise error


def probe(session: Session) -> None:
    """Whether samples and the held-out loss fit beside everything else, asked once before it can cost a checkpoint's worth of work.

    What the optimizer will hold from its first step on is set aside meanwhile.
    """
    config, device = session.config, session.world.device
    engines = [part.engine for part in session.parts.values()]
    taken = [] if config.sample_offload else [tensor for engine in engines for tensor in engine.reserve()]
    rows = 2 * config.sample_batch_size if config.sample and session.sample_settings.prompts else 0
    checks = [(rows, f"try --sample_batch_size {max(1, config.sample_batch_size // 2)}, or --no_sample")]
    if min(config.heldout_pictures, session.source.num_heldout):
        checks.append((heldout.SHEET, "try --heldout_pictures 0"))
    if config.eval_every:
        checks.append((2 * config.eval_batch_size, f"try --eval_batch_size {max(1, config.eval_batch_size // 2)}"))
    with contextlib.ExitStack() as stack:
        for engine in engines if config.sample_offload else ():
            stack.enter_context(engine.parked())
        for num_rows, advice in checks:
            if num_rows:
                _refuse_forward(session, num_rows, advice)
    del taken
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _refuse_forward(session: Session, num_rows: int, advice: str) -> None:
    try:
        with torch.no_grad(), autocast(session.world.device, session.config.dtype):
            denoising(session.denoiser)(session.denoiser.module, Task.idle(session.task, num_rows))
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"no room on {session.world.device} for a forward of {num_rows} rows beside the training",
            "memory for it",
            advice,
        ) from error
    finally:
        session.engine.at_rest()
