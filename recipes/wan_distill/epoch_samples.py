"""Samples of one epoch on all ranks, for your own training loop with a Wan student.

A thin wrapper around Halation's sampling. `halation distill` and `train_distillation.py` do not need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halation.distributed.external_process_group import eval_mode, external_world, is_sharded, reshard, unwrap_model
from halation.distributed.world import World
from halation.models.denoiser import PIPELINE_SCHEDULER
from halation.models.pipelines import load
from halation.models.pipelines.folder_safety_check import PipelineFiles
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
from halation.sampling.sample_folder import RankNaming, SampleFolder, SampleRow, publish_index

load.filter_library_warnings()  # before the import of the pipeline, which logs some of them
from diffusers import WanPipeline  # noqa: E402

from halation.models.pipelines.training.denoiser import PipelineDenoiser  # noqa: E402
from halation.models.pipelines.training.wan import WanFamily  # noqa: E402

TIMEOUT_S = 600.0


@torch.no_grad()
def draw(
    *,
    student: nn.Module,
    text_encoder: nn.Module,
    vae: Any,
    teacher: Any,
    prompts: tuple[str, ...],
    folder: Path,
    epoch: int,
    device: torch.device | str,
    teacher_device: torch.device | str,
    teacher_dtype: torch.dtype,
    settings: Any,
    projection: Callable[[Tensor], Tensor] | None,
    rank: int,
    world_size: int,
) -> list[SampleRow]:
    """Sample `epoch_0001_rank_0_sample_00.png` and so on; return the same rows on every rank.

    Each rank samples its contiguous share of the prompts. `student` is a Wan transformer, bare or wrapped. Of
    `teacher`, a Wan pipeline, only the tokenizer and the scheduler are used. Texts are encoded and latents decoded on
    `teacher_device` in `teacher_dtype`, independent of the student's device. `settings` is a mapping or a namespace
    with optional image_size, sample_steps, guidance_scale, sample_seed, same_seed and sample_batch_size. `projection`
    is applied to text embeddings before the student reads them. An error fails only its own images.
    """
    there = torch.device(teacher_device)
    with (
        external_world(rank, world_size, torch.device(device), TIMEOUT_S) as world,
        eval_mode(text_encoder, vae),
    ):
        pipe: Any = _Pipe(
            tokenizer=teacher.tokenizer,
            text_encoder=text_encoder,
            vae=vae,
            scheduler=type(teacher.scheduler).from_config(teacher.scheduler.config),
            transformer=unwrap_model(student),
        )
        pipe.set_progress_bar_config(disable=True)
        denoiser = _denoiser(pipe, _size(settings), there, teacher_dtype)
        denoiser.set_text_store(_GivenEncoder(pipe=pipe, family=denoiser.family, device=there, projection=projection))
        names = RankNaming(epoch=epoch, num_prompts=len(prompts), num_ranks=world_size)
        return _drawn(world, denoiser, _settings(settings, prompts), SampleFolder(folder=folder, naming=names))


def _drawn(world: World, denoiser: PipelineDenoiser, settings: SampleSettings, place: SampleFolder) -> list[SampleRow]:
    if world.is_rank_zero:
        place.clear()  # remove images of the same epoch from other weights
    drawing = DenoiserSampler(
        world,
        denoiser,
        settings,
        sharded=is_sharded(denoiser.module),
        timeout_s=TIMEOUT_S,
        stop=lambda: 0,
        share_mode="contiguous",
    )
    rows = drawing.run(place, place.prefix.rstrip("_"))
    reshard(denoiser.module)
    if world.is_rank_zero:
        assert isinstance(place.naming, RankNaming)
        publish_index(place, rows, {"epoch": place.naming.epoch, "ranks": world.size})
    return rows


class _Pipe(WanPipeline):
    """The pipeline on the student's device, independent of that of its text encoder."""

    drawing_on = torch.device("cpu")

    @property
    def _execution_device(self) -> torch.device:
        return self.drawing_on


@dataclass(frozen=True, kw_only=True)
class _GivenEncoder:
    """A text store that encodes on demand with the given text encoder."""

    pipe: Any
    family: Any
    device: torch.device
    projection: Callable[[Tensor], Tensor] | None

    def __contains__(self, text: str) -> bool:
        return True

    def read(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        rows = [self.family.encode(self.pipe, text, self.device) for text in texts]
        found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        if self.projection is not None:
            found = {name: self.projection(value) for name, value in found.items()}
        return {name: value.float().cpu() for name, value in found.items()}


def _denoiser(
    pipe: Any, size: tuple[int, int], teacher_device: torch.device, teacher_dtype: torch.dtype
) -> PipelineDenoiser:
    components: dict[str, Any] = {name: value for name, value in pipe.config.items() if isinstance(value, tuple | list)}
    family: Any = WanFamily(pipe)
    denoiser = PipelineDenoiser(
        files=PipelineFiles(path=Path(), class_name="WanPipeline", components=components, variant=None),
        pipe=pipe,
        family=family,
        size=size,
        dtype="fp32",
        weights_dtype="fp32",
        lora=None,
    )
    denoiser.space.to(teacher_device)
    space: Any = denoiser.space
    space.decode = functools.partial(space.decode, dtype=teacher_dtype)
    return denoiser


def _settings(given: Any, prompts: tuple[str, ...]) -> SampleSettings:
    height, width = _size(given)
    return SampleSettings(
        prompts=prompts,
        height=height,
        width=width,
        steps=_asked(given, "sample_steps", 10),
        seed=_asked(given, "sample_seed", 42),
        same_seed=_asked(given, "same_seed", False),
        sampler=PIPELINE_SCHEDULER,
        guidance_scale=_asked(given, "guidance_scale", 1.0),
        batch_size=_asked(given, "sample_batch_size", 1),
        dtype="fp32",
    )


def _asked(given: Any, name: str, otherwise: Any) -> Any:
    value = given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
    return otherwise if value is None else value


def _size(given: Any) -> tuple[int, int]:
    size = _asked(given, "image_size", (480, 832))
    height, width = (size, size) if isinstance(size, int) else (*size, *size)[:2]
    return height, width
