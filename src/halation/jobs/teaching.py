"""The teacher of a run: opened, placed, asked for its pictures, and let go."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halation.config.distill import DistillConfig
from halation.errors import InputError
from halation.jobs.models import load_denoiser
from halation.models.base import Denoiser
from halation.models.compiling import compile_units
from halation.models.denoiser import DiTDenoiser
from halation.models.teacher import Teacher, spread_by_layers
from halation.training.loop import AUTOCAST
from halation.world.engines import Fsdp
from halation.world.launch import num_gpus
from halation.world.ranks import World

if TYPE_CHECKING:
    from halation.models.finetuning import PipelineDenoiser


def open_dit(config: DistillConfig) -> DiTDenoiser:
    """The DiT that is learned from, on the CPU."""
    denoiser = load_denoiser(Path(config.teacher_path), raw=False)
    if not isinstance(denoiser, DiTDenoiser):
        raise InputError(
            f"--teacher_path {config.teacher_path} is a run that fine-tuned a pipeline",
            "a DiT of Halation, or a whole pipeline",
            "give its export",
        )
    return denoiser


def open_teacher(world: World, config: DistillConfig, student: Denoiser, guidance: float) -> Teacher:
    """The teacher in its place, frozen, reading the texts that were encoded for the student."""
    denoiser: Denoiser = _pipeline(config, student) if config.model_path else open_dit(config)
    device = torch.device("cpu") if config.teacher_placement == "cpu" else world.device
    teacher = Teacher(
        denoiser,
        guidance=guidance,
        device=device,
        dtype=AUTOCAST[config.teacher_dtype] or torch.float32,
        batch_size=config.teacher_batch_size,
    )
    if config.feature_weight and hasattr(denoiser.module, "in_step"):
        raise InputError(
            f"--feature_weight with a teacher of two experts ({config.teacher_path})",
            "a teacher with one transformer, whose middle can be compared with",
            "leave --feature_weight out",
        )
    _place(world, config, denoiser, device)
    if config.compile and device.type == "cuda":
        compile_units(denoiser.shard_units())
    return teacher


def _pipeline(config: DistillConfig, student: Denoiser) -> PipelineDenoiser:
    from halation.models.finetuning import PipelineDenoiser

    assert isinstance(student, PipelineDenoiser)
    height, width = config.image_size
    denoiser = PipelineDenoiser.open(
        Path(config.model_path),
        dtype=config.teacher_dtype,
        weights_dtype=config.teacher_dtype,
        lora=None,
        height=height,
        width=width,
        experts=True,
    )
    denoiser.read_texts_of(student)
    return denoiser


def _place(world: World, config: DistillConfig, denoiser: Denoiser, device: torch.device) -> None:
    module, units = denoiser.module, denoiser.shard_units()
    if config.teacher_placement == "fsdp":
        denoiser.to(device, module=False)
        if hasattr(module, "in_step"):  # experts: ranks must ask for the shards of both equally often
            module.in_step = True  # type: ignore[assignment]
        Fsdp(world, module, units)
    elif config.teacher_placement == "layers" and device.type == "cuda":
        denoiser.to(device, module=False)
        spread_by_layers(module, units, _own_gpus(world))
    else:
        denoiser.to(device)


def _own_gpus(world: World) -> list[torch.device]:
    """This rank's GPU and its share of those that no rank computes on."""
    used = world.exchange([world.device.index or 0])
    free = [number for number in range(num_gpus()) if [number] not in used]
    mine = free[world.local_rank :: max(1, len(used))]
    return [world.device, *(torch.device("cuda", number) for number in mine)]


def where_it_draws(world: World, teacher: Teacher) -> World:
    """The same ranks, computing where the teacher does."""
    return dataclasses.replace(world, device=teacher.device)


def forget(device: torch.device) -> None:
    """Give back what a teacher held, once nobody holds the teacher."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
