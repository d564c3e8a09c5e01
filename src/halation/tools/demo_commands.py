"""The commands that the demo runs, word by word as it prints them, and the list of prompts that one of them reads."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halation.config import as_json
from halation.data.streets import DRIVING_PROMPTS, Streets
from halation.distributed import launcher
from halation.evaluation.config import EvaluateConfig
from halation.generation.config import GenerateConfig
from halation.runs.folder import publish
from halation.tools.config import DemoConfig
from halation.training.config import TrainConfig

MODEL = "streets-64"
MODEL_SIZE = 64
NUM_PICTURES = 32
NUM_REFERENCE = 1000
WARMUP_STEPS = 40
LINE_LENGTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where the demo puts what it makes."""

    folder: Path

    @property
    def training(self) -> Path:
        return self.folder / "training"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.png"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.csv"

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def uninterrupted(self) -> Path:
        return self.folder / "uninterrupted"

    @property
    def scores(self) -> Path:
        """Inside what it is about, because there the gallery finds it."""
        return self.pictures / "scores.json"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def page(self) -> Path:
        return self.folder / "gallery.html"


def train_words(config: DemoConfig) -> list[str]:
    """A training that shows something within two minutes on two cores."""
    settings = TrainConfig(
        output_dir=Places(folder=config.output_dir).training,
        data="streets",
        model="tiny",
        image_size=(32, 32),
        patch_size=4,
        num_register_tokens=2,
        n_steps=config.n_steps,
        batch_size=8,
        lr=2e-3,
        betas=(0.9, 0.95),
        warmup_steps=WARMUP_STEPS,
        decay_steps=decay_steps(config),
        ema_decay=0.98,
        ckpt_every=-(-config.n_steps // 6),
        keep_last=2,
        heldout_pictures=16,
        sample_steps=20,
        guidance_scale=2.0,
        nproc=num_ranks(config),
        progress=config.progress,
    )
    return ["train", *flags(settings, TrainConfig())]


def decay_steps(config: DemoConfig) -> int:
    """Over all steps but those that warm up: so the number of steps is part of what a demo is begun with."""
    return max(1, config.n_steps - WARMUP_STEPS)


def generate_words(config: DemoConfig, folder: Path, num_workers: int) -> list[str]:
    """Lines and no bars, because a bar that is killed leaves a terminal without its cursor; one picture a sheet, so that a kill finds
    something left to draw on a fast machine too."""
    settings = GenerateConfig(
        prompts_csv=str(Places(folder=config.output_dir).prompts),
        model_path=MODEL,
        output_dir=folder,
        batch_size=1,
        nproc=num_workers,
        progress="plain" if config.progress in ("auto", "rich") else config.progress,
    )
    return ["generate", *flags(settings, GenerateConfig())]


def evaluate_words(config: DemoConfig) -> list[str]:
    places = Places(folder=config.output_dir)
    settings = EvaluateConfig(
        generated=str(places.pictures),
        reference=("streets",),
        metrics=("fd", "kid", "agreement"),
        allow_few=True,
        num_reference=NUM_REFERENCE,
        cache_dir=places.cache,
        output=places.scores,
        progress=config.progress,
    )
    return ["evaluate", *flags(settings, EvaluateConfig())]


def page_words(config: DemoConfig) -> list[str]:
    places = Places(folder=config.output_dir)
    return ["gallery", str(places.training), str(places.pictures), "--export", str(places.page)]


def live_words(config: DemoConfig) -> list[str]:
    return ["gallery", str(config.output_dir)]


def num_ranks(config: DemoConfig) -> int:
    """What --nproc of the training says: 0 is all GPUs."""
    return config.nproc or (0 if launcher.num_gpus() else 2)


def num_workers() -> int:
    """Two, where there are two GPUs or none: one GPU has room for one."""
    return 1 if launcher.num_gpus() == 1 else 2


def flags(settings: Any, defaults: Any) -> list[str]:
    """What has to be said to a command for these settings."""
    words: list[str] = []
    usual: Mapping[str, Any] = as_json(defaults)
    for name, value in as_json(settings).items():
        if value == usual[name]:
            continue
        words.append(f"--{name}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def written(words: Sequence[str]) -> str:
    """A command as a person types it, over several lines where it is long; a flag stays with its values."""
    groups = [program()]
    for word in words:
        if word.startswith("--"):
            groups.append(word)
        else:
            groups[-1] += f" {shlex.quote(word)}"
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) < LINE_LENGTH:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return " \\\n".join(lines)


def program() -> str:
    """How to call this program again: by its name only where a shell would find it."""
    beside = Path(sys.executable).with_name("halation")
    if shutil.which("halation") or not beside.exists():
        return "halation"
    return shlex.quote(os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside))


def write_prompts(path: Path) -> None:
    """The prompts of every training's samples, then captions of scenes that no model was trained on."""
    scenes = Streets(MODEL_SIZE, MODEL_SIZE)
    captions = [*DRIVING_PROMPTS, *(scenes.heldout(k).caption for k in range(NUM_PICTURES - len(DRIVING_PROMPTS)))]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image_id", "caption"])
    rows.writerows([f"street_{number:02d}", caption] for number, caption in enumerate(captions, start=1))
    publish(path, text.getvalue().encode())
