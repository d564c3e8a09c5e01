"""Trackers: scalars and images, one tag a prompt, in TensorBoard and offline wandb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = (
    "train --data streets --model tiny --image_size 32 --patch_size 8 --batch_size 2 --n_steps 2 --ckpt_every 0 "
    "--sample_steps 2 --validation_images 4 --output_dir run --report_to tensorboard wandb --sample_raw --progress none"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a small training with both trackers was started; WANDB_MODE was not set."""
    place = tmp_path_factory.mktemp("tracked")
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    prompts = ["--sample_prompts", "a red car", "two trees"]
    done = subprocess.run(
        [sys.executable, "-m", "halation.cli", *WORDS.split(), *prompts],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return place


def test_tensorboard_has_the_numbers_and_one_image_tag_a_prompt(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"train/loss", "train/lr", "train/pictures_per_s", "train/mfu", "train/memory_gb"} <= set(tags["scalars"])
    assert "heldout/heldout_loss" in tags["scalars"]
    names = {"samples/00 a red car", "samples/01 two trees", "samples_raw/00 a red car", "samples_raw/01 two trees"}
    assert set(tags["images"]) == names
    assert [event.step for event in events.Images("samples/01 two trees")] == [2]


def test_wandb_wrote_an_offline_run_with_the_images_in_it(folder: Path) -> None:
    (run,) = (folder / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    assert len(list(run.rglob("*.png"))) == 4
