"""Checkpoint and samples of one training step on all ranks, for your own training loop with HunyuanDiT.

A thin wrapper around Halation's sampling. `halation train` and the scripts of this recipe do not need it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from halation.distributed.checkpoint.writer import write_safetensors
from halation.distributed.external_process_group import eval_mode, external_world, is_sharded, reshard, unwrap_model
from halation.distributed.world import World
from halation.errors import InputError
from halation.models.denoiser import PIPELINE_SCHEDULER
from halation.models.pipelines import load
from halation.models.pipelines.folder_safety_check import PipelineFiles
from halation.runs.run_folder import publish_folder, remove_path, temporary_path
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
from halation.sampling.sample_folder import SampleFolder, SampleRow, publish_index

load.filter_library_warnings()  # before the import of the pipeline, which logs some of them
from diffusers import HunyuanDiTPipeline  # noqa: E402

from halation.models.pipelines.training.denoiser import PipelineDenoiser  # noqa: E402
from halation.models.pipelines.training.hunyuan_dit import HunyuanFamily  # noqa: E402
from hydit.sample_settings import num_steps, prompts  # noqa: E402

TIMEOUT_S = 600.0


def save_checkpoint(
    model: nn.Module,
    diffusion: Any,
    vae: Any,
    text_encoder: nn.Module,
    tokenizer: Any,
    text_encoder_t5: nn.Module,
    tokenizer_t5: Any,
    rank: int,
    world_size: int,
    args: Any,
    logger: logging.Logger,
    train_steps: int,
) -> list[SampleRow]:
    """Save the transformer of a step, and sample it on all ranks.

    Every rank calls it, with the arguments of `sample_images_multi_gpu`. Rank 0 writes
    `checkpoints/step_0000010/transformer/`, which `HunyuanDiT2DModel.from_pretrained` reads. If it cannot be written,
    the ranks sample all the same, and rank 0 raises the error afterwards: no rank waits for another.
    """
    module = unwrap_model(model)
    weights = _whole_weights(module, rank)
    folder = _folder(args) / "checkpoints" / f"step_{train_steps:07d}" / "transformer"
    error: OSError | None = None
    if rank == 0:
        try:
            _write_transformer(module, weights, folder)
        except OSError as problem:
            error = OSError(problem.errno, f"cannot write to directory {folder}: {problem.strerror}")
    parts = (vae, text_encoder, tokenizer, text_encoder_t5, tokenizer_t5)
    rows = sample_images_multi_gpu(model, diffusion, *parts, rank, world_size, args, logger, train_steps)
    if error is not None:
        raise error
    return rows


def _whole_weights(module: nn.Module, rank: int) -> dict[str, Tensor]:
    """Return the weights, on rank 0 only; with FSDP2 all ranks take part."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise InputError(
            "the weights are sharded by ZeRO-3",
            "weights that are whole, or sharded by FSDP2",
            "save with the engine's own save_checkpoint(), and call sample_images_multi_gpu()",
        )
    if not is_sharded(module):
        return {name: value.detach().cpu() for name, value in module.state_dict().items()} if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(module, options=options)
    return weights


def _write_transformer(module: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = temporary_path(folder)
    try:
        module.save_config(str(staging))
        write_safetensors(staging / "diffusion_pytorch_model.safetensors", weights, {"format": "pt"})
        publish_folder(staging, folder, "checkpoint")
    finally:
        remove_path(staging)


@torch.no_grad()
def sample_images_multi_gpu(
    model: nn.Module,
    diffusion: Any,
    vae: Any,
    text_encoder: nn.Module,
    tokenizer: Any,
    text_encoder_t5: nn.Module,
    tokenizer_t5: Any,
    rank: int,
    world_size: int,
    args: Any,
    logger: logging.Logger,
    train_steps: int,
) -> list[SampleRow]:
    """Sample the prompts of a step on all ranks; every rank returns one row per image.

    Every rank calls it with its own modules: the transformer, bare or wrapped, its scheduler as `diffusion`, and the
    rest of the pipeline. `args` is a namespace; missing attributes have defaults. A failed image does not affect
    others.
    """
    with (
        external_world(rank, world_size, _device(model), TIMEOUT_S) as world,
        eval_mode(text_encoder, text_encoder_t5, vae),
    ):
        pipe: Any = _Pipe(
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=unwrap_model(model),
            scheduler=type(diffusion).from_config(diffusion.config),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            text_encoder_2=text_encoder_t5,
            tokenizer_2=tokenizer_t5,
        )
        pipe.set_progress_bar_config(disable=True)
        denoiser = _denoiser(pipe, args)
        settings = _settings(args, denoiser, world_size)
        place = SampleFolder(folder=_folder(args) / "samples" / f"step_{train_steps:07d}", naming="gpu")
        logger.info(
            "Generating samples of step %d: prompts %d, ranks %d", train_steps, len(settings.prompts), world_size
        )
        rows = _draw(world, denoiser, settings, place, train_steps)
        for row in rows:
            if row["state"] == "failed":
                logger.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])
    return rows


