"""The commands of the recipe draw the files that its page names; a rerun completes them."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support import tiny_models

RECIPE = Path(__file__).parents[2] / "recipes" / "coco_eval"
SCRIPT = "batch_generate_t2i_multigpu.py"
SMALL = ["--height", "32", "--width", "48"]
PROMPTS = ["a red bus", "two dogs, and a cat", 'a sign that says "stop"']
MORE = ["a prompt that is not asked for"]


def commands() -> list[list[str]]:
    """The words of every command on the recipe's page."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (RECIPE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(block.replace("\\\n", " "), comments=True) for block in blocks]


def on_cpu(command: list[str]) -> list[str]:
    """The command without a GPU: two workers, a model that is there, few and small images."""
    assert command[:2] == ["python", SCRIPT]
    words = [sys.executable, str(RECIPE / SCRIPT)]
    flag = ""
    for word in command[2:]:
        flag = word if word.startswith("--") else flag
        if flag == "--model_path" and word != flag:
            word = str(tiny_models.built("sd3"))
        if flag != "--gpu_ids":
            words.append(word)
    return [*words, "--nproc", "2", "--num_samples", str(len(PROMPTS)), *SMALL]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to run the commands in, with a prompt list where they look for it."""
    (tmp_path / "mscoco_data").mkdir()
    with open(tmp_path / "mscoco_data" / "prompts.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([prompt] for prompt in PROMPTS + MORE)])
    return tmp_path


def started(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALATION")}
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_page_shows_the_four_commands() -> None:
    assert len(commands()) == 4
    assert all(command[:2] == ["python", SCRIPT] for command in commands())


def test_help_shows_the_flags_of_the_page_and_a_batch_of_one_image(tmp_path: Path) -> None:
    done = started([sys.executable, str(RECIPE / SCRIPT), "--help_all"], tmp_path)
    assert done.returncode == 0, done.stderr
    flat = re.sub(r"[\s│]+", " ", done.stdout)
    assert SCRIPT in flat
    for flag in {word for command in commands() for word in command if word.startswith("--")}:
        assert f" {flag}" in flat, flag
    shown = {"batch_size": "1", "seed_start": "42", "num_inference_steps": "20", "guidance_scale": "7.5"}
    for flag, default in (shown | {"height": "480", "width": "832"}).items():
        told = re.search(rf"^  --{flag} .*\[(.*)\]$", done.stdout, re.MULTILINE)
        assert told is not None
        assert told.group(1) == default, flag


NAMES = ["000001_seed42.png", "000002_seed43.png", "000003_seed44.png"]


def test_the_first_command_draws_every_prompt(place: Path) -> None:
    done = started([*on_cpu(commands()[0]), "--num_inference_steps", "2"], place)
    assert done.returncode == 0, done.stderr
    folder = place / "generated_images"
    assert sorted(path.name for path in folder.glob("*.png")) == NAMES
    for name in NAMES:
        with Image.open(folder / name) as image:
            image.load()
            assert image.size == (48, 32)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert [(row["file_name"], row["prompt"], row["seed"]) for row in rows] == list(
        zip(NAMES, PROMPTS, (42, 43, 44), strict=True)
    )
    lists = [(folder / f"failed_prompts_gpu{worker}.txt").read_text() for worker in (0, 1)]
    assert all(text.startswith("#") and text.count("\n") == 1 for text in lists)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["planned"], summary["done"], summary["failed"], summary["drawn_now"]) == (3, 3, 0, 3)


@pytest.mark.slow
def test_the_first_command_again_draws_only_what_is_gone(place: Path) -> None:
    command = [*on_cpu(commands()[0]), "--num_inference_steps", "2"]
    folder = place / "generated_images"
    assert started(command, place).returncode == 0
    before = {name: (folder / name).read_bytes() for name in NAMES}
    untouched = (folder / NAMES[0]).stat().st_mtime_ns
    (folder / NAMES[1]).unlink()
    again = started([*command, "--nproc", "1"], place)  # one worker: whoever draws it, it is the same image
    assert again.returncode == 0, again.stderr
    assert {name: (folder / name).read_bytes() for name in NAMES} == before
    assert (folder / NAMES[0]).stat().st_mtime_ns == untouched
    assert json.loads((folder / "summary.json").read_text())["drawn_now"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_other_commands_of_the_page_work(place: Path, number: int) -> None:
    command = on_cpu(commands()[number])
    done = started(command, place)
    assert done.returncode == 0, done.stderr
    folder = place / command[command.index("--output_dir") + 1]
    assert sorted(path.name for path in folder.glob("*.png"))[0] == "000001_seed42.png"
    assert len(list(folder.glob("*.png"))) == len(PROMPTS)
    if "--enable_half_frame" in command:
        assert "half_frame" in done.stderr, "for one frame it changes nothing, and a warning says so"


def test_bad_input_is_told_in_the_exit_code(place: Path) -> None:
    words = [sys.executable, str(RECIPE / SCRIPT), "--output_dir", "out", "--model_path", "nosuch"]
    done = started([*words, "--prompts_csv", "nosuch.csv"], place)
    assert done.returncode == 2
    assert "nosuch" in done.stderr
    assert started([*words, "--prompts_csvs", "x"], place).returncode == 2
