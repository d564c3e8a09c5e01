"""The commands of the recipe run as on its page, from any folder, with correct exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halation.runs.run_folder import RunFolder, create_or_resume_run
from halation.training.config import TrainConfig, fill_dit_defaults

RECIPE = Path(__file__).parents[2] / "recipes" / "dit_registers"
TORCHRUN = Path(sys.executable).with_name("torchrun")
TINY = [
    "--model",
    "tiny",
    "--image_size",
    "32",
    "--patch_size",
    "8",
    "--n_steps",
    "4",
    "--batch_size",
    "2",
    "--sample_steps",
    "1",
    "--eval_images",
    "16",
    "--eval_reference",
    "16",
]
_SPEC = importlib.util.spec_from_file_location("dit_registers_train", RECIPE / "train.py")
assert _SPEC is not None
assert _SPEC.loader is not None
train: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(train)
QUIET = ["--validation_images", "0", "--sample_prompts", "a rainy street"]


def started(command: list[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MASTER_", "HALATION"))}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as owner:
        owner.bind(("", 0))
        owner.listen()
        yield int(owner.getsockname()[1])


@pytest.mark.slow
def test_run_ddp_trains_on_two_cpu_ranks_from_a_foreign_folder_with_its_port_taken(
    tmp_path: Path, taken_port: int
) -> None:
    command = [
        "bash",
        RECIPE / "run_ddp.sh",
        *TINY,
        *QUIET,
        "--num-register-tokens",
        "3",
        "--lr",
        "2e-4",
        "--eval_every",
        "2",
    ]
    done = started(command, tmp_path, MASTER_PORT=str(taken_port))
    assert done.returncode == 0, done.stderr
    assert "training on 2 CPU ranks" in done.stderr
    assert f"MASTER_PORT {taken_port} is in use" in done.stderr
    run = tmp_path / "runs" / "dit_registers"
    record = json.loads((run / "config.json").read_text())
    assert (record["settings"]["num_register_tokens"], record["settings"]["lr"], record["settings"]["nproc"]) == (
        3,
        2e-4,
        2,
    )
    assert record["fixed"]["global batch"] == 4
    weights = torch.load(run / "export" / "model.pth", weights_only=True)
    same = load_file(run / "export" / "model.safetensors")
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in same)
    assert weights["registers"].shape[0] == 3
    assert list((run / "samples" / "step_0000004").glob("sample_*.png"))
    assert list((tmp_path / "wandb").glob("offline-run-*")), "wandb is offline unless told otherwise"
    assert list((run / "tensorboard").iterdir())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line.get("metric") == "FD-streets"} == {2, 4}, "evaluated by all ranks"
    assert json.loads((run / "evaluation/step_0000004.json").read_text())["num_ranks"] == 2


def test_run_single_gpu_is_one_rank_and_flags_and_wandb_mode_win_over_the_recipe(tmp_path: Path) -> None:
    command = ["bash", RECIPE / "run_single_gpu.sh", *TINY, *QUIET, "--report_to", "wandb", "--output-dir", "here"]
    done = started(command, tmp_path, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert "1 rank (single, cpu, fp32)" in done.stderr
    assert (tmp_path / "here" / "export" / "model.pth").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "model.pth"], "WANDB_MODE is disabled"
    weights = torch.load(tmp_path / "model.pth", weights_only=True)
    assert weights.keys() == load_file(tmp_path / "here" / "export" / "model.safetensors").keys()
    assert not list((tmp_path / "here").glob("evaluation/*")), "a run shorter than --eval_every is not evaluated"


def test_without_a_gpu_a_batch_runs_in_micro_batches_of_the_same_total(tmp_path: Path) -> None:
    def flags(**settings: int) -> list[str]:
        return train.cpu_micro_batches(fill_dit_defaults(TrainConfig(output_dir=tmp_path / "run", **settings)))

    assert flags(batch_size=128) == ["--batch_size", "4", "--accumulate", "32"]
    assert flags(batch_size=64, accumulate=3) == ["--batch_size", "4", "--accumulate", "48"]
    assert flags(batch_size=7) == ["--batch_size", "1", "--accumulate", "7"]
    assert flags(batch_size=6) == ["--batch_size", "3", "--accumulate", "2"]
    assert flags(batch_size=4) == flags(batch_size=1) == []


def test_a_run_that_was_started_with_larger_micro_batches_keeps_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.folder.mkdir()
    settings = {"batch_size": 16, "accumulate": 1}
    create_or_resume_run(run, "train", settings, {}, accept_changes=False)
    asked = fill_dit_defaults(TrainConfig(output_dir=run.folder, batch_size=16))
    assert train.cpu_micro_batches(asked) != [], "a start that was refused fixes nothing"
    (run.checkpoints / "step_0000001").mkdir(parents=True)
    assert train.cpu_micro_batches(asked) == []
    assert train.cpu_micro_batches(fill_dit_defaults(TrainConfig(output_dir=run.folder, batch_size=32))) != []


def test_a_run_with_fewer_steps_than_the_first_evaluation_has_none() -> None:
    assert train.by_steps(4) == {"eval_every": 0}
    assert train.by_steps(train.DEFAULTS["n_steps"]) == {}


def test_model_pth_is_a_link_to_the_last_export_and_no_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pth").write_text(name)
        train.link_weights(Path(name) / "model.pth")
        assert Path("model.pth").read_text() == name
    train.link_weights(Path("nosuch") / "model.pth")
    assert Path("model.pth").read_text() == "second"
    Path("model.pth").unlink()
    Path("model.pth").write_text("mine")
    train.link_weights(Path("first") / "model.pth")
    assert Path("model.pth").read_text() == "mine"
    assert "model.pth is a file of its own" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model.pth", "second"]


@pytest.mark.slow
def test_with_its_default_batch_it_trains_without_a_gpu(tmp_path: Path) -> None:
    """The default batch of 128 images per rank fits into the memory of a machine without a GPU."""
    small = ["--model", "tiny", "--image_size", "32", "--patch_size", "8", "--n_steps", "1", "--sample_steps", "1"]
    done = started(["bash", RECIPE / "run_ddp.sh", *small, *QUIET, "--report_to", "none"], tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "runs" / "dit_registers" / "config.json").read_text())
    assert record["fixed"]["global batch"] == 2 * 128
    assert (record["settings"]["batch_size"], record["settings"]["accumulate"]) == (4, 32)


@pytest.mark.slow
def test_under_torchrun_its_ranks_are_joined(tmp_path: Path) -> None:
    torchrun = [TORCHRUN, "--standalone", "--nproc_per_node=2", RECIPE / "train.py"]
    done = started([*torchrun, *TINY, *QUIET, "--report_to", "none", "--output_dir", tmp_path / "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (ddp, cpu, fp32)" in done.stderr
    assert (tmp_path / "run" / "export" / "model.pth").is_file()


@pytest.mark.slow
def test_torchrun_with_a_taken_port_fails_before_training_as_the_page_says(tmp_path: Path, taken_port: int) -> None:
    torchrun = [TORCHRUN, "--nproc_per_node=1", f"--master_port={taken_port}", RECIPE / "train.py", "--help"]
    done = started(torchrun, tmp_path)
    assert done.returncode != 0
    assert "EADDRINUSE" in done.stderr
    assert "num_register_tokens" not in done.stdout


def test_help_shows_the_defaults_of_the_recipe(tmp_path: Path) -> None:
    for command in (
        ["bash", RECIPE / "run_ddp.sh"],
        [TORCHRUN, "--nproc_per_node=1", "--standalone", RECIPE / "train.py"],
    ):
        done = started([*command, "--help_all"], tmp_path, COLUMNS="300")
        assert done.returncode == 0, done.stderr
        for flag, default in (
            ("num_register_tokens", "0"),
            ("batch_size", "128"),
            ("n_steps", "200000"),
            ("lr", "0.0001"),
            ("eval_every", "5000"),
        ):
            told = re.search(rf"^  --{flag} .*\[(.*)\]$", done.stdout, re.MULTILINE)
            assert told is not None
            assert told.group(1) == default, flag
        assert "runs/dit_registers" in done.stdout


def test_exit_codes_pass_through_the_scripts(tmp_path: Path) -> None:
    for script in ("run_ddp.sh", "run_single_gpu.sh"):
        done = started(["bash", RECIPE / script, "--data", "nosuch"], tmp_path)
        assert done.returncode == 2
        assert "nosuch does not exist" in done.stderr
        assert started(["bash", RECIPE / script, "--num_register_token", "4"], tmp_path).returncode == 2


def test_without_a_venv_beside_it_the_scripts_use_the_python_on_the_path(tmp_path: Path) -> None:
    copy = tmp_path / "recipes" / "dit_registers"
    shutil.copytree(RECIPE, copy, ignore=shutil.ignore_patterns("__pycache__", "wandb", "runs"))
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\necho "this python" >&2\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    done = started(["bash", copy / "run_single_gpu.sh", "--data", "nosuch"], tmp_path, PATH=path)
    assert done.returncode == 2
    assert "this python" in done.stderr
