"""What ranks of a pool are asked to do in several tests: whole trainings and drawings, small enough to take a second."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

from halation.distributed import launcher
from halation.training.config import TrainConfig

PROMPTS = ("a red car in a city", "a rainy street at night", "three trees", "a highway", "a parking lot at dusk")


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    """A training of a second: a tiny model, few pixels, two sampling steps, nothing but files."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "data": "streets",
        "model": "tiny",
        "image_size": (32, 32),
        "patch_size": 8,
        "batch_size": 2,
        "n_steps": 2,
        "ckpt_every": 0,
        "keep_last": 0,
        "log_every": 1,
        "validation_images": 4,
        "sample_prompts": PROMPTS[:2],
        "sample_steps": 2,
        "report_to": ("none",),
        "progress": "none",
        "dist_timeout_s": 30.0,
    }
    return TrainConfig(**settings | changes)


def train(world: Any, config: TrainConfig) -> None:
    """A whole training in a world that stands already, by the road that torchrun's ranks take."""
    _let_libraries_be_old()
    from halation.training import command as job
    from halation.training.session import TrainingSession

    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        session.run()


def distill(world: Any, config: Any) -> None:
    """The same for a distillation, whose settings are written out already."""
    _let_libraries_be_old()
    from halation.distillation import command as job
    from halation.training import command as train
    from halation.training.session import TrainingSession

    with (
        train.open_run_on_rank_zero(config, world, "distill", job.open_record),
        TrainingSession(world, config, job.new_task) as session,
    ):
        session.prepare()
        session.run()


def train_until(world: Any, config: TrainConfig, step: int, rank: int = 0) -> int:
    """A training of which one rank alone is sent SIGTERM so that all stop at `step`; the exit code, 0 where it ran to its end."""
    from halation.errors import Interrupted
    from halation.training import command as job
    from halation.training.session import TrainingSession

    class Signalled(TrainingSession):
        def _train(self) -> None:
            self._send(self.train_state.step)
            super()._train()

        def _log(self, report: Any, window: Any) -> None:
            super()._log(report, window)
            self._send(report.step)

        def _send(self, done: int) -> None:
            if done == step - 1 and self.world.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    with job.open_run_on_rank_zero(config, world), Signalled(world, config) as session:
        session.prepare()
        try:
            session.run()
        except Interrupted as interruption:
            assert session.train_state.step == step
            return interruption.exit_code
    return 0


def _let_libraries_be_old() -> None:
    """PixArt's scheduler hands tensors to numpy in a way that numpy 2 will not take for ever."""
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword", DeprecationWarning)


def run_job(world: Any, name: str, config: Any, rendezvous: Path) -> None:
    """`halation NAME` as the launcher's ranks run it: it joins a world of its own, so the pool's is closed first."""
    import importlib

    from halation.cli import COMMANDS

    _let_libraries_be_old()
    world.close()
    os.environ[launcher.RENDEZVOUS_ENV] = str(rendezvous)
    os.environ[launcher.DEVICE_ENV] = "cpu"
    job: Any = importlib.import_module(f"halation.{COMMANDS[name].module}")
    for folder in ("output_dir", "cache_dir"):  # the command makes it before it starts its ranks
        if getattr(config, folder, None) is not None:
            getattr(config, folder).mkdir(parents=True, exist_ok=True)
    job.run_rank(job._resolve_config(config)[0] if name == "sample" else config)
