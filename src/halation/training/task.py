"""What a run learns, as far as one learns otherwise than another: its model, its data, its parts, its batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halation.data.dataset import Pictures
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import World
from halation.flow.ema import Ema
from halation.models.autoencoder import LatentSpace, PixelSpace, Space
from halation.models.denoiser import Denoiser
from halation.runs.folder import Run
from halation.sampling.denoiser_sampler import SampleSettings
from halation.sampling.files import Place
from halation.training import batches, finetune, setup
from halation.training.config import TrainConfig
from halation.training.loop import MODEL, Part, Rows, model_alone
from halation.training.objectives import denoising

Spread = Callable[[torch.nn.Module, list[torch.nn.Module]], Engine]
"""A module and its units to an engine with an optimizer."""
NewTask = Callable[[World, Any, Run], "Task"]
"""World, config and run to the task; the command that starts a session chooses it."""


class Task:
    """A training from pictures: one model, and what it is asked for is the path's target."""

    beside: Place | None = None
    """Where pictures lie that samples are shown next to."""
    epochs_every = 0
    """Every how many epochs their end is a date, where that was asked for."""

    def __init__(self, world: World, config: TrainConfig, run: Run) -> None:
        self.world = world
        self.config = config
        self.run = run

    @property
    def title(self) -> str:
        """What is done to what, in a few words."""
        return f"training {Path(self.config.model_path).name or self.config.model}"

    item = "picture"
    """What data consist of, in a word."""

    def open(self) -> tuple[Denoiser, Pictures]:
        """Model and data, which need to know of each other."""
        self.denoiser, self.source = self._opened()
        return self.denoiser, self.source

    def _opened(self) -> tuple[Denoiser, Pictures]:
        world, config = self.world, self.config
        if config.model_path:
            opened = finetune.open_denoiser(config, world.device)
            setup.confirm_device(world, config, self.run, opened.space)
            multiple = finetune.bucket_multiple(config, opened)
            return opened, setup.open_source(world, config, self.run, opened.space, multiple)
        space: Space = LatentSpace.load(config.vae) if config.vae else PixelSpace()
        setup.confirm_device(world, config, self.run, space)
        source = setup.open_source(world, config, self.run, space)
        return setup.new_denoiser(config, source, space), source

    def dated(self, global_batch: int) -> TrainConfig:
        """The config, with the number of steps written out where it follows from the data."""
        return self.config

    def sampling(self, prompts: tuple[str, ...]) -> SampleSettings:
        """How its samples are drawn."""
        return setup.sample_settings(self.config, prompts, self.denoiser.habits)

    def prepare(self, settings: SampleSettings) -> None:
        """What is to be done once texts can be read, before the model is on its device."""

    def parts(self, engine: Engine, ema: Ema, spread: Spread) -> dict[str, Part]:
        """The networks that learn; `engine` has the model already."""
        return {MODEL: Part(engine=engine, ema=ema, objective=denoising(self.denoiser))}

    def turn(self, step: int) -> tuple[str, ...]:
        """Which of them a step moves."""
        return model_alone(step)

    def preparer(self, num_real: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """What makes tensors of pictures and captions, ahead of the step."""
        config, habits = self.config, self.denoiser.habits
        return batches.Preparer(
            self.denoiser,
            seed=config.seed,
            dropout=config.caption_dropout,
            time_sampling=config.time_sampling or habits.time_sampling,
            time_shift=config.time_shift or habits.time_shift,
            num_real=num_real,
            pin=self.world.device.type == "cuda",
        )

    def idle(self, rows: int) -> Rows:
        """Rows that stand for nothing, of the kind the objective takes."""
        height, width = self.config.image_size
        return batches.idle(self.denoiser, rows, (height, width), self.world.device)
