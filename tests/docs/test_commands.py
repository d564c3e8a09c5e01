"""Commands that the pages show are run as they stand there, and what the pages list is what the code says."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halation.distillation.config import DistillConfig
from halation.evaluation.config import EvaluateConfig
from halation.gallery.config import GalleryConfig
from halation.generation.config import GenerateConfig
from halation.sampling.config import SampleConfig
from halation.tools.config import CtlConfig, DemoConfig, DoctorConfig
from halation.training.config import TrainConfig
from halation.watcher.config import WatchConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^<!-- run(?:: exit (?P<code>\d+))? -->\n```bash\n(?P<script>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, int]]:
    return [(match["script"], int(match["code"] or 0)) for match in BLOCK.finditer(page.read_text())]


RUN = [page for page in PAGES if blocks(page)]
SLOW = {
    "getting_started.md",
    "finetuning.md",
    "distillation.md",
    "training.md",
    "watch.md",
    "evaluation.md",
    "data.md",
    "gallery.md",
}
"""Pages with commands that take seconds each; what these do is held to its laws by faster tests elsewhere."""


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
    for script, code in blocks(page):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, f"{script}\n{done.stdout}\n{done.stderr}"


def test_every_mark_has_its_block() -> None:
    for page in PAGES:
        marks = re.findall(r"^<!-- run", page.read_text(), re.MULTILINE)
        assert len(marks) == len(blocks(page)), page
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
    }


def headings(page: Path) -> set[str]:
    """The anchors of a page, as they are made of its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in headings(path), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize(
    ("page", "config"), [("training.md", TrainConfig), ("generation.md", GenerateConfig), ("watch.md", WatchConfig)]
)
@pytest.mark.parametrize(("words", "change"), [("may change", "free"), ("may grow", "grows")])
def test_a_page_lists_exactly_what_a_later_call_may_change(page: str, config: Any, words: str, change: str) -> None:
    row = re.search(rf"^\| {words} \| (.*) \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert row is not None
    fields = {field.name for field in dataclasses.fields(config) if field.metadata.get("change") == change}
    assert set(re.findall(r"`(\w+)`", row.group(1))) == fields


@pytest.mark.parametrize(("words", "change"), [("may change", "free"), ("may grow", "grows")])
def test_the_page_on_distillation_lists_what_of_its_own_a_later_call_may_change(words: str, change: str) -> None:
    row = re.search(rf"^\| {words} \| (.*) \|$", (ROOT / "docs" / "distillation.md").read_text(), re.MULTILINE)
    assert row is not None
    inherited = {field.name for field in dataclasses.fields(TrainConfig)}
    own = [field for field in dataclasses.fields(DistillConfig) if field.name not in inherited]
    told = set(re.findall(r"`(\w+)`", row.group(1)))
    assert told == {field.name for field in own if field.metadata.get("change") == change}


def test_flags_that_pages_name_exist() -> None:
    known = {
        field.name
        for config in (
            TrainConfig,
            DistillConfig,
            SampleConfig,
            GenerateConfig,
            EvaluateConfig,
            WatchConfig,
            GalleryConfig,
            CtlConfig,
            DemoConfig,
            DoctorConfig,
        )
        for field in dataclasses.fields(config)
    }
    foreign = {
        "config", "help", "input_limits", "follow_links", "checkpoint", "prompts", "prompts_file",
        "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_port", "master_addr", "nnodes", "node_rank", "standalone",
        "nodes", "ntasks_per_node", "gres", "cpus_per_task", "gpus_per_task", "time", "signal", "requeue", "open_mode", "job_name",
        "kill_on_bad_exit", "head", "port", "address", "only", "bf16", "logdir",
        "distributed", "save_samples", "sample_dir", "num_steps", "mixed_precision", "gradient_checkpointing",
    }  # fmt: skip
    for page in PAGES:
        if page.name == "log.md":
            continue
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", page.read_text()):
            name = flag.replace("-", "_")
            assert name in known | foreign or name.removeprefix("no_") in known, f"{page}: --{flag}"
