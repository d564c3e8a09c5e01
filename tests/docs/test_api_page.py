"""docs/api.md is current and has every flag that --help has."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
import tyro

import halation
from halation.cli import COMMANDS, parse
from halation.config import free_setting, setting

DOCS = Path(__file__).parents[2] / "docs"
FLAG = re.compile(r"--[a-z]\w+")


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    """docs/reference.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["reference"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["reference"]


def test_the_reference_is_made_of_the_code_as_it_is(reference: ModuleType) -> None:
    stale = reference.page() != (DOCS / "api.md").read_text(encoding="utf-8")
    if stale:
        pytest.fail(f"docs/api.md does not match the docstrings and settings; update it with: {reference.COMMAND}")


@dataclass(frozen=True, kw_only=True)
class Example:
    """Settings of all kinds."""

    place: Path
    """Where it is: a|b."""

    # -- how
    kind: Literal["", "round", "square"] = setting("")
    """What it is, with --place too."""
    sizes: tuple[int, ...] = free_setting((3, 4), low=1)
    """How
    large."""
    number: Annotated[int | None, tyro.conf.arg(aliases=["--count"])] = setting(None, change="grows")
    """How many."""
    hidden: Annotated[str, tyro.conf.Suppress] = free_setting("")
    """Nobody sees it."""


def test_a_setting_is_told_with_its_default_its_choices_and_what_a_later_call_may_do(reference: ModuleType) -> None:
    rows = [(row.section, row.flag, row.default, row.meaning, row.later) for row in reference.settings(Example)]
    assert rows == [
        ("", "`--place PATH`", "**required**", "Where it is: a\\|b.", "no"),
        ("how", "`--kind CHOICE`", "", "What it is, with `--place` too. One of `round`, `square`.", "no"),
        ("how", "`--sizes N ...`", "`3 4`", "How large. From 1 on.", "yes"),
        ("how", "`--number N`, `--count N`", "", "How many.", "may grow"),
    ]


def test_a_docstring_keeps_its_code_and_lists_its_arguments(reference: ModuleType) -> None:
    told = reference.in_markdown("""Draws.

        f(x)

    prompts: what to draw,
        one each.
    seed: a number.
    """)
    assert told == "Draws.\n\n```python\nf(x)\n```\n\n- `prompts`: what to draw, one each.\n- `seed`: a number.\n"


def test_every_public_name_is_on_the_page() -> None:
    headings = set(re.findall(r"^### halation\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert headings >= set(halation.__all__) - {"__version__"}


def test_every_row_of_a_table_has_the_cells_of_its_head() -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", (DOCS / "api.md").read_text(), re.MULTILINE)
    cells = [{len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()} for table in tables]
    assert len(cells) > 20
    assert all(len(found) == 1 for found in cells)


def offered(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags that --help_all lists."""
    with pytest.raises(SystemExit):
        parse(command, ["--help_all"])
    printed = capsys.readouterr().out
    flat = " ".join(printed.split())
    aliases = {alias for sentence in re.findall(r"The same as (--[^.]*)\.", flat) for alias in FLAG.findall(sentence)}
    return aliases | {f"--{name}" for name in re.findall(r"^  --(?:\[no_\])?(\w+)", printed, re.MULTILINE)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_every_flag_of_its_help_and_no_other(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = re.split(r"^### halation (\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    cells = {
        name: set(FLAG.findall("".join(re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE))))
        for name, text in sections.items()
    }
    told = cells[command]
    if built_on := re.search(r"every flag of \[halation (\w+)\].* but (.*)\.$", sections[command], re.MULTILINE):
        told |= cells[built_on[1]] - set(FLAG.findall(built_on[2]))
    assert told == offered(command, capsys)
