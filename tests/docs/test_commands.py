"""Blocks under `<!-- run -->` are executed as they are on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.docs import ROOT, Block, blocks, pages


def run_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.code is not None]


RUN = [page for page in pages() if run_blocks(page)]
SLOW = {
    "getting_started.md",
    "finetuning.md",
    "distillation.md",
    "training.md",
    "watch.md",
    "evaluation.md",
    "data.md",
    "gallery.md",
    "lora.md",
    "notebook.md",
    "overnight.md",
    "scores.md",
}
"""Pages with commands that take seconds each; faster tests cover the same commands elsewhere."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else [], id=str(page.relative_to(ROOT)))
        for page in RUN
    ],
)
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    environment = dict(os.environ) | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CLONE": str(ROOT),
        "HALATION_CACHE": str(tmp_path / "cache"),
    }
    for block in run_blocks(page):
        script = "\n".join(block.lines)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == block.code, f"{script}\n{done.stdout}\n{done.stderr}"


def test_every_mark_has_its_block() -> None:
    for page in pages():
        marks = re.findall(r"^ *<!-- run", page.read_text(), re.MULTILINE)
        assert len(marks) == len(run_blocks(page)), page
        assert all(block.language == "bash" for block in run_blocks(page)), page
    assert {page.name for page in RUN} >= {
        "training.md",
        "data.md",
        "troubleshooting.md",
        "generation.md",
        "cluster.md",
        "watch.md",
        "evaluation.md",
        "finetuning.md",
        "distillation.md",
        "lora.md",
        "notebook.md",
        "overnight.md",
        "scores.md",
    }
