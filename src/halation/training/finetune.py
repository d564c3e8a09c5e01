"""What fine-tuning a pipeline needs besides what every training does: its folder, its size, its texts encoded once on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halation.errors import HalationError, InputError, refused_by_system
from halation.runs import folder as runs
from halation.training.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from halation.data.dataset import Pictures
    from halation.data.text_cache import Encode
    from halation.distributed.world import World
    from halation.models.denoiser import Denoiser
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.runs.folder import Run

log = logging.getLogger(__name__)

MOST_LOOKED_AT = 20_000
SMALL_SIDE, SMALL_STEP, LARGE_STEP = 512, 32, 64
NATIVE_SIZES = {"WanPipeline": (480, 832)}
"""Of models whose configs do not name a size."""
NOT_FOR_PIPELINES = {
    "model": "the pipeline brings its own transformer",
    "vae": "the pipeline brings its own autoencoder",
    "patch_size": "the pipeline's transformer has its own",
    "num_register_tokens": "the pipeline's transformer has none",
}
ONLY_FOR_PIPELINES = ("lora_rank", "lora_alpha", "lora_targets", "aspect_buckets", "weights_dtype")


def resolved(config: TrainConfig) -> TrainConfig:
    """The folder of the pipeline and the size of its pictures written out; flags that do not go together are refused."""
    from halation.models.model_ref import pipeline_folder

    usual = TrainConfig()
    if not config.model_path:
        wrong = next((name for name in ONLY_FOR_PIPELINES if getattr(config, name) != getattr(usual, name)), None)
        if wrong:
            raise InputError(
                f"--{wrong} without --model_path", "a diffusers pipeline to fine-tune", "give --model_path"
            )
        _refuse_pipeline(config.model)
        return config
    for name, why in NOT_FOR_PIPELINES.items():
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name} with --model_path", f"one of the two: {why}", f"leave --{name} out")
    if config.lora_rank and config.weights_dtype != usual.weights_dtype:
        raise InputError(
            "--weights_dtype bf16 with --lora_rank",
            "adapters in float32 over a base in --dtype",
            "leave --weights_dtype out; --dtype bf16 makes the base narrow",
        )
    if (config.lora_alpha or config.lora_targets) and not config.lora_rank:
        raise InputError(
            "--lora_alpha or --lora_targets without --lora_rank", "the rank of the adapters", "give --lora_rank 16"
        )
    refuse_missing_peft(config)
    folder = pipeline_folder(config.model_path)
    size = config.image_size or native_size(folder)
    return dataclasses.replace(config, model_path=str(folder.resolve()), image_size=size)


def refuse_missing_peft(config: TrainConfig) -> None:
    """Said before a pipeline is opened for it."""
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise InputError(
            f"--lora_rank {config.lora_rank}, but peft is not installed",
            "the extra `train`",
            "pip install 'halation[train]'",
        )


def _refuse_pipeline(model: str) -> None:
    """`--model` is for DiTs of Halation; said at once where the folder is a pipeline, or a run that fine-tuned one."""
    from halation.models.model_ref import fine_tuned, fine_tuned_run

    folder = Path(model)
    is_pipeline = (folder / "model_index.json").is_file()
    run = fine_tuned_run(folder) if folder.is_dir() and not is_pipeline else None
    if not is_pipeline and run is None:
        return
    from halation.models.dit.network import SIZES

    if model in SIZES:  # a folder that happens to be called so
        return
    if run is not None:
        raise fine_tuned("model", folder, run)
    raise InputError(
        f"--model {model} is a diffusers pipeline", "a DiT of Halation", f"fine-tune it with --model_path {model}"
    )


def refuse_other_base(config: TrainConfig, run: Run, model: str) -> None:
    """A run goes on from the pipeline it began with, or from none; `model` is the fingerprint of what is asked for."""
    if not (run.config.exists() and run.has_saved()):
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
    """The size a pipeline's pictures have by default, from its configs alone."""
    try:
        kind = json.loads((folder / "model_index.json").read_bytes()).get("_class_name")
        if kind in NATIVE_SIZES:
            return NATIVE_SIZES[kind]
        sample = json.loads((folder / "transformer" / "config.json").read_bytes()).get("sample_size")
        blocks = json.loads((folder / "vae" / "config.json").read_bytes())["block_out_channels"]
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
    from halation.models.pipelines.library_messages import silence

    silence()  # before the families are imported, which is when some of it is said
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.models.pipelines.training.lora import Lora

    height, width = config.image_size
    lora = None
    if config.lora_rank:
        lora = Lora(rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets)
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
    step = LARGE_STEP if min(config.image_size) >= SMALL_SIDE else SMALL_STEP
    needed = denoiser.size_multiple
    return -(-step // needed) * needed


def cache_texts(
    world: World, config: TrainConfig, run: Run, denoiser: Denoiser, source: Pictures, prompts: Sequence[str]
) -> None:
    """Encode captions and prompts once, all ranks together; the text encoders are gone from the device afterwards."""
    from halation.data import text_cache as cache
    from halation.distributed.world import alive, on_first
    from halation.models.pipelines.training.denoiser import PipelineDenoiser

    assert isinstance(denoiser, PipelineDenoiser)
    folder = Path(config.cache_dir) if config.cache_dir else run.folder / "cache"
    texts = list(dict.fromkeys(["", *source.every_caption(), *prompts]))
    made_by = denoiser.text_fingerprint()
    place = folder / f"texts_{hashlib.sha256(made_by.encode()).hexdigest()[:12]}"

    def look(beat: Callable[[], None]) -> int:
        return alive(lambda: cache.missing(texts, place, made_by), beat)

    num_missing = on_first(world, "looking for text embeddings", look, config.dist_timeout_s)
    if num_missing:
        log.info("encoding %d texts once, into %s", num_missing, place)
        num_cut = sum(denoiser.truncated(texts[:MOST_LOOKED_AT])) if world.first else 0
        if num_cut:
            log.warning(
                "%d of %d texts are longer than the model reads; their ends have no effect", num_cut, len(texts)
            )
        _encode(world, config, denoiser, texts, place, made_by)
    denoiser.use_texts(cache.open(place, made_by, verify=False))


def _encode(
    world: World, config: TrainConfig, denoiser: PipelineDenoiser, texts: Sequence[str], place: Path, made_by: str
) -> None:
    import torch

    from halation.data import text_cache as cache
    from halation.distributed.world import Vigil
    from halation.training.setup import bar

    with Vigil(world, "encoding texts", config.dist_timeout_s) as vigil, contextlib.ExitStack() as stack:
        error = ""
        try:
            tell = stack.enter_context(bar(world, config, "encoding texts", vigil.beat, "texts"))
            encode = stack.enter_context(denoiser.encoders(world.device))
            part = (world.rank, world.size)
            cache.build(texts, place, _finite(encode), fingerprint=made_by, part=part, on_progress=tell)
        except (HalationError, OSError) as problem:
            error = refused_by_system(problem) or str(problem)
        except (torch.OutOfMemoryError, MemoryError):
            error = (
                f"the text encoders do not fit into the memory of {world.device}; use --dtype bf16, "
                "or build the cache on a larger device and name it by --cache_dir"
            )
        words = [word for word in vigil.finish(error) if word]
    if words:
        failure = HalationError(words[0])
        failure.exit_code = InputError.exit_code
        raise failure


def _finite(encode: Encode) -> Encode:
    """A cache of what overflowed would make every later loss NaN, and nobody would look for it there."""

    def checked(texts: Sequence[str]) -> Mapping[str, Tensor]:
        rows = encode(texts)
        for row, text in enumerate(texts):
            if not all(bool(value[row].isfinite().all()) for value in rows.values()):
                raise InputError(
                    f"the text encoders answer {text[:80]!r} with numbers that are not finite",
                    "finite embeddings",
                    "use --dtype bf16 or fp32; fp16 overflows in T5",
                )
        return rows

    return checked
