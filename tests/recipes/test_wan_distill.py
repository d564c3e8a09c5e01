"""The commands of the recipe run as on its page, with a tiny Wan, on one process and four."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halation.distillation.config import DistillConfig
from halation.errors import InputError
from halation.images.png_codec import read_png
from halation.models.students.config import StudentConfig
from support import run_readers
from support.rank_pool import RankPool

RECIPE = Path(__file__).parents[2] / "recipes" / "wan_distill"
sys.path.insert(0, str(RECIPE))

import recipe_checks  # noqa: E402
import test_parallel_sample_generation as check  # noqa: E402
import tiny_wan  # noqa: E402
import train_distillation as recipe  # noqa: E402

SCRIPT = RECIPE / "train_distillation.py"
FLAGS = ["--teacher_path", "tiny", "--student_config", "config/student_config.json"]
FLAGS += ["--data_path", "data/static_prompts.txt", "--output_dir", "./outputs/wan_t2i", "--save_samples"]
PROMPTS = ["A cat", "A dog", "A bird", "A fish"]
SMALL = ["--num_epochs", "2", "--batch_size", "3", "--max_images", "14", "--sample_steps", "2"]
SMALL += ["--teacher_steps", "4", "--teacher_states", "2", "--report_to", "none"]


def started(command: list[Any], folder: Path, timeout_s: float = 280, **environment: str) -> tuple[int, str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout, done.stderr


# Flags and files


def test_the_flags_of_the_document_are_those_of_the_command() -> None:
    words = ["--num-steps", "9", "--save_samples", "--gradient_checkpointing", "--mixed_precision=no", "--distributed"]
    words += ["--teacher_dtype", "bfloat16", "--sample_dir", "there", "--sample_prompts", "A cat", "no", "--same_seed"]
    found, sample_dir, distributed = recipe.translated(words)
    assert found == [
        "--n_steps", "9", "--sample", "--gradient_checkpointing", "--dtype", "fp32", "--teacher_dtype", "bf16",
        "--sample_prompts", "A cat", "no", "--same_seed",
    ]  # fmt: skip
    assert (sample_dir, distributed) == ("there", True)
    assert recipe.translated(["--distributed", "False", "--lr", "1e-4"]) == (["--lr", "1e-4"], "", False)
    config = recipe.cli.parse("distill", found, defaults=recipe.DEFAULTS)
    assert (config.n_steps, config.sample, config.gradient_checkpointing) == (9, True, True)
    assert (config.dtype, config.teacher_dtype, config.same_seed) == ("fp32", "bf16", True)
    assert config.sample_prompts == ("A cat", "no")


def test_steps_take_the_place_of_epochs_and_both_are_refused() -> None:
    assert recipe.by_flags(["--n_steps", "9"]) == {"num_epochs": 0}
    assert recipe.by_flags(["--lr", "1"]) == {}
    with pytest.raises(InputError, match="--num_steps with --num_epochs"):
        recipe.by_flags(["--n_steps", "9", "--num_epochs", "3"])


def test_a_precision_that_is_none_is_refused_by_its_own_name() -> None:
    with pytest.raises(InputError, match="--mixed_precision int8"):
        recipe.translated(["--mixed_precision", "int8"])


def test_without_a_launcher_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe.by_machine()["nproc"] == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert recipe.by_machine()["nproc"] == 0


def test_files_of_the_recipe_are_found_from_anywhere_and_own_ones_go_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(recipe.found("data/static_prompts.txt")) == RECIPE / "data" / "static_prompts.txt"
    assert recipe.found("data/others.txt") == "data/others.txt"
    assert recipe.found("") == ""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/static_prompts.txt").touch()
    assert recipe.found("data/static_prompts.txt") == "data/static_prompts.txt"


def test_samples_may_lie_elsewhere_but_never_among_files_of_others(tmp_path: Path) -> None:
    run, there, taken = tmp_path / "run", tmp_path / "there", tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.png").touch()
    with pytest.raises(InputError, match="is already in use"):
        recipe.link(run, taken)
    recipe.link(run, there)
    (run / "samples" / "epoch_0001_grid.png").touch()
    assert [path.name for path in there.iterdir()] == ["epoch_0001_grid.png"]
    recipe.link(run, there)
    with pytest.raises(InputError, match="is already in use"):
        recipe.link(tmp_path / "other_run", there)
    with pytest.raises(InputError, match="is already in use"):
        recipe.link(run, tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="Not a directory"):
        recipe.link(tmp_path / "new", tmp_path / "file" / "below")


def test_the_example_of_a_students_config_names_every_key_and_fits_any_teacher() -> None:
    said = json.loads((RECIPE / "config" / "student_config.json").read_text())
    assert set(said) == {field.name for field in dataclasses.fields(StudentConfig)}
    assert StudentConfig.read(RECIPE / "config" / "student_config.json") == StudentConfig()
    small = StudentConfig.read(RECIPE / "config" / "student_small.json")
    assert (small.width, small.heads, small.depth) == (1536, 12, 30)


def test_prompts_are_many_and_the_tiny_tokenizer_knows_their_words() -> None:
    prompts = (RECIPE / "data" / "static_prompts.txt").read_text().splitlines()
    assert len(prompts) == len(set(prompts)) >= 24
    tokenizer = tiny_wan.tokenizer()
    for prompt in [*PROMPTS, *prompts]:
        known = set(tokenizer.tokenize(prompt))
        assert {f"▁{word}" for word in prompt.split() if "-" not in word} <= known


def test_help_shows_the_flags_of_the_recipe_too(tmp_path: Path) -> None:
    code, said, _ = started([sys.executable, SCRIPT, "--help"], tmp_path, COLUMNS="200")
    assert code == 0
    for flag in ("--save_samples", "--mixed_precision", "--sample_dir", "--teacher_on_cpu", "--sample_interval"):
        assert flag in said
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_said_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student.json").write_text('{"widht": 64}')
    (tmp_path / "empty.txt").write_text("\n")
    cases = [
        ([], "neither --teacher_path nor --model_path"),
        (["--teacher_path", "nosuch/model"], "nosuch/model"),
        (["--teacher_path", "x", "--student_config", "student.json"], "write width"),
        (["--teacher_path", "x", "--data_path", "nosuch.txt"], "nosuch.txt"),
        (["--teacher_path", "x", "--mixed_precision", "fp8"], "--mixed_precision fp8"),
        (["--teacher_path", "x", "--num_steps", "5", "--num_epochs", "1"], "one of them"),
    ]
    for words, sentence in cases:
        assert recipe.main(words) == 2, words
        assert sentence in capsys.readouterr().err


# The tiny teacher


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert tiny_wan.ensure(folder)
    assert not tiny_wan.ensure(folder)
    return folder


@pytest.mark.slow
def test_the_tiny_teacher_draws_by_diffusers_alone_and_prompts_and_both_experts_show(tiny: Path) -> None:
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config.boundary_ratio == 0.875

    def drawn(prompt: str, seed: int = 1) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        settings: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": 10}
        return np.asarray(pipe(prompt, generator=generator, output_type="np", **settings).frames[0][0])

    cat = drawn("A cat")
    assert cat.std() > 0.05
    assert np.abs(cat - drawn("A mountain lake with the peaks mirrored in it")).mean() > 0.05
    assert np.abs(cat - drawn("A cat", seed=2)).mean() > 0.02
    for expert in ("transformer", "transformer_2"):
        with torch.no_grad():
            getattr(pipe, expert).proj_out.weight.mul_(0.5)
        assert np.abs(cat - drawn("A cat")).mean() > 0.005, expert


# The commands


def image_names(samples: Path, epoch: int) -> list[str]:
    return sorted(path.name for path in samples.glob(f"epoch_{epoch:04d}_rank_*.png"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_documented_commands_draw_the_same_teacher_images(tmp_path: Path) -> None:
    """Both documented commands, on one process and on four, draw the same teacher images."""
    one, four = tmp_path / "one", tmp_path / "four"
    one.mkdir()
    four.mkdir()
    code, _, said = started([sys.executable, SCRIPT, *FLAGS, "--sample_prompts", *PROMPTS, *SMALL], one)
    assert code == 0, said
    samples = one / "outputs/wan_t2i/samples"
    for epoch in (1, 2):
        assert image_names(samples, epoch) == [f"epoch_{epoch:04d}_rank_0_sample_0{k}.png" for k in range(4)]
    assert (samples / "epoch_0001_rank_0_sample_01.txt").read_text() == "A dog"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4"]
    words = [*torchrun, SCRIPT, *FLAGS, "--distributed", "--sample_prompts", *PROMPTS, *SMALL]
    code, _, said = started(words, four, timeout_s=500)
    assert code == 0, said
    assert "4 ranks (ddp, cpu, fp32)" in said
    samples = four / "outputs/wan_t2i/samples"
    for epoch in (1, 2):
        assert image_names(samples, epoch) == [f"epoch_{epoch:04d}_rank_{k}_sample_00.png" for k in range(4)]
    rows = json.loads((samples / "epoch_0002_samples.json").read_text())["samples"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert [row["teacher"] for row in rows] == [f"teacher/sample_0{k}.png" for k in range(4)]
    assert "Generating samples" in (four / "outputs/wan_t2i/logs/train.log").read_text()
    teachers = [run_readers.sample_files(folder / "outputs/wan_t2i/samples/teacher") for folder in (one, four)]
    assert teachers[0] == teachers[1]


@pytest.mark.slow
def test_samples_go_where_they_are_wanted_and_none_are_drawn_unasked(tmp_path: Path) -> None:
    steps = ["--num_steps", "1", *SMALL[2:]]
    words = [sys.executable, SCRIPT, *FLAGS[:-1], *steps, "--sample_prompts", "A cat"]
    code, _, said = started(words, tmp_path)
    assert code == 0, said
    assert "without --save_samples" in said
    assert not (tmp_path / "outputs/wan_t2i/samples").exists()
    words = [sys.executable, SCRIPT, *FLAGS, *steps, "--sample_prompts", "A cat", "--sample_dir", "pictures"]
    words += ["--output_dir", "outputs/second", "--distributed"]
    code, _, said = started(words, tmp_path)
    assert code == 0, said
    assert "--distributed without torchrun" in said
    assert image_names(tmp_path / "pictures", 1) == ["epoch_0001_rank_0_sample_00.png"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_that_tries_four_ranks_tells_what_it_checked(tmp_path: Path) -> None:
    code, said, errors = started([sys.executable, check.__file__, tmp_path / "here"], tmp_path, timeout_s=500)
    assert code == 0, said + errors
    assert len([line for line in said.splitlines() if line.startswith("ok ")]) >= 14
    assert "[2, 2, 2, 0]" in said
    assert said.splitlines()[-1] == "ALL CHECKS PASSED"
    assert started([sys.executable, check.__file__, tmp_path / "here"], tmp_path)[0] == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "num_checks"), [("test_fixes.py", 7), ("test_nccl_timeout_fix.py", 7)])
def test_a_script_of_the_recipe_finds_its_fix(tmp_path: Path, name: str, num_checks: int) -> None:
    code, said, errors = started([sys.executable, RECIPE / name], tmp_path, timeout_s=800)
    assert code == 0, said + errors
    assert len([line for line in said.splitlines() if line.startswith("ok ")]) == num_checks
    assert said.splitlines()[-1] == "ALL CHECKS PASSED"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_check_of_the_scripts_that_fails_or_raises_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe_checks.report(iter([(True, "this holds")]))
    assert not recipe_checks.report(iter([(False, "this does not"), (True, "this holds")]))

    def missing() -> Any:
        yield True, "this holds"
        (RECIPE / "nosuch").read_text()

    assert not recipe_checks.report(missing())
    assert recipe_checks.main("it", lambda folder: iter([(False, "this does not")])) == 1
    said = capsys.readouterr().out
    assert "FAIL this does not" in said
    assert "FAIL FileNotFoundError" in said
    assert said.splitlines()[-1] == "SOME CHECKS FAILED"


def test_what_does_not_hold_is_told_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.report(iter([(True, "this holds")]))
    assert not check.report(iter([(True, "this holds"), (False, "this does not")]))
    assert "FAIL this does not" in capsys.readouterr().out

    def missing() -> Any:
        yield True, "this holds"
        (RECIPE / "nosuch").read_text()

    assert not check.report(missing())


# From Python


def sampled(world: Any, model: Path, folder: Path, wrapping: str, prompts: list[str]) -> list[dict[str, Any]]:
    """One call of the function on this rank, which must leave weights, modes and random states as they were."""
    teacher, student = check.opened(str(model))
    wrapped: Any = student
    if wrapping == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(student)
    elif wrapping == "data_parallel":
        wrapped = torch.nn.DataParallel(student)
    elif wrapping == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in student.blocks:
            fully_shard(block)
        fully_shard(student)
    state = torch.random.get_rng_state()
    teacher.vae.train()
    rows = recipe.generate_and_save_samples(
        wrapped, teacher.text_encoder, teacher.vae, teacher, prompts, folder, 3, "cpu", "cpu", torch.float32,
        {"image_size": [32, 48], "sample_steps": 2}, torch.nn.Identity(), world.rank, world.size,
    )  # fmt: skip
    assert torch.equal(state, torch.random.get_rng_state())
    assert student.training
    assert teacher.vae.training
    assert all(weight.requires_grad for weight in teacher.vae.parameters())
    return rows


def plain(model: Path, prompts: list[str]) -> list[np.ndarray]:
    """What the pipeline draws alone with the student in the place of both experts."""
    pipe, student = check.opened(str(model))
    pipe.register_modules(transformer=student.eval(), transformer_2=None)
    pipe.register_to_config(boundary_ratio=None)
    pipe.set_progress_bar_config(disable=True)
    found = []
    for k, prompt in enumerate(prompts):
        settings: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 1, "num_inference_steps": 2}
        generator = torch.Generator().manual_seed(42 + k)
        frames = pipe(prompt, guidance_scale=1.0, generator=generator, output_type="np", **settings).frames
        found.append((frames[0][0] * 255).round().astype(np.uint8))
    return found


class Alone:
    rank, size = 0, 1


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["bare", "data_parallel"])
def test_alone_and_under_data_parallel_it_draws_what_the_pipeline_draws(
    tiny: Path, tmp_path: Path, wrapping: str
) -> None:
    """Alone and under DataParallel it is one process and draws what the pipeline draws."""
    rows = sampled(Alone, tiny, tmp_path, wrapping, PROMPTS[:2])
    assert [row["file"] for row in rows] == [f"epoch_0003_rank_0_sample_0{k}.png" for k in range(2)]
    for row, wanted in zip(rows, plain(tiny, PROMPTS[:2]), strict=True):
        np.testing.assert_array_equal(read_png(tmp_path / row["file"])[0], wanted)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "wrapping"), [(2, "ddp"), (3, "fsdp")])
def test_the_function_draws_on_all_ranks_what_the_pipeline_draws_alone(
    ranks: RankPool, tiny: Path, tmp_path: Path, size: int, wrapping: str
) -> None:
    words = ranks.run(size, sampled, tiny, tmp_path, wrapping, PROMPTS)
    assert all(rows == words[0] for rows in words)
    names = ["0_sample_00", "0_sample_01", "1_sample_00", "1_sample_01"]  # shares of 2, 2 and, on three ranks, 0
    assert [row["file"] for row in words[0]] == [f"epoch_0003_rank_{name}.png" for name in names]
    for row, wanted in zip(words[0], plain(tiny, PROMPTS), strict=True):
        np.testing.assert_array_equal(read_png(tmp_path / row["file"])[0], wanted)


def test_the_recipes_defaults_are_settings_of_the_command() -> None:
    names = {field.name for field in dataclasses.fields(DistillConfig)}
    assert recipe.DEFAULTS.keys() | recipe.FOR_TINY.keys() <= names
    assert set(recipe.RENAMED.values()) - {"--no_sample"} <= {f"--{name}" for name in names}
