"""Laws of training for a student: ranks agree, sampling is invisible, resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from halation.distillation.config import DistillConfig
from support import rank_functions, run_readers
from support.rank_pool import RankPool

pytestmark = pytest.mark.ranks

SLOW = pytest.mark.slow
PATIENCE = {"timeout_s": 120.0, "world_timeout_s": 60.0}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "velocity": {"objective": "velocity"},
    "pictures": {"objective": "velocity", "data_path": "streets", "max_images": 8},
    "asked": {"objective": "velocity", "data_path": "streets", "teacher_cache": False},
    "features": {"objective": "velocity", "feature_weight": 0.5},
    "trajectory": {"objective": "trajectory"},
    "dmd": {"objective": "dmd", "fake_updates": 1, "n_steps": 4},
}


def distilled(folder: Path, objective: str, **changes: Any) -> DistillConfig:
    return rank_functions.small_distill_config(folder, **OBJECTIVES[objective] | changes)


@pytest.mark.parametrize(
    ("objective", "engine", "size"),
    [
        ("dmd", "ddp", 2),
        pytest.param("trajectory", "fsdp", 2, marks=SLOW),
        pytest.param("features", "fsdp", 3, marks=SLOW),
        pytest.param("features", "ddp", 2, marks=SLOW),
        pytest.param("dmd", "fsdp", 3, marks=SLOW),
        pytest.param("asked", "ddp", 3, marks=SLOW),
        pytest.param("velocity", "ddp", 1, marks=SLOW),
    ],
)
def test_sampling_at_every_step_leaves_the_bits_of_a_student(
    ranks: RankPool, tmp_path: Path, objective: str, engine: str, size: int
) -> None:
    """A student that is sampled at every step has the bits of one that is never sampled."""
    drawing = distilled(tmp_path / "drawing", objective, engine=engine, sample_raw=True)
    ranks.run(size, rank_functions.distill, drawing, **PATIENCE)
    never = distilled(tmp_path / "never", objective, engine=engine, sample=False, ckpt_every=0)
    ranks.run(size, rank_functions.distill, never, **PATIENCE)
    images = list((tmp_path / "drawing/samples").glob("step_*/sample_*.png"))
    assert len(images) == drawing.n_steps * 2 * 2
    assert not list((tmp_path / "never").glob("samples/step_*"))
    assert run_readers.checkpoint_bytes(tmp_path / "drawing", drawing.n_steps) == run_readers.checkpoint_bytes(
        tmp_path / "never", drawing.n_steps
    )


@pytest.mark.parametrize(
    ("objective", "engine"),
    [
        ("features", "ddp"),
        pytest.param("dmd", "fsdp", marks=SLOW),
        pytest.param("dmd", "ddp", marks=SLOW),
        pytest.param("velocity", "fsdp", marks=SLOW),
        pytest.param("asked", "ddp", marks=SLOW),
        pytest.param("trajectory", "ddp", marks=SLOW),
    ],
)
def test_a_resumed_distillation_has_the_bits_of_an_unbroken_one_in_every_optimizer(
    ranks: RankPool, tmp_path: Path, objective: str, engine: str
) -> None:
    whole = distilled(tmp_path / "whole", objective, engine=engine)
    ranks.run(2, rank_functions.distill, whole, **PATIENCE)
    half = whole.n_steps // 2
    broken = {"engine": engine, "sample": False}
    ranks.run(
        2, rank_functions.distill, distilled(tmp_path / "broken", objective, **broken | {"n_steps": half}), **PATIENCE
    )
    resumed = distilled(tmp_path / "broken", objective, **broken | {"n_steps": whole.n_steps})
    ranks.run(2, rank_functions.distill, resumed, **PATIENCE)
    assert run_readers.checkpoint_bytes(tmp_path / "whole", whole.n_steps) == run_readers.checkpoint_bytes(
        tmp_path / "broken", whole.n_steps
    )
    parts = {
        path.name.split(".")[0].split("-")[0] for path in (tmp_path / "broken").glob("checkpoints/*/*.safetensors")
    }
    beside = {"dmd": {"fake_model", "fake_optimizer"}, "features": {"projection_model", "projection_optimizer"}}
    assert parts == {"model", "ema", "optimizer"} | beside.get(objective, set())


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@SLOW
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_follow_each_other_whatever_the_number_of_ranks(ranks: RankPool, tmp_path: Path, objective: str) -> None:
    steps = {"n_steps": 4, "ckpt_every": 0, "sample": False}
    for size in (1, 2):
        config = distilled(tmp_path / str(size), objective, batch_size=4 // size, **steps)
        ranks.run(size, rank_functions.distill, config, **PATIENCE)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-4)


@pytest.mark.slow
def test_a_student_begins_at_its_teacher_and_moves_away_from_it(ranks: RankPool, tmp_path: Path) -> None:
    config = distilled(tmp_path / "run", "velocity", teacher_guidance=1.0, sample=False)
    ranks.run(1, rank_functions.distill, config, **PATIENCE)
    assert losses(tmp_path / "run")[0] == pytest.approx(0.0, abs=1e-10), "a copy says what its teacher says"
    teacher = load_file(rank_functions.tiny_teacher() / "model.safetensors")
    config = distilled(tmp_path / "guided", "velocity", sample=False)
    ranks.run(1, rank_functions.distill, config, **PATIENCE)
    student = load_file(tmp_path / "guided/export/model.safetensors")
    assert losses(tmp_path / "guided")[0] > 1e-4, "guidance is what it has to learn"
    assert student.keys() == teacher.keys()
    assert any(not student[name].equal(teacher[name]) for name in student)


def images(folder: Path) -> dict[str, bytes]:
    """What was drawn, by the prompt's place in the list."""
    index = json.loads((folder / "epoch_0001_samples.json").read_text())
    return {str(row["index"]): (folder / row["file"]).read_bytes() for row in index["samples"]}


