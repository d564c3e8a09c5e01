"""What fine-tuning a pipeline needs besides what every training does: its folder, its size, its texts encoded once on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halation.errors import HalationError, InputError, os_error_message
from halation.input_files import read_json
from halation.models.model_path_resolver import find_fine_tuned_run, fine_tuned_error, resolve_pipeline_folder
from halation.progress import delayed_progress
from halation.runs import run_folder as runs
from halation.training.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from halation.data.dataset_protocol import ImageDataset
    from halation.data.text_cache import Encode
    from halation.distributed.world import World
    from halation.models.denoiser import Denoiser
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.runs.run_folder import RunFolder

log = logging.getLogger(__name__)

MAX_TRUNCATION_CHECKS = 20_000
LARGE_IMAGE_SIDE, SMALL_BUCKET_STEP, LARGE_BUCKET_STEP = 512, 32, 64
NATIVE_SIZES = {"WanPipeline": (480, 832)}
"""Of models whose configs do not name a size."""


def resolve_config(config: TrainConfig) -> TrainConfig:
    """The folder of the pipeline and the size of its images written out."""
    if not config.model_path:
        _check_not_pipeline(config.model)
        return config
    check_peft_installed(config)
    folder = resolve_pipeline_folder(config.model_path)
    size = config.image_size or native_size(folder)
    return dataclasses.replace(config, model_path=str(folder.resolve()), image_size=size)


def check_peft_installed(config: TrainConfig) -> None:
    """Said before a pipeline is opened for it."""
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise InputError(
            f"--lora_rank {config.lora_rank}, but peft is not installed",
            "the extra `train`",
            "pip install 'halation[train]'",
        )


def _check_not_pipeline(model: str) -> None:
    """`--model` is for DiTs of Halation; said at once where the folder is a pipeline, or a run that fine-tuned one."""
    folder = Path(model)
    is_pipeline = (folder / "model_index.json").is_file()
    run = find_fine_tuned_run(folder) if folder.is_dir() and not is_pipeline else None
    if not is_pipeline and run is None:
        return
    from halation.models.dit.network import SIZES

    if model in SIZES:  # a folder that happens to be called so
        return
    if run is not None:
        raise fine_tuned_error("model", folder, run)
    raise InputError(
        f"--model {model} is a diffusers pipeline", "a DiT of Halation", f"fine-tune it with --model_path {model}"
    )


def check_same_base_model(config: TrainConfig, run: RunFolder, model: str) -> None:
    """A run goes on from the pipeline it began with, or from none; `model` is the fingerprint of what is asked for."""
    if not (run.config.exists() and run.has_checkpoints()):
        return
    record = runs.read_record(run)
    base, known = record.get("settings", {}).get("model_path"), record["fixed"].get("model of --model_path")
    expected, elsewhere = "the model that this run began with", "or choose another --output_dir"
    if base and not config.model_path:
        found = f"no --model_path, but {run.folder} was fine-tuned from {base}"
        raise InputError(found, expected, f"give --model_path {base}, {elsewhere}")
    if config.model_path and not base:
        found = f"--model_path {config.model_path}, but {run.folder} trains a DiT of Halation"
        raise InputError(found, expected, f"leave --model_path out, {elsewhere}")
    if base and known and known != model and not config.accept_changes:
        if Path(base) == Path(config.model_path):
            found = f"the files in {base} are others than when {run.folder} was fine-tuned from it"
            raise InputError(found, expected, f"put them back, {elsewhere}")
        found = f"--model_path {config.model_path} is another model than {base}, which {run.folder} was fine-tuned from"
        raise InputError(found, expected, f"give --model_path {base} (or where it lies now), {elsewhere}")


def native_size(folder: Path) -> tuple[int, int]:
    """The size a pipeline's images have by default, from its configs alone."""
    try:
        kind = read_json(folder / "model_index.json").get("_class_name")
        if kind in NATIVE_SIZES:
            return NATIVE_SIZES[kind]
        sample = read_json(folder / "transformer" / "config.json").get("sample_size")
        blocks = read_json(folder / "vae" / "config.json")["block_out_channels"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{folder} does not say what size it draws ({type(error).__name__}: {error})",
            "a pipeline with model_index.json, transformer/config.json and vae/config.json",
            "give --image_size, or check --model_path",
        ) from error
    side = int(sample or 128) * 2 ** (len(blocks) - 1)
    return side, side


def open_denoiser(config: TrainConfig, device: torch.device) -> PipelineDenoiser:
    """The pipeline as a denoiser, on the CPU and without its text encoders."""
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
    """What the sides of buckets divide by: coarse enough that buckets are few, and what the model needs."""
    if not config.aspect_buckets:
        return 0
    step = LARGE_BUCKET_STEP if min(config.image_size) >= LARGE_IMAGE_SIDE else SMALL_BUCKET_STEP
    needed = denoiser.size_multiple
    return -(-step // needed) * needed


def cache_texts(
    world: World, config: TrainConfig, run: RunFolder, denoiser: Denoiser, source: ImageDataset, prompts: Sequence[str]
) -> None:
    """Encode captions and prompts once, all ranks together; the text encoders are gone from the device afterwards."""
    from halation.data import text_cache as cache
    from halation.distributed.world import run_on_rank_zero, run_with_heartbeat
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
        log.info("encoding %d texts once, into %s", num_missing, cache_folder)
        num_truncated = sum(denoiser.truncation_flags(texts[:MAX_TRUNCATION_CHECKS])) if world.is_rank_zero else 0
        if num_truncated:
            log.warning(
                "%d of %d texts are longer than the model reads; their ends have no effect", num_truncated, len(texts)
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
    import torch

    from halation.data import text_cache as cache
    from halation.distributed.world import HeartbeatMonitor

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
                "or build the cache on a larger device and name it by --cache_dir"
            )
        errors = [word for word in monitor.gather_results(error) if word]
    if errors:
        failure = HalationError(errors[0])
        failure.exit_code = InputError.exit_code
        raise failure


def _require_finite(encode: Encode) -> Encode:
    """A cache of what overflowed would make every later loss NaN, and nobody would look for it there."""

    def encode_checked(texts: Sequence[str]) -> Mapping[str, Tensor]:
        rows = encode(texts)
        for row, text in enumerate(texts):
            if not all(bool(value[row].isfinite().all()) for value in rows.values()):
                raise InputError(
                    f"the text encoders answer {text[:80]!r} with numbers that are not finite",
                    "finite embeddings",
                    "use --dtype bf16 or fp32; fp16 overflows in T5",
                )
        return rows

    return encode_checked
