"""Prompt files, read exactly or refused: CSV, TXT, JSON lines and Parquet, in UTF-8 and nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.tables import Row, csv_header, csv_rows, decode, json_rows, lines, nearest, refuse

FORMATS = ("csv", "txt", "jsonl", "parquet")
PROMPT_COLUMNS = ("prompt", "caption")
NUM_SEEDS = 2**63
_NAMES = {
    "image_id": ("image_id", "id"),
    "seed": ("seed",),
    "negative_prompt": ("negative_prompt",),
    "width": ("width",),
    "height": ("height",),
    "steps": ("steps", "num_inference_steps"),
    "guidance_scale": ("guidance_scale",),
}
_ONE_PROMPT_A_LINE = "name the file .csv, .txt, .jsonl or .parquet after what is in it"


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt with what its file says about it; None where the file says nothing."""

    prompt: str
    """Exactly as in the file, spaces included."""
    image_id: str | None = None
    """Raw text: not yet fit to be part of a file name."""
    seed: int | None = None
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    line: int = 0
    """Where it begins in its file (the row in Parquet), from 1; 0 where there is no file."""


def read_prompts(path: str | Path, format: str | None = None) -> list[PromptRow]:
    """The prompts of a file, or of standard input for "-" (TXT unless `format` says otherwise), in the file's order.

    The format follows the ending. CSV has a header with a `prompt` column (or `caption`, where there is no `prompt`); JSON
    lines hold objects with the same names; other columns are ignored. In TXT every line is a prompt. Blank lines are
    skipped in all three. Nothing else is changed: "null" is a prompt, an empty field is an empty prompt, spaces stay.
    """
    name = "standard input" if str(path) == "-" else str(path)
    kind = format or ("txt" if str(path) == "-" else Path(path).suffix.lower().removeprefix("."))
    if kind not in FORMATS:
        raise InputError(f"{name} ends with {kind!r}", f"one of {', '.join(FORMATS)}", _ONE_PROMPT_A_LINE)
    data = _bytes(path, name)
    rows = list(_parquet(name, data) if kind == "parquet" else _READERS[kind](name, decode(name, data)))
    if not rows:
        raise InputError(f"{name} has no prompts", "at least one", "write one prompt a line")
    return rows


def from_flags(prompts: Sequence[str], file: str | Path | None) -> list[str]:
    """The prompts given on the command line, followed by those of a file; a lone `-` stands for standard input."""
    if list(prompts) == ["-"]:
        prompts = [row.prompt for row in read_prompts("-")]
    return [*prompts, *([row.prompt for row in read_prompts(file)] if file is not None else [])]


def _bytes(path: str | Path, name: str) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"no such file: {name}", "a file with prompts", "check the path") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder", "a file with prompts", "name the file in it") from None
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror}", "a file with prompts", "check its rights"
        ) from None


def _txt(name: str, text: str) -> Iterator[PromptRow]:
    for number, line in lines(name, text):
        yield PromptRow(prompt=line, line=number)


def _csv(name: str, text: str) -> Iterator[PromptRow]:
    header = csv_header(name, text)
    if header:
        _prompt_column(name, 1, header)
    return _typed(name, csv_rows(name, text), _from_text)


def _jsonl(name: str, text: str) -> Iterator[PromptRow]:
    return _typed(name, json_rows(name, text), _from_json)


_READERS: dict[str, Callable[[str, str], Iterable[PromptRow]]] = {"txt": _txt, "csv": _csv, "jsonl": _jsonl}


def _parquet(name: str, data: bytes) -> Iterator[PromptRow]:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        action = "pip install pyarrow, or save the prompts as CSV"
        raise InputError(f"{name} is a Parquet file, and pyarrow is not installed", "pyarrow", action) from None
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputError(f"{name} is not a Parquet file: {error}", "Parquet", _ONE_PROMPT_A_LINE) from None
    _prompt_column(name, 1, table.column_names)
    rows = (Row(line=number, values=values) for number, values in enumerate(table.to_pylist(), start=1))
    return _typed(name, rows, _from_json)


def _prompt_column(name: str, line: int, columns: Sequence[str]) -> str:
    for column in PROMPT_COLUMNS:
        if column in columns:
            return column
    hints = [f"{column!r}{nearest(column, PROMPT_COLUMNS)}" for column in columns]
    found = f"no prompt column among {', '.join(hints) or 'no columns'}"
    raise refuse(
        name, line, 1, found, "a column named 'prompt' or 'caption'", "rename the column that holds the prompts"
    )


def _typed(name: str, rows: Iterable[Row], convert: Callable[[Any, type], Any]) -> Iterator[PromptRow]:
    """Rows with their values as the types of PromptRow; `convert(value, type)` gives None for "not said"."""
    for row in rows:
        column = _prompt_column(name, row.line, list(row.values))
        prompt = row.values[column]
        if not isinstance(prompt, str):
            found = f"the {column} is {prompt!r}"
            raise refuse(name, row.line, 1, found, "text", "write the prompt, or remove the line")
        values = {field: _value(name, row, field, convert) for field in _NAMES}
        yield PromptRow(prompt=prompt, line=row.line, **values)


def _value(name: str, row: Row, field: str, convert: Callable[[Any, type], Any]) -> Any:
    wanted: type = {"image_id": str, "negative_prompt": str, "guidance_scale": float}.get(field, int)
    column = next((alias for alias in _NAMES[field] if alias in row.values), None)
    if column is None:
        return None
    try:
        return convert(row.values[column], wanted)
    except ValueError:
        found = f"{column} is {row.values[column]!r}"
        expected = {int: "a whole number", float: "a number", str: "text"}[wanted]
        raise refuse(name, row.line, 1, found, expected, "correct the line") from None


def _from_text(value: str, wanted: type) -> Any:
    if wanted is str:
        return value
    if not value.strip():
        return None
    # int() and float() also take 1_000, full-width digits and "nan", which nobody means.
    pattern = r"\s*[+-]?[0-9]+\s*" if wanted is int else r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
    if not re.fullmatch(pattern, value):
        raise ValueError(value)
    return wanted(value)


def _from_json(value: Any, wanted: type) -> Any:
    if value is None:
        return None
    if wanted is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted):
        raise ValueError(value)
    return wanted(value)
