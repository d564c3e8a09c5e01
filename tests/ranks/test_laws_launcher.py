"""Laws of failing and stopping with ranks that the launcher starts and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from halation.config import as_json
from halation.training.config import TrainConfig
from support import rank_functions, run_readers
from support.rank_pool import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.faults, pytest.mark.slow]

HALATION = Path(sys.executable).with_name("halation")


def command(config: TrainConfig, *more: str) -> list[str]:
    """`halation train` with the settings of a config that are not the defaults."""
    usual, words = as_json(TrainConfig()), [str(HALATION), "train"]
    for name, value in as_json(config).items():
        if value != usual[name]:
            values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
            words += [f"--{name}", *values]
    return [*words, *more]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", **more}


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_inside_a_sharded_forward_names_its_rank_and_a_restart_helps(
    ranks: RankPool, tmp_path: Path, culprit: int
) -> None:
    """A failure inside a sharded forward names its rank, and a restart completes the run."""
    fired = tmp_path / "fired"
    settings = {"engine": "fsdp", "lr": 1e-2, "ckpt_every": 1, "n_steps": 2}
    config = rank_functions.small_config(tmp_path / "run", **settings, max_restarts=1, nproc=2)
    fault = {"HALATION_FAULT": f"sample.forward:1:raise:{culprit}:once", "HALATION_FAULT_LOG": str(fired)}
    result = subprocess.run(
        command(config), env=environment(**fault), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert fired.read_text() == f"sample.forward:1:raise:{culprit}\n"
    assert f"rank {culprit} failed inside a sharded forward while sampling" in result.stderr
    assert "fault injected at sample.forward" in result.stderr
    assert "restarting from the last checkpoint (1 of 1)" in result.stderr
    for step in (1, 2):
        assert [row["state"] for row in run_readers.sample_rows(tmp_path / "run", step)] == ["done", "done"]
    ranks.run(2, rank_functions.train, rank_functions.small_config(tmp_path / "never", **settings))
    assert run_readers.checkpoint_bytes(tmp_path / "run", 2) == run_readers.checkpoint_bytes(tmp_path / "never", 2)


def rank_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANK", "")
    except psutil.Error:
        return ""


def test_sigterm_to_one_rank_stops_all_and_resumes_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """SIGTERM to one rank stops all at one step; the same command resumes to the same bits."""
    settings: dict[str, Any] = {"engine": "ddp", "lr": 1e-2, "n_steps": 8, "sample": False, "validation_images": 0}
    config = rank_functions.small_config(tmp_path / "run", **settings, nproc=2)
    fired = tmp_path / "fired"
    pause = {"HALATION_FAULT": "train.step:3:sleep=2:0", "HALATION_FAULT_LOG": str(fired)}
    with open(tmp_path / "said", "wb") as said:
        job = subprocess.Popen(command(config), env=environment(**pause), stderr=said, stdout=said)
    deadline = time.monotonic() + 60
    while not fired.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    (last,) = (child for child in psutil.Process(job.pid).children() if rank_of(child) == "1")
    last.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM, (tmp_path / "said").read_text()
    assert "saved at step" in (tmp_path / "said").read_text()

    stopped = [int(path.name.removeprefix("step_")) for path in (tmp_path / "run/checkpoints").glob("step_*")]
    assert len(stopped) == 1
    assert 3 < stopped[0] < 8
    subprocess.run(command(config), env=environment(), timeout=120, check=True)
    ranks.run(2, rank_functions.train, rank_functions.small_config(tmp_path / "never", **settings))
    assert run_readers.checkpoint_bytes(tmp_path / "run", 8) == run_readers.checkpoint_bytes(tmp_path / "never", 8)
    assert run_readers.losses(tmp_path / "run") == run_readers.losses(tmp_path / "never")


def test_the_launcher_reports_the_rank_that_hung_and_not_its_later_errors(
    tmp_path: Path,
) -> None:
    """The launcher reports the rank that hung while sampling, not its errors on waking up."""
    config = rank_functions.small_config(tmp_path / "run", engine="ddp", sample_timeout_s=2.0, max_restarts=0, nproc=2)
    fault = {"HALATION_FAULT": "sample.forward:1:sleep=4:1"}
    result = subprocess.run(
        command(config), env=environment(**fault), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert "rank 1 has made no progress for 2 s in sampling step" in result.stderr
