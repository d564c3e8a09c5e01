"""The commands that the pages show: found in their blocks of code, with the page and the line they stand on. Knows no command of ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SHELL = frozenset({"bash", "sh", "shell", "console", "zsh", ""})
LAUNCHERS = frozenset({"torchrun", "srun", "python", "python3", "nohup", "time", "timeout", "exec", "env", "docker"})
"""Words after which a command of ours may come."""
KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!"})
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[\w-]*)[^`]*$")
RUN = re.compile(r"^ *<!-- run(?:: exit (?P<code>\d+))? -->$")
OPERATORS = frozenset("();<>|&")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: `line` is where its first line stands, `code` the exit code where another test runs it as it is."""

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    code: int | None


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command of a shell, with the variables that are set before it."""

    page: Path
    line: int
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    code: int | None = None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}:{self.line}"

    def ours(self) -> tuple[str, ...] | None:
        """What `halation` is told, also behind a launcher; None where this is another program's command."""
        for position, word in enumerate(self.words):
            module = word in ("halation", "halation.cli") and position > 0 and self.words[position - 1] == "-m"
            if module or Path(word).name == "halation":
                return self.words[position + 1 :]
            if Path(self.words[0]).name not in LAUNCHERS:
                return None
        return None


def pages() -> list[Path]:
    """Every page a reader may open: of the project, its documentation, its recipes and examples, and the cards of its models."""
    folders = [ROOT / "docs", ROOT / "recipes", ROOT / "examples", ROOT / "benchmarks", ROOT / "src" / "halation"]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def scripts() -> list[Path]:
    """Shell scripts of the recipes: pages of another kind."""
    return sorted((ROOT / "recipes").rglob("*.sh"))


def blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    position = 0
    while position < len(lines):
        fence = FENCE.match(lines[position])
        position += 1
        if fence is None:
            continue
        start = position
        while position < len(lines) and lines[position].strip() != fence["ticks"]:
            position += 1
        mark = RUN.match(lines[start - 2]) if start > 1 else None
        inner = tuple(line.removeprefix(fence["indent"]) for line in lines[start:position])
        code = int(mark["code"] or 0) if mark else None
        yield Block(page=page, line=start + 1, language=fence["language"], lines=inner, code=code)
        position += 1


def commands(page: Path, text: str | None = None) -> Iterator[Command]:
    """The commands in all blocks of a page, those inside manifests (YAML) too; or those of a script, which is one block."""
    if page.suffix == ".sh":
        lines = tuple(page.read_text(encoding="utf-8").splitlines())
        yield from shell_commands(Block(page=page, line=1, language="bash", lines=lines, code=None))
        return
    for block in blocks(page, text):
        if block.language in SHELL:
            yield from shell_commands(block)
        elif block.language in ("yaml", "yml"):
            for part in yaml.safe_load_all("\n".join(block.lines)):
                for words in manifest_commands(part):
                    yield Command(page=page, line=block.line, words=tuple(words))


def shell_commands(block: Block) -> Iterator[Command]:
    """The commands of a block. Without a language it may as well be a tree of files or what a command printed: then only ours count."""
    for offset, line in logical_lines(block.lines, whole=bool(block.language)):
        if not block.language and not line.startswith("halation "):
            continue
        for words in simple_commands(line):
            environment = []
            while words and (assignment := re.match(r"^([A-Za-z_]\w*)=(.*)$", words[0], re.DOTALL)):
                environment.append((assignment[1], assignment[2]))
                words = words[1:]
            found = Command(
                page=block.page,
                line=block.line + offset,
                words=tuple(words),
                environment=tuple(environment),
                code=block.code,
            )
            for _, value in environment:  # command="halation ...", to be said twice
                if not words and value.startswith("halation "):
                    found = Command(
                        page=block.page, line=block.line + offset, words=tuple(shlex.split(value)), code=block.code
                    )
            if found.words:
                yield found


def logical_lines(lines: tuple[str, ...], *, whole: bool) -> Iterator[tuple[int, str]]:
    """Lines with those they go on in, each with its number; what a here-document holds is no command. Not `whole`: a quote may be an apostrophe."""
    position = 0
    while position < len(lines):
        start, line = position, lines[position].removeprefix("$ ")
        position += 1
        while position < len(lines) and (line.endswith("\\") or (whole and _is_open(line))):
            line = line[:-1] + " " + lines[position] if line.endswith("\\") else f"{line}\n{lines[position]}"
            position += 1
        ends = re.findall(r"<<-?\s*['\"]?(\w+)", line)
        for end in ends:
            while position < len(lines) and lines[position].strip() != end:
                position += 1
            position += 1
        yield start, line


def _is_open(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command on a line, without redirections, comments and the shell's own words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for token in [
        *(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", token) for token in lexer),
        ";",
    ]:  # what holds where nobody says else
        if token and set(token) <= OPERATORS:
            skip = token[0] in "<>"
            if skip and words and words[-1].isdigit():
                words.pop()  # 2>
            if not skip and words:
                yield words
                words = []
        elif skip:
            skip = False
        elif words or token not in KEYWORDS:
            words.append(token)


def manifest_commands(part: Any) -> Iterator[list[str]]:
    """Everything in a manifest that is a command."""
    if isinstance(part, dict):
        if isinstance(part.get("command"), list):
            yield [str(word) for word in part["command"]]
        if isinstance(part.get("entrypoint"), str):
            yield shlex.split(part["entrypoint"])
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from manifest_commands(inner)
