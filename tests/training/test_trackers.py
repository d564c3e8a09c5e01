"""Trackers: scalars and images, one tag a prompt, in TensorBoard and offline wandb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halation.config import check_settings
from halation.errors import InputError
from halation.training.config import TrainConfig
from halation.training.reporting import OptionalTracker, TrackedRun, open_trackers

WORDS = (
    "train --data streets --model tiny --image_size 32 --patch_size 8 --batch_size 2 --n_steps 2 --ckpt_every 0 "
    "--sample_steps 2 --validation_images 4 --output_dir run --report_to tensorboard wandb --sample_raw --progress none"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a small training with both trackers was started; WANDB_MODE was not set."""
    place = tmp_path_factory.mktemp("tracked")
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    environment |= {"WANDB_PROJECT": "of the environment", "WANDB_NAME": "night", "WANDB_ENTITY": "environment"}
    prompts = ["--sample_prompts", "a red car", "two trees", "--tracker_entity", "team"]
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
    data = b"".join(path.read_bytes() for path in run.glob("*.wandb"))
    assert b"of the environment" in data, "no flag: the project of the environment"
    assert b"night" in data
    assert b"team" in data, "the flag wins over the environment"


class FailingTracker:
    """A tracker whose server is lost after the first numbers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def log_scalars(self, step: int, values: object) -> None:
        self.calls.append(f"scalars {step}")
        if step > 1:
            raise ConnectionResetError("the server is gone\nwith details")

    def log_images(self, step: int, images: object) -> None:
        self.calls.append(f"images {step}")

    def close(self) -> None:
        self.calls.append("close")


def test_a_tracker_that_fails_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    failing = FailingTracker()
    tracker = OptionalTracker("wandb", lambda: failing)
    for step in (1, 2, 3):
        tracker.log_scalars(step, {"loss": 1.0})
        tracker.log_images(step, {})
    tracker.close()
    assert failing.calls == ["scalars 1", "images 1", "scalars 2"]
    (message,) = caplog.messages
    assert message == (
        "--report_to wandb failed and is switched off, training goes on: ConnectionResetError: the server is gone"
    )


def test_a_tracker_that_cannot_start_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    monkeypatch.chdir(tmp_path)
    run = TrackedRun(folder=tmp_path, step=0, project="", entity="", run_name="", config={})
    trackers = open_trackers(("wandb", "tensorboard"), run)
    assert "--report_to wandb failed and is switched off" in caplog.messages[0]
    for tracker in trackers:
        tracker.log_scalars(1, {"loss": 1.0})
        tracker.log_images(1, {"samples/one": np.zeros((4, 4, 3), np.uint8)})
        tracker.close()
    assert list((tmp_path / "tensorboard").iterdir())
    assert len(caplog.messages) == 1


def test_flags_win_over_the_environment_and_the_environment_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    plain = TrackedRun(folder=tmp_path / "cars", step=0, project="", entity="", run_name="", config={})
    named = TrackedRun(folder=tmp_path / "cars", step=0, project="flag", entity="", run_name="own", config={})
    assert (plain.project_for("WANDB_PROJECT"), plain.name_for("WANDB_NAME")) == ("halation", "cars")
    monkeypatch.setenv("WANDB_PROJECT", "variable")
    monkeypatch.setenv("WANDB_NAME", "night")
    assert (plain.project_for("WANDB_PROJECT"), plain.name_for("WANDB_NAME")) == ("variable", "night")
    assert (named.project_for("WANDB_PROJECT"), named.name_for("WANDB_NAME")) == ("flag", "own")


def test_a_project_or_team_that_no_tracker_has_is_refused() -> None:
    with pytest.raises(InputError, match="--tracker_project cars with --report_to tensorboard"):
        check_settings(TrainConfig(tracker_project="cars"))
    with pytest.raises(InputError, match="--tracker_entity team with --report_to mlflow"):
        check_settings(TrainConfig(tracker_entity="team", report_to=("mlflow",)))
    check_settings(TrainConfig(tracker_entity="team", tracker_project="cars", report_to=("wandb",)))
