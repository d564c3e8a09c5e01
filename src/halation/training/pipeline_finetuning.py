"""Fine-tuning of a pipeline: open it, and encode all texts once on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halation.data import text_cache as cache
from halation.data.dataset_protocol import ImageDataset
from halation.data.text_cache import Encode
from halation.distributed.world import HeartbeatMonitor, World, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError, format_count, os_error_message
from halation.models.denoiser import Denoiser
from halation.progress import delayed_progress
from halation.runs.run_folder import RunFolder
from halation.training.config import TrainConfig

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
