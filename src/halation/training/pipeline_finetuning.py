"""Fine-tuning of a pipeline: open it, and encode all texts once on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halation.config import fixed_settings
from halation.data import text_cache as cache
from halation.data.dataset_protocol import ImageDataset
from halation.data.text_cache import Encode
from halation.distributed.world import HeartbeatMonitor, World, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError, format_count, os_error_message
from halation.models.denoiser import Denoiser
from halation.progress import delayed_progress
from halation.runs.run_folder import RunFolder, read_record, record_facts
from halation.training.config import DIT_DEFAULTS, TrainConfig, missing_settings

if TYPE_CHECKING:
    from halation.models.pipelines.training.denoiser import PipelineDenoiser

log = logging.getLogger(__name__)

MAX_TRUNCATION_CHECKS = 20_000
LARGE_IMAGE_SIDE, SMALL_BUCKET_STEP, LARGE_BUCKET_STEP = 512, 32, 64


def open_denoiser(config: TrainConfig, device: torch.device) -> PipelineDenoiser:
    """Open the pipeline as a denoiser, on the CPU and without its text encoders."""
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.models.pipelines.training.lora import LoraSettings

    height, width = config.image_size
    lora = None
    if config.lora_rank:
        lora = LoraSettings(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
    return PipelineDenoiser.open(
        Path(config.model_path),
        dtype=config.dtype,
        weights_dtype=config.weights_dtype,
        lora=lora,
        height=height,
        width=width,
        seed=config.seed,
        stays_on_cpu=device.type == "cpu",
    )


def read_recorded_settings(world: World, config: TrainConfig, run: RunFolder) -> tuple[TrainConfig, list[str]]:
    """Give missing settings the values of the run's record; also return the names of those that it does not have.

    The precision, which opening the model needs, is chosen here.
    """
    names = missing_settings(config)
    if not names:
        return config, []

    def read_settings(_heartbeat: Callable[[], None]) -> dict[str, Any]:
        settings = read_record(run).get("settings") or {}
        return {name: settings[name] for name in names if settings.get(name) is not None}

    recorded = run_on_rank_zero(world, "reading the record", read_settings, config.dist_timeout_s)
    names = [name for name in names if name not in recorded]
    if "dtype" in names:
        recorded["dtype"] = "bf16" if all(world.all_gather_object(_computes_in_bf16(world.device))) else "fp32"
    return dataclasses.replace(config, **recorded), names


def _computes_in_bf16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_defaults(
    world: World,
    given: TrainConfig,
    names: Sequence[str],
    run: RunFolder,
    denoiser: Denoiser,
    num_images: int,
    num_fitting: Callable[[], int],
) -> TrainConfig:
    """Give the settings in `names` the defaults of this model and these images, and record them.

    `num_fitting` is collective and returns the images of a micro-batch that fit into memory.
    """
    if not names:
        return given
    from halation.models.pipelines.training.denoiser import PipelineDenoiser

    assert isinstance(denoiser, PipelineDenoiser)
    config = given
    if "batch_size" in names or "accumulate" in names:
        fitting = num_fitting() if "batch_size" in names else given.batch_size
        target = TARGET_BATCHES[bool(given.lora_rank)]
        batch_size, accumulate = choose_batch(given, target, num_images, world.size, fitting)
        config = dataclasses.replace(config, batch_size=batch_size, accumulate=accumulate)
    if "n_steps" in names:
        global_batch = config.batch_size * config.accumulate * world.size
        config = dataclasses.replace(config, n_steps=choose_num_steps(num_images, global_batch, bool(given.lora_rank)))
    defaults: dict[str, Any] = {
        "lr": denoiser.default_learning_rate,
        "warmup_steps": min(MAX_WARMUP_STEPS, config.n_steps // 10),
        "ckpt_every": next((every for every in CHECKPOINT_INTERVALS if 10 * every >= config.n_steps), 1000),
        "sample_steps": denoiser.default_steps,
    }
    config = dataclasses.replace(config, **{name: defaults[name] for name in names if name in defaults})
    settings = {name: getattr(config, name) for name in DIT_DEFAULTS}
    fixed = fixed_settings(config)

    def record_settings(_heartbeat: Callable[[], None]) -> None:
        facts = {name: value for name, value in settings.items() if name in fixed}
        record_facts(run, facts, config.accept_changes, settings)

    run_on_rank_zero(world, "recording the settings", record_settings, config.dist_timeout_s)
    return config


TARGET_BATCHES = {True: 4, False: 32}
"""Global batch with adapters, and with all weights; DreamBooth scripts use 1 to 4, fine-tuning on large data sets 32
and more."""
EPOCHS = {True: 100, False: 50}
STEP_LIMITS = {True: (500, 4_000), False: (1_000, 20_000)}
"""Fewest and most steps: a handful of images needs more epochs, and a large data set fewer."""
MAX_WARMUP_STEPS = 100
CHECKPOINT_INTERVALS = (10, 25, 50, 100, 250, 500, 1000)


def choose_batch(
    config: TrainConfig, target: int, num_images: int, num_ranks: int, num_fitting: int
) -> tuple[int, int]:
    """Return micro-batch size and accumulation for about `target` images in a step, where they are not given.

    A micro-batch is the largest power of two that fits. A small data set gets smaller steps: at least eight an epoch.
    """
    target = _power_of_two(min(target, max(1, num_images // 8)))
    asked = config.accumulate or 1
    batch_size = config.batch_size or _power_of_two(max(1, min(num_fitting, target // (num_ranks * asked))))
    if config.batch_size or config.accumulate:
        return batch_size, asked
    return batch_size, max(1, target // (batch_size * num_ranks))


def _power_of_two(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def choose_num_steps(num_images: int, global_batch: int, lora: bool) -> int:
    """Return the number of steps for this number of images, a multiple of 50."""
    low, high = STEP_LIMITS[lora]
    return min(high, max(low, -(-EPOCHS[lora] * num_images // (50 * global_batch)) * 50))


def describe_defaults(names: Sequence[str], config: TrainConfig, family: str, guidance_scale: float) -> str:
    """One line with the settings in `names`, which were not given."""
    texts = {
        "lr": f"lr {config.lr:g}",
        "dtype": config.dtype,
        "batch_size": f"batch {config.batch_size}",
        "accumulate": f"accumulate {config.accumulate}",
        "n_steps": f"{config.n_steps} steps",
        "warmup_steps": f"warm-up {config.warmup_steps}",
        "ckpt_every": f"a checkpoint every {config.ckpt_every} steps",
        "sample_steps": f"samples in {config.sample_steps} steps",
    }
    words = [text for name, text in texts.items() if name in names]
    if config.guidance_scale is None:
        words.append(f"guidance {guidance_scale:g}")
    kind = "LoRA" if config.lora_rank else "full training"
    return f"defaults for {family} {kind}: {', '.join(words)}"


def bucket_multiple(config: TrainConfig, denoiser: PipelineDenoiser) -> int:
    """Multiple of the sides of buckets; 0 without buckets.

    It is a multiple of what the model needs, and large enough to keep the number of buckets small.
    """
    if not config.aspect_buckets:
        return 0
    step = LARGE_BUCKET_STEP if min(config.image_size) >= LARGE_IMAGE_SIDE else SMALL_BUCKET_STEP
    needed = denoiser.size_multiple
    return -(-step // needed) * needed


def cache_texts(
    world: World, config: TrainConfig, run: RunFolder, denoiser: Denoiser, source: ImageDataset, prompts: Sequence[str]
) -> None:
    """Encode captions and prompts once on all ranks, then free the text encoders."""
    from halation.models.pipelines.training.denoiser import PipelineDenoiser

    assert isinstance(denoiser, PipelineDenoiser)
    folder = Path(config.cache_dir) if config.cache_dir else run.folder / "cache"
    texts = list(dict.fromkeys(["", *source.all_captions(), *prompts]))
    fingerprint = denoiser.text_fingerprint()
    cache_folder = folder / f"texts_{hashlib.sha256(fingerprint.encode()).hexdigest()[:12]}"

    def count_missing(heartbeat: Callable[[], None]) -> int:
        return run_with_heartbeat(lambda: cache.count_missing(texts, cache_folder, fingerprint), heartbeat)

    num_missing = run_on_rank_zero(world, "looking for text embeddings", count_missing, config.dist_timeout_s)
    if num_missing:
        log.info("encoding %s once, into %s", format_count(num_missing, "text"), cache_folder)
        num_truncated = sum(denoiser.truncation_flags(texts[:MAX_TRUNCATION_CHECKS])) if world.is_rank_zero else 0
        if num_truncated:
            log.warning(
                "%d of %s longer than the model reads; the ends have no effect",
                num_truncated,
                format_count(len(texts), "text"),
            )
        _encode_texts(world, config, denoiser, texts, cache_folder, fingerprint)
    denoiser.set_text_store(cache.open_cache(cache_folder, fingerprint, verify=False))


def _encode_texts(
    world: World,
    config: TrainConfig,
    denoiser: PipelineDenoiser,
    texts: Sequence[str],
    cache_folder: Path,
    fingerprint: str,
) -> None:

    with HeartbeatMonitor(world, "encoding texts", config.dist_timeout_s) as monitor, contextlib.ExitStack() as stack:
        error = ""
        try:
            part = (world.rank, world.size)
            update_progress = stack.enter_context(
                delayed_progress(config.progress, "encoding texts", "texts", monitor.heartbeat, part)
            )
            encode = stack.enter_context(denoiser.load_text_encoders(world.device))
            cache.build(
                texts,
                cache_folder,
                _require_finite(encode),
                fingerprint=fingerprint,
                rank_and_size=part,
                on_progress=update_progress,
            )
        except (HalationError, OSError) as problem:
            error = os_error_message(problem) or str(problem)
        except (torch.OutOfMemoryError, MemoryError):
            error = (
                f"the text encoders do not fit into the memory of {world.device}; use --dtype bf16, "
                "or build the cache on a larger device and pass it with --cache_dir"
            )
        errors = [word for word in monitor.gather_results(error) if word]
    if errors:
        failure = HalationError(errors[0])
        failure.exit_code = InputError.exit_code
        raise failure


def _require_finite(encode: Encode) -> Encode:
    """Reject embeddings that are not finite.

    Once cached they would make every later loss NaN, and the cause would be hard to find.
    """

    def encode_checked(texts: Sequence[str]) -> Mapping[str, Tensor]:
        rows = encode(texts)
        for row, text in enumerate(texts):
            if not all(bool(value[row].isfinite().all()) for value in rows.values()):
                raise InputError(
                    f"the text encoders return embeddings of {text[:80]!r} that are not finite",
                    "finite embeddings",
                    "use --dtype bf16 or fp32; fp16 overflows in T5",
                )
        return rows

    return encode_checked
