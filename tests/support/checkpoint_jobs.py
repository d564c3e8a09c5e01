"""What a rank of the pool does in the checkpoint tests: saves of small tensors whose every value follows from the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halation.distributed.checkpoint.reader import TensorShard
from halation.distributed.checkpoint.writer import CheckpointWriter, find_newest_valid
from halation.distributed.world import World

SHAPES = {"weight": (5, 3), "bias": (7,), "one_row": (1, 4), "scale": ()}


def values(step: int, part: str) -> dict[str, Tensor]:
    """The tensors of a part at a step, whole."""
    generator = torch.Generator().manual_seed(step * 2 + (part == "ema"))
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def pieces(step: int, part: str, rank: int, size: int) -> dict[str, TensorShard]:
    """This rank's rows by ceiling division, as FSDP2 cuts them: later ranks may hold none; scalars are everywhere."""
    found = {}
    for name, tensor in values(step, part).items():
        if tensor.ndim == 0:
            found[name] = TensorShard(local=tensor, start=0, shape=())
            continue
        rows = -(-tensor.shape[0] // size)
        start = min(rank * rows, tensor.shape[0])
        found[name] = TensorShard(local=tensor[start : start + rows], start=start, shape=tuple(tensor.shape))
    return found


def parts(step: int, rank: int = 0, size: int = 1) -> dict[str, dict[str, TensorShard]]:
    return {part: pieces(step, part, rank, size) for part in ("model", "ema")}


def open_checkpoints(world: World, folder: Path, keep_last: int, sharded: bool) -> CheckpointWriter:
    return CheckpointWriter(world, folder, keep_last=keep_last, sharded=sharded)


def save_one(checkpoints: CheckpointWriter, step: int, kind: str) -> None:
    world = checkpoints.world
    whole = parts(step, world.rank, world.size) if checkpoints.sharded else parts(step)
    checkpoints.save(step, kind, whole, {"position": step}, {"rng": [step, world.rank]})


def save(
    world: World, folder: Path, saves: list[tuple[int, str]], keep_last: int = 0, sharded: bool = False
) -> list[Any]:
    """Take these saves one after another; the error each of them ended with."""
    checkpoints = open_checkpoints(world, folder, keep_last, sharded)
    errors = []
    for step, kind in saves:
        save_one(checkpoints, step, kind)
        checkpoints.wait()
        errors.append(checkpoints.error)
        checkpoints.error = None
    return errors


def resume_and_save(world: World, folder: Path, saves: list[tuple[int, str]], keep_last: int) -> int:
    """As a restarted run does: open, go on from the newest good one, and take the saves that are still to come."""
    checkpoints = open_checkpoints(world, folder, keep_last, sharded=False)
    found = find_newest_valid(folder)
    begun = found.step if found else 0
    for step, kind in saves:
        if step > begun:
            save_one(checkpoints, step, kind)
    checkpoints.wait()
    checkpoints.raise_if_failed()
    return begun
