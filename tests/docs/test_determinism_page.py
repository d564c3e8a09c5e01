"""What the page on determinism says of each option is what the code records of it and does with it on resume."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from halation.generation.config import GenerateConfig
from halation.models.pipelines.capabilities import PipelineChecker, PipelineOptions
from halation.models.pipelines.family_quirks import get_family
from support.pipeline_specs import plain_pipe

PAGE = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text()
CLASSES = re.split(r"^## ", PAGE.split("## Equality classes\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
FLAG = re.compile(r"`--(\w+)`")
CHANGES = {field.name: field.metadata.get("change") for field in dataclasses.fields(GenerateConfig)}


def rows() -> list[list[str]]:
    """Cells of the table of options: names, class, recorded, on resume, held by."""
    lines = [line for line in CLASSES.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_setting_that_a_later_call_may_not_change_is_on_the_page() -> None:
    told = set(FLAG.findall(CLASSES))
    assert {name for name, change in CHANGES.items() if change == "refused"} <= told


def test_the_page_says_what_a_later_call_may_change() -> None:
    for names, _kind, _recorded, on_resume, _held_by in rows():
        for name in FLAG.findall(names):
            assert ("refused" if on_resume == "refused" else "free") == CHANGES[name], name


@pytest.mark.filterwarnings("ignore")  # of diffusers, while it loads
def test_the_page_has_the_class_that_is_recorded_with_a_run() -> None:
    told = {
        name: kind[:2]
        for names, kind, recorded, _on_resume, _held_by in rows()
        if recorded == "where it is used"
        for name in FLAG.findall(names)
    }
    everything = PipelineOptions(
        dtype="fp32",
        device="cpu",
        scheduler="",
        offload="model",
        compile=True,
        arguments={"max_sequence_length": 64},
        cfg_truncation_step=1,
        half_frame=True,
    )
    checks = PipelineChecker(pipe=plain_pipe("wan"), family=get_family("WanPipeline"), options=everything)
    assert checks.describe("of another scheduler")["options"] == told
