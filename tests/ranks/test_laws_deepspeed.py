"""Laws of training, sampling and resuming on ZeRO 1, 2 and 3."""

from __future__ import annotations

import dataclasses
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halation.distributed import rng
from halation.distributed.checkpoint.reader import CheckpointReader
from halation.errors import HalationError
from halation.sampling.all_rank_sampler import DenoiserSampler
from halation.sampling.config import SampleConfig
from halation.sampling.sample_folder import SampleFolder, publish_index
from halation.training import checkpoint_state
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import commands, rank_functions, run_readers
from support.rank_pool import RankPool, RanksFailed
from support.training_loops import StateCheckingSession

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed"),
]

NUM_STEPS = 3
SLOW = pytest.mark.slow
WORLDS = [
    pytest.param(1, 2, marks=SLOW),
    pytest.param(1, 3, marks=SLOW),
    pytest.param(2, 2, marks=SLOW),
    pytest.param(2, 3, marks=SLOW),
    (3, 2),
    pytest.param(3, 3, marks=SLOW),
]


def config(folder: Path, stage: int, **changes: Any) -> TrainConfig:
    """Steps large enough that weights show in the images."""
    settings = {"engine": "deepspeed", "zero_stage": stage, "n_steps": NUM_STEPS, "lr": 1e-2, "ema_decay": 0.5}
    return rank_functions.small_config(folder, **settings | changes)


class SampledSession(StateCheckingSession):
    def _visible(self) -> dict[str, Any]:
        pieces = checkpoint_state.checkpoint_parts(self.networks)
        return {
            "random": rng.capture(self.world.device),
            "modes": [module.training for module in self.denoiser.module.modules()],
            "bits": {
                f"{part}/{name}": p.local.numpy().tobytes()
                for part, named in pieces.items()
                for name, p in named.items()
            },
        }


def train_suspiciously(world: Any, config: TrainConfig) -> int:
    with job.open_run_on_rank_zero(config, world), SampledSession(world, config) as session:
        session.prepare()
        session.run()
        return session.num_looks


@pytest.mark.parametrize(("stage", "size"), WORLDS)
def test_sampling_at_every_step_leaves_the_bits_of_training(
    ranks: RankPool, tmp_path: Path, stage: int, size: int
) -> None:
    """Training that samples at every step has the bits of training that never samples."""
    drawing = config(tmp_path / "drawing", stage, ckpt_every=1, sample_raw=True, sample_offload=True)
    assert ranks.run(size, train_suspiciously, drawing) == [NUM_STEPS] * size
    ranks.run(size, rank_functions.train, config(tmp_path / "never", stage, sample=False, validation_images=0))
    assert len(list((tmp_path / "drawing/samples").glob("step_*/sample_*.png"))) == NUM_STEPS * 2 * 2
    assert run_readers.checkpoint_bytes(tmp_path / "drawing", NUM_STEPS) == run_readers.checkpoint_bytes(
        tmp_path / "never", NUM_STEPS
    )
    assert run_readers.losses(tmp_path / "drawing") == run_readers.losses(tmp_path / "never")


@SLOW
@pytest.mark.parametrize(("stage", "size"), [(1, 2), (1, 3), (2, 3), (3, 2), (3, 3)])
def test_a_run_stopped_and_started_again_ends_in_the_bits_of_one_that_never_stopped(
    ranks: RankPool, tmp_path: Path, stage: int, size: int
) -> None:
    ranks.run(size, rank_functions.train, config(tmp_path / "whole", stage))
    cut = config(tmp_path / "cut", stage)
    assert ranks.run(size, rank_functions.train_until, cut, 2, size - 1) == [128 + signal.SIGTERM] * size
    ranks.run(size, rank_functions.train, cut)
    assert run_readers.checkpoint_bytes(tmp_path / "cut", NUM_STEPS) == run_readers.checkpoint_bytes(
        tmp_path / "whole", NUM_STEPS
    )
    place = f"samples/step_{NUM_STEPS:07d}"
    assert run_readers.sample_files(tmp_path / "cut" / place) == run_readers.sample_files(tmp_path / "whole" / place)


@SLOW
@pytest.mark.parametrize(("stage", "size"), [pytest.param(1, 3, marks=SLOW), (2, 2), pytest.param(3, 3, marks=SLOW)])
def test_training_agrees_with_ddp_and_the_export_has_every_weight(
    ranks: RankPool, tmp_path: Path, stage: int, size: int
) -> None:
    changes = {"sample": False, "validation_images": 0, "lr": 1e-3}
    ranks.run(size, rank_functions.train, config(tmp_path / "zero", stage, **changes))
    ranks.run(size, rank_functions.train, config(tmp_path / "ddp", TrainConfig.zero_stage, engine="ddp", **changes))
    assert run_readers.losses(tmp_path / "zero") == pytest.approx(run_readers.losses(tmp_path / "ddp"), rel=1e-5)
    for part in ("model", "ema"):
        mine, theirs = (
            dict(CheckpointReader(tmp_path / name / f"checkpoints/step_{NUM_STEPS:07d}").read_part(part))
            for name in ("zero", "ddp")
        )
        assert mine.keys() == theirs.keys()
        difference = np.concatenate([(mine[name] - theirs[name]).numpy().ravel() for name in mine])
        assert np.abs(difference).mean() < 1e-5
    exported = (tmp_path / "zero/export/model.safetensors").stat().st_size
    assert exported == (tmp_path / "ddp/export/model.safetensors").stat().st_size


