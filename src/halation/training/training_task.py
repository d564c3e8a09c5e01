"""The task of a training run: its model, its data and its batches.

All randomness of a batch is a function of (seed, position in the order of the data).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation import work_division
from halation.data.dataset_protocol import ImageDataset
from halation.data.prefetch import BatchPrefetcher, BucketOrder, ShuffledOrder
from halation.data.streets import DRIVING_PROMPTS
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.flow.ema import Ema
from halation.flow.paths import times_from_uniform
from halation.flow.samplers import drop_conditions
from halation.flow.seeded_noise import training_draw
from halation.logging_setup import log_duration
from halation.models.autoencoder import LatentSpace, PixelSpace
from halation.models.denoiser import PIPELINE_SCHEDULER, Condition, Denoiser, ImageSpace, PromptEncoder, null_condition
from halation.models.dit.network import SIZES
from halation.prompt_files import parse_rows
from halation.runs.run_folder import RunFolder
from halation.sampling.all_rank_sampler import SampleSettings
from halation.sampling.sample_folder import SampleFolder
from halation.training import build_components, pipeline_finetuning
from halation.training.config import TrainConfig
from halation.training.loop import MODEL, MicroBatch, TrainedNetwork, TrainState, denoising_objective, only_model

MEMORY_CACHE_BYTES = 2 * 2**30
NUM_DEFAULT_PROMPTS = 8
LOADER_THREADS = 4
"""With a GPU: the loader generates the noise, and a small model consumes thousands of images per second."""
EngineFactory = Callable[[torch.nn.Module, list[torch.nn.Module]], Engine]
"""Takes a module and its shard units, returns an engine with an optimizer."""
TaskFactory = Callable[[World, Any, RunFolder], "TrainingTask"]
"""Takes world, config and run folder, returns the task; each command has its own."""


class TrainingTask:
    """Training of one model on images with the denoising objective."""

    comparison_folder: SampleFolder | None = None
    """Folder of images to show next to the samples."""
    epoch_interval = 0
    """Epochs between scheduled epoch ends, or 0 to derive it from the other intervals."""

    def __init__(self, world: World, config: TrainConfig, run: RunFolder) -> None:
        self.world = world
        self.config = config
        self.run = run

    @property
    def title(self) -> str:
        """A short description for the log."""
        return f"training {Path(self.config.model_path).name or self.config.model}"

    item_name = "image"
    """Noun for one item of the data."""

    def open(self) -> None:
        """Open model and data, which depend on each other."""
        world, config = self.world, self.config
        self.denoiser: Denoiser
        self.source: ImageDataset
        if config.model_path:
            with log_duration(f"opening {config.model_path}"):
                pipeline = pipeline_finetuning.open_denoiser(config, world.device)
            build_components.record_device_and_space(world, config, self.run, pipeline.space)
            multiple = pipeline_finetuning.bucket_multiple(config, pipeline)
            with log_duration(f"reading {config.data}"):
                self.source = build_components.open_source(world, config, self.run, pipeline.space, multiple)
            self.denoiser = pipeline
            return
        space: ImageSpace = LatentSpace.load(config.vae) if config.vae else PixelSpace()
        build_components.record_device_and_space(world, config, self.run, space)
        with log_duration(f"reading {config.data}"):
            self.source = build_components.open_source(world, config, self.run, space)
        with log_duration(f"opening {config.model}"):
            self.denoiser = build_components.new_denoiser(config, self.source, space)

    def _default_prompts(self) -> tuple[str, ...]:
        """The driving prompts for streets; class names or the first distinct captions of a folder."""
        if self.config.data == "streets":
            return tuple(DRIVING_PROMPTS)
        names = self.source.class_names or dict.fromkeys(self.source.captions())
        return tuple(itertools.islice(names, NUM_DEFAULT_PROMPTS))

    def resolve_num_steps(self, global_batch: int) -> TrainConfig:
        """Return the config, with the number of steps filled in if it depends on the data."""
        return self.config

    def sample_settings(self) -> SampleSettings:
        """Return the sample settings; default prompts depend on the data."""
        config, defaults = self.config, self.denoiser.defaults
        height, width = config.image_size
        self.denoiser.sample_shape(height, width)
        prompts = config.sample_prompts or self._default_prompts()
        if self.source.class_names and not config.model_path:
            self.denoiser.encode_prompts(prompts)  # raise for an unknown class now, not at the first checkpoint
        settings = SampleSettings(
            prompts=prompts,
            rows=parse_rows(prompts, config.sample_rows),
            height=height,
            width=width,
            steps=config.sample_steps,
            seed=config.sample_seed,
            same_seed=config.same_seed,
            sampler=PIPELINE_SCHEDULER if config.model_path else config.sampler,
            guidance_scale=defaults.guidance_scale if config.guidance_scale is None else config.guidance_scale,
            batch_size=config.sample_batch_size,
            dtype=config.dtype,
            time_shift=config.time_shift or defaults.time_shift,
            threads=config.threads,
            compile=config.compile,
            deterministic=config.deterministic,
        )
        settings.check_rows(self.denoiser)
        return settings

    def has_initial_samples(self) -> bool:
        """Return True if samples before the first step show something: the model has learned before."""
        return bool(self.config.model_path) or self.config.model not in SIZES

    def prepare(self, settings: SampleSettings) -> None:
        """Hook that runs after texts are encoded and before the model is moved to its device."""

    def build_networks(self, engine: Engine, ema: Ema | None, build_engine: EngineFactory) -> dict[str, TrainedNetwork]:
        """Return the trained networks; `engine` already has the model."""
        return {MODEL: TrainedNetwork(engine=engine, ema=ema, objective=denoising_objective(self.denoiser))}

    def active_networks(self, step: int) -> tuple[str, ...]:
        """Names of the networks that a step updates."""
        return only_model(step)

    def batch_transform(self, num_real: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return the transform from images and captions to tensors; it runs ahead of the step."""
        config, habits = self.config, self.denoiser.defaults
        return BatchTransform(
            self.denoiser,
            seed=config.seed,
            dropout=config.caption_dropout,
            time_sampling=config.time_sampling or habits.time_sampling,
            time_shift=config.time_shift or habits.time_shift,
            num_real=num_real,
            pin=self.world.device.type == "cuda",
        )

    def open_loader(self, train_state: TrainState, global_batch: int) -> BatchPrefetcher:
        """Prefetch this rank's batches from the current step to the last one."""
        world, config = self.world, self.config
        buckets = getattr(self.source, "bucket_of", None)
        order: ShuffledOrder | BucketOrder
        if buckets is None:
            order = ShuffledOrder(config.seed, self.source.num_train)
        else:  # whole global batches of one shape
            order = BucketOrder(config.seed, buckets, global_batch)
            # Rounds up only after the global batch was changed (--accept_changes).
            train_state.num_images = -(-train_state.num_images // global_batch) * global_batch
        num_threads = LOADER_THREADS if world.device.type == "cuda" else 1
        return BatchPrefetcher(
            self.source,
            order,
            positions(
                train_state.step,
                train_state.num_images,
                config.n_steps,
                global_batch,
                world.size,
                world.rank,
                config.batch_size,
            ),
            num_threads=num_threads,
            depth=max(4, 2 * num_threads),
            num_workers=config.num_workers,
            memory_bytes=0 if config.cache in ("none", "pixels", "latents") else MEMORY_CACHE_BYTES,
            transform=self.batch_transform(len(work_division.rank_range(global_batch, world.size, world.rank))),
        )

    def dummy_batch(self, rows: int) -> MicroBatch:
        """A batch of placeholder rows in the form that the objective takes."""
        height, width = self.config.image_size
        return dummy_batch(self.denoiser, rows, (height, width), self.world.device)


def positions(
    start_step: int, start: int, n_steps: int, global_batch: int, num_ranks: int, rank: int, max_rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (step, positions) of this rank for each remaining step.

    Positions are padded to whole micro-batches.
    """
    num_micro_batches, rows = work_division.micro_batch_layout(global_batch, num_ranks, max_rows)
    share = work_division.rank_range(global_batch, num_ranks, rank)
    padded = np.zeros(num_micro_batches * rows, np.int64)
    padded[: len(share)] = np.arange(share.start, share.stop)
    for step in range(start_step, n_steps):
        yield step, padded + (start + (step - start_step) * global_batch)


@dataclass(frozen=True)
class BatchTransform:
    """Turn a host batch into tensors: noise, times, dropped captions.

    Runs in the threads of the loader, ahead of the step.
    """

    denoiser: Denoiser
    _: KW_ONLY
    seed: int
    dropout: float
    time_sampling: str
    time_shift: float
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        height, width, shape = self._sizes(batch["pixels"])
        draws = [training_draw(self.seed, int(position), shape) for position in batch["positions"]]
        dropped = torch.tensor([d.u_drop < self.dropout for d in draws])
        u_time = torch.tensor([d.u_time for d in draws], dtype=torch.float64)
        tensors = {
            "pixels": torch.from_numpy(batch["pixels"]),
            "noise": torch.from_numpy(np.stack([d.noise for d in draws])),
            "t": times_from_uniform(u_time, self.time_sampling, self.time_shift).float(),  # type: ignore[arg-type]
        }
        condition = encode_conditions(self.denoiser, batch, dropped, (height, width))
        return pack_batch(batch["step"], tensors, condition, self.num_real, self.pin)

    def _sizes(self, pixels: np.ndarray) -> tuple[int, int, tuple[int, ...]]:
        """Height and width of a batch's images, and the shape of the model's tensor for one."""
        if pixels.dtype == np.uint8:
            height, width = pixels.shape[1:3]
            return height, width, self.denoiser.sample_shape(height, width)
        factor = self.denoiser.space.downsampling_factor
        return pixels.shape[2] * factor, pixels.shape[3] * factor, pixels.shape[1:]


def encode_conditions(
    encoder: PromptEncoder,
    batch: Mapping[str, Any],
    dropped: Tensor,
    size: tuple[int, int],
    *,
    from_prompts: bool = False,
) -> Condition:
    """Encode a batch's captions on the CPU; rows that are `dropped` get the null condition.

    With `from_prompts`, conditions are those of sampling. Otherwise they include the original size of the image file.
    """
    captions: list[str] = batch["captions"]
    if from_prompts:
        return drop_conditions(encoder.encode_prompts(captions), null_condition(encoder, len(captions)), dropped)
    condition = encoder.encode_captions(captions, batch["labels"].tolist())
    condition = drop_conditions(condition, null_condition(encoder, len(captions)), dropped)
    return encoder.add_size_condition(condition, torch.from_numpy(batch["originals"]), *size)


def pack_batch(step: int, tensors: dict[str, Tensor], condition: Condition, num_real: int, pin: bool) -> dict[str, Any]:
    """Add conditions and weights to the tensors, and pin them if `pin` is set."""
    tensors = {
        **tensors,
        "weight": (torch.arange(len(tensors["t"])) < num_real).float(),
        **{f"condition/{name}": value for name, value in condition.items()},
    }
    if pin:
        tensors = {name: value.pin_memory() for name, value in tensors.items()}
    return {"step": step, "tensors": tensors}


def to_model_space(space: ImageSpace, pixels: Tensor) -> Tensor:
    """Encode pixels into the model's space; latents pass unchanged."""
    return pixels.float() if pixels.is_floating_point() else space.encode(pixels)


def to_micro_batches(space: ImageSpace, batch: dict[str, Any], rows: int, device: torch.device) -> Sequence[MicroBatch]:
    """Split a batch into micro-batches of `rows` rows on the device, with encoded pixels.

    If a batch has no pixels or no noise, the rows of `x0` or `noise` are empty.
    """
    tensors = {name: value.to(device, non_blocking=True) for name, value in batch["tensors"].items()}
    result = []
    for start in range(0, len(tensors["t"]), rows):
        chunk = {name: value[start : start + rows] for name, value in tensors.items()}
        empty = torch.empty(len(chunk["t"]), 0, device=device)
        with torch.no_grad():
            x0 = to_model_space(space, chunk["pixels"]) if "pixels" in chunk else empty
        result.append(
            MicroBatch(
                x0=x0,
                noise=chunk.get("noise", empty),
                t=chunk["t"],
                condition=_select_prefix(chunk, "condition/"),
                weight=chunk["weight"],
                step=batch["step"],
                extra={name: value.float() for name, value in _select_prefix(chunk, "extra/").items()},
            )
        )
    return result


def _select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def dummy_batch(denoiser: Denoiser, rows: int, size: tuple[int, int], device: torch.device) -> MicroBatch:
    """A batch of placeholder rows of this size, for the pass before the first step."""
    originals = torch.tensor([size] * rows, dtype=torch.int64)
    null = denoiser.add_size_condition(null_condition(denoiser, rows), originals, *size)
    condition = {name: value.to(device) for name, value in null.items()}
    zeros = torch.zeros((rows, *denoiser.sample_shape(*size)), device=device)
    return MicroBatch(
        x0=zeros,
        noise=zeros + 0.5,
        t=torch.full((rows,), 0.5, device=device),
        condition=condition,
        weight=torch.ones(rows, device=device),
    )
