"""The help of a command: its settings in groups, from the source of its config class."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

_GROUP = re.compile(r"^\s*# -- (.*)$")
_CLAUSE_END = re.compile(r"(?<=[\w\")])(?:[.;:](?=\s|$)| (?=\()|,(?= by ))")
_PLACES = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}
_MIN_CLAUSE = 0.5
"""Share of the room; a shorter clause is followed by the next words."""
_MAX_CHOICES = 16
"""Longer lists of choices are in the sentence instead."""


def read_fields(config_type: type) -> dict[str, tuple[str, str]]:
    """Return group and docstring of each field that this class itself declares.

    A comment `# -- NAME` starts a group, so a new field is in the group of its neighbours. Comments and docstrings are
    only in the source.
    """
    source = textwrap.dedent(inspect.getsource(config_type))
    groups = [(number, match[1]) for number, line in enumerate(source.splitlines(), 1) if (match := _GROUP.match(line))]
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    fields = {}
    for field, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = [title for number, title in groups if number < field.lineno]
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            fields[field.target.id] = (above[-1] if above else "", " ".join(str(text).split()))
    return fields


def value_word(hint: Any) -> str:
    """Return the word that stands for a value of this type, empty for a switch."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        word = value_word(arguments[0])
        return f"{word} ..." if arguments[-1] is Ellipsis else " ".join(map(value_word, arguments))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return value_word(next(part for part in arguments if part is not types.NoneType))
    return "CHOICE" if typing.get_origin(hint) is Literal else _PLACES.get(hint, "")


def choices(hint: Any) -> tuple[str, ...]:
    """Return the values that a setting, or each value of a list, may have; empty if they are not listed."""
    if typing.get_origin(hint) is Literal:
        return tuple(str(value) for value in typing.get_args(hint) if value != "")
    return next((found for part in typing.get_args(hint) if (found := choices(part))), ())


def format_default(default: Any) -> str:
    """Return a default as it would be typed, empty if the sentence explains what applies."""
    if default is None or default == "" or default == () or default is dataclasses.MISSING:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


