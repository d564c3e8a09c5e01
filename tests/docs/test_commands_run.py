"""Commands outside of `<!-- run -->` blocks run, made small, with the inputs they name."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halation import cli
from support.docs import HALATION, Command, Inputs, commands, environment, pages, place_inputs, shrink_flags

PATIENCE_S = 120
ONLY_READ = {
    "srun": "needs SLURM; tests/docs/test_cluster_generation.py runs such scripts under a stand-in for it",
    "torchrun": "several machines; tests/docs/test_cluster.py runs it with both on one",
    "docker": "needs an image",
    "black-forest-labs/FLUX.1-dev": "needs the Hub; tests/models/test_hub_download.py runs such commands on a local one",
    "stabilityai/stable-diffusion-xl-base-1.0": "the same",
    "RAY_ADDRESS": "a Ray of several machines; tests/generation/workers/test_ray_pool.py runs one of two nodes",
    "auto": "a Ray of several machines; tests/generation/workers/test_ray_pool.py runs one of two nodes",
    "demo": "minutes of its own; tests/tools/test_demo.py runs it",
    "--help": "tests/test_cli.py asks every command for it",
    "--version": "tests/test_cli.py asks for it",
    "...": "no whole command",
}
"""Words of commands that are not run here, and why. test_every_command.py parses them all the same."""


def to_run() -> Iterator[Command]:
    """Each different command once."""
    seen = set()
    for page in pages():
        for command in commands(page):
            words = command.arguments()
            told = {*command.words, *(name for name, _ in command.environment)}
            if words and command.code is None and not told & ONLY_READ.keys() and words not in seen:
                seen.add(words)
                yield command


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def beginning(words: tuple[str, ...]) -> list[str]:
    """The command with paths relative to the folder and without `--gpu_ids`."""
    result: list[str] = []
    flag = ""
    for word in words:
        flag = word if word.startswith("--") else flag
        if flag != "--gpu_ids":
            result.append(word.lstrip("/") or word)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param(command, id=command.where) for command in to_run()])
def test_a_command_that_a_page_shows_works(command: Command, inputs: Inputs, tmp_path: Path) -> None:
    words = beginning(command.arguments() or ())
    config = cli.parse(words[0], words[1:])
    if words[0] != "ctl":
        place_inputs(inputs, words[0], config, tmp_path)
    line = [HALATION, *words, *shrink_flags(inputs, words[0], config, tmp_path)]
    settings = {**environment(tmp_path), **dict(command.environment), "CUDA_VISIBLE_DEVICES": ""}
    if words[0] == "gallery" and config.export is None:
        check_served(line, tmp_path, settings)
    elif words[0] == "ctl":
        check_asked(line, config, tmp_path, settings)
    else:
        check_done(line, tmp_path, settings)


def check_done(line: list[str], folder: Path, settings: dict[str, str]) -> None:
    done = subprocess.run(line, cwd=folder, env=settings, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{' '.join(line)}\n{done.stdout}\n{done.stderr}"


def check_served(line: list[str], folder: Path, settings: dict[str, str]) -> None:
    """The gallery prints its link, and Ctrl+C ends it."""
    with subprocess.Popen(
        [*line, "--port", "0"], cwd=folder, env=settings, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            said = list(itertools.takewhile(lambda text: "to end" not in text, server.stdout))
            assert any("?token=" in text for text in said)
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_S) in (0, 130)
        finally:
            server.kill()


def check_asked(line: list[str], config: Any, folder: Path, settings: dict[str, str]) -> None:
    """Send the request to a training that runs meanwhile."""
    model = "--model tiny --image_size 32 --patch_size 8 --batch_size 1 --sample_steps 1 --validation_images 0"
    training = [HALATION, "train", *model.split(), "--n_steps", "1000000", "--report_to", "none", "--nproc", "1"]
    command = [*training, "--output_dir", str(config.run)]
    with subprocess.Popen(command, cwd=folder, env=settings, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (folder / config.run / "metrics.jsonl").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            check_done([*line, "--wait_s", "60"], folder, settings)
        finally:
            process.terminate()
    assert process.returncode == (0 if config.action == "stop" else 143)
