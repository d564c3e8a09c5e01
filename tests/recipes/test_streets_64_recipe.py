"""The recipe of the embedded model runs from training to its table, at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "streets_64"


def call(folder: Path, *words: str) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "OUTPUT_DIR": str(folder / "run"),
        "HALATION_CACHE": str(folder / "cache"),
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def packed_by_the_recipe(folder: Path, num_steps: int) -> Path:
    words = [str(RECIPE / "pack.py"), str(folder / "run" / "export"), str(folder / "packed")]
    call(folder, sys.executable, *words, "--num_inference_steps", str(num_steps))
    return folder / "packed"


@pytest.mark.slow
def test_a_model_is_trained_packed_and_measured_beside_real_and_blurred_scenes(tmp_path: Path) -> None:
    small = ["--n_steps", "2", "--batch_size", "2", "--no_compile", "--dtype", "fp32", "--num_workers", "0"]
    call(tmp_path, "bash", str(RECIPE / "train.sh"), *small, "--sample_steps", "2", "--validation_images", "2")
    packed = packed_by_the_recipe(tmp_path, num_steps=3)
    assert json.loads((packed / "config.json").read_text())["sampling"]["steps"] == 3
    assert (packed / "model.safetensors").stat().st_size <= 16 * 2**20
    measure = [
        sys.executable,
        str(RECIPE / "measure.py"),
        "--num_samples",
        "6",
        "--nproc",
        "1",
        "--output_dir",
        "figures",
    ]
    table = call(tmp_path, *measure, "--model_path", str(packed), "--num_inference_steps", "2")
    report = json.loads((tmp_path / "figures" / "packed_2_steps.json").read_text())
    assert table.count("\n") == 5
    agreements = {side: metrics["agreement"]["value"] for side, metrics in report.items()}
    assert agreements["real scenes"] > 0.9 > agreements["packed"]


@pytest.mark.slow
def test_the_model_of_the_package_is_distilled_to_four_steps_and_packed(tmp_path: Path) -> None:
    small = [
        "--n_steps",
        "2",
        "--batch_size",
        "2",
        "--teacher_steps",
        "4",
        "--teacher_states",
        "4",
        "--trajectories",
        "4",
    ]
    quiet = ["--no_sample", "--no_teacher_samples", "--dtype", "fp32"]
    call(tmp_path, "bash", str(RECIPE / "distil.sh"), *small, *quiet)
    packed = packed_by_the_recipe(tmp_path, num_steps=4)
    sampling = json.loads((packed / "config.json").read_text())["sampling"]
    assert (sampling["steps"], sampling["sampler"], sampling["distilled"]["steps"]) == (4, "euler", 4)
