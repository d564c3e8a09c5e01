"""Build the components of a training run from its config: data, model, engine, settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from halation import work_division
from halation.data import latent_cache
from halation.data.aspect_buckets import bucket_shapes, describe_buckets
from halation.data.dataset_protocol import ImageDataset
from halation.data.image_folder import ImageFolder
from halation.data.streets import Streets
from halation.data.streets.dataset import NUM_TRAIN, NUM_VALIDATION
from halation.distributed.engines import deepspeed_config
from halation.distributed.engines.ddp_fsdp import DDPEngine, Engine, EngineSettings, FSDPEngine
from halation.distributed.launcher import describe_device
from halation.distributed.world import HeartbeatMonitor, World, run_on_rank_zero
from halation.errors import HalationError, InputError, format_count, os_error_message
from halation.logging_setup import ON_CONSOLE
from halation.models.checkpoint_loading import load_denoiser
from halation.models.denoiser import ImageSpace
from halation.models.dit.denoiser import DiTDenoiser, create_dit
from halation.models.dit.network import SIZES
from halation.models.model_folder import bundled_names, resolve_model_path, suggest_model
from halation.progress import delayed_progress
from halation.runs import run_folder as runs
from halation.training.config import TrainConfig

log = logging.getLogger(__name__)


def record_device_and_space(world: World, config: TrainConfig, run: runs.RunFolder, space: ImageSpace) -> None:
    """Record GPU and autoencoder, so that a resumed run with another one is rejected."""
    devices = world.all_gather_object(describe_device(str(world.device)))
    if len(set(devices)) > 1:
        log.warning("the ranks use different devices (%s), which round differently", ", ".join(sorted(set(devices))))

    def record(_heartbeat: Callable[[], None]) -> None:
        runs.record_facts(run, {"computes on": devices[0], "space": space.fingerprint()}, config.accept_changes)

    run_on_rank_zero(world, "recording the device", record, config.dist_timeout_s)


def open_source(
    world: World, config: TrainConfig, run: runs.RunFolder, space: ImageSpace, bucket_multiple: int = 0
) -> ImageDataset:
    """Open the data, check it once on rank 0, and cache it as configured.

    Images are sorted into buckets if `bucket_multiple` is not 0.
    """
    height, width = config.image_size
    encodes = bool(config.vae or config.model_path)
    cache = Path(config.cache_dir) if config.cache_dir else run.folder / "cache"
    kind = config.cache if config.cache != "auto" else ("latents" if encodes else "memory")
    if kind == "latents" and not encodes:
        raise InputError(
            "--cache latents without --vae",
            "an autoencoder that makes latents",
            "give --vae FOLDER or use --cache pixels",
        )

    def open_data() -> ImageDataset:
        source = open_dataset(
            config.data,
            height,
            width,
            config.validation_images,
            max_images=config.max_images,
            bucket_multiple=bucket_multiple,
        )
        if isinstance(source, Streets) and encodes:  # scenes cost nothing until they are encoded
            num_validation = min(source.num_validation, config.validation_images)
            return Streets(height, width, num_train=source.num_train, num_validation=num_validation)
        return source

    def check_data(heartbeat: Callable[[], None]) -> None:
        source = open_data()
        with delayed_progress(config.progress, "reading", "images", heartbeat) as update_progress:
            check_dataset(source, cache, update_progress)
        runs.record_facts(run, {"data fingerprint": source.fingerprint}, config.accept_changes)

    run_on_rank_zero(world, "reading the data", check_data, config.dist_timeout_s)
    source = open_data()
    check_dataset(source, cache, quiet=True)  # cached and logged by now
    if bucket_multiple and world.is_rank_zero:
        for number, line in enumerate(describe_buckets(source, bucket_multiple)):
            log.log(logging.WARNING if number else logging.INFO, "%s", line, extra=ON_CONSOLE)
    return _build_cache(world, config, source, space, kind, cache) if kind in ("pixels", "latents") else source


def _build_cache(
    world: World, config: TrainConfig, source: ImageDataset, space: ImageSpace, kind: str, folder: Path
) -> ImageDataset:
    """Encode the data once on all ranks into memory-mapped shards."""
    fingerprint: dict[str, Any] = {
        "source": source.fingerprint,
        "kind": kind,
        "space": space.fingerprint() if kind == "latents" else "pixels",
    }

    # float32 latents only if training computes in float32; in half precision they would only take more space.
    exact = bool(config.model_path) and config.dtype == "fp32"
    dtype = torch.float32 if exact else torch.float16
    if exact:
        fingerprint["dtype"] = "float32"

    def encode(pixels: list[np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            batch = torch.from_numpy(np.stack(pixels)).to(world.device)
            encoded: np.ndarray = space.encode(batch).to(dtype).cpu().numpy()
        if not np.isfinite(encoded).all():
            raise InputError(
                "the autoencoder returned latents that are not finite", "finite latents", "check the model's files"
            )
        return encoded

    if kind == "latents":
        space.to(world.device)
    with (
        HeartbeatMonitor(world, "caching the data", config.dist_timeout_s) as monitor,
        delayed_progress(
            config.progress, "caching", "images", monitor.heartbeat, (world.rank, world.size)
        ) as update_progress,
    ):
        error, chunk_size = "", latent_cache.CHUNK_SIZE
        try:
            latent_cache.build(
                source,
                folder / kind,
                encode if kind == "latents" else None,
                fingerprint=fingerprint,
                rank_and_size=(world.rank, world.size),
                # Depends on the image size only, so that no other setting changes a latent.
                encode_size=max(1, min(chunk_size, chunk_size * 256**2 // (source.height * source.width))),
                num_workers=config.num_workers,
                on_progress=update_progress,
            )
        except (HalationError, OSError) as problem:
            error = os_error_message(problem) or str(problem)
        except (torch.OutOfMemoryError, MemoryError):
            error = (
                f"encoding images of {source.height} x {source.width} does not fit into the memory of {world.device}"
            )
        errors = monitor.gather_results(error)
    if any(errors):
        failure = HalationError(next(word for word in errors if word))
        failure.exit_code = InputError.exit_code
        raise failure
    return latent_cache.open_cache(folder / kind, fingerprint, verify=world.local_rank == 0)


def new_denoiser(config: TrainConfig, source: ImageDataset, space: ImageSpace) -> DiTDenoiser:
    """Create a model of a named size, or load the one in a folder if it matches the data."""
    if config.model not in SIZES:
        folder = resolve_model_path(config.model)
        if not folder.is_dir():
            raise InputError(
                f"--model {config.model}",
                f"one of {', '.join(SIZES)}, {', '.join(bundled_names())}, or the folder of an export or checkpoint",
                suggest_model(config.model, "check the name or path"),
            )
        denoiser = load_denoiser(folder, raw=False)
        if not isinstance(denoiser, DiTDenoiser):
            raise InputError(
                f"--model {config.model} is a run that fine-tuned a pipeline",
                "a DiT of Halation",
                "continue from its export: --model_path RUN/export",
            )
        return _check_model_matches(denoiser, config, source, space)
    height, width = config.image_size
    fresh = create_dit(
        config.model,
        height=height,
        width=width,
        captions=() if source.class_names else source.captions(),
        class_names=source.class_names,
        space=space,
        patch_size=config.patch_size or None,
        num_register_tokens=config.num_register_tokens,
    )
    return fresh.init_weights(config.seed)


def _check_model_matches(
    denoiser: DiTDenoiser, config: TrainConfig, source: ImageDataset, space: ImageSpace
) -> DiTDenoiser:
    if denoiser.class_names and denoiser.class_names != source.class_names:
        raise InputError(
            f"--model {config.model} has {len(denoiser.class_names)} classes, "
            f"--data {config.data} has {format_count(len(source.class_names), 'other')}",
            "a data set with the classes that the model was trained on",
            "choose other data, or a model with text prompts",
        )
    for name, asked in (("num_register_tokens", config.num_register_tokens), ("patch_size", config.patch_size)):
        if asked and asked != getattr(denoiser.config, name):
            raise InputError(
                f"--{name} {asked} with --model {config.model}",
                f"{getattr(denoiser.config, name)}, the value of that model",
                f"leave --{name} out",
            )
    if denoiser.space.fingerprint() != space.fingerprint():
        raise InputError(
            f"--model {config.model} works in another space than --vae {config.vae or '(none: pixels)'}",
            "the autoencoder the model was trained with",
            "give the same --vae, or none for a model trained on pixels",
        )
    return denoiser


def resolve_global_batch(world: World, config: TrainConfig, run: runs.RunFolder) -> int:
    """Return the global batch size, which is recorded when the run is created.

    If the number of ranks changes, the same images are divided among them, so that the loss does not change.
    """

    def read_or_record(_heartbeat: Callable[[], None]) -> int:
        known = runs.read_record(run)["fixed"].get("global batch")
        asked = config.batch_size * world.size * config.accumulate
        size = asked if config.accept_changes else int(known or asked)
        runs.record_facts(run, {"global batch": size}, config.accept_changes)
        return size

    return int(run_on_rank_zero(world, "the global batch", read_or_record, config.dist_timeout_s))


def engine_settings(world: World, config: TrainConfig, global_batch: int) -> EngineSettings:
    """Collect the settings that an engine needs besides the module."""
    number, rows = work_division.micro_batch_layout(global_batch, world.size, config.batch_size)
    return EngineSettings(
        offload_optimizer=config.offload_optimizer,
        zero_stage=config.zero_stage,
        deepspeed_config=config.deepspeed_config,
        global_batch=global_batch,
        num_micro_batches=number,
        micro_batch_size=rows,
        grad_clip=config.grad_clip,
        dtype=config.dtype,
    )


def build_engine(
    name: str,
    world: World,
    module: nn.Module,
    units: Sequence[nn.Module],
    settings: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
) -> Engine:
    """Build the engine of this name; `auto` is ddp for several ranks and single for one."""
    check_engine_settings(name, world, settings)
    name = resolve_engine_name(name, world.size)
    if name == "single":
        return Engine(world, module)
    if name == "ddp":
        return DDPEngine(world, module) if dist.is_initialized() else Engine(world, module)
    if name == "fsdp":
        return FSDPEngine(world, module, units, settings.offload_optimizer)
    from halation.distributed.engines.deepspeed import DeepSpeedEngine

    unknown = deepspeed_config.find_unknown_keys(deepspeed_config.read_config(settings.deepspeed_config))
    if unknown and world.is_rank_zero:
        log.warning("--deepspeed_config: DeepSpeed may not know %s, and then ignores it", ", ".join(unknown))
    return DeepSpeedEngine(world, module, settings)


def resolve_engine_name(name: str, num_ranks: int) -> str:
    """Return the engine that `auto` means; other names are returned unchanged."""
    if name != "auto":
        return name
    return "ddp" if num_ranks > 1 else "single"


def check_engine_settings(name: str, world: World, settings: EngineSettings) -> None:
    """Raise for settings that conflict, before data and model are loaded."""
    name = resolve_engine_name(name, world.size)
    if name == "single" and world.size > 1:
        raise InputError(
            f"--engine single with {format_count(world.size, 'rank')}",
            "one rank",
            "use --engine ddp or fsdp, or --nproc 1 (the ranks would train separate models)",
        )
    if settings.offload_optimizer and name in ("single", "ddp"):
        raise InputError(
            f"--offload_optimizer with --engine {name}",
            "an engine that can keep the optimizer in host memory",
            "use --engine fsdp or deepspeed, or omit the flag",
        )
    if settings.deepspeed_config and name != "deepspeed":
        raise InputError(
            f"--deepspeed_config with --engine {name}", "--engine deepspeed", "use it, or omit --deepspeed_config"
        )
    if settings.zero_stage != EngineSettings.zero_stage and name != "deepspeed":
        raise InputError(
            f"--zero_stage {settings.zero_stage} with --engine {name}",
            "--engine deepspeed",
            "use it, or omit --zero_stage",
        )
    if name == "deepspeed":
        from halation.distributed.engines.deepspeed import build_config, import_deepspeed

        import_deepspeed(world)
        user_config = deepspeed_config.read_config(settings.deepspeed_config)
        deepspeed_config.find_unknown_keys(user_config)
        build_config(user_config, settings, pin_memory=False)


def open_dataset(
    data: str, height: int, width: int, validation_images: int, *, max_images: int = 0, bucket_multiple: int = 0
) -> ImageDataset:
    """Open `streets`, a folder of images or a CSV file.

    `max_images` limits the training images to the first ones; 0 uses all. `bucket_multiple` sorts the training images
    of a folder into shapes whose sides are multiples of it; 0 disables buckets. Streets are square and need none. With
    `max_images`, validation scenes are limited too, or they would be most of a cache.
    """
    if max_images < 0:
        raise InputError(f"--max_images {max_images}", "a number of images, or 0 for all", "give another number")
    if data == "streets":
        if not max_images:
            return Streets(height, width)
        return Streets(height, width, min(max_images, NUM_TRAIN), min(validation_images, NUM_VALIDATION))
    return ImageFolder(
        Path(data),
        height,
        width,
        validation_images=validation_images,
        max_images=max_images,
        buckets=bucket_shapes(height, width, bucket_multiple) if bucket_multiple else (),
    )


def check_dataset(
    source: ImageDataset, cache_folder: Path, on_progress: Callable[[int, int], None] | None = None, quiet: bool = False
) -> None:
    """Decode a folder once, so that a broken image is reported before training starts."""
    if isinstance(source, ImageFolder):
        source.check(cache_folder, on_progress=on_progress, quiet=quiet)
