"""What `halation distill` refuses before it opens anything, and what it writes out."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halation import cli
from halation.distillation import command as distill
from halation.distillation.config import DistillConfig
from halation.errors import InputError
from halation.gallery.training_runs import TrainingRun
from support import rank_functions
from support.commands import HALATION


def asked(folder: Path, **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {
        "output_dir": folder / "run",
        "teacher_path": str(rank_functions.tiny_teacher()),
        "data_path": str(rank_functions.write_prompts(folder)),
    }
    return DistillConfig(**settings | changes)


def student(folder: Path, **values: Any) -> str:
    path = folder / "student.json"
    path.write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_path": ""}, ["--teacher_path"]),
        ({"teacher_path": "no/such/folder/anywhere"}, ["no/such/folder/anywhere", "--teacher_path"]),
        ({"data_path": ""}, ["--data_path"]),
        ({"data_path": "no/such/prompts.txt"}, ["no/such/prompts.txt"]),
        ({"model": "tiny"}, ["--model", "--student_config"]),
        ({"vae": "somewhere"}, ["--vae", "teacher"]),
        ({"aspect_buckets": True}, ["--aspect_buckets"]),
        ({"lora_rank": 4}, ["--lora_rank", "DiT"]),
        ({"image_size": (64, 64)}, ["64 64", "32 32"]),
        ({"objective": "trajectory", "student_steps": 8, "teacher_states": 4}, ["4", "8", "--teacher_states 16"]),
        ({"objective": "trajectory", "student_steps": 8, "teacher_steps": 4}, ["--teacher_steps 4", "8"]),
        ({"objective": "trajectory", "teacher_cache": False}, ["--no_teacher_cache"]),
        ({"teacher_cache": False}, ["--no_teacher_cache", "a list of prompts"]),
        ({"teacher_steps": 1}, ["--teacher_steps 1", "pure noise", "--teacher_steps 50"]),
        ({"caption_dropout": 0.1}, ["--caption_dropout 0.1", "5 trajectories of 5 prompts", "--trajectories 50"]),
        ({"caption_dropout": 0.1, "trajectories": 9}, ["9 trajectories of 5 prompts", "2 trajectories per prompt"]),
        (
            {"caption_dropout": 0.1, "trajectories": 3, "max_images": 2},
            ["3 trajectories of 2 prompts", "--trajectories 20"],
        ),
        ({"objective": "dmd", "feature_weight": 1.0}, ["--feature_weight", "dmd"]),
        ({"objective": "dmd", "engine": "deepspeed"}, ["dmd", "deepspeed"]),
        ({"feature_weight": 1.0, "teacher_batch_size": 2}, ["--feature_weight", "--teacher_batch_size"]),
        ({"objective": "dmd", "eval_steps": 8}, ["--eval_steps 8", "4"]),
        ({"eval_every": 2}, ["--eval_every", "prompts.txt"]),
        ({"validation_images": 8}, ["--validation_images"]),
        ({"objective": "trajectory", "guidance_scale": 4.0}, ["--guidance_scale 4", "--teacher_guidance"]),
        ({"objective": "dmd", "student_steps": 0}, ["--student_steps 0"]),
        ({"objective": "dmd", "student_steps": 65}, ["--student_steps 65"]),
        ({"student_steps": 4}, ["--student_steps 4", "--objective trajectory"]),
        ({"num_epochs": 2, "n_steps": 4}, ["--n_steps 4", "--num_epochs 2"]),
        ({"fake_updates": 0}, ["--fake_updates 0"]),
        ({"teacher_guidance": -1.0}, ["--teacher_guidance -1"]),
        ({"student_config": "no/student.json"}, ["no/student.json"]),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as refusal:
        distill.resolve_config(asked(tmp_path, **changes))
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_path": "streets", "teacher_steps": 1, "teacher_cache": False, "caption_dropout": 0.1},
        {"objective": "dmd", "teacher_steps": 1, "caption_dropout": 0.1},
        {"caption_dropout": 0.1, "trajectories": 10},
        {"caption_dropout": 0.1, "trajectories": 4, "max_images": 2},
    ],
)
def test_what_images_dmd_or_many_ways_make_sense_of_is_not_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    distill.resolve_config(asked(tmp_path, **changes))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"widht": 64}, ["'widht'", "width"]),
        ({"latent_channels": 5}, ["5", "3"]),
        ({"width": 100, "heads": 7}, ["100", "7"]),
        ({"family": "wan"}, ["wan", "dit"]),
        ({"layers": [0, 99]}, ["99"]),
    ],
)
def test_a_student_that_does_not_fit_its_teacher_is_refused_with_both_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], words: list[str]
) -> None:
    config = asked(tmp_path, student_config=student(tmp_path, **values))
    flags = ["--teacher_path", config.teacher_path, "--data_path", config.data_path]
    more = ["--student_config", config.student_config, "--output_dir", str(config.output_dir), "--progress", "none"]
    assert cli.run("distill", [*flags, *more]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


def test_an_empty_list_of_prompts_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    config = asked(tmp_path)
    flags = ["--teacher_path", config.teacher_path, "--data_path", str(tmp_path / "empty.txt")]
    assert cli.run("distill", [*flags, "--output_dir", str(tmp_path / "run"), "--progress", "none"]) == 2
    assert "empty.txt" in capsys.readouterr().err


def test_a_student_as_a_teacher_is_not_guided_again_and_one_of_few_steps_is_none(tmp_path: Path) -> None:
    """What a model is drawn with is what it answers with, unless somebody says otherwise."""
    assert distill.resolve_config(asked(tmp_path)).teacher_guidance == 2.0
    folder = Path(shutil.copytree(rank_functions.tiny_teacher(), tmp_path / "student"))
    description = json.loads((folder / "config.json").read_text())
    description["sampling"] |= {"guidance_scale": 1.0, "distilled": {"objective": "velocity"}}
    (folder / "config.json").write_text(json.dumps(description))
    assert distill.resolve_config(asked(tmp_path, teacher_path=str(folder))).teacher_guidance == 1.0
    assert (
        distill.resolve_config(asked(tmp_path, teacher_path=str(folder), teacher_guidance=3.0)).teacher_guidance == 3.0
    )
    description["sampling"]["distilled"] = {"objective": "trajectory", "steps": 4}
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(InputError, match="is a 4-step student"):
        distill.resolve_config(asked(tmp_path, teacher_path=str(folder)))


def test_short_forms_are_written_out(tmp_path: Path) -> None:
    config = distill.resolve_config(asked(tmp_path, teacher_on_cpu=True, dtype="bf16", objective="trajectory"))
    assert config.student_steps == 4
    assert config.teacher_placement == "cpu"
    assert config.teacher_dtype == "bf16"
    assert config.image_size == (rank_functions.SIDE, rank_functions.SIDE)
    assert config.data == config.data_path
    assert distill.resolve_config(config) == config, "ranks of torchrun write out what is written out already"


@pytest.mark.slow
def test_a_run_by_epochs_records_its_number_of_steps(tmp_path: Path) -> None:
    """Two epochs of five prompts in batches of two are six steps; the page shows them as all of them."""
    config = asked(tmp_path)
    words = [
        *("distill", "--teacher_path", config.teacher_path, "--data_path", config.data_path, "--num_epochs", "2"),
        *("--student_config", student(tmp_path, width=8, heads=1, depth=1, text_width=8), "--batch_size", "2"),
        *("--teacher_steps", "4", "--teacher_states", "2", "--no_sample", "--nproc", "1", "--report_to", "none"),
        *("--caption_dropout", "0", "--output_dir", str(config.output_dir), "--progress", "none"),
    ]
    done = subprocess.run([HALATION, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads((config.output_dir / "config.json").read_text())["settings"]["n_steps"] == 6
    run = TrainingRun(config.output_dir, "0")
    run.refresh()
    summary = run.summary()
    assert (summary["state"], summary["done"], summary["planned"]) == ("finished", 6, 6)