class HelpPage:
    """The help of a command: the settings that most users need, or all of them in full sentences.

    A config class may name the former in `COMMON`; without it all are shown. `USUAL_DEFAULTS` has the defaults of
    settings whose default depends on others.
    """

    def __init__(self, config_type: type, defaults: Mapping[str, Any], width: int, *, bold: bool = False) -> None:
        self.config_type, self.defaults, self.bold = config_type, defaults, bold
        self.width = max(width, 40)
        self._fields = {field.name: field for field in dataclasses.fields(config_type)}
        self._hints = typing.get_type_hints(config_type, include_extras=True)
        self._texts: dict[str, tuple[str, str]] = {}
        for base in config_type.__mro__[:-1]:
            shown = {name: text for name, text in read_fields(base).items() if name not in self._texts}
            self._texts |= {name: text for name, text in shown.items() if name in self._fields}
        self._texts = {
            name: text for name, text in self._texts.items() if "Suppress" not in str(self._split_hint(name)[1])
        }
        self.common = str(getattr(config_type, "COMMON", "")).split() or list(self._texts)

    def format(self, prog: str, notes: Mapping[str, str], *, everything: bool) -> str:
        """Return the page; `notes` are further sentences on settings, for the page of everything."""
        names = [name for name in self._texts if everything or name in self.common]
        words = [self._flag(name) for name in names if self._is_positional(name)]
        docs = inspect.cleandoc(self.config_type.__doc__ or "").split("\n\n")
        paragraphs = [" ".join(text.split()) for text in (docs if everything else docs[:1])]
        lines = [" ".join(["usage:", prog, *words, "[--flags]"])]
        lines += [line for text in paragraphs for line in ["", *self._wrap(text, "")]]
        if not everything:
            lines.append("")
        column = min(max((len(self._flag(name)) for name in names), default=0), 20 if self.width < 72 else 31)
        for group in dict.fromkeys(self._texts[name][0] for name in names):
            members = [name for name in names if self._texts[name][0] == group]
            title = f"{group or 'flags'}:"
            lines += [*([""] if everything else []), f"\x1b[1m{title}\x1b[0m" if self.bold else title]
            for name in members:
                lines += self._full(name, notes.get(name, "")) if everything else [self._line(name, column)]
        num_more = len(self._texts) - len(names)
        lines += ["", *self._footer(prog, num_more, everything)]
        return "\n".join(line.rstrip() for line in lines)

    def _footer(self, prog: str, num_more: int, everything: bool) -> Iterator[str]:
        if everything:
            yield from self._wrap(
                "Every command has --config FILE (settings in YAML, TOML or JSON; flags override it), --print_config "
                "(print the settings in the form of such a file, and exit), --input_limits SCALE (raise the limits on "
                "input files) and --follow_links (allow links in an image folder that point outside of it).",
                "",
            )
            text = "Dashes and underscores are the same. A switch --x is turned off by --no_x."
        else:
            more = f"{num_more} more flags, and the full" if num_more else "The full"
            text = f"{more} sentences: {prog} --help_all. --config FILE reads flags from YAML, TOML or JSON."
        yield from self._wrap(text, "")

    def _split_hint(self, name: str) -> tuple[Any, list[Any]]:
        """Return the type of a setting and its annotations for the parser."""
        hint = self._hints[name]
        if typing.get_origin(hint) is not typing.Annotated:
            return hint, []
        hint, *marks = typing.get_args(hint)
        return hint, marks

    def _is_positional(self, name: str) -> bool:
        return bool(self._fields[name].metadata.get("positional")) or "Positional" in str(self._split_hint(name)[1])

    def _default(self, name: str) -> str:
        usual = getattr(self.config_type, "USUAL_DEFAULTS", {})
        default = self.defaults.get(name, self._fields[name].default)
        default = usual.get(name) if default is None else default
        return "required" if default is dataclasses.MISSING else format_default(default)

    def _flag(self, name: str) -> str:
        """Return a setting with a word for its value, as it is written on the command line."""
        hint, marks = self._split_hint(name)
        if self._is_positional(name):
            metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
            return metavar or "|".join(choices(hint)) or name.upper()
        if hint is bool:
            return f"--[no_]{name}" if self._default(name) == "on" else f"--{name}"
        listed = "|".join(choices(hint))
        word = value_word(hint)
        return f"--{name} {listed if word == 'CHOICE' and len(listed) <= _MAX_CHOICES else word}".rstrip()

    def _line(self, name: str, column: int) -> str:
        """Return one line: the flag, the start of its sentence, and its default."""
        default = self._default(name)
        default = f" [{default}]" if default not in ("", "off") else ""
        flag = f"  {self._flag(name).ljust(column)}  "
        room = self.width - len(flag) - len(default)
        if room < 16:  # a long path as the default, on a narrow terminal
            default, room = "", self.width - len(flag)
        return flag + self._shorten(self._texts[name][1].replace("`", ""), room) + default

    @staticmethod
    def _shorten(text: str, room: int) -> str:
        """Return as many whole clauses of a sentence as fit, or its first words."""
        if len(text.rstrip(".")) <= room:
            return text.rstrip(".")
        ends = [match.start() for match in _CLAUSE_END.finditer(text) if match.start() <= room]
        whole = [end for end in ends if end >= _MIN_CLAUSE * room and text[:end].count("(") == text[:end].count(")")]
        whole = [end for end in whole if text[end] != ":"] or whole  # what follows a colon belongs to it
        if whole:
            return text[: whole[-1]]
        return text[: max(text.rfind(" ", 0, max(room - 3, 1)), 0)].rstrip(",;:") + " ..."

    def _full(self, name: str, note: str) -> Iterator[str]:
        default = self._default(name)
        flag = self._flag(name)
        yield f"  {flag}" + (f"  [{default}]" if default not in ("", "off") else "")
        hint, marks = self._split_hint(name)
        listed = choices(hint) if "CHOICE" in flag else ()
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        sentences = [
            self._texts[name][1].replace("`", ""),
            f"One of {', '.join(listed)}." if listed else "",
            note,
            f"The same as {', '.join(aliases)}." if aliases else "",
        ]
        yield from self._wrap(" ".join(filter(None, sentences)), "      ")

    def _wrap(self, text: str, indent: str) -> list[str]:
        return textwrap.wrap(
            text,
            self.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