@pytest.mark.slow
def test_samples_of_an_epoch_are_shared_out_2_2_0_and_are_those_of_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    """Steps too small to round differently: what is compared is the drawing."""
    shared = {"sample_prompts": rank_functions.PROMPTS[:4], "sample_names": "rank", "num_epochs": 1, "lr": 1e-12}
    for size in (1, 3):
        config = distilled(tmp_path / str(size), "trajectory", batch_size=6 // size, ckpt_every=0, **shared)
        ranks.run(size, rank_functions.distill, config, **PATIENCE)
    names = {path.name for path in (tmp_path / "3/samples").glob("epoch_*.png")} - {"epoch_0001_grid.png"}
    assert names == {f"epoch_0001_rank_{rank}_sample_{number:02d}.png" for rank in range(2) for number in range(2)}
    assert len(images(tmp_path / "1/samples")) == 4
    assert images(tmp_path / "1/samples") == images(tmp_path / "3/samples")


@pytest.mark.slow
def test_a_sampler_far_slower_than_the_timeout_hangs_nobody(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks wait three times as long as the group's timeout while one draws, and go on."""
    config = distilled(
        tmp_path / "run",
        "velocity",
        sample_prompts=("one",),
        sample_steps=12,
        dist_timeout_s=4.0,
        teacher_samples=False,
    )
    fired = tmp_path / "fired"
    environment = {"HALATION_FAULT": "sample.forward:1+:sleep=1", "HALATION_FAULT_LOG": str(fired)}
    ranks.run(3, rank_functions.distill, config, timeout_s=120.0, world_timeout_s=4.0, environment=environment)
    assert fired.read_text().count("sample.forward") == 2 * 12
    for step in (1, 2):
        index = json.loads((tmp_path / f"run/samples/step_000000{step}/samples.json").read_text())
        assert [(row["state"], row["seconds"] > 12) for row in index["samples"]] == [("done", True)]


@pytest.mark.slow
def test_an_error_of_one_rank_while_it_samples_costs_its_image_and_nothing_else(
    ranks: RankPool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"teacher_samples": False, "sample_names": "rank", "num_epochs": 1, "batch_size": 3}
    undisturbed = distilled(tmp_path / "undisturbed", "velocity", sample=False, **settings)
    ranks.run(2, rank_functions.distill, undisturbed, **PATIENCE)
    config = distilled(tmp_path / "run", "velocity", **settings)
    ranks.run(2, rank_functions.distill, config, **PATIENCE, environment={"HALATION_FAULT": "sample.prepare:1:raise:1"})
    index = json.loads((tmp_path / "run/samples/epoch_0001_samples.json").read_text())
    assert [row["state"] for row in index["samples"]] == ["done", "failed"]
    assert "Error during sampling on GPU 1" in (tmp_path / "run/logs/train.log").read_text()
    step = index["step"]
    assert run_readers.checkpoint_bytes(tmp_path / "run", step) == run_readers.checkpoint_bytes(
        tmp_path / "undisturbed", step
    )
