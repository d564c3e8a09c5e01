"""Errors that users see (found, expected, what to do), with their exit codes."""

from __future__ import annotations

import errno
import re
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

RESOURCE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM, errno.ESTALE)
_MAX_CHARS = 5000
MAX_NAMES_SHOWN = 20


class HalationError(Exception):
    """An error for users; the command line prints it without a traceback."""

    exit_code = 1


class InputError(HalationError):
    """Bad input or settings: found, expected, and what to do about it."""

    exit_code = 2

    def __init__(self, found: str, expected: str, action: str) -> None:
        found = _shorten(found)
        super().__init__(f"{found}\n  expected: {expected}\n  to do:    {action}")
        self.found = found
        self.expected = expected
        self.action = action

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        return type(self), (self.found, self.expected, self.action)  # to be pickled between processes


def _shorten(text: str) -> str:
    """Shorten a message: names and values from files may have millions of characters."""
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 500]} ... {text[-500:]}"


def shorten(text: object, max_chars: int = 60) -> str:
    """Shorten a name from a file for a message and escape unprintable characters."""
    shown = str(text)
    shown = shown if len(shown) <= max_chars else shown[:max_chars] + "..."
    return shown if shown.isprintable() else repr(shown)[1:-1]


def format_count(number: int, noun: str) -> str:
    """Return `1 image`, `2 images`, `2 batches` or `2 trajectories`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def format_names(names: Sequence[str]) -> str:
    """Join column names, at most the first MAX_NAMES_SHOWN."""
    more = [f"{len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    return ", ".join([*map(format_value, names[:MAX_NAMES_SHOWN]), *more])


def format_value(value: object, max_chars: int = 60) -> str:
    """Return the repr of a value from a file, shortened for a message."""
    text = repr(value[: max_chars + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= max_chars + 2 else text[:max_chars] + "..."


class FolderError(HalationError):
    """The output folder of a command is gone, was replaced, or cannot be written to."""


class RankFailure(HalationError):
    """A rank failed, hangs or disagrees with the others; the message names it."""


class Interrupted(HalationError):
    """The run was stopped and has saved its state; the same command resumes it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def read_extras() -> dict[str, tuple[str, ...]]:
    """Return the packages of each optional extra of Halation, by name.

    They are read from pyproject.toml in a clone, whose installed metadata may be old, else from the metadata.
    """
    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text()).get("project", {})
        if project.get("name") == "halation":
            tables = project["optional-dependencies"].items()
            return {name: tuple(packages) for name, packages in tables if name != "dev"}
    extras: dict[str, tuple[str, ...]] = {}
    for entry in metadata.requires("halation") or ():
        package, _, marker = entry.partition(";")
        match = re.search(r"""extra == ['"]([^'"]+)""", marker)
        if match and match[1] != "dev":
            extras[match[1]] = (*extras.get(match[1], ()), package.strip())
    return extras


def install_command(extra: str, *packages: str) -> str:
    """Return the command that installs the packages of an extra, or only those of these names.

    It names the packages and not `halation[extra]`: the name is not registered on the package index, and a package of
    that name there would not be this one.
    """
    entries = read_extras()[extra]
    wanted = [entry for entry in entries if re.split(r"[^\w.-]", entry)[0] in packages]
    return "pip install " + " ".join(f'"{entry}"' for entry in wanted or entries)


def os_error_message(error: BaseException) -> str | None:
    """Return a message for OS errors such as a full disk, which need no traceback, else None."""
    if not isinstance(error, OSError) or error.errno not in RESOURCE_ERRNOS + PERMISSION_ERRNOS:
        return None
    where = f" ({error.filename})" if error.filename else ""
    action = (
        "check its permissions"
        if error.errno in PERMISSION_ERRNOS
        else "fix the cause (for a full disk, free some space)"
    )
    return f"{error.strerror}{where}: {action}, then run the same command again"
