"""Samples from all ranks: invisible to training, the same bytes on any ranks, no hang."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halation.distributed import rng
from halation.models.checkpoint_loading import find_checkpoint, load_denoiser, read_sampling_settings
from halation.runs import run_folder as runs
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings
from halation.sampling.config import SampleConfig
from halation.sampling.sample_folder import SampleFolder, publish_index
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import rank_functions, run_readers
from support.rank_pool import RankPool
from support.training_loops import StateCheckingSession

pytestmark = pytest.mark.ranks

NUM_STEPS = 3


class SampledSession(StateCheckingSession):
    def _visible(self) -> dict[str, Any]:
        modules = self.denoiser.module.modules()
        weights = [parameter.detach() for _, parameter in self.engine.named_parameters()]
        return {
            "random": rng.capture(self.world.device),
            "modes": [module.training for module in modules],
            "requires_grad": [weight.requires_grad for weight in self.denoiser.module.parameters()],
            "grad": torch.is_grad_enabled(),
            "places": [type(weight).__name__ for weight in weights],
            "weights": [getattr(weight, "to_local", lambda w=weight: w)().numpy().tobytes() for weight in weights],
            "averages": [average.numpy().tobytes() for average in self.ema.tensors().values()],
        }


def train_suspiciously(world: Any, config: TrainConfig) -> int:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    with job.open_run_on_rank_zero(config, world), SampledSession(world, config) as session:
        session.prepare()
        next(iter(session.denoiser.shard_units())).eval()  # one module in its own mode, which must stay its own
        session.run()
        return session.num_looks


def draw(world: Any, folder: Path, prompts: tuple[str, ...], batch_size: int, output: Path) -> list[str]:
    """Draw from a run's newest checkpoint as `halation sample` does, also where there is no prompt at all."""
    checkpoint = find_checkpoint(folder)
    settings = SampleSettings.from_json(
        read_sampling_settings(checkpoint) | {"prompts": prompts, "sheet_size": batch_size}
    )
    drawing = DenoiserSampler(
        world, load_denoiser(checkpoint, raw=False), settings, sharded=False, timeout_s=30.0, stop=lambda: 0
    )
    rows = drawing.run(SampleFolder(folder=output), "for a test")
    if world.is_rank_zero:
        publish_index(SampleFolder(folder=output), rows, {})
    return [row["state"] for row in rows]


def draw_sharded(world: Any, config: TrainConfig, cases: list[tuple[int, int]], output: Path) -> list[list[str]]:
    """The same with sharded weights: one case for each (number of prompts, batch size)."""
    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        assert session._resume()
        states = []
        with session.ema.swap_during():
            for num, batch_size in cases:
                changes = {"prompts": rank_functions.PROMPTS[:num], "batch_size": batch_size}
                settings = dataclasses.replace(session.sample_settings, **changes)
                drawing = DenoiserSampler(
                    world, session.denoiser, settings, sharded=True, timeout_s=30.0, stop=lambda: 0
                )
                place = SampleFolder(folder=output / f"{num}_{batch_size}")
                rows = drawing.run(place, f"{num} on batches of {batch_size}")
                if world.is_rank_zero:
                    publish_index(place, rows, {})
                states.append([row["state"] for row in rows])
            session.engine.reshard()
    return states


def sampled(folder: Path, **changes: Any) -> TrainConfig:
    """Steps large enough that weights show in the images."""
    settings = {"n_steps": NUM_STEPS, "lr": 2e-2, "ckpt_every": 1, "ema_decay": 0.5}
    return rank_functions.small_config(folder, **settings | changes)