def draw(world: Any, config: TrainConfig, numbers: list[int], output: Path) -> list[list[str]]:
    """Images of the newest checkpoint for so many prompts, with the averages where the weights were."""
    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        assert session._resume()
        session.ema.swap()
        session.engine.sync_master_weights()
        states = []
        for num in numbers:
            settings = dataclasses.replace(session.sample_settings, prompts=rank_functions.PROMPTS[:num])
            sharded = session.engine.sharded
            drawing = DenoiserSampler(
                world, session.denoiser, settings, sharded=sharded, timeout_s=30.0, stop=lambda: 0
            )
            rows = drawing.run(SampleFolder(folder=output / str(num)), f"{num} prompts")
            if world.is_rank_zero:
                publish_index(SampleFolder(folder=output / str(num)), rows, {})
            states.append([row["state"] for row in rows])
    return states


@SLOW
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_none_one_and_five_prompts_on_three_ranks_give_the_images_of_one(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    """None, one and five prompts on three ranks do not hang and give the images of one rank."""
    trained = config(tmp_path / "run", stage, sample_prompts=rank_functions.PROMPTS)
    ranks.run(2, rank_functions.train, trained)
    published = run_readers.sample_files(tmp_path / f"run/samples/step_{NUM_STEPS:07d}")
    states = ranks.run(3, draw, trained, [0, 1, 5], tmp_path / "drawn")
    assert states == [[[], ["done"], ["done"] * 5]] * 3
    assert ": 3.2 M parameters" in run_readers.rank_log(tmp_path / "run", 0)
    drawn = run_readers.sample_files(tmp_path / "drawn/5")
    images = {name: data for name, data in published.items() if name.startswith("sample_")}
    assert len(images) == 10
    assert {name: drawn[name] for name in images} == images
    one = run_readers.sample_files(tmp_path / "drawn/1")
    assert one["sample_00.png"] == images["sample_00.png"]
    (tmp_path / "rendezvous").mkdir()
    alone = SampleConfig(
        checkpoint=tmp_path / "run", output_dir=tmp_path / "alone", progress="none", dist_timeout_s=30.0
    )
    ranks.run(1, rank_functions.run_job, "sample", alone, tmp_path / "rendezvous")
    assert {name: run_readers.sample_files(tmp_path / "alone")[name] for name in images} == images


@pytest.mark.faults
@SLOW
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_killed_while_it_saves_leaves_the_last_good_checkpoint_to_go_on_from(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    ranks.run(2, rank_functions.train, config(tmp_path / "whole", stage, ckpt_every=1))
    cut = config(tmp_path / "cut", stage, ckpt_every=1)
    with pytest.raises(RanksFailed):
        ranks.run(2, rank_functions.train, cut, environment={"HALATION_FAULT": "checkpoint.part:5:kill"})
    good = sorted(path.name for path in (tmp_path / "cut/checkpoints").glob("step_*"))
    assert good == ["step_0000001"]
    ranks.run(2, rank_functions.train, cut)
    assert run_readers.checkpoint_bytes(tmp_path / "cut", NUM_STEPS) == run_readers.checkpoint_bytes(
        tmp_path / "whole", NUM_STEPS
    )


@pytest.mark.slow
def test_another_engine_is_refused_with_the_way_through_the_exported_weights(ranks: RankPool, tmp_path: Path) -> None:
    settings = {"sample": False, "validation_images": 0, "n_steps": 1}
    ranks.run(1, rank_functions.train, config(tmp_path, 2, **settings))
    for changes in ({"engine": "fsdp"}, {"zero_stage": 3}, {"engine": "ddp", "accept_changes": True}):
        with pytest.raises(HalationError) as caught:
            job.open_record(config(tmp_path, 2, **settings | {"n_steps": 2} | changes), "cpu")
        assert "was trained with --engine deepspeed --zero_stage 2" in str(caught.value)
        assert f"--output_dir NEW --model {tmp_path / 'export'}" in str(caught.value)
    # The way it names.
    ranks.run(2, rank_functions.train, config(tmp_path / "new", 3, model=str(tmp_path / "export"), **settings))
    assert sorted(run_readers.losses(tmp_path / "new")) == [1]


@SLOW
def test_a_run_of_two_ranks_on_zero_3_goes_on_with_one_that_no_launcher_started(tmp_path: Path) -> None:
    run, settings = tmp_path / "run", {"engine": "deepspeed", "zero_stage": 3}
    for size, num_steps in ((2, 4), (1, 6)):
        words = commands.halation(commands.train(run, nproc=size, n_steps=num_steps, **settings))
        assert commands.finish(words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert commands.last_step(run) == 6
    assert commands.last_bits(run)
