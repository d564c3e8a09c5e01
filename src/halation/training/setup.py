"""The parts of a training run, each built from the config and checked before the next: world, data, model, prompts, global batch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halation import plan
from halation.data import latent_cache
from halation.data.aspect_buckets import bucket_words
from halation.data.dataset import Pictures
from halation.data.open import check_pictures, open_pictures
from halation.data.shuffle import BucketOrder, Order
from halation.data.streets import DRIVING_PROMPTS, Streets
from halation.distributed.engines.ddp_fsdp import EngineSettings
from halation.distributed.launcher import computes_on
from halation.distributed.world import Vigil, World, on_first
from halation.errors import HalationError, InputError, refused_by_system
from halation.models.autoencoder import Space
from halation.models.bundled import advice, embedded_names, meant
from halation.models.checkpoints import load_denoiser
from halation.models.denoiser import OWN, Habits
from halation.models.dit.denoiser import DiTDenoiser, new_dit
from halation.models.dit.network import SIZES
from halation.runs import folder as runs
from halation.sampling.denoiser_sampler import SampleSettings
from halation.step_progress import Progress
from halation.training.config import TrainConfig
from halation.training.loop import StepSettings

log = logging.getLogger(__name__)

NUM_DEFAULT_PROMPTS = 8
PATIENCE_S = 2.0


def confirm_device(world: World, config: TrainConfig, run: runs.Run, space: Space) -> None:
    """Record what computes and what encodes; a resumed run on another GPU or autoencoder is not the run it was."""
    everybody = world.exchange(computes_on(str(world.device)))
    if len(set(everybody)) > 1:
        log.warning(
            "a mixed world: %s; pictures round differently on different devices", ", ".join(sorted(set(everybody)))
        )

    def record(_beat: Callable[[], None]) -> None:
        runs.confirm(run, {"computes on": everybody[0], "space": space.fingerprint()}, config.accept_changes)

    on_first(world, "recording the device", record, config.dist_timeout_s)


def open_source(world: World, config: TrainConfig, run: runs.Run, space: Space, bucket_multiple: int = 0) -> Pictures:
    """The pictures, looked at once by rank 0 for all, and cached where asked; in buckets where their sides have a multiple."""
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

    def opened() -> Pictures:
        source = open_pictures(
            config.data,
            height,
            width,
            config.heldout_pictures,
            max_pictures=config.max_pictures,
            bucket_multiple=bucket_multiple,
        )
        if isinstance(source, Streets) and encodes:  # scenes cost nothing until they are encoded
            num_heldout = min(source.num_heldout, config.heldout_pictures)
            return Streets(height, width, num_train=source.num_train, num_heldout=num_heldout)
        return source

    def look(beat: Callable[[], None]) -> None:
        source = opened()
        with bar(world, config, "reading", beat, shared=False) as tell:
            check_pictures(source, cache, tell)
        runs.confirm(run, {"data fingerprint": source.fingerprint}, config.accept_changes)

    on_first(world, "reading the data", look, config.dist_timeout_s)
    source = opened()
    check_pictures(source, cache, quiet=True)  # remembered by now, and told
    for line in bucket_words(source, bucket_multiple) if world.first else ():
        log.warning("%s", line)
    return _cached(world, config, source, space, kind, cache) if kind in ("pixels", "latents") else source


def _cached(world: World, config: TrainConfig, source: Pictures, space: Space, kind: str, folder: Path) -> Pictures:
    """Encode once, on all ranks, into memory-mapped shards."""
    fingerprint: dict[str, Any] = {
        "source": source.fingerprint,
        "kind": kind,
        "space": space.fingerprint() if kind == "latents" else "pixels",
    }

    # Exact latents where training is exact; where it computes in half precision they would only take room.
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
                "the autoencoder made latents that are not finite", "finite ones", "check the model's files"
            )
        return encoded

    if kind == "latents":
        space.to(world.device)
    with (
        Vigil(world, "caching the data", config.dist_timeout_s) as vigil,
        bar(world, config, "caching", vigil.beat) as tell,
    ):
        error = ""
        try:
            latent_cache.build(
                source,
                folder / kind,
                encode if kind == "latents" else None,
                fingerprint=fingerprint,
                part=(world.rank, world.size),
                encode_size=_encode_size(source),
                num_workers=config.num_workers,
                on_progress=tell,
            )
        except (HalationError, OSError) as problem:
            error = refused_by_system(problem) or str(problem)
        except (torch.OutOfMemoryError, MemoryError):
            error = (
                f"encoding pictures of {source.height} x {source.width} does not fit into the memory of {world.device}"
            )
        words = vigil.finish(error)
    if any(words):
        failure = HalationError(next(word for word in words if word))
        failure.exit_code = InputError.exit_code
        raise failure
    return latent_cache.open(folder / kind, fingerprint, verify=world.local_rank == 0)


def _encode_size(source: Pictures) -> int:
    """Pictures in one call of the autoencoder: by their size alone, so that a latent depends on nothing else."""
    return max(1, min(latent_cache.CHUNK, latent_cache.CHUNK * 256**2 // (source.height * source.width)))


@contextlib.contextmanager
def bar(
    world: World,
    config: TrainConfig,
    title: str,
    beat: Callable[[], None],
    what: str = "pictures",
    shared: bool = True,
) -> Iterator[Callable[[int, int], None]]:
    """Progress of rank 0, which has one share of several where work is shared; shown only where it takes long enough to wonder."""
    words = f"{what}, the first of {world.size} shares" if shared and world.size > 1 else what
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        bars: list[Progress] = []

        def tell(done: int, total: int) -> None:
            beat()
            if not bars and world.first and time.monotonic() - began > PATIENCE_S:
                bars.append(stack.enter_context(Progress(config.progress, total, done, title)))
            for shown in bars:
                shown.update(done, words, {})

        yield tell


def new_denoiser(config: TrainConfig, source: Pictures, space: Space) -> DiTDenoiser:
    """A model of a named size, or the one in a folder, if it fits the data."""
    if config.model not in SIZES:
        folder = meant(config.model)
        if not folder.is_dir():
            raise InputError(
                f"--model {config.model}",
                f"one of {', '.join(SIZES)}, {', '.join(embedded_names())}, or the folder of an export or checkpoint",
                advice(config.model, "check the name or path"),
            )
        denoiser = load_denoiser(folder, raw=False)
        if not isinstance(denoiser, DiTDenoiser):
            raise InputError(
                f"--model {config.model} is a run that fine-tuned a pipeline",
                "a DiT of Halation",
                "train on from its export: --model_path RUN/export",
            )
        return _refuse_misfit(denoiser, config, source, space)
    height, width = config.image_size
    fresh = new_dit(
        config.model,
        height=height,
        width=width,
        captions=() if source.class_names else source.captions(),
        class_names=source.class_names,
        space=space,
        patch_size=config.patch_size or None,
        num_register_tokens=config.num_register_tokens,
    )
    return fresh.initialise(config.seed)


def _refuse_misfit(denoiser: DiTDenoiser, config: TrainConfig, source: Pictures, space: Space) -> DiTDenoiser:
    if denoiser.class_names and denoiser.class_names != source.class_names:
        raise InputError(
            f"--model {config.model} knows {len(denoiser.class_names)} classes, --data {config.data} has {len(source.class_names)} others",
            "a data set with the classes the model was trained on",
            "choose other data, or a model that reads text",
        )
    for name, asked in (("num_register_tokens", config.num_register_tokens), ("patch_size", config.patch_size)):
        if asked and asked != getattr(denoiser.config, name):
            raise InputError(
                f"--{name} {asked} with --model {config.model}",
                f"{getattr(denoiser.config, name)}, which that model was made with",
                f"leave --{name} out",
            )
    if denoiser.space.fingerprint() != space.fingerprint():
        raise InputError(
            f"--model {config.model} works in another space than --vae {config.vae or '(none: pixels)'}",
            "the autoencoder the model was trained with",
            "give the same --vae, or none for a model of pixels",
        )
    return denoiser


def order(seed: int, source: Pictures, global_batch: int) -> Order | BucketOrder:
    """The order of the data: by whole global batches of one shape where pictures lie in buckets."""
    buckets = getattr(source, "bucket_of", None)
    return Order(seed, source.num_train) if buckets is None else BucketOrder(seed, buckets, global_batch)


def default_prompts(source: Pictures, data: str) -> tuple[str, ...]:
    """The driving prompts, class names, or the first different captions of a folder."""
    if data == "streets":
        return tuple(DRIVING_PROMPTS)
    if source.class_names:
        return source.class_names[:NUM_DEFAULT_PROMPTS]
    return tuple(itertools.islice(dict.fromkeys(source.captions()), NUM_DEFAULT_PROMPTS))


def global_batch(world: World, config: TrainConfig, run: runs.Run) -> int:
    """Pictures a step, decided when the run began: other ranks share them out anew, so the loss goes on as it was."""

    def recall(_beat: Callable[[], None]) -> int:
        known = runs.read_record(run)["fixed"].get("global batch")
        asked = config.batch_size * world.size * config.accumulate
        size = asked if config.accept_changes else int(known or asked)
        runs.confirm(run, {"global batch": size}, config.accept_changes)
        return size

    return int(on_first(world, "the global batch", recall, config.dist_timeout_s))


def sample_settings(config: TrainConfig, prompts: tuple[str, ...], habits: Habits) -> SampleSettings:
    height, width = config.image_size
    return SampleSettings(
        prompts=prompts,
        height=height,
        width=width,
        steps=config.sample_steps,
        seed=config.sample_seed,
        same_seed=config.same_seed,
        sampler=OWN if config.model_path else config.sampler,
        guidance_scale=habits.guidance_scale if config.guidance_scale is None else config.guidance_scale,
        sheet_size=config.sample_batch_size,
        dtype=config.dtype,
        time_shift=config.time_shift or habits.time_shift,
        threads=config.threads,
        compile=config.compile,
        deterministic=config.deterministic,
    )


def engine_settings(world: World, config: TrainConfig, global_batch: int) -> EngineSettings:
    """What an engine wants to know besides the module."""
    number, rows = plan.micro_batches(global_batch, world.size, config.batch_size)
    return EngineSettings(
        offload_optimizer=config.offload_optimizer,
        zero_stage=config.zero_stage,
        deepspeed_config=config.deepspeed_config,
        global_batch=global_batch,
        num_micro_batches=number,
        rows=rows,
        grad_clip=config.grad_clip,
        dtype=config.dtype,
    )


def step_settings(config: TrainConfig, global_batch: int) -> StepSettings:
    return StepSettings(
        global_batch=global_batch,
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        grad_clip=config.grad_clip,
        dtype=config.dtype,
        nan_policy=config.nan_policy,
    )
