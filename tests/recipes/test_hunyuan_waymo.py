"""The commands of the recipe run as on its page, with a tiny model or a given one."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halation.data.streets import DRIVING_PROMPTS, Streets
from halation.errors import InputError
from halation.images.png_codec import encode_png, read_png
from halation.training.config import TrainConfig
from support import tiny_models
from support.rank_pool import RankPool

RECIPE = Path(__file__).parents[2] / "recipes" / "hunyuan_waymo"
sys.path.insert(0, str(RECIPE))

from hydit import check_sampling, sample_settings, tiny_autoencoder, tiny_hunyuan, training  # noqa: E402

BASE = ["bash", RECIPE / "scripts" / "train_waymo_base.sh"]
DEEPSPEED = [sys.executable, RECIPE / "hydit" / "train_deepspeed.py"]
SMALL = ["--image-size", "64", "64", "--batch-size", "1", "--max-pictures", "4", "--heldout-pictures", "0"]
SMALL += ["--sample-steps", "2", "--report-to", "none"]
with_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def started(command: list[Any], folder: Path, timeout_s: float = 250, **environment: str) -> tuple[int, str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("MODEL_PATH", "DATA", "RANK")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout, done.stderr


def sample_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("gpu_*"))


# The tiny model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert tiny_hunyuan.ensure(folder)
    return folder


def test_the_autoencoder_that_nobody_trained_brings_streets_back(tiny: Path) -> None:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(str(tiny / "vae"), use_safetensors=True)
    images = tiny_autoencoder.scenes(tiny_autoencoder.FITTED_TO + 4, 256)[-4:]
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mode()
        again = vae.decode(latents).sample.clamp(-1.0, 1.0)
        # What it does is linear, in spite of norms and activations on the way.
        mixture = vae.encode(0.5 * images[:1] + 0.5 * images[1:2]).latent_dist.mode()
    error = (again - images).square().mean((1, 2, 3)) / 4
    assert (-10 * error.log10()).min() > 20
    flat = images.mean((2, 3), keepdim=True).expand_as(images)
    assert (error < (flat - images).square().mean((1, 2, 3)) / 4 / 5).all()
    torch.testing.assert_close(mixture, latents[:2].mean(0, keepdim=True), rtol=1e-3, atol=1e-2)
    assert 0.7 < (latents * vae.config.scaling_factor).std() < 1.4


def test_the_tiny_model_draws_by_diffusers_alone_and_its_tokenizers_know_the_prompts(tiny: Path) -> None:
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe).__name__ == "HunyuanDiTPipeline"
    assert 1e6 < sum(weight.numel() for weight in pipe.transformer.parameters()) < 3e6
    for prompt in DRIVING_PROMPTS:
        assert pipe.tokenizer.tokenize(prompt) == prompt.lower().split()
        assert pipe.tokenizer_2.tokenize(prompt) == [f"▁{word}" for word in prompt.split()]

    def drawn(prompt: str) -> np.ndarray:
        settings = {"height": 64, "width": 64, "num_inference_steps": 2, "use_resolution_binning": False}
        return np.asarray(pipe(prompt, generator=torch.Generator().manual_seed(1), **settings).images[0])

    first, second = drawn(DRIVING_PROMPTS[0]), drawn(DRIVING_PROMPTS[1])
    assert np.ptp(first) > 0
    assert not np.array_equal(first, second)


def test_a_tiny_model_that_is_there_stays_and_half_of_one_is_replaced(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not tiny_hunyuan.ensure(tiny)
    half = tmp_path / "half"
    (half / "vae").mkdir(parents=True)
    monkeypatch.setattr(tiny_hunyuan, "write", lambda folder: shutil.copytree(tiny, folder))
    assert tiny_hunyuan.ensure(half)
    assert (half / "model_index.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


@pytest.mark.slow
def test_the_tiny_model_is_the_same_bytes_each_time(tiny: Path, tmp_path: Path) -> None:
    code, said, _ = started([sys.executable, RECIPE / "hydit" / "tiny_hunyuan.py", "here"], tmp_path)
    assert code == 0
    assert "created a tiny HunyuanDiT" in said
    files = [path.relative_to(tiny) for path in tiny.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert all((tmp_path / "here" / file).read_bytes() == (tiny / file).read_bytes() for file in files)
    assert "already exists" in started([sys.executable, RECIPE / "hydit" / "tiny_hunyuan.py", "here"], tmp_path)[1]


# Flags, environment and refusals


def test_help_shows_the_defaults_of_the_recipe(tmp_path: Path) -> None:
    code, said, _ = started([*BASE, "--help"], tmp_path, COLUMNS="300")
    assert code == 0
    flat = re.sub(r"[\s│]+", " ", said)
    for flag, default in (
        ("image_size", "256 256"),
        ("n_steps", "1000"),
        ("sample_steps", "10"),
        ("sample_names", "gpu"),
    ):
        told = flat.split(f" --{flag} ", 1)[1]
        assert re.search(r"\(default: (.*?)\)", told).group(1) == default, flag  # type: ignore[union-attr]
    assert "results/waymo_base" in flat
    assert list(tmp_path.iterdir()) == [], "asking for help makes no model"


def test_what_cannot_be_is_said_with_exit_code_2(tiny: Path, tmp_path: Path) -> None:
    code, _, said = started([*BASE, "many"], tmp_path)
    assert (code, "'many' is not a number of steps" in said) == (2, True)
    code, _, said = started([*BASE, "20"], tmp_path, MODEL_PATH="nosuch/model", HF_HUB_OFFLINE="1")
    assert (code, "nosuch/model" in said) == (2, True)
    code, _, said = started([*DEEPSPEED, "--ckpt-every", "500"], tmp_path, MODEL_PATH=str(tiny), DATA="nosuch")
    assert (code, "nosuch" in said) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["results"])


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert training.main(["--output_dir", str(tmp_path / "file" / "run")], prog="it") == 2
    said = capsys.readouterr().err
    assert f"cannot write to directory {tmp_path / 'file'}" in said
    assert "chmod" in said


def test_a_model_path_that_leads_nowhere_is_told_by_the_name_of_its_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATH", str(tmp_path / "nosuch"))
    assert training.main(["--output_dir", str(tmp_path / "run")], prog="it") == 2
    assert "correct MODEL_PATH" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "kept", "latest"), [(20, 10, 100), (1000, 100, 100), (5000, 500, 100)])
def test_a_run_keeps_ten_checkpoints_whatever_its_length(steps: int, kept: int, latest: int) -> None:
    found = training.by_flags(TrainConfig(n_steps=steps))
    assert (found["ckpt_every"], found["ckpt_latest_every"]) == (kept, latest)


def test_the_eight_prompts_are_the_default_and_own_data_is_used_whole() -> None:
    """The eight prompts are drawn unless others are given, and own data is used whole."""
    assert training.by_flags(TrainConfig())["sample_prompts"] == DRIVING_PROMPTS
    assert training.by_flags(TrainConfig(sample_prompts_file="mine.txt"))["sample_prompts"] == ()
    assert training.by_flags(TrainConfig())["max_images"] == 512
    assert training.by_flags(TrainConfig(data="mine"))["max_images"] == 0
    assert training.by_flags(TrainConfig(model_path="real"))["lr"] < training.by_flags(TrainConfig())["lr"]


def test_the_environment_names_model_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "models/real")
    monkeypatch.setenv("DATA", "pictures.csv")
    found = training.by_environment()
    assert (found["model_path"], found["data"]) == ("models/real", "pictures.csv")
    monkeypatch.setenv("DATA", "")
    assert training.by_environment()["data"] == "streets"


def test_the_page_shows_the_prompts_that_are_drawn() -> None:
    rows = re.findall(r"^\| (\d) \| (.*) \|$", (RECIPE / "README.md").read_text(), re.MULTILINE)
    assert rows == [(str(k), prompt) for k, prompt in enumerate(DRIVING_PROMPTS)]
    assert sample_settings.prompts == list(DRIVING_PROMPTS)


def test_an_edited_list_of_prompts_and_steps_is_what_a_training_samples(tmp_path: Path) -> None:
    copy = tmp_path / "recipe"
    shutil.copytree(RECIPE, copy, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (copy / "hydit" / "sample_settings.py").write_text('prompts = ["Your custom prompt 1"]\nnum_steps = 20\n')
    script = "import hydit.training as t; from halation.training.config import TrainConfig; "
    script += "print(t.DEFAULTS['sample_steps'], t.by_flags(TrainConfig())['sample_prompts'])"
    code, said, errors = started([sys.executable, "-c", script], copy)
    assert code == 0, errors
    assert said == "20 ('Your custom prompt 1',)\n"


# Training


def test_a_given_model_is_trained_and_draws_the_first_prompts_under_their_names(tiny: Path, tmp_path: Path) -> None:
    code, _, said = started([*BASE, "1", *SMALL, "--nproc", "1"], tmp_path, MODEL_PATH=str(tiny))
    assert code == 0, said
    run = tmp_path / "results" / "waymo_base"
    assert sample_names(run / "samples" / "step_0000001") == ["gpu_0_prompt.txt", "gpu_0_sample.png"]
    assert (run / "samples/step_0000001/gpu_0_prompt.txt").read_text() == DRIVING_PROMPTS[0]
    assert read_png(run / "samples/step_0000001/gpu_0_sample.png")[0].shape == (64, 64, 3)
    assert "Generating samples" in (run / "logs" / "train.log").read_text()
    assert not (tmp_path / "results" / training.TINY).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_nothing_two_ranks_train_on_the_cpu_and_more_steps_on_one_rank_go_on(tmp_path: Path) -> None:
    code, _, said = started([*BASE, "20", "--max_images", "16"], tmp_path)
    assert code == 0, said
    assert "ranks on the CPU: 2" in said
    run = tmp_path / "results" / "waymo_base"
    assert (tmp_path / "results" / training.TINY / "model_index.json").is_file()
    wanted = ["gpu_0_prompt.txt", "gpu_0_sample.png", "gpu_1_prompt.txt", "gpu_1_sample.png"]
    for step in (10, 20):
        samples = run / "samples" / f"step_{step:07d}"
        assert sample_names(samples) == wanted
        assert read_png(samples / "gpu_1_sample.png")[0].shape == (256, 256, 3)
        assert (samples / "gpu_1_sample.png").stat().st_size < 250_000
        assert (run / "checkpoints" / samples.name / "COMMIT.json").is_file()
    assert list((run / "tensorboard").iterdir())
    code, _, said = started([*BASE, "22", "--max-pictures", "16", "--nproc", "1", "--sample_all"], tmp_path)
    assert code == 0, said
    assert "resuming from step 20" in said
    assert len(sample_names(run / "samples" / "step_0000022")) == 16
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (min(steps), max(steps)) == (1, 22)


@pytest.mark.slow
@with_deepspeed
def test_train_deepspeed_takes_the_flags_of_the_page_on_two_ranks(tiny: Path, tmp_path: Path) -> None:
    flags = ["--ckpt-every", "2", "--ckpt-latest-every", "1", "--n-steps", "2"]
    code, _, said = started([*DEEPSPEED, *flags, *SMALL], tmp_path, MODEL_PATH=str(tiny))
    assert code == 0, said
    assert "2 ranks (deepspeed, cpu, fp32)" in said
    run = tmp_path / "results" / "waymo_base"
    for step in (1, 2):
        assert len(sample_names(run / "samples" / f"step_{step:07d}")) == 4
    assert (run / "export" / "model_index.json").is_file()


def test_without_deepspeed_it_says_so_and_takes_the_usual_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hydit import train_deepspeed

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train_deepspeed.engine() == "auto"
    assert "deepspeed is not installed" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert train_deepspeed.engine() == "deepspeed"


# The quick sampling test


def drawn_run(folder: Path, num: int) -> tuple[Path, Path]:
    """What a good run leaves behind, made by hand."""
    run, alone = folder / "run", folder / "alone"
    samples = run / "samples" / f"step_{check_sampling.NUM_STEPS:07d}"
    for path in (samples, alone, run / "logs"):
        path.mkdir(parents=True)
    rows = []
    for k in range(num):
        image = encode_png(Streets(256, 256).train(k).pixels, {})
        (samples / f"gpu_{k}_sample.png").write_bytes(image)
        (alone / f"sample_{k:02d}.png").write_bytes(image)
        (samples / f"gpu_{k}_prompt.txt").write_text(DRIVING_PROMPTS[k])
        rows.append({"index": k, "rank": k, "state": "done", "reason": ""})
    (samples / "samples.json").write_text(json.dumps({"samples": rows}))
    (run / "logs" / "train.log").write_text("Generating samples: 2 of 2\n")
    return run, alone


def test_the_quick_test_is_content_with_good_samples_and_fails_on_each_that_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, alone = drawn_run(tmp_path, 2)
    samples = run / "samples" / f"step_{check_sampling.NUM_STEPS:07d}"

    def good() -> bool:
        return check_sampling.report(check_sampling.checks(run, alone, 2))

    assert good()
    assert "FAIL" not in capsys.readouterr().out
    other = encode_png(Streets(256, 256).train(5).pixels, {})
    harms: dict[Path, bytes] = {
        samples / "gpu_1_prompt.txt": b"another prompt",
        samples / "gpu_1_sample.png": (samples / "gpu_0_sample.png").read_bytes(),
        samples / "gpu_2_sample.png": other,
        samples / "samples.json": b"{}",
        run / "logs" / "train.log": b"",
        alone / "sample_01.png": other,
    }
    for path, content in harms.items():
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        assert not good(), path
        assert "FAIL" in capsys.readouterr().out
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
    assert good()
    (samples / "gpu_0_sample.png").unlink()
    assert not good()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_test_runs_four_ranks_and_tells_what_it_checked(tmp_path: Path) -> None:
    code, said, errors = started(["bash", RECIPE / "scripts" / "test_sampling.sh"], tmp_path)
    assert code == 0, said + errors
    lines = [line for line in said.splitlines() if line.startswith("ok ")]
    assert len(lines) >= 8
    assert "{0: 0, 1: 1, 2: 2, 3: 3}" in said
    assert "one rank alone samples the same 4 images" in said
    assert started(["bash", RECIPE / "scripts" / "test_sampling.sh", "--data", "nosuch"], tmp_path)[0] == 2


# From Python


def sampled(world: Any, model: Path, results: Path, wrapping: str, **asked: Any) -> list[dict[str, Any]]:
    """One call of the function on this rank, which must leave weights, modes and random states as they were."""
    import diffusers
    from hydit.sampling import sample_images_multi_gpu

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(model), use_safetensors=True)
    transformer: Any = pipe.transformer.train()
    if wrapping == "ddp":
        transformer = torch.nn.parallel.DistributedDataParallel(transformer)
    elif wrapping == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in transformer.blocks:
            fully_shard(block)
        fully_shard(transformer)
    state = torch.random.get_rng_state()
    weights = [getattr(each, "to_local", lambda each=each: each)().clone() for each in transformer.parameters()]
    rows = sample_images_multi_gpu(
        transformer, pipe.scheduler, pipe.vae, pipe.text_encoder, pipe.tokenizer, pipe.text_encoder_2, pipe.tokenizer_2,
        world.rank, world.size, argparse.Namespace(results_dir=results, image_size=[32, 32], sample_steps=2, **asked),
        logging.getLogger("recipe"), 10,
    )  # fmt: skip
    after = [getattr(each, "to_local", lambda each=each: each)() for each in transformer.parameters()]
    assert all(torch.equal(*pair) for pair in zip(weights, after, strict=True))
    assert transformer.training
    assert torch.equal(state, torch.random.get_rng_state())
    return rows


@pytest.mark.parametrize(("size", "wrapping", "num"), [(2, "ddp", 2), (3, "fsdp", 2)])
def test_the_function_draws_on_all_ranks_what_the_pipeline_draws_alone(
    ranks: RankPool, tmp_path: Path, size: int, wrapping: str, num: int
) -> None:
    model = tiny_models.built("hunyuan")
    prompts = list(DRIVING_PROMPTS[:num])
    words = ranks.run(size, sampled_with_prompts, model, tmp_path, wrapping, prompts)
    assert all(rows == words[0] for rows in words), "every rank returns the same rows"
    assert [(row["rank"], row["index"], row["state"]) for row in words[0]] == [(k, k, "done") for k in range(num)]
    samples = tmp_path / "samples" / "step_0000010"
    assert len(sample_names(samples)) == 2 * num
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(model), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    for k, prompt in enumerate(prompts):
        plain = pipe(
            prompt, height=32, width=32, num_inference_steps=2, use_resolution_binning=False,
            generator=torch.Generator().manual_seed(42 + k),
        ).images[0]  # fmt: skip
        image, _ = read_png(samples / f"gpu_{k}_sample.png")
        np.testing.assert_array_equal(image, np.asarray(plain))
        assert (samples / f"gpu_{k}_prompt.txt").read_text() == prompt


def sampled_with_prompts(world: Any, model: Path, results: Path, wrapping: str, prompts: list[str]) -> Any:
    return sampled(world, model, results, wrapping, sample_prompts=prompts)


def saved(world: Any, model: Path, results: Path, wrapping: str) -> Any:
    """One call of `save_checkpoint` on this rank."""
    import diffusers
    from hydit.sampling import save_checkpoint

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(model), use_safetensors=True)
    transformer: Any = pipe.transformer.train()
    if wrapping == "ddp":
        transformer = torch.nn.parallel.DistributedDataParallel(transformer)
    elif wrapping == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in transformer.blocks:
            fully_shard(block)
        fully_shard(transformer)
    arguments = argparse.Namespace(results_dir=results, image_size=32, sample_steps=1)
    try:
        rows = save_checkpoint(
            transformer, pipe.scheduler, pipe.vae, pipe.text_encoder, pipe.tokenizer, pipe.text_encoder_2,
            pipe.tokenizer_2, world.rank, world.size, arguments, logging.getLogger("recipe"), 10,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return [row["state"] for row in rows]


@pytest.mark.parametrize(("size", "wrapping"), [(2, "ddp"), (2, "fsdp")])
def test_save_checkpoint_writes_a_transformer_for_diffusers_and_samples(
    ranks: RankPool, tmp_path: Path, size: int, wrapping: str
) -> None:
    import diffusers

    model = tiny_models.built("hunyuan")
    assert ranks.run(size, saved, model, tmp_path, wrapping) == [["done"] * size] * size
    folder = tmp_path / "checkpoints" / "step_0000010" / "transformer"
    again = diffusers.HunyuanDiT2DModel.from_pretrained(str(folder), use_safetensors=True).state_dict()
    first = diffusers.HunyuanDiT2DModel.from_pretrained(str(model / "transformer")).state_dict()
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert [path.name for path in folder.parent.iterdir()] == ["transformer"]
    assert len(sample_names(tmp_path / "samples" / "step_0000010")) == 2 * size


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_rank_0_after_the_samples(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    said = ranks.run(2, saved, tiny_models.built("hunyuan"), tmp_path, "ddp")
    assert said[0].endswith(
        "cannot write to directory " + str(tmp_path / "checkpoints/step_0000010/transformer: Not a directory")
    )
    assert said[1] == ["done", "done"]


def test_a_checkpoint_of_weights_that_zero_3_shards_is_refused() -> None:
    from hydit.sampling import save_checkpoint

    module = torch.nn.Linear(2, 2)
    module.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="sharded by ZeRO-3"):
        save_checkpoint(module, *[None] * 6, 0, 1, argparse.Namespace(), logging.getLogger("recipe"), 1)


def refused(world: Any, model: Path, results: Path) -> str:
    class Pretended:
        rank, size = world.rank, world.size + 1

    with pytest.raises(InputError) as refusal:
        sampled(Pretended, model, results, "bare")
    return str(refusal.value)


def test_ranks_that_do_not_know_each_other_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    model = tiny_models.built("hunyuan")
    words = ranks.run(2, refused, model, tmp_path)
    assert "rank 1 of 3" in words[1]
    assert "0 of 2" in words[0]

    class Alone:
        rank, size = 0, 2

    with pytest.raises(InputError, match="is not initialised"):
        sampled(Alone, model, tmp_path, "bare")


def test_alone_the_function_needs_no_process_group_and_leaves_none(tmp_path: Path) -> None:
    class Alone:
        rank, size = 0, 1

    rows = sampled(Alone, tiny_models.built("hunyuan"), tmp_path, "bare", sample_all=True)
    assert [row["state"] for row in rows] == ["done"] * 8
    assert not torch.distributed.is_initialized()
