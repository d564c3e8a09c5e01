"""Training learns: captions reach the image, the validation loss falls on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halation.training import command as job
from halation.training import periodic_tasks
from halation.training.config import TrainConfig
from halation.training.loop import denoising_objective
from halation.training.session import TrainingSession
from support import rank_functions, run_readers
from support.rank_pool import RankPool

pytestmark = pytest.mark.ranks


def measure(world: Any, config: TrainConfig) -> dict[str, float]:
    """The validation loss of a run's newest checkpoint, from the EMA as training measures it."""
    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        assert session._resume()
        with session.ema.swap_during():
            losses = periodic_tasks.compute_validation_losses(
                world,
                session.denoiser,
                session.source,
                denoising_objective(session.denoiser),
                num_images=config.validation_images,
                dtype=config.dtype,
                heartbeat=lambda: None,
            )
            session.engine.reshard()
        return periodic_tasks.summarize_losses(world.all_gather_object(losses), config.validation_images)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_held_out_loss_of_a_checkpoint_is_the_same_on_any_ranks(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    """The held-out loss of a checkpoint is the same number on one, two and three ranks."""
    # Nine images are 72 rows on three batches, the last of them partial: fillers must not count.
    changes = {"lr": 1e-2, "validation_images": 9, "sample": False, "batch_size": 6}
    config = rank_functions.small_config(tmp_path, engine=engine, **changes)
    ranks.run(1, rank_functions.train, config)
    written = [row for row in run_readers.metric_rows(tmp_path) if row.get("metric") == "heldout_loss"][-1]
    for size in (1, 2, 3):
        for found in ranks.run(size, measure, config):
            assert found == {"heldout_loss": written["value"], **written["bins"]}


def test_the_held_out_loss_falls_with_training(ranks: RankPool, tmp_path: Path) -> None:
    changes = {"n_steps": 30, "ckpt_every": 10, "lr": 2e-3, "ema_decay": 0.8, "batch_size": 4, "validation_images": 8}
    ranks.run(2, rank_functions.train, rank_functions.small_config(tmp_path, sample=False, **changes))
    values = list(run_readers.validation_losses(tmp_path).values())
    assert len(values) == 3
    assert values[2] < values[1] < values[0]
    assert values[2] < 0.8 * values[0]


CAPTIONS = {"a red sunset": (220, 40, 20), "a deep blue sea": (10, 50, 210)}


@pytest.fixture
def two_captions(tmp_path: Path) -> Path:
    """A folder of two plain images, each under several names."""
    folder = tmp_path / "two_captions"
    folder.mkdir()
    rows = []
    for caption, colour in CAPTIONS.items():
        for number in range(4):
            name = f"{caption.replace(' ', '_')}_{number}.png"
            Image.new("RGB", (32, 32), colour).save(folder / name)
            rows.append({"file_name": name, "text": caption})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_a_caption_reaches_the_image(ranks: RankPool, tmp_path: Path, two_captions: Path) -> None:
    changes = {"n_steps": 100, "batch_size": 8, "lr": 2e-3, "ema_decay": 0.95, "warmup_steps": 10}
    sampling = {"sample_prompts": tuple(CAPTIONS), "same_seed": True, "sample_steps": 8, "guidance_scale": 2.0}
    config = rank_functions.small_config(
        tmp_path / "run", data=str(two_captions), validation_images=0, **changes, **sampling
    )
    ranks.run(1, rank_functions.train, config, timeout_s=120)
    drawn = [
        np.asarray(Image.open(tmp_path / f"run/samples/step_0000100/sample_{index:02d}.png")).astype(float)
        for index in range(2)
    ]
    own = [np.array(colour, float) for colour in CAPTIONS.values()]
    distance = np.array([[np.abs(image - colour).mean() for colour in own] for image in drawn])
    assert np.abs(drawn[0] - drawn[1]).mean() > 40, "one seed, two captions, two images"
    assert distance[0, 0] < 0.5 * distance[0, 1]
    assert distance[1, 1] < 0.5 * distance[1, 0]
