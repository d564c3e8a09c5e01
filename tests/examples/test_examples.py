"""Every example trains on one rank and on two and writes the same images."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from halation.gallery.run_catalog import read_run_kind
from support.rank_pool import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("plain_torch", "with_accelerate", "with_lightning", "with_transformers")


def images(out: Path, step: int) -> dict[str, bytes]:
    folder = out / "samples" / f"step_{step:07d}"
    said = json.loads((folder / "samples.json").read_text())
    assert [row["state"] for row in said["samples"]] == ["done"] * 5
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "samples.json"}
    assert len(found) == 11
    return found


def ranks_that_drew(out: Path, step: int) -> list[int]:
    said = json.loads((out / "samples" / f"step_{step:07d}" / "samples.json").read_text())
    return [row["rank"] for row in said["samples"]]


def run_plain(world: Any, out: str) -> None:
    """As torchrun would: the example makes the group itself."""
    dist.destroy_process_group()
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("plain_torch").main(out=out, num_steps=2, every=1)


def test_the_plain_loop_on_one_rank_and_on_two(ranks: RankPool, tmp_path: Path) -> None:
    outs = [tmp_path / "one", tmp_path / "two", tmp_path / "again"]
    for out, size in zip(outs, (1, 2, 2), strict=True):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks.run(size, run_plain, str(out), environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    one, two, again = ([images(out, step) for step in (0, 1, 2)] for out in outs)
    assert one[0] == two[0]  # before training the weights are the same
    assert one[2] != two[2]
    assert two == again
    assert ranks_that_drew(outs[1], 2) == [0, 1, 0, 1, 0]
    assert read_run_kind(outs[1]) == "train"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_its_first_lines_say(name: str, tmp_path: Path) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", "2"]
    outs = {"one": [sys.executable], "two": torchrun, "again": torchrun}
    for out, launcher in outs.items():
        done = subprocess.run(
            [*launcher, str(EXAMPLES / f"{name}.py"), "--output_dir", out, "--num_steps", "2", "--every", "1"],
            cwd=tmp_path,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"images are in {out}/samples; to look at them: halation gallery {out}") == 1
    one, two, again = ([images(tmp_path / out, step) for step in (0, 1, 2)] for out in outs)
    assert one[0] == two[0]
    assert two == again
    assert (
        len({image for step in two for image in step.values()}) == 5 + 3 * 6
    )  # each prompt's text, and no image twice
    assert ranks_that_drew(tmp_path / "two", 2) == [0, 1, 0, 1, 0]