@pytest.mark.parametrize("changes", [{}, {"model": "tiny"}, {"sample": False}])
def test_a_model_that_has_learned_before_is_sampled_at_step_0(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A DiT from scratch draws only noise then, and --no_sample draws nothing."""
    config = sampled(tmp_path, **{"model": str(rank_functions.tiny_teacher()), "n_steps": 1} | changes)
    ranks.run(1, rank_functions.train, config)
    drawn = sorted(path.parent.name for path in (tmp_path / "samples").glob("*/grid.png"))
    assert drawn == (["step_0000000", "step_0000001"] if not changes else ["step_0000001"] * changes.get("sample", 1))


SIZES = [
    pytest.param("ddp", 2, marks=pytest.mark.slow),
    pytest.param("ddp", 3, marks=pytest.mark.slow),
    ("fsdp", 2),
    pytest.param("fsdp", 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "size"), SIZES)
def test_sampling_at_every_step_leaves_the_bits_of_training(
    ranks: RankPool, tmp_path: Path, engine: str, size: int
) -> None:
    """Training that samples at every step has the bits of training that never samples."""
    drawing = sampled(tmp_path / "drawing", engine=engine, sample_raw=True, sample_batch_size=2)
    assert ranks.run(size, train_suspiciously, drawing) == [NUM_STEPS] * size
    never = sampled(tmp_path / "never", engine=engine, sample=False, ckpt_every=0, validation_images=0)
    ranks.run(size, train_suspiciously, never)
    assert len(list((tmp_path / "drawing/samples").glob("step_*/sample_*.png"))) == NUM_STEPS * 2 * 2
    assert not (tmp_path / "never/samples").exists()
    assert run_readers.checkpoint_bytes(tmp_path / "drawing", NUM_STEPS) == run_readers.checkpoint_bytes(
        tmp_path / "never", NUM_STEPS
    )
    assert run_readers.losses(tmp_path / "drawing") == run_readers.losses(tmp_path / "never")
    for rank in range(size):
        mine, theirs = (
            json.loads((tmp_path / name / f"checkpoints/step_{NUM_STEPS:07d}/rank_state_{rank}.json").read_text())
            for name in ("drawing", "never")
        )
        assert mine == theirs, "python, numpy and torch drew nothing"


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of two ranks that published five images on batches of two, trained once for each engine."""
    known: dict[str, Path] = {}

    def folder(engine: str) -> Path:
        if engine not in known:
            known[engine] = tmp_path_factory.mktemp(f"trained_{engine}")
            settings = {
                "engine": engine,
                "sample_prompts": rank_functions.PROMPTS,
                "sample_batch_size": 2,
                "ckpt_every": 0,
            }
            ranks.run(2, rank_functions.train, sampled(known[engine], **settings))
        return known[engine]

    return folder


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_checkpoint_gives_the_published_images_on_any_ranks(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str
) -> None:
    """A checkpoint gives the images that training published on one, two and three ranks."""
    folder = trained(engine)
    published = run_readers.sample_files(folder / f"samples/step_{NUM_STEPS:07d}")
    assert len(published) == 5 + 5 + 1, "images, prompts and the grid"
    assert len({data for name, data in published.items() if name.endswith(".png")}) == 6, "prompts and seeds differ"
    for size in (1, 2, 3):
        rendezvous = tmp_path / f"rendezvous_{size}"
        rendezvous.mkdir()
        output = tmp_path / f"by_hand_{size}"
        config = SampleConfig(checkpoint=folder, output_dir=output, progress="none", dist_timeout_s=30.0)
        ranks.run(size, rank_functions.run_job, "sample", config, rendezvous)
        assert run_readers.sample_files(output) == published


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num", [0, pytest.param(1, marks=pytest.mark.slow), 5])
def test_none_one_and_five_prompts_are_the_same_bytes_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], engine: str, num: int
) -> None:
    for batch_size in (1, 2):
        seen = []
        for size in (1, 2, 3):
            output = tmp_path / f"{batch_size}_{size}"
            states = ranks.run(size, draw, trained(engine), rank_functions.PROMPTS[:num], batch_size, output)
            assert states == [["done"] * num] * size
            seen.append(run_readers.sample_files(output))
        assert len(seen[0]) == (2 * num + 1 if num else 0)
        assert seen[1] == seen[0]
        assert seen[2] == seen[0]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_sharded_ranks_draw_none_one_and_five_prompts_to_the_bytes_of_one_whole_rank(
    ranks: RankPool, tmp_path: Path, trained: Callable[[str], Path], size: int
) -> None:
    cases = [(0, 1), (1, 1), (5, 1), (1, 2), (5, 2)]
    folder = trained("fsdp")
    settings = {"engine": "fsdp", "sample_prompts": rank_functions.PROMPTS, "sample_batch_size": 2, "ckpt_every": 0}
    states = ranks.run(size, draw_sharded, sampled(folder, **settings), cases, tmp_path / "sharded")
    assert states == [[["done"] * num for num, _ in cases]] * size
    for num, batch_size in cases:
        ranks.run(1, draw, folder, rank_functions.PROMPTS[:num], batch_size, tmp_path / "whole" / f"{num}_{batch_size}")
        whole = run_readers.sample_files(tmp_path / "whole" / f"{num}_{batch_size}")
        assert run_readers.sample_files(tmp_path / "sharded" / f"{num}_{batch_size}") == whole


def test_a_changed_index_of_samples_is_written_again_and_its_images_stay(ranks: RankPool, tmp_path: Path) -> None:
    """An index of samples that was changed on disk is written again, and its images stay."""
    config = sampled(tmp_path / "run", ckpt_every=0)
    ranks.run(1, rank_functions.train, config)
    folder = tmp_path / f"run/samples/step_{NUM_STEPS:07d}"
    index = folder / "samples.json"
    written, drawn = index.read_bytes(), run_readers.sample_files(folder)
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("sample_*.png")}
    index.write_bytes(written.replace(b'"state": "done"', b'"state": "dond"', 1))
    ranks.run(1, rank_functions.train, config)
    assert runs.read_json_with_digest(index)["step"] == NUM_STEPS
    assert [row["state"] for row in runs.read_json_with_digest(index)["samples"]] == ["done"] * len(stamps)
    assert run_readers.sample_files(folder) == drawn
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("sample_*.png")} == stamps
