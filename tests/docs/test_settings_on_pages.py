"""Settings that pages mention exist, with the defaults and resume rules that pages give."""

from __future__ import annotations

import dataclasses
import re

import pytest

from halation.cli import COMMANDS, config_type
from support.docs import ROOT, pages

PAGES = [page for page in pages() if page.relative_to(ROOT).parts[0] in ("docs", "recipes", "README.md")]
SHARED_WITH_TRAIN = {("distill", field.name) for field in dataclasses.fields(config_type("train"))}
"""distillation.md lists only the settings that training.md does not."""


def test_flags_that_pages_name_exist() -> None:
    known = {field.name for command in COMMANDS for field in dataclasses.fields(config_type(command))}
    foreign = {
        "config", "help", "help_all", "print_config", "input_limits", "follow_links", "checkpoint", "prompts", "prompts_file",
        "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_port", "master_addr", "nnodes",
        "node_rank",
        "standalone", "nodes", "ntasks_per_node", "gres", "cpus_per_task", "gpus_per_task", "time", "signal", "requeue",
        "open_mode", "job_name", "kill_on_bad_exit", "head", "port", "address", "only", "bf16", "logdir",
        "distributed", "save_samples", "sample_dir", "num_steps", "mixed_precision", "gradient_checkpointing",
    }  # fmt: skip
    for page in PAGES:
        if page.name == "log.md":
            continue
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", page.read_text()):
            name = flag.replace("-", "_")
            assert name in known | foreign or name.removeprefix("no_") in known, f"{page}: --{flag}"


def defaults() -> dict[str, list[object]]:
    """The defaults of each flag in the commands that have it."""
    found: dict[str, list[object]] = {}
    for command in COMMANDS:
        for field in dataclasses.fields(config_type(command)):
            found.setdefault(field.name, []).append(field.default)
    return found


def test_a_number_in_brackets_behind_a_flag_is_its_default() -> None:
    """Pages write defaults as `--poll_s` (30)."""
    known = defaults()
    told = [
        (page.name, *one)
        for page in (ROOT / "docs").glob("*.md")
        for one in re.findall(r"`--(\w+)` \(([\d,.]+)\b", page.read_text())
    ]
    wrong = [
        (page, flag, number)
        for page, flag, number in told
        if None not in known[flag] and float(number.replace(",", "")) not in known[flag]
    ]
    assert not wrong
    assert len(told) > 10


@pytest.mark.parametrize(
    ("page", "command"),
    [("training.md", "train"), ("distillation.md", "distill"), ("generation.md", "generate"), ("watch.md", "watch")],
)
@pytest.mark.parametrize(("words", "change"), [("may change", "free"), ("may grow", "grows")])
def test_a_page_lists_exactly_what_a_later_call_may_change(page: str, command: str, words: str, change: str) -> None:
    row = re.search(rf"^\| {words} \| (.*) \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert row is not None
    fields = {
        field.name
        for field in dataclasses.fields(config_type(command))
        if field.metadata.get("change") == change
        and (command, field.name) not in SHARED_WITH_TRAIN
        and field.name != "sample_rows"  # no flag: the rows of --sample_prompts_file
    }
    assert set(re.findall(r"`(\w+)`", row.group(1))) == fields
