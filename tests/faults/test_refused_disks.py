"""A full disk ends a training with a message; with space it resumes to the same bits."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from support import commands, run_readers
from support.commands import finish, fired, halation, train


def test_a_disk_that_is_full_from_the_start_is_told_in_a_sentence(tmp_path: Path) -> None:
    began = time.monotonic()
    assert finish(halation(train(tmp_path / "run")), tmp_path / "log", "publish.write:1+:ENOSPC") == 1
    assert time.monotonic() - began < 10
    assert fired(tmp_path / "log")
    said = (tmp_path / "log").read_text()
    assert "No space left on device" in said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert run_readers.leftovers(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_up_while_saving_ends_the_run_and_space_lets_it_go_on(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    words = halation(train(run))
    point = "checkpoint.part:4+" if rank == 0 else "publish.write:3+"
    assert finish(words, tmp_path / "log", f"{point}:ENOSPC:{rank}") == 1
    assert len(fired(tmp_path / "log")) >= 2
    said = (tmp_path / "log").read_text()
    assert re.search(r"cannot save checkpoint step_000000[46] in ", said), (
        said
    )  # whichever save the counted write fell into
    assert f"{run / 'checkpoints'}: No space left on device" in said
    assert "free some space" in said
    assert "Traceback" not in said
    assert (
        list(run_readers.valid_checkpoints(run / "checkpoints"))
        == list(run_readers.checkpoints(run / "checkpoints"))
        == [2]
    )
    assert finish(words, tmp_path / "log") == 0
    assert commands.last_bits(run) == commands.undisturbed_training()


@pytest.mark.slow
def test_a_disk_that_refuses_once_costs_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(halation(train(run)), tmp_path / "log", "checkpoint.part:4:EIO:0;publish.fsync:3:ENOSPC:1") == 0
    assert sorted(fired(tmp_path / "log")) == ["checkpoint.part:4:EIO:0", "publish.fsync:3:ENOSPC:1"]
    assert commands.last_bits(run) == commands.undisturbed_training()
