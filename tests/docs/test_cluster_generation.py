"""Scripts on the cluster page run with a stand-in for srun; its manifests are checked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from halation.cli import parse
from support.docs import manifest_commands

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
SCRIPTS = [script for script in re.findall(r"```bash\n(#!.*?)```", PAGE, re.DOTALL) if "halation generate" in script]
MANIFESTS = [part for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) for part in yaml.safe_load_all(block)]
SMALL = "--model_path testcard:0.1 --height 32 --width 32 --batch_size 1 --nproc 1"

# A stand-in for srun: two tasks on two nodes with the variables of a step; fails if one of them fails.
SRUN = """#!/bin/bash
for task in 0 1; do
    export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE="1(x2)"
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" &
    pids="$pids $!"
done
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""


def job(script: str, folder: Path, num_prompts: int) -> subprocess.Popen[bytes]:
    """The script as a node would run it, with a test card instead of the model."""
    (folder / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/bash\necho "$@" > requeued\n'}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "prompts.txt").write_text("".join(f"image {number}\n" for number in range(num_prompts)))
    script = script.replace("/shared/prompts.csv", "prompts.txt").replace("--model_path /shared/model", SMALL)
    script = script.replace("/shared/images", "pictures")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment)


def drawn(folder: Path) -> int:
    return len(list((folder / "pictures").glob("*.png")))


def test_the_page_shows_two_scripts_and_three_manifests() -> None:
    assert ["srun" in script for script in SCRIPTS] == [False, True]
    assert [manifest["kind"] for manifest in MANIFESTS] == ["Job", "PersistentVolumeClaim", "RayJob"]


@pytest.mark.parametrize("script", SCRIPTS, ids=["one node", "several nodes"])
def test_a_script_draws_every_image(tmp_path: Path, script: str) -> None:
    assert job(script, tmp_path, 6).wait(60) == 0
    assert drawn(tmp_path) == 6
    assert not (tmp_path / "requeued").exists()


@pytest.mark.ranks
def test_the_warning_signal_ends_the_one_node_script_and_requeues_the_job(tmp_path: Path) -> None:
    """The warning signal of the scheduler ends the one-node script early and requeues the job."""
    process = job(SCRIPTS[0], tmp_path, 400)
    deadline = time.monotonic() + 30
    while not drawn(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)  # B: in --signal=B:USR1@120 is the script itself
    assert process.wait(30) == 143
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert 0 < drawn(tmp_path) < 400


def pods(manifest: Any) -> Iterator[dict[str, Any]]:
    if isinstance(manifest, dict):
        if "containers" in manifest:
            yield manifest
        manifest = list(manifest.values())
    if isinstance(manifest, list):
        for part in manifest:
            yield from pods(part)


def test_the_commands_of_the_manifests_are_ours_and_lie_on_what_is_mounted() -> None:
    claims = {manifest["metadata"]["name"] for manifest in MANIFESTS if manifest["kind"] == "PersistentVolumeClaim"}
    for manifest, cluster in ((MANIFESTS[0], "files"), (MANIFESTS[2], "auto")):
        (command,) = manifest_commands(manifest)
        assert command[:2] == ["halation", "generate"]
        config = parse("generate", command[2:])
        assert config.cluster == cluster
        for pod in pods(manifest):
            volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
            assert set(volumes.values()) <= claims
            mounts = {mount["mountPath"]: mount["name"] for box in pod["containers"] for mount in box["volumeMounts"]}
            assert set(mounts.values()) == set(volumes)
            for path in (config.prompts_csv, config.model_path, str(config.output_dir)):
                assert any(path.startswith(f"{mount}/") for mount in mounts)


def test_the_ray_job_asks_for_as_many_workers_as_its_nodes_have_gpus() -> None:
    spec = MANIFESTS[2]["spec"]
    (command,) = manifest_commands(MANIFESTS[2])
    num_gpus = sum(
        group["replicas"] * box["resources"]["limits"]["nvidia.com/gpu"]
        for group in spec["rayClusterSpec"]["workerGroupSpecs"]
        for box in group["template"]["spec"]["containers"]
    )
    assert parse("generate", command[2:]).nproc == num_gpus
