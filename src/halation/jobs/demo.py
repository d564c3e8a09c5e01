"""`halation demo`: the whole job in a few minutes on a laptop, ending in one picture of the progress and one page of the run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halation.config.demo import DemoConfig
from halation.config.fields import as_json
from halation.config.gallery import GalleryConfig
from halation.config.train import TrainConfig
from halation.data.streets import DRIVING_PROMPTS
from halation.errors import InputError
from halation.gallery.catalog import id_of
from halation.gallery.export import export
from halation.gallery.scores import Scores
from halation.jobs import train
from halation.jobs.gallery import catalog_of
from halation.pictures import progress_figure
from halation.png import encode_png, read_png
from halation.runs import Metrics, Run, publish
from halation.world import launch

MAX_ROWS = 8


def run(config: DemoConfig) -> int:
    """Train, then put the samples of all saved steps into one picture, and the run into one page."""
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
    page = write_page(config.output_dir)
    _say(
        f"\nprogress    {path.resolve()}\n            rows are steps, columns are prompts; done in {time.monotonic() - began:.0f} s"
        f"\npage        {page.resolve()}\n            samples, curves and settings in one file: open it in a browser"
        f"\nlive        {program()} gallery {shlex.quote(str(config.output_dir))}"
        "\n            the same while a run goes on" + ("" if has_web() else ", after pip install 'halation[web]'")
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


def write_page(folder: Path) -> Path:
    """gallery.html: the run as one page."""
    catalog = catalog_of([folder])
    scores = Scores(catalog)
    catalog.refresh()
    scores.refresh()
    entry = catalog.get(id_of(folder))
    assert entry is not None, f"{folder} holds no run"
    return export(entry, catalog, scores, folder / "gallery.html", GalleryConfig().export_pictures).path


def program() -> str:
    """How to call this program again: by its name only where a shell would find it."""
    beside = Path(sys.executable).with_name("halation")
    if shutil.which("halation") or not beside.exists():
        return "halation"
    return shlex.quote(os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside))


def has_web() -> bool:
    return all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))


def _picture(path: Path) -> NDArray[np.uint8] | None:
    return read_png(path)[0] if path.exists() else None


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
