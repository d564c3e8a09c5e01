"""A training killed at random times ends with the bits of an undisturbed one."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from support import commands, run_readers
from support.commands import finish, halation, started, train

SLOWLY = "train.step:1+:sleep=0.1;checkpoint.fsync:1+:sleep=0.05"
"""So that kills fall between steps and into saves, and not only into the start."""

pytestmark = [pytest.mark.ranks, pytest.mark.faults]


def kill_until(folder: Path, seed: int, num_kills: int) -> tuple[int, int]:
    """Kill the process tree at random times; return the number of kills, and of those inside a save."""
    generator = random.Random(seed)
    run = folder / "run"
    words = halation(train(run))
    kills = inside = best = 0
    while kills < num_kills:
        with started(words, folder / "log", SLOWLY) as command:
            began = commands.last_line(run)
            commands.until(
                lambda began=began: commands.last_line(run) != began or command.process.poll() is not None, 60
            )
            time.sleep(generator.uniform(0.0, 0.6))
            if command.process.poll() is not None:
                break
            command.kill_all()
            kills += 1
        inside += bool(list((run / "checkpoints").glob(".saving_*")))
        steps = run_readers.checkpoints(run / "checkpoints")
        assert all(run_readers.checkpoint_problem(path) is None for path in steps.values())
        assert max(steps, default=0) >= best, "what was saved once stays"
        best = max(steps, default=0)
    return kills, inside


def assert_same_bits(folder: Path) -> None:
    assert finish(halation(train(folder / "run")), folder / "log") == 0, (folder / "log").read_text()
    assert commands.last_bits(folder / "run") == commands.undisturbed_training()


@pytest.mark.slow  # one kill of each kind is fast: tests/ranks/test_launch.py
def test_two_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = 20261115
    kills, inside = kill_until(tmp_path, seed, 2)
    with capsys.disabled():
        print(f"\nseed {seed}: {kills} kills of a training, {inside} inside a save")  # noqa: T201
    assert kills == 2
    assert_same_bits(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills = 0
    seed = int(time.time())
    while kills < 20:
        folder = tmp_path / str(seed)
        folder.mkdir()
        done, inside = kill_until(folder, seed, 7)
        assert_same_bits(folder)
        with capsys.disabled():
            print(f"\nseed {seed}: {done} kills of a training, {inside} inside a save")  # noqa: T201
        assert done > 0
        kills += done
        seed += 1
