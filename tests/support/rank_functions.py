"""Small configs, and functions for ranks of a pool: trainings and distillations.

tests/conftest.py and the fork server of the pool import this module, so it imports torch only inside functions.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

from halation.distillation.config import DistillConfig
from halation.distributed import launcher
from halation.runs.run_folder import scratch_folder
from halation.training.config import TrainConfig, fill_dit_defaults

PROMPTS = ("a red car in a city", "a rainy street at night", "three trees", "a highway", "a parking lot at dusk")
SIDE = 32
_folders = contextlib.ExitStack()
atexit.register(_folders.close)


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    """A training of a second: a tiny model, few pixels, two sampling steps, no tracker."""
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
    config = TrainConfig(**settings | changes)
    return config if config.model_path else fill_dit_defaults(config)


def train(world: Any, config: TrainConfig) -> None:
    """A whole training in an existing world, as on ranks that torchrun started."""
    _ignore_numpy_copy_warning()
    from halation.training import command as job
    from halation.training.session import TrainingSession

    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        session.run()


def distill(world: Any, config: Any) -> None:
    """A whole distillation; `config` is resolved."""
    _ignore_numpy_copy_warning()
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
    """A training in which one rank gets SIGTERM so that all stop at `step`; the exit code, 0 at the end."""
    from halation.errors import Interrupted
    from halation.training import command as job
    from halation.training.session import TrainingSession

    class Signalled(TrainingSession):
        def _train(self) -> None:
            self._send(self.train_state.step)
            super()._train()

        def _log(self, report: Any, *arguments: Any) -> None:
            super()._log(report, *arguments)
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


def _ignore_numpy_copy_warning() -> None:
    """PixArt's scheduler passes tensors to numpy in a way that numpy 2 deprecates."""
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword", DeprecationWarning)


def run_job(world: Any, name: str, config: Any, rendezvous: Path) -> None:
    """`halation NAME` as on ranks of the launcher. It creates its own world, so that of the pool is closed first."""
    import importlib

    from halation.cli import COMMANDS

    _ignore_numpy_copy_warning()
    world.close()
    os.environ[launcher.RENDEZVOUS_ENV] = str(rendezvous)
    os.environ[launcher.DEVICE_ENV] = "cpu"
    job: Any = importlib.import_module(f"halation.{COMMANDS[name].module}")
    for folder in ("output_dir", "cache_dir"):  # the command creates it before it starts its ranks
        if getattr(config, folder, None) is not None:
            getattr(config, folder).mkdir(parents=True, exist_ok=True)
    job.run_rank(job._resolve_config(config)[0] if name == "sample" else config)


@functools.cache
def tiny_teacher(side: int = SIDE, guidance_scale: float = 2.0) -> Path:
    """The folder of an export of a tiny DiT whose every weight reaches the pixels."""
    import torch
    from safetensors.torch import save_file

    from halation.models.dit.denoiser import create_dit

    denoiser = create_dit("tiny", height=side, width=side, captions=PROMPTS, patch_size=8).init_weights(7)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():  # zeros hide what is not connected
        for parameter in denoiser.module.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.1, generator=generator)
    folder = _folders.enter_context(scratch_folder("halation_teacher_"))
    sampling = {
        "height": side,
        "width": side,
        "guidance_scale": guidance_scale,
        "sampler": "multistep",
        "time_shift": 1.0,
    }
    (folder / "config.json").write_text(json.dumps(denoiser.describe() | {"sampling": sampling}))
    save_file(dict(denoiser.module.state_dict()), folder / "model.safetensors")
    return folder


def write_prompts(folder: Path, num: int = 5) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in PROMPTS[:num]))
    return path


def small_distill_config(folder: Path, teacher: Path | None = None, **changes: Any) -> DistillConfig:
    """A distillation of a second, with its settings resolved as by the command."""
    from halation.distillation import command as distill

    settings: dict[str, Any] = {
        "output_dir": folder,
        "teacher_path": str(teacher or tiny_teacher()),
        "data_path": str(write_prompts(folder.parent / "lists")),
        "batch_size": 2,
        "n_steps": 2,
        "teacher_steps": 4,
        "teacher_states": 4,
        "student_steps": 2,
        "ckpt_every": 1,
        "keep_last": 0,
        "log_every": 1,
        "lr": 1e-2,
        "ema_decay": 0.5,
        "sample_prompts": PROMPTS[:2],
        "sample_steps": 2,
        "report_to": ("none",),
        "progress": "none",
        "dist_timeout_s": 30.0,
    }
    settings |= changes
    if settings.get("num_epochs"):
        del settings["n_steps"]
    if settings.get("objective", "velocity") == "velocity":
        settings["student_steps"] = None
    return distill.resolve_config(DistillConfig(**settings))
