"""The page's modules as one script: import and export words taken away, modules behind those they need.

It is no parser. The page keeps a few rules that make this safe, and a module that breaks one is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ENTRANCE = "app.js"
LAST_LINE = "start();"
IMPORT = re.compile(r'import \{ ([\w$]+(?:, [\w$]+)*) \} from "\./([\w-]+\.js)";')
DECLARATION = re.compile(r"(export )?(?:async )?(?:function\*? ?|class |const |let )([\w$]+)")
INSIDE = re.compile(r"//|/\*|[ \t]|[\]})]|$")
"""How a line at the left margin may begin besides: a comment, what is indented, the end of what was begun."""
FORBIDDEN = (
    "</script",
    "<!--",
    "import(",
    "import.meta",
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
)


class BundleError(ValueError):
    """A module of the page breaks the rules that let it stand in one file."""


def bundle(modules: Mapping[str, str]) -> str:
    """One script that does what loading `app.js` does; `modules` are the texts by file name."""
    parts = {name: _Module(name, text) for name, text in modules.items()}
    order: list[str] = []
    _visit(ENTRANCE, parts, order, [])
    owners: dict[str, str] = {}
    for name in order:
        for word in parts[name].names:
            if word in owners:
                raise BundleError(f"{name} and {owners[word]} both declare {word}")
            owners[word] = name
        for word, origin in parts[name].imports.items():
            if word not in parts[origin].exports:
                raise BundleError(f"{name} imports {word}, which {origin} does not export")
    return "".join(f"// {name}\n{parts[name].text}\n" for name in order)


def _visit(name: str, parts: Mapping[str, _Module], order: list[str], above: list[str]) -> None:
    if name in order or name in above:
        return
    if name not in parts:
        raise BundleError(f"{above[-1] if above else 'the page'} needs {name}, which is not there")
    for other in dict.fromkeys(parts[name].imports.values()):
        _visit(other, parts, order, [*above, name])
    order.append(name)


class _Module:
    """One file, checked, and its text without the words of modules."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.imports: dict[str, str] = {}
        self.exports: set[str] = set()
        self.names: list[str] = []
        for word in FORBIDDEN:
            if word in text:
                raise BundleError(f"{name} holds {word}")
        lines = text.rstrip().split("\n")
        if name == ENTRANCE and lines[-1] != LAST_LINE:
            raise BundleError(f"{name} ends with {lines[-1]!r} and not with {LAST_LINE}")
        last = lines.pop() if name == ENTRANCE else ""
        self.text = "\n".join(
            [kept for line in lines if (kept := self._line(line)) is not None] + ([last] if last else [])
        )

    def _line(self, line: str) -> str | None:
        if line.startswith("import"):
            match = IMPORT.fullmatch(line)
            if match is None:
                raise BundleError(f"{self.name}: an import that is not one line of plain names: {line}")
            self.imports |= dict.fromkeys(match[1].split(", "), match[2])
            return None
        match = DECLARATION.match(line)
        if match is not None:
            self.names.append(match[2])
            if match[1]:
                self.exports.add(match[2])
            return line.removeprefix("export ")
        if not INSIDE.match(line):
            raise BundleError(f"{self.name}: neither a declaration nor inside one: {line}")
        return line
