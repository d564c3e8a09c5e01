"""`--ema_decay 0` trains without an EMA: none is kept or saved, and the raw weights take its place everywhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from halation.errors import InputError
from halation.models.checkpoint_loading import load_denoiser
from halation.models.model_path_resolver import resolve_model
from halation.runs import run_folder
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import commands, rank_functions, run_readers, tiny_models
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
SLOW = pytest.mark.slow
PATIENCE = {"timeout_s": 400.0, "world_timeout_s": 200.0}


def small(folder: Path, engine: str = "auto", **changes: Any) -> TrainConfig:
    """A training of seconds; `zero2` is stage 2 of DeepSpeed."""
    settings: dict[str, Any] = {"lr": 2e-2, "ckpt_every": 1, "ema_decay": 0.0, "engine": engine, "validation_images": 0}
    if engine.startswith("zero"):
        settings |= {"engine": "deepspeed", "zero_stage": int(engine[-1])}
    if "model_path" in changes:
        settings |= {"model": TrainConfig.model, "patch_size": 0, "max_images": 6, "lr": 2e-3}
    return rank_functions.small_config(folder, **settings | {"dist_timeout_s": 100.0} | changes)


def files(run: Path, step: int) -> set[str]:
    return {
        path.name.split(".")[0].split("-")[0] for path in (run / f"checkpoints/step_{step:07d}").glob("*.safetensors")
    }


def weights(run: Path, *, raw: bool) -> dict[str, torch.Tensor]:
    return dict(load_denoiser(run, raw=raw).module.named_parameters())


@pytest.mark.parametrize(
    ("engine", "size"),
    [("ddp", 2), *(pytest.param(engine, 2, marks=SLOW) for engine in ("fsdp", "zero2", "zero3"))],
)
def test_without_an_ema_the_weights_are_those_of_training_with_one(
    ranks: RankPool, tmp_path: Path, engine: str, size: int
) -> None:
    """Weights and images without an EMA are the raw ones of a run with it, and no EMA is saved."""
    ranks.run(size, rank_functions.train, small(tmp_path / "without", engine), **PATIENCE)
    averaged = small(tmp_path / "with", engine, ema_decay=0.5, sample_raw=True)
    ranks.run(size, rank_functions.train, averaged, **PATIENCE)
    for step in (1, 2):
        assert files(tmp_path / "without", step) == {"model", "optimizer"}
        assert files(tmp_path / "with", step) == {"model", "ema", "optimizer"}
        folder = f"samples/step_{step:07d}"
        for number in range(2):
            image = tmp_path / "without" / folder / f"sample_{number:02d}.png"
            raw = tmp_path / "with" / folder / f"sample_{number:02d}_raw.png"
            assert (np.asarray(Image.open(image)) == np.asarray(Image.open(raw))).all()
    expected = weights(tmp_path / "with", raw=True)
    for is_raw in (False, True):
        found = weights(tmp_path / "without", raw=is_raw)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    exported = load_file(tmp_path / "without/export/model.safetensors")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert not (tmp_path / "without/export/model_raw.safetensors").exists()
    assert torch.load(tmp_path / "without/export/model.pth", weights_only=True).keys() == exported.keys()
    checkpoint = resolve_model(str(tmp_path / "without"), raw=False)
    assert checkpoint.digest == resolve_model(str(tmp_path / "without"), raw=True).digest


@pytest.mark.parametrize(
    ("engine", "size"), [("fsdp", 2), *(pytest.param(engine, 2, marks=SLOW) for engine in ("ddp", "zero1", "zero3"))]
)
def test_a_stopped_run_without_an_ema_resumes_bit_for_bit(
    ranks: RankPool, tmp_path: Path, engine: str, size: int
) -> None:
    changes = {"sample": False, "ckpt_every": 0, "n_steps": 3}
    ranks.run(size, rank_functions.train, small(tmp_path / "whole", engine, **changes), **PATIENCE)
    stopped = small(tmp_path / "stopped", engine, **changes)
    ranks.run(size, rank_functions.train_until, stopped, 1, **PATIENCE)
    assert files(tmp_path / "stopped", 1) == {"model", "optimizer"}
    ranks.run(size, rank_functions.train, stopped, **PATIENCE)
    found, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "checkpoints/step_0000003").glob("*.safetensors")}
        for name in ("stopped", "whole")
    )
    assert len(expected) >= 2
    assert found == expected


def test_switching_the_ema_on_or_off_is_refused_unless_accepted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, rank_functions.train, small(tmp_path, n_steps=1), **PATIENCE)
    switched = small(tmp_path, ema_decay=0.5)
    with pytest.raises(RanksFailed) as refused:
        ranks.run(1, rank_functions.train, switched, **PATIENCE)
    assert "ema_decay" in refused.value.troubles[0].message
    assert "0.0" in refused.value.troubles[0].message
    accepted = small(tmp_path, ema_decay=0.5, n_steps=1, accept_changes=True, sample=False)
    start = ranks.run(1, averages_at_start, accepted, **PATIENCE)[0]
    assert start["averages"] == start["weights"], "the EMA starts at the weights"
    ranks.run(1, rank_functions.train, small(tmp_path, ema_decay=0.5, accept_changes=True), **PATIENCE)
    assert files(tmp_path, 2) == {"model", "ema", "optimizer"}
    with pytest.raises(RanksFailed, match="ema_decay"):
        ranks.run(1, rank_functions.train, small(tmp_path, n_steps=3), **PATIENCE)
    ranks.run(1, rank_functions.train, small(tmp_path, n_steps=3, accept_changes=True), **PATIENCE)
    assert files(tmp_path, 3) == {"model", "optimizer"}


def averages_at_start(world: Any, config: TrainConfig) -> dict[str, float]:
    """Sums of the EMA and of the weights right after a resume."""
    from halation.training import command as job

    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        assert session._resume()
        assert session.ema is not None
        averages = session.ema.tensors()
        return {
            "averages": sum(float(value.double().sum()) for value in averages.values()),
            "weights": sum(float(value.detach().double().sum()) for value in session.engine.master_weights().values()),
        }


def test_a_run_of_an_earlier_version_with_decay_0_resumes(ranks: RankPool, tmp_path: Path) -> None:
    """Earlier versions saved an EMA equal to the weights; it is left out from the next checkpoint on."""
    ranks.run(1, rank_functions.train, small(tmp_path, n_steps=1, ema_decay=0.5), **PATIENCE)
    record = run_folder.read_record(run_folder.RunFolder(tmp_path))
    record["fixed"]["ema_decay"] = record["settings"]["ema_decay"] = 0.0
    run_folder.write_json_with_digest(tmp_path / "config.json", record)
    ranks.run(1, rank_functions.train, small(tmp_path), **PATIENCE)
    assert files(tmp_path, 1) == {"model", "ema", "optimizer"}
    assert files(tmp_path, 2) == {"model", "optimizer"}
    assert run_readers.losses(tmp_path).keys() >= {1, 2}


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=SLOW), 2])
def test_a_pipeline_without_an_ema_exports_its_weights_once(ranks: RankPool, tmp_path: Path, lora_rank: int) -> None:
    folder = str(tiny_models.built("hunyuan"))
    config = small(tmp_path, "single", model_path=folder, lora_rank=lora_rank, sample=False, n_steps=1)
    ranks.run(1, rank_functions.train, config, **PATIENCE)
    assert files(tmp_path, 1) == {"model", "optimizer"}
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert "transformer" in names
    assert "transformer_raw" not in names
    if lora_rank:
        saved = run_readers.tensors_at(tmp_path, 1, "model")
        exported = load_file(tmp_path / "export/pytorch_lora_weights.safetensors")
        assert len(exported) == len(saved)
        ups = sorted(float(value.sum()) for name, value in exported.items() if "lora_B" in name)
        assert ups == pytest.approx(
            sorted(float(value.sum()) for name, value in saved.items() if "lora_B" in name), abs=1e-7
        )


@pytest.mark.slow
def test_every_command_reads_a_run_without_an_ema(tmp_path: Path) -> None:
    """sample, generate, evaluate, distill and watch load its checkpoints as they load any other."""
    run, folder = tmp_path / "run", tmp_path / "out"
    quiet = ["--progress", "none"]
    halation(tmp_path, *commands.train(run, nproc=1, n_steps=2, ckpt_every=2, ema_decay=0.0))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red car\na blue car\n")
    steps = ["--num_inference_steps", "2"]
    halation(tmp_path, "sample", "--checkpoint", str(run), "--prompts", "a car", "--output_dir", str(folder / "s"))
    halation(tmp_path, "generate", "--model_path", str(run), "--prompts", str(prompts), *steps, *quiet,
             "--output_dir", str(folder / "g"))  # fmt: skip
    assert len(list((folder / "g").rglob("*.png"))) == 2
    evaluated = ["--model_path", str(run), "--prompts", str(prompts), "--metrics", "agreement", *steps, *quiet]
    halation(tmp_path, "evaluate", *evaluated, "--output", str(folder / "scores.json"))
    assert (folder / "scores.json").exists()
    distilled = ["--teacher_path", str(run), "--data_path", str(prompts), "--batch_size", "2", "--n_steps", "2"]
    halation(tmp_path, "distill", *distilled, "--teacher_steps", "2", "--teacher_states", "2", "--no_sample", *quiet,
             "--ema_decay", "0", "--report_to", "none", "--nproc", "1", "--output_dir", str(folder / "d"))  # fmt: skip
    assert files(folder / "d", 2) == {"model", "optimizer"}
    halation(
        tmp_path,
        "watch",
        str(run),
        "--once",
        "--prompts",
        str(prompts),
        *steps,
        "--num_samples",
        "2",
        "--metrics",
        "agreement",
        *quiet,
    )
    assert list((run / "watch").rglob("*.png"))


def halation(folder: Path, *words: str) -> str:
    """Run a command to its end; return its output."""
    result = subprocess.run([commands.HALATION, *words], cwd=folder, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def test_raw_samples_beside_samples_without_an_ema_are_refused() -> None:
    from halation.config import check_settings

    with pytest.raises(InputError, match=re.escape("leave --sample_raw out: without an EMA all samples")):
        check_settings(TrainConfig(sample_raw=True, ema_decay=0.0))
    check_settings(TrainConfig(sample_raw=True))
    check_settings(TrainConfig(ema_decay=0.0))
