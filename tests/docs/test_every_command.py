"""Every command on a page parses; targets and scripts that it names exist. Nothing runs."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import halation
from halation import cli
from halation.config import validate_settings
from halation.errors import InputError
from support.docs import ROOT, Command, blocks, commands, pages, without_blocks

PAGES = pages()
LEFT_OUT = {"...", "[--flags]"}
"""Placeholders for further flags."""
STAND_FOR = {"PORT": "8642", "N": "2", "STEP": "1000", "STEPS": "1000"}
"""Placeholders for numbers. Those for names and paths (RUN, DIR, FOLDER) parse as they are."""
WORDS_FOR_ANY = {"COMMAND"}
"""Placeholders for any command."""


def misunderstood(command: Command) -> str:
    """The error of the parser for a `halation` command; empty if there is none."""
    words = [STAND_FOR.get(word, word) for word in command.arguments() or () if word not in LEFT_OUT]
    if not words or words[0] in ("--version", "--help", *WORDS_FOR_ANY):
        return ""
    if words[0] not in cli.COMMANDS:
        return f"there is no command {words[0]!r}"
    while "--config" in words:  # a file that is not here
        del words[words.index("--config") : words.index("--config") + 2]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            cli.parse(words[0], words[1:])
    except InputError as error:
        return str(error)
    except SystemExit as end:
        return said.getvalue() if end.code else ""
    return ""


def file_of(command: Command) -> Path | None:
    """The script that a command runs: beside its page, below the clone, or where `$CLONE` leads."""
    if Path(command.words[0]).name not in ("bash", "sh", "python", "python3", "torchrun", "source"):
        return None
    for word in command.words[1:]:
        if word in ("-c", "-m", "-"):
            return None
        if word.endswith((".sh", ".py")):
            path = Path(re.sub(r"^\$\{?CLONE\}?/", f"{ROOT}/", word))
            beside = command.page.parent / path
            return beside if beside.exists() else ROOT / path
    return None


def wrong(found: Iterator[Command]) -> list[str]:
    """A message for each command that cannot be run as it is on the page."""
    result = []
    for command in found:
        if command.code:  # test_commands.py runs it and checks its exit code
            continue
        if command.arguments() is not None:
            why = misunderstood(command)
        elif command.words[0] == "make":
            words = [word for word in command.words if "'" not in word]
            told = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
            why = told.stderr if told.returncode else ""
        else:
            file = file_of(command)
            why = "" if file is None or file.is_file() else f"there is no {file}"
        if why:
            result.append(f"{command.where}: {' '.join(command.words)}\n{why}")
    return result


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    assert not wrong(commands(page)), "\n".join(wrong(commands(page)))


def test_the_pages_have_commands_of_each_kind() -> None:
    found = [command for page in PAGES for command in commands(page)]
    ours = [words[0] for command in found if (words := command.arguments())]
    assert {"train", "distill", "sample", "generate", "evaluate", "watch", "ctl", "gallery"} <= set(ours)
    assert any(command.words[0] == "make" for command in found)
    assert len([command for command in found if file_of(command)]) > 10
    assert {"torchrun", "srun"} <= {command.words[0] for command in found if command.arguments()}


def calls(text: str) -> Iterator[tuple[str, dict[str, object]]]:
    """`halation.train(...)` and its like in a piece of Python, with those settings whose value stands there."""
    text = text.replace(", ...)", ")")  # further arguments
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a signature, as the reference shows them
        tree = ast.parse(re.sub(r"^[\w.]+\(", "def shown(", text.strip()) + ": ...")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="halation"), attr=name), keywords=keywords):
                settings = {}
                for keyword in keywords:
                    with contextlib.suppress(ValueError):
                        settings[str(keyword.arg)] = ast.literal_eval(keyword.value)
                yield name, settings


def check_calls(text: str, where: str) -> int:
    number = 0
    for name, settings in calls(text):
        assert callable(getattr(halation, name)), f"{where}: halation.{name}"
        if name in cli.COMMANDS:
            validate_settings(cli.config_type(name), settings, where)
        number += 1
    return number


def test_python_on_the_pages_is_python_and_its_settings_exist() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("python", "py"):
                check_calls("\n".join(block.lines), f"{page}:{block.line}")


def test_the_example_of_the_package_says_what_is_there() -> None:
    example = "\n".join(line[4:] for line in (halation.__doc__ or "").splitlines() if line.startswith("    "))
    assert check_calls(example, "halation") >= 5
    with pytest.raises(InputError, match="n_stpes"):
        check_calls("halation.train(n_stpes=3)", "here")


def test_commands_that_pages_name_in_passing_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`halation ([a-zA-Z]\w*)", without_blocks(page)):
            assert name in cli.COMMANDS or name in WORDS_FOR_ANY, f"{page}: halation {name}"
