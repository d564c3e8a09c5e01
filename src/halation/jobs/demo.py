"""`halation demo`: the whole job in a few minutes on a laptop, ending in one picture of the progress."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halation.config.demo import DemoConfig
from halation.config.fields import as_json
from halation.config.train import TrainConfig
from halation.data.streets import DRIVING_PROMPTS
from halation.errors import InputError
from halation.jobs import train
from halation.pictures import progress_figure
from halation.png import encode_png, read_png
from halation.runs import Metrics, Run, publish
from halation.world import launch

MAX_ROWS = 8


def run(config: DemoConfig) -> int:
    """Train, then put the samples of all saved steps into one picture."""
    if config.n_steps < MAX_ROWS:
        raise InputError(f"--n_steps {config.n_steps}", f"at least {MAX_ROWS} steps", "leave it out for the default")
    began = time.monotonic()
    settings = settings_for(config)
    _say(
        "Training a small diffusion transformer on embedded street scenes. This is the command:\n\n"
        + command(settings)
        + "\n"
    )
    train.run(settings)
    path = draw_progress(
        Run(config.output_dir), f"{config.n_steps} steps on {settings.nproc or launch.num_gpus()} ranks"
    )
    _say(
        f"\nprogress    {path.resolve()}\n            rows are steps, columns are prompts; done in {time.monotonic() - began:.0f} s"
    )
    return 0


def settings_for(config: DemoConfig) -> TrainConfig:
    """A training that shows something within minutes on two cores."""
    return TrainConfig(
        output_dir=config.output_dir,
        data="streets",
        model="tiny",
        image_size=(32, 32),
        patch_size=4,
        num_register_tokens=2,
        n_steps=config.n_steps,
        batch_size=8,
        lr=2e-3,
        betas=(0.9, 0.95),
        warmup_steps=40,
        decay_steps=max(1, config.n_steps - 40),
        ema_decay=0.98,
        ckpt_every=-(-config.n_steps // 6),
        keep_last=2,
        heldout_pictures=16,
        sample_steps=20,
        guidance_scale=2.0,
        nproc=config.nproc or (0 if launch.num_gpus() else 2),
        progress=config.progress,
    )


def command(settings: TrainConfig) -> str:
    """What a person would type for these settings."""
    words = ["halation train"]
    defaults = as_json(TrainConfig())
    for field in dataclasses.fields(settings):
        value = as_json(settings)[field.name]
        if value != defaults[field.name]:
            values = value if isinstance(value, list) else [value]
            words.append(f"--{field.name} {' '.join(shlex.quote(str(v)) for v in values)}")
    lines, line = [], ""
    for word in words:
        if len(line) + len(word) > 100:
            lines.append(line)
            line = "    "
        line += ("" if not line.strip() else " ") + word
    return " \\\n".join([*lines, line])


def draw_progress(run: Run, title: str) -> Path:
    """progress.png: rows are steps, columns are prompts, the loss below."""
    folders = sorted(run.samples.glob("step_*"))
    chosen = (
        [folders[round(i * (len(folders) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
        if len(folders) > MAX_ROWS
        else folders
    )
    rows = []
    for folder in chosen:
        pictures = [_picture(folder / f"sample_{index:02d}.png") for index in range(len(DRIVING_PROMPTS))]
        rows.append((int(folder.name.removeprefix("step_")), pictures))
    loss = [(row["step"], row["loss"]) for row in Metrics(run.metrics).lines() if "loss" in row]
    path = run.folder / "progress.png"
    publish(path, encode_png(progress_figure(rows, list(DRIVING_PROMPTS), loss, title), {}))
    return path


def _picture(path: Path) -> NDArray[np.uint8] | None:
    return read_png(path)[0] if path.exists() else None


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
