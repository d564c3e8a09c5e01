"""Every command of ours on every page that no other test runs is run here, small, in a folder that holds what it names."""

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
from support.page_commands import ROOT, Command, commands, pages, scripts
from support.page_furniture import HALATION, Store, environment, furnish, small

PATIENCE_S = 120
ONLY_READ = {
    "srun": "needs SLURM; tests/docs/test_cluster_generation.py runs such scripts under a stand-in for it",
    "torchrun": "several machines; tests/docs/test_cluster.py runs it with both on one",
    "docker": "needs an image",
    "RAY_ADDRESS": "a Ray of several machines; tests/generation/workers/test_ray_pool.py runs one of two nodes",
    "auto": "a Ray of several machines; tests/generation/workers/test_ray_pool.py runs one of two nodes",
    "demo": "minutes of its own; tests/tools/test_demo.py runs it",
    "--help": "tests/test_cli.py asks every command for it",
    "--version": "tests/test_cli.py asks for it",
    "...": "no whole command",
}
"""Words of commands that are not run here, and why; test_every_command.py reads them by the real command line all the same."""


def to_run() -> Iterator[Command]:
    """Each command once, wherever and how often it stands on the pages."""
    seen = set()
    for page in pages() + scripts():
        for command in commands(page):
            words = command.ours()
            told = {*command.words, *(name for name, _ in command.environment)}
            if words and command.code is None and not told & ONLY_READ.keys() and words not in seen:
                seen.add(words)
                yield command


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("furniture"))


def beginning(words: tuple[str, ...]) -> list[str]:
    """The command as this machine can take it: names below this folder, and no GPUs by number."""
    result: list[str] = []
    flag = ""
    for word in words:
        flag = word if word.startswith("--") else flag
        if flag != "--gpu_ids" and word != "$@":
            result.append(word.lstrip("/") or word)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("command", [pytest.param(command, id=command.where) for command in to_run()])
def test_a_command_that_a_page_shows_works(command: Command, store: Store, tmp_path: Path) -> None:
    words = beginning(command.ours() or ())
    config = cli.parse(words[0], words[1:])
    if words[0] != "ctl":
        furnish(store, words[0], config, tmp_path)
    line = [HALATION, *words, *small(store, words[0], config, tmp_path)]
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
    """It says its link, and Ctrl+C ends it."""
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
    """A training that runs meanwhile takes what it is asked for."""
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


def who_runs(command: Command) -> list[Path]:
    """The tests of the script that a command runs: those of its recipe by name, else those of the folder it lies in."""
    [script] = [word for word in command.words if word.endswith((".py", ".sh"))][:1]
    beside = command.page.parent / script
    parts = (beside if beside.exists() else ROOT / script).relative_to(ROOT).parts
    return list((ROOT / "tests" / parts[0]).glob(f"test_*{parts[1]}*.py" if parts[0] == "recipes" else "test_*.py"))


def test_scripts_that_pages_show_are_run_by_somebody() -> None:
    found = [
        command
        for page in pages()
        for command in commands(page)
        if command.code is None
        and command.words[0] in ("python", "bash", "torchrun")
        and any(word.endswith((".py", ".sh")) for word in command.words)
    ]
    assert len(found) > 10
    assert not [f"{command.where}: {' '.join(command.words)}" for command in found if not who_runs(command)]


def test_who_is_said_to_run_something_is_there() -> None:
    named = {word.strip(";,") for why in ONLY_READ.values() for word in why.split() if word.startswith("tests/")}
    assert len(named) > 3
    assert all((ROOT / name).is_file() for name in named)
