"""The laws of training hold for a student too: ranks agree, sampling is invisible, a resumed run has the bits of an unbroken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rank_jobs
import run_folders
import tiny_teachers
from halation.config.distill import DistillConfig
from halation.world.testing import RankPool

pytestmark = pytest.mark.ranks

SLOW = pytest.mark.slow
PATIENCE = {"timeout_s": 120.0, "world_timeout_s": 60.0}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "velocity": {"objective": "velocity"},
    "pictures": {"objective": "velocity", "data_path": "streets", "max_pictures": 8},
    "asked": {"objective": "velocity", "data_path": "streets", "teacher_cache": False},
    "features": {"objective": "velocity", "feature_weight": 0.5},
    "trajectory": {"objective": "trajectory"},
    "dmd": {"objective": "dmd", "fake_updates": 1, "n_steps": 4},
}


def distilled(folder: Path, objective: str, **changes: Any) -> DistillConfig:
    return tiny_teachers.small_config(folder, **OBJECTIVES[objective] | changes)


@pytest.mark.parametrize(
    ("objective", "engine", "size"),
    [
        ("dmd", "ddp", 2),
        ("trajectory", "fsdp", 2),
        pytest.param("features", "fsdp", 3, marks=SLOW),
        pytest.param("features", "ddp", 2, marks=SLOW),
        pytest.param("dmd", "fsdp", 3, marks=SLOW),
        pytest.param("asked", "ddp", 3, marks=SLOW),
        pytest.param("velocity", "ddp", 1, marks=SLOW),
    ],
)
def test_a_student_whose_samples_are_drawn_at_every_step_has_the_bits_of_one_that_is_never_drawn(
    ranks: RankPool, tmp_path: Path, objective: str, engine: str, size: int
) -> None:
    drawing = distilled(tmp_path / "drawing", objective, engine=engine, sample_raw=True)
    ranks.run(size, rank_jobs.distill, drawing, **PATIENCE)
    never = distilled(tmp_path / "never", objective, engine=engine, sample=False, ckpt_every=0)
    ranks.run(size, rank_jobs.distill, never, **PATIENCE)
    pictures = list((tmp_path / "drawing/samples").glob("step_*/sample_*.png"))
    assert len(pictures) == drawing.n_steps * 2 * 2
    assert not list((tmp_path / "never").glob("samples/step_*"))
    assert run_folders.saved(tmp_path / "drawing", drawing.n_steps) == run_folders.saved(
        tmp_path / "never", drawing.n_steps
    )


@pytest.mark.parametrize(
    ("objective", "engine"),
    [
        ("dmd", "fsdp"),
        ("features", "ddp"),
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
    ranks.run(2, rank_jobs.distill, whole, **PATIENCE)
    half = whole.n_steps // 2
    broken = {"engine": engine, "sample": False}
    ranks.run(2, rank_jobs.distill, distilled(tmp_path / "broken", objective, **broken | {"n_steps": half}), **PATIENCE)
    resumed = distilled(tmp_path / "broken", objective, **broken | {"n_steps": whole.n_steps})
    ranks.run(2, rank_jobs.distill, resumed, **PATIENCE)
    assert run_folders.saved(tmp_path / "whole", whole.n_steps) == run_folders.saved(tmp_path / "broken", whole.n_steps)
    parts = {
        path.name.split(".")[0].split("-")[0] for path in (tmp_path / "broken").glob("checkpoints/*/*.safetensors")
    }
    beside = {"dmd": {"fake_model", "fake_optimizer"}, "features": {"projection_model", "projection_optimizer"}}
    assert parts == {"model", "ema", "optimizer"} | beside.get(objective, set())


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    "objective", ["trajectory", *(pytest.param(name, marks=SLOW) for name in OBJECTIVES if name != "trajectory")]
)
def test_losses_follow_each_other_whatever_the_number_of_ranks(ranks: RankPool, tmp_path: Path, objective: str) -> None:
    steps = {"n_steps": 4, "ckpt_every": 0, "sample": False}
    for size in (1, 2):
        config = distilled(tmp_path / str(size), objective, batch_size=4 // size, **steps)
        ranks.run(size, rank_jobs.distill, config, **PATIENCE)
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-4)


def test_a_student_begins_at_its_teacher_and_moves_away_from_it(ranks: RankPool, tmp_path: Path) -> None:
    config = distilled(tmp_path / "run", "velocity", teacher_guidance=1.0, sample=False)
    ranks.run(1, rank_jobs.distill, config, **PATIENCE)
    assert losses(tmp_path / "run")[0] == pytest.approx(0.0, abs=1e-10), "a copy says what its teacher says"
    teacher = load_file(tiny_teachers.dit() / "model.safetensors")
    config = distilled(tmp_path / "guided", "velocity", sample=False)
    ranks.run(1, rank_jobs.distill, config, **PATIENCE)
    student = load_file(tmp_path / "guided/export/model.safetensors")
    assert losses(tmp_path / "guided")[0] > 1e-4, "guidance is what it has to learn"
    assert student.keys() == teacher.keys()
    assert any(not student[name].equal(teacher[name]) for name in student)
