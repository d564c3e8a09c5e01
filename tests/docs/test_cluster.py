"""Ranks that srun would have started find each other by its variables, and a warning to one of them saves all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


def task(number: int, folder: Path) -> subprocess.Popen[str]:
    """Task `number` of two, as srun starts it."""
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "SLURM_SUBMIT_DIR": str(folder),
    }
    command = (
        "train --data streets --model tiny --image_size 32 --patch_size 8 --batch_size 2 --n_steps 100000 --ckpt_every 0 --no_sample "
        "--heldout_pictures 0 --report_to none --progress json --log_every 1 --output_dir run"
    )
    return subprocess.Popen(
        [Path(sys.executable).with_name("halation"), *command.split()],
        cwd=folder,
        env={**os.environ, **slurm, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_tasks_of_srun_train_together_and_a_warning_to_one_saves_all(tmp_path: Path) -> None:
    tasks = [task(number, tmp_path) for number in range(2)]
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics.exists() and metrics.read_text().count("\n") > 1):
            assert all(one.poll() is None for one in tasks), [one.communicate()[1] for one in tasks if one.poll()]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        tasks[1].send_signal(signal.SIGUSR1)
        said = [one.communicate(timeout=60)[1] for one in tasks]
    finally:
        for one in tasks:
            one.kill()
            one.wait()
    assert [one.returncode for one in tasks] == [143, 143], said
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*/COMMIT.json"))) == 1
    assert not list(tmp_path.glob(".halation_rendezvous_*")), "nothing is left in the folder the job was submitted from"


def agent(port: int, folder: Path) -> subprocess.Popen[str]:
    """torchrun on one of two machines, as the page shows it; both are this one."""
    torchrun = Path(sys.executable).with_name("torchrun")
    where = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} --rdzv_id base --max_restarts 3"
    command = (
        "-m halation.cli train --data streets --model tiny --image_size 32 --patch_size 8 --batch_size 2 --n_steps 4 --ckpt_every 2 "
        "--sample_steps 1 --heldout_pictures 0 --report_to none --output_dir run"
    )
    fault = {"HALATION_FAULT": "train.step:3:kill:1:once", "HALATION_FAULT_LOG": str(folder / "faults")}
    return subprocess.Popen(
        [torchrun, *where.split(), *command.split()],
        cwd=folder,
        env={**os.environ, **fault, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_two_agents_of_torchrun_train_together_and_their_restart_resumes_by_itself(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    agents = [agent(port, tmp_path) for _ in range(2)]
    try:
        said = [one.communicate(timeout=120)[1] for one in agents]
    finally:
        for one in agents:
            one.kill()
            one.wait()
    assert [one.returncode for one in agents] == [0, 0], said
    assert (tmp_path / "faults").read_text() == "train.step:3:kill:1\n"
    assert "going on from step 2" in said[0] + said[1]
    assert (tmp_path / "run" / "export" / "model.pth").is_file()
