"""What a run learns, as far as one learns otherwise than another: its model, its data, its parts, its batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halation.data.dataset_protocol import ImageDataset
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.flow.ema import Ema
from halation.logging_setup import log_duration
from halation.models.autoencoder import LatentSpace, PixelSpace
from halation.models.denoiser import PIPELINE_SCHEDULER, Denoiser, ImageSpace
from halation.runs.run_folder import RunFolder
from halation.sampling.denoiser_sampler import SampleSettings
from halation.sampling.sample_folder import SampleFolder
from halation.training import batch_preparation, build_components, pipeline_finetuning
from halation.training.config import TrainConfig
from halation.training.loop import MODEL, MicroBatch, TrainedNetwork, only_model
from halation.training.objectives import denoising_objective

EngineFactory = Callable[[torch.nn.Module, list[torch.nn.Module]], Engine]
"""A module and its units to an engine with an optimizer."""
TaskFactory = Callable[[World, Any, RunFolder], "TrainingTask"]
"""World, config and run to the task; the command that starts a session chooses it."""


class TrainingTask:
    """A training from images: one model, and what it is asked for is the path's target."""

    comparison_folder: SampleFolder | None = None
    """Where images lie that samples are shown next to."""
    epoch_interval = 0
    """Every how many epochs their end is a date, where that was asked for."""

    def __init__(self, world: World, config: TrainConfig, run: RunFolder) -> None:
        self.world = world
        self.config = config
        self.run = run

    @property
    def title(self) -> str:
        """What is done to what, in a few words."""
        return f"training {Path(self.config.model_path).name or self.config.model}"

    item_name = "image"
    """What data consist of, in a word."""

    def open(self) -> None:
        """Open model and data, which need to know of each other."""
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

    def resolve_num_steps(self, global_batch: int) -> TrainConfig:
        """The config, with the number of steps written out where it follows from the data."""
        return self.config

    def sample_settings(self) -> SampleSettings:
        """How its samples are drawn; prompts that were not given follow from the data."""
        config, defaults = self.config, self.denoiser.defaults
        height, width = config.image_size
        self.denoiser.sample_shape(height, width)
        prompts = config.sample_prompts or build_components.default_prompts(self.source, config.data)
        if self.source.class_names and not config.model_path:
            self.denoiser.encode_prompts(prompts)  # an unknown class is refused now, not at the first checkpoint
        return SampleSettings(
            prompts=prompts,
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

    def prepare(self, settings: SampleSettings) -> None:
        """What is to be done once texts can be read, before the model is on its device."""

    def build_networks(self, engine: Engine, ema: Ema, build_engine: EngineFactory) -> dict[str, TrainedNetwork]:
        """The networks that learn; `engine` has the model already."""
        return {MODEL: TrainedNetwork(engine=engine, ema=ema, objective=denoising_objective(self.denoiser))}

    def active_networks(self, step: int) -> tuple[str, ...]:
        """Which of them a step moves."""
        return only_model(step)

    def batch_transform(self, num_real: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """What makes tensors of images and captions, ahead of the step."""
        config, habits = self.config, self.denoiser.defaults
        return batch_preparation.BatchTransform(
            self.denoiser,
            seed=config.seed,
            dropout=config.caption_dropout,
            time_sampling=config.time_sampling or habits.time_sampling,
            time_shift=config.time_shift or habits.time_shift,
            num_real=num_real,
            pin=self.world.device.type == "cuda",
        )

    def dummy_batch(self, rows: int) -> MicroBatch:
        """Rows that stand for nothing, of the kind the objective takes."""
        height, width = self.config.image_size
        return batch_preparation.dummy_batch(self.denoiser, rows, (height, width), self.world.device)
