"""The torchrun command of the cluster page runs, with both machines on this one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def agent(port: int, folder: Path) -> subprocess.Popen[str]:
    """torchrun on one of two machines, as the page shows it; both are this one."""
    torchrun = Path(sys.executable).with_name("torchrun")
    where = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port}"
    where += " --rdzv_id base --max_restarts 3"
    command = (
        "-m halation.cli train --data streets --model tiny --image_size 32 --patch_size 8 --batch_size 2 "
        "--n_steps 4 --ckpt_every 2 "
        "--sample_steps 1 --validation_images 0 --report_to none --output_dir run"
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
    assert "resuming from step 2" in said[0] + said[1]
    assert (tmp_path / "run" / "export" / "model.pth").is_file()