def _draw(
    world: World, denoiser: PipelineDenoiser, settings: SampleSettings, place: SampleFolder, step: int
) -> list[SampleRow]:
    if world.is_rank_zero:
        # Remove images of the same step from other weights.
        shutil.rmtree(place.folder, ignore_errors=True)
    sharded = is_sharded(denoiser.module)
    drawing = DenoiserSampler(world, denoiser, settings, sharded=sharded, timeout_s=TIMEOUT_S, stop=lambda: 0)
    with _unsaid("Generating samples", "Error during sampling"):
        rows = drawing.run(place, f"step {step}")
    reshard(denoiser.module)
    if world.is_rank_zero:
        publish_index(place, rows, {"step": step})
    return rows


@contextmanager
def _unsaid(*beginnings: str) -> Iterator[None]:
    """Suppress Halation's messages that are already sent to the caller's logger."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginnings)

    words = logging.getLogger("halation.sampling.all_rank_sampler")
    words.addFilter(wanted)
    try:
        yield
    finally:
        words.removeFilter(wanted)


class _Pipe(HunyuanDiTPipeline):
    """The pipeline on the transformer's device, independent of that of its text encoders."""

    drawing_on = torch.device("cpu")

    @property
    def _execution_device(self) -> torch.device:
        return self.drawing_on


@dataclass(frozen=True, kw_only=True)
class _GivenEncoders:
    """A text store that encodes on demand with the given text encoders."""

    pipe: Any
    family: HunyuanFamily

    def __contains__(self, text: str) -> bool:
        return True

    def read(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        device = _device(self.pipe.text_encoder)
        rows = [self.family.encode(self.pipe, text, device) for text in texts]
        return {name: torch.cat([row[name] for row in rows]).cpu() for name in rows[0]}


def _denoiser(pipe: Any, args: Any) -> PipelineDenoiser:
    components: dict[str, Any] = {name: value for name, value in pipe.config.items() if isinstance(value, tuple | list)}
    family: Any = HunyuanFamily(pipe)
    denoiser = PipelineDenoiser(
        files=PipelineFiles(path=Path(), class_name="HunyuanDiTPipeline", components=components, variant=None),
        pipe=pipe,
        family=family,
        size=_size(args),
        dtype="fp32",
        weights_dtype="fp32",
        lora=None,
    )
    denoiser.set_text_store(_GivenEncoders(pipe=pipe, family=family))
    return denoiser


def _settings(args: Any, denoiser: PipelineDenoiser, world_size: int) -> SampleSettings:
    texts = tuple(_asked(args, "sample_prompts", None) or prompts)
    height, width = _size(args)
    return SampleSettings(
        prompts=texts if _asked(args, "sample_all", False) else texts[:world_size],
        height=height,
        width=width,
        steps=_asked(args, "sample_steps", num_steps),
        seed=_asked(args, "sample_seed", 42),
        same_seed=False,
        sampler=PIPELINE_SCHEDULER,
        guidance_scale=_asked(args, "guidance_scale", denoiser.default_guidance),
        batch_size=1,
        dtype=_asked(args, "dtype", "fp32"),
    )


def _asked(args: Any, name: str, otherwise: Any) -> Any:
    value = getattr(args, name, None)
    return otherwise if value is None else value


def _folder(args: Any) -> Path:
    return Path(_asked(args, "results_dir", "results/waymo_base"))


def _size(args: Any) -> tuple[int, int]:
    size = _asked(args, "image_size", (256, 256))
    height, width = (size, size) if isinstance(size, int) else (*size, *size)[:2]
    return height, width


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
