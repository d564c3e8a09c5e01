"""Settings of a fine-tuning that are not given: which values they get, and that a resumed run keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halation import cli
from halation.runs import run_folder as runs
from halation.training import command as train
from halation.training.config import DIT_DEFAULTS, TrainConfig, missing_settings
from halation.training.pipeline_finetuning import choose_batch, choose_num_steps
from support import run_readers, tiny_models


def settings_of(folder: Path) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((folder / "config.json").read_text())["settings"]
    return {name: recorded[name] for name in DIT_DEFAULTS}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rows = []
    for index in range(16):
        pixels = np.random.default_rng(index).integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        rows.append(json.dumps({"file_name": f"{index}.png", "text": "a red cat"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def words(data: Path, folder: Path, family: str, *more: str) -> list[str]:
    fixed = ["--image_size", "32", "--validation_images", "0", "--report_to", "none", "--progress", "none"]
    fixed += ["--sample_prompts", "a red cat", "--nproc", "1", "--log_every", "1"]
    model = ["--model_path", str(tiny_models.built(family)), "--data", str(data), "--output_dir", str(folder)]
    return ["train", *model, *fixed, *more]


@pytest.mark.parametrize(
    ("num_images", "lora", "num_ranks", "fitting", "batch"),
    [
        (40, True, 1, 64, (4, 1)),
        (40, True, 1, 3, (2, 2)),
        (40, True, 1, 1, (1, 4)),
        (40, True, 8, 64, (1, 1)),
        (40, False, 1, 64, (4, 1)),
        (9, True, 1, 64, (1, 1)),
        (10_000, False, 1, 64, (32, 1)),
        (10_000, False, 1, 5, (4, 8)),
        (10_000, False, 3, 64, (8, 1)),
        (10_000, False, 64, 64, (1, 1)),
    ],
)
def test_a_batch_fits_into_memory_and_suits_the_number_of_images(
    num_images: int, lora: bool, num_ranks: int, fitting: int, batch: tuple[int, int]
) -> None:
    assert choose_batch(TrainConfig(), 4 if lora else 32, num_images, num_ranks, fitting) == batch


def test_a_given_batch_or_accumulation_is_kept() -> None:
    assert choose_batch(TrainConfig(batch_size=6), 32, 10_000, 1, 1) == (6, 1)
    assert choose_batch(TrainConfig(accumulate=4), 32, 10_000, 1, 64) == (8, 4)
    assert choose_batch(TrainConfig(batch_size=6, accumulate=2), 32, 10, 1, 1) == (6, 2)


@pytest.mark.parametrize(
    ("num_images", "global_batch", "lora", "steps"),
    [(1, 1, True, 500), (40, 4, True, 1000), (37, 4, True, 950), (10**6, 4, True, 4000), (10**6, 32, False, 20_000)],
)
def test_the_number_of_steps_follows_the_number_of_images(
    num_images: int, global_batch: int, lora: bool, steps: int
) -> None:
    assert choose_num_steps(num_images, global_batch, lora) == steps


def test_without_a_pipeline_the_defaults_are_those_of_a_dit(tmp_path: Path) -> None:
    config = train.resolve_config(TrainConfig(output_dir=tmp_path))
    assert {name: getattr(config, name) for name in DIT_DEFAULTS} == DIT_DEFAULTS
    assert missing_settings(train.resolve_config(TrainConfig(lr=1.0))) == []


def test_defaults_of_a_fine_tuning_are_recorded_printed_and_kept(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is not given is resolved once; a resumed run keeps it, also with more steps."""
    command = words(data, tmp_path / "run", "sd3", "--lora_rank", "2")
    assert cli.main([*command, "--n_steps", "2"]) == 0
    line = "defaults for SD3 LoRA: lr 0.0001, fp32, batch 2, accumulate 1, warm-up 0, a checkpoint every 10 steps, "
    line += "samples in 28 steps, guidance 7"
    assert line in capfd.readouterr().err
    resolved = {"batch_size": 2, "accumulate": 1, "lr": 1e-4, "warmup_steps": 0, "dtype": "fp32", "ckpt_every": 10}
    assert settings_of(tmp_path / "run") == {"n_steps": 2, "sample_steps": 28} | resolved
    record = runs.read_record(runs.RunFolder(tmp_path / "run"))
    assert {name: record["fixed"][name] for name in ("lr", "batch_size", "accumulate", "warmup_steps", "dtype")} == {
        name: resolved[name] for name in ("lr", "batch_size", "accumulate", "warmup_steps", "dtype")
    }
    assert cli.main([*command, "--n_steps", "40"]) == 0
    assert settings_of(tmp_path / "run") == {"n_steps": 40, "sample_steps": 28} | resolved
    assert "defaults for" not in capfd.readouterr().err
    assert cli.main([*command, "--lr", "1e-3"]) == 2
    assert "lr: 0.0001 -> 0.001" in capfd.readouterr().err


def test_a_run_with_the_defaults_of_an_earlier_version_keeps_them(data: Path, tmp_path: Path) -> None:
    """A run whose record has explicit values of its own resumes with a command that leaves them out."""
    own = {"lr": 1e-3, "batch_size": 3, "accumulate": 1, "warmup_steps": 0, "dtype": "fp32", "ckpt_every": 1000}
    given = [text for name, value in own.items() for text in (f"--{name}", str(value))]
    begun = words(data, tmp_path / "run", "hunyuan", "--sample_steps", "2")
    assert cli.main([*begun, *given, "--n_steps", "1"]) == 0
    assert cli.main(words(data, tmp_path / "run", "hunyuan", "--n_steps", "2")) == 0
    assert settings_of(tmp_path / "run") == own | {"n_steps": 2, "sample_steps": 2}
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows if "lr" in row] == [1e-3, 1e-3]
    assert sorted(run_readers.losses(tmp_path / "run")) == [1, 2]


def test_given_settings_win_over_the_defaults_of_the_family(data: Path, tmp_path: Path) -> None:
    own = {"lr": 3e-4, "batch_size": 1, "accumulate": 2, "warmup_steps": 1, "dtype": "bf16", "ckpt_every": 1}
    own |= {"n_steps": 1, "sample_steps": 1}
    given = [text for name, value in own.items() for text in (f"--{name}", str(value))]
    assert cli.main(words(data, tmp_path / "run", "pixart", *given)) == 0
    assert settings_of(tmp_path / "run") == own


def test_a_precision_that_alone_was_not_given_is_recorded(data: Path, tmp_path: Path) -> None:
    own = {"lr": 3e-4, "batch_size": 1, "accumulate": 1, "warmup_steps": 0, "ckpt_every": 1, "n_steps": 1}
    given = [text for name, value in (own | {"sample_steps": 1}).items() for text in (f"--{name}", str(value))]
    command = words(data, tmp_path / "run", "hunyuan", *given)
    assert cli.main(command) == 0
    assert settings_of(tmp_path / "run")["dtype"] == "fp32"
    assert cli.main([*command, "--dtype", "bf16"]) == 2, "another precision than the recorded one"
