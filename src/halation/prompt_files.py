"""Reads prompts from CSV, TXT, JSON lines or Parquet, in UTF-8, with strict checks."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halation import csv_jsonl_reader, input_files
from halation.csv_jsonl_reader import TableRow, decode_blocks, error_at
from halation.errors import InputError, format_value, shorten
from halation.input_files import format_size

FORMATS = ("csv", "txt", "jsonl", "parquet")
PROMPT_COLUMNS = ("prompt", "caption", "text")
"""`prompt` if present, else the one of the others that is present; both without `prompt` is an error."""
NUM_SEEDS = 2**63
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_MAX_COLUMNS_SHOWN = 20
_ROWS_PER_BATCH = 4096
_BATCH_BYTES = 128 << 20
_WHOLE_NUMBER = re.compile(r"\s*[+-]?[0-9]+\s*")
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


class _ColumnType(NamedTuple):
    """Accepted names and values of a column other than the prompt."""

    names: tuple[str, ...]
    type: type
    expected: str
    minimum: float = -math.inf
    maximum: float = math.inf


_COLUMN_TYPES = {
    "image_id": _ColumnType(("image_id", "id"), str, "text"),
    "seed": _ColumnType(("seed",), int, "a whole number from 0 to 2**63 - 1", 0, NUM_SEEDS - 1),
    "negative_prompt": _ColumnType(("negative_prompt",), str, "text"),
    "width": _ColumnType(("width",), int, "a whole number from 1 to 16384", 1, 16384),
    "height": _ColumnType(("height",), int, "a whole number from 1 to 16384", 1, 16384),
    "steps": _ColumnType(("steps", "num_inference_steps"), int, "a whole number from 1 to 10000", 1, 10000),
    "guidance_scale": _ColumnType(("guidance_scale",), float, "a finite number, 0 or more", 0, sys.float_info.max),
}
ROW_SETTINGS = ("height", "width", "steps", "guidance_scale", "negative_prompt", "seed")
"""Columns that set a sample's own value."""
_FORMAT_HINT = "use the extension of its format: .csv, .txt, .jsonl or .parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One prompt with the values of its row; None for values that the file does not have."""

    prompt: str
    """Exactly as in the file, spaces included."""
    image_id: str | None = None
    """Raw text, not safe as part of a file name."""
    seed: int | None = None
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    line: int = 0
    """Line in the file (row in Parquet), from 1; 0 without a file."""


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """The bytes of a prompt file, read once because standard input cannot be read twice."""

    name: str
    """Name in messages."""
    format: str
    sha256: str
    """Of the file's bytes."""
    ignored_columns: tuple[str, ...]
    """Columns of the CSV header that are not used; empty for other formats."""
    data: bytes = field(repr=False)

    @classmethod
    def open(cls, path: str | Path, format: str | None = None) -> PromptFile:
        """Read a file, or standard input for "-".

        The format follows the file extension unless `format` is given; standard input is TXT by default.
        """
        name = "standard input" if str(path) == "-" else str(path)
        kind = format or ("txt" if str(path) == "-" else Path(path).suffix.lower().removeprefix("."))
        if kind not in FORMATS:
            found = f"the format {kind!r}" if format else f"{name} ends with {kind!r}"
            raise InputError(found, f"one of {', '.join(FORMATS)}", f"{_FORMAT_HINT}, or give --prompts_format")
        data = _read_bytes(path, name)
        if kind != "parquet":
            csv_jsonl_reader.check_text(name, data)
        if kind in ("txt", "jsonl"):
            csv_jsonl_reader.check_num_lines(name, data)
        if str(path) == "-" and format is None:
            _check_not_table(data)
        ignored_columns: tuple[str, ...] = ()
        if kind == "csv":
            _check_separator(name, next(decode_blocks(data), ""))
            header, _ = csv_jsonl_reader.csv_table(name, decode_blocks(data))
            known = {*_map_columns(header).values(), *PROMPT_COLUMNS[: 2 if "prompt" in header else 3]}
            ignored_columns = tuple(shorten(column) for column in header if column and column not in known)
        sha256 = hashlib.sha256(data).hexdigest()
        return cls(name=name, format=kind, sha256=sha256, ignored_columns=ignored_columns, data=data)

    @classmethod
    def from_rows(cls, rows: Sequence[str | Mapping[str, Any]], name: str) -> PromptFile:
        """Return prompts that are in no file: texts, or columns by name. They are read as JSON lines would be."""
        lines = []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, str | Mapping):
                found = f"{name}: prompt {number} is a {type(row).__name__}"
                raise InputError(found, "a text, or a dict of columns", "correct the list")
            columns = {"prompt": row} if isinstance(row, str) else dict(row)
            lines.append(json.dumps(columns, ensure_ascii=False).encode(errors="surrogateescape") + b"\n")
        data = b"".join(lines)
        csv_jsonl_reader.check_text(name, data)
        csv_jsonl_reader.check_num_lines(name, data)
        sha256 = hashlib.sha256(data).hexdigest()
        return cls(name=name, format="jsonl", sha256=sha256, ignored_columns=(), data=data)

    @classmethod
    def from_values(cls, values: str | Sequence[str], format: str | None = None) -> PromptFile:
        """Read the values of --prompts: one file, `-` for standard input, or texts."""
        values = (values,) if isinstance(values, str) else values
        return cls.open(values[0], format) if is_prompt_file(values) else cls.from_rows(values, "--prompts")

    def rows(self) -> Iterator[PromptRow]:
        """Yield the rows, converted one by one; a malformed row raises InputError."""
        row = None
        for row in _READERS[self.format](self.name, self.data):
            yield row
        if row is None:
            raise InputError(f"{self.name} has no prompts", "at least one", "write one prompt per line")


def read_prompts(path: str | Path, format: str | None = None) -> list[PromptRow]:
    """Read the prompts of a file, or of standard input for "-", in file order.

    The format follows the file extension unless `format` is given; standard input is TXT by default. CSV has a header
    with a `prompt` column or, without it, either `caption` or `text`. JSON lines are objects with the same names. Other
    columns are ignored. In TXT every line is a prompt. Blank lines are skipped in all three. Nothing else is changed:
    "null" is a prompt, an empty field is an empty prompt, spaces are kept.
    """
    return list(iter_prompts(path, format))


def iter_prompts(path: str | Path, format: str | None = None) -> Iterator[PromptRow]:
    """Iterate over the rows of `read_prompts`; memory stays close to the size of the file."""
    return PromptFile.open(path, format).rows()


def is_prompt_file(values: Sequence[str]) -> bool:
    """Whether the values of --prompts are one file instead of texts.

    One value is a file if it exists, is `-`, or is written like a path: a file that is missing must not become a text.
    """
    if len(values) != 1:
        return False
    value = values[0]
    if value == "-":
        return True
    try:
        if Path(value).exists():
            return not Path(value).is_dir()
    except (OSError, ValueError):  # a text too long for a path, or with a zero byte
        return False
    is_word = not any(char.isspace() for char in value)
    return value.startswith(("/", "./", "../", "~/")) or (
        is_word and ("/" in value or Path(value).suffix.lower().removeprefix(".") in FORMATS)
    )


def collect_prompts(
    prompts: Sequence[str], rows: Sequence[str], file: str | Path | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the prompts of the command line, which may be one file or `-`, then those of a file; and their rows.

    A row is JSON with the prompt and its own settings (ROW_SETTINGS); without any there are no rows. `rows` are those
    of prompts that were collected earlier.
    """
    from_file: list[PromptRow] = []
    if is_prompt_file(prompts):
        from_file, prompts, rows = read_prompts(prompts[0]), (), ()
    if file is not None:
        from_file = [*from_file, *read_prompts(file)]
    result = (*prompts, *(row.prompt for row in from_file))
    own = [{name: getattr(row, name) for name in ROW_SETTINGS} for row in from_file]
    own = [{name: value for name, value in values.items() if value not in (None, "")} for values in own]
    if not any(own):
        return result, tuple(rows)
    padded = [*rows, *["{}"] * len(prompts)][: len(prompts)]
    return result, (
        *padded,
        *(json.dumps({"prompt": row.prompt} | values) for row, values in zip(from_file, own, strict=True)),
    )


def parse_rows(prompts: Sequence[str], rows: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return each prompt's own settings from the rows of `collect_prompts`; empty if no prompt has any."""
    parsed = [json.loads(row) for row in rows]
    own = [
        {name: row[name] for name in ROW_SETTINGS if name in row} if row.get("prompt") == prompt else {}
        for prompt, row in zip(prompts, parsed, strict=False)
    ]
    return tuple(own) if any(own) else ()


def _check_not_table(data: bytes) -> None:
    """Reject a table on standard input: without a format, its header would become a prompt."""
    first = next(decode_blocks(data), "").partition("\n")[0].strip()
    names = [word.strip().strip('"') for word in first.split(",")]
    # "text" also occurs in prompts; it is a column only without a space next to its comma.
    known = set(names) & set(PROMPT_COLUMNS[:2]) or "text" in first.replace('"', "").split(",")
    if (len(names) > 1 and known) or first.startswith('{"'):
        kind = "jsonl" if first.startswith("{") else "csv"
        raise InputError(
            f"standard input begins with {first[:80]!r}, which looks like a table",
            "one prompt per line, or the format of the table",
            f"give --prompts_format {kind}, or --prompts_format txt if it is a prompt",
        )


def _read_bytes(path: str | Path, name: str) -> bytes:
    try:
        if str(path) == "-":
            return input_files.read_stream(sys.stdin.buffer, name, input_files.MAX_TABLE_BYTES)
        return input_files.read_bytes(path, input_files.MAX_TABLE_BYTES)
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from None
    except FileNotFoundError:
        raise InputError(f"no such file: {name}", "a file with prompts", "check the path") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder", "a file with prompts", "name the file in it") from None
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror}", "a file with prompts", "check its permissions"
        ) from None


def _read_txt(name: str, data: bytes) -> Iterator[PromptRow]:
    max_chars = input_files.limit(input_files.MAX_FIELD_CHARS)
    for number, line in csv_jsonl_reader.iter_lines(name, decode_blocks(data)):
        if len(line) > max_chars:
            csv_jsonl_reader.check_field(name, number, "prompt", line)
        yield PromptRow(prompt=line, line=number)


def _read_csv(name: str, data: bytes) -> Iterator[PromptRow]:
    header, records = csv_jsonl_reader.csv_table(name, decode_blocks(data))
    prompt = header.index(_prompt_column(name, 1, header))
    columns = [(part, header.index(column)) for part, column in _map_columns(header).items()]
    texts = [(part, position) for part, position in columns if _COLUMN_TYPES[part].type is str]
    numbers = [(part, position) for part, position in columns if _COLUMN_TYPES[part].type is not str]
    for line, fields in records:
        values: dict[str, Any] = {part: fields[position] for part, position in texts}
        for part, position in numbers:
            try:
                values[part] = _parse_number(fields[position], _COLUMN_TYPES[part])
            except ValueError:
                raise _bad_value_error(name, line, header[position], fields[position], _COLUMN_TYPES[part]) from None
        yield PromptRow(prompt=fields[prompt], line=line, **values)


def _read_parquet(name: str, data: bytes) -> Iterator[PromptRow]:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        action = "pip install pyarrow, or save the prompts as CSV"
        raise InputError(f"{name} is a Parquet file, and pyarrow is not installed", "pyarrow", action) from None
    max_footer = input_files.limit(input_files.MAX_PARQUET_FOOTER_BYTES)
    num_footer = int.from_bytes(data[-8:-4], "little")
    if data.endswith(b"PAR1") and max_footer < num_footer < len(data):
        found = f"{name} has a Parquet footer of {num_footer} bytes"
        raise input_files.over_limit_error(found, f"at most {max_footer}")
    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data))
        names = list(file.schema_arrow.names)
        csv_jsonl_reader.check_num_columns(name, 1, len(names))
        csv_jsonl_reader.check_num_rows(name, file.metadata.num_rows, file.metadata.num_rows)
        wanted = [_prompt_column(name, 1, names), *_map_columns(names).values()]
        if twice := csv_jsonl_reader.find_duplicate([column for column in names if column in wanted]):
            found = f"the column {format_value(twice[0])} appears twice"
            raise error_at(name, 1, 1, found, "each column once", "rename or remove one of them")
        types = pyarrow.types
        is_plain = [types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean]
        is_plain += [types.is_null, getattr(types, "is_string_view", types.is_string)]  # pyarrow 16 and newer
        for column in wanted:
            type = file.schema_arrow.field(column).type
            value_type = type.value_type if types.is_dictionary(type) else type
            if not any(is_kind(value_type) for is_kind in is_plain):
                found = f"the column {format_value(column)} has type {shorten(type)}"
                raise error_at(name, 1, 1, found, "text or numbers", "convert the column")
        batch_size = _parquet_batch_size(name, data, wanted)
        yield from _parse_typed_rows(name, _iter_parquet_rows(name, file, wanted, batch_size))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        text = shorten(str(error).partition("\n")[0])
        raise InputError(f"{name} is not a Parquet file: {text}", "Parquet", _FORMAT_HINT) from None


def _parquet_batch_size(name: str, data: bytes, columns: Sequence[str]) -> int:
    """Return how many rows to unpack at a time; raises if the file unpacks to too many bytes.

    A value can be as large as its page and be repeated in every row of it at a cost of a few bits. Sizes in the footer
    may be wrong; the reader allocates the size in the page header.
    """
    max_bytes = input_files.limit(input_files.MAX_TABLE_BYTES)
    max_pages = input_files.limit(input_files.MAX_PARQUET_PAGES)
    num_bytes, num_pages, largest, end = 0, 0, 1, 0
    for start, stop, group in sorted(_parquet_chunks(data, columns)):
        if start < end or stop > len(data):
            raise OSError(f"row group {group + 1} overlaps another one, or ends after the end of the file")
        end = max(end, stop)
        for size in _parquet_page_sizes(data, start, stop):
            num_bytes, num_pages, largest = num_bytes + size, num_pages + 1, max(largest, size)
            if num_pages > max_pages:
                found = f"{name}, row group {group + 1}: its columns have more than {max_pages} pages"
                raise input_files.over_limit_error(found, "fewer and larger pages")
            if num_bytes > max_bytes:
                raise input_files.over_limit_error(
                    f"{name}, row group {group + 1}: its columns unpack to more than {format_size(max_bytes)}",
                    "a smaller table",
                )
    return max(1, min(_ROWS_PER_BATCH, _BATCH_BYTES // largest))


def _parquet_chunks(data: bytes, columns: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, end and row group of the non-empty chunks of these columns.

    The footer is parsed here because pyarrow can crash the process on a damaged one.
    """
    paths = [[column.encode("utf-8", "surrogatepass")] for column in columns]
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    try:
        for number, group in enumerate(_read_thrift(footer, 0)[0].get(4, [])):
            for chunk in (chunk[3] for chunk in group[1] if 3 in chunk and chunk[3][3] in paths):
                offsets = [chunk[9], *([chunk[11]] if 0 < chunk.get(11, 0) < chunk[9] else [])]
                if chunk[7] > 0:
                    yield min(offsets), min(offsets) + chunk[7], number
    except (IndexError, KeyError, TypeError) as error:
        raise OSError("a footer that cannot be read") from error


def _parquet_page_sizes(data: bytes, start: int, stop: int) -> Iterator[int]:
    """Yield the unpacked size of each page, from its header."""
    while 0 <= start < min(stop, len(data)):
        try:
            fields, start = _read_thrift(data, start)
            unpacked, packed = fields[2], fields[3]
            if packed < 0 or unpacked < 0:
                raise OSError("a page of negative size")
        except (IndexError, KeyError, TypeError) as error:
            raise OSError("a page header that cannot be read") from error
        yield unpacked
        start += packed


def _read_thrift(data: bytes, offset: int, kind: int = 12, depth: int = 0) -> tuple[Any, int]:
    """Return a value of Thrift's compact protocol (struct: dict by field number) and its end."""
    match kind:
        case 1 | 2:
            return kind == 1, offset
        case 3:
            return data[offset], offset + 1
        case 4 | 5 | 6:
            number, offset = _read_thrift_varint(data, offset)
            return (number >> 1) ^ -(number & 1), offset
        case 7:
            return None, offset + 8
        case 8:
            length, offset = _read_thrift_varint(data, offset)
            return data[offset : offset + length], offset + length
        case 9 | 10 if depth < 8:
            size, kind = data[offset] >> 4, data[offset] & 15
            offset += 1
            if size == 15:
                size, offset = _read_thrift_varint(data, offset)
            values = []
            for _ in range(size):
                # In a list, a boolean takes a byte.
                value, offset = _read_thrift(data, offset, 3 if kind in (1, 2) else kind, depth + 1)
                values.append(value)
                if offset > len(data):
                    raise IndexError(offset)
            return values, offset
        case 12 if depth < 9:
            fields, number = {}, 0
            while head := data[offset]:
                offset += 1
                number += head >> 4
                if not head >> 4:
                    number, offset = _read_thrift(data, offset, 4)
                fields[number], offset = _read_thrift(data, offset, head & 15, depth + 1)
            return fields, offset + 1
    raise KeyError(kind)


def _read_thrift_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[offset] & 127) << shift
        offset += 1
        if data[offset - 1] < 128:
            return value, offset
    raise KeyError(value)


def _iter_parquet_rows(name: str, file: Any, columns: Sequence[str], batch_size: int) -> Iterator[TableRow]:
    num_before, num_chars, max_chars = 0, 0, input_files.limit(input_files.MAX_TABLE_BYTES)
    max_field = input_files.limit(input_files.MAX_FIELD_CHARS)
    for batch in file.iter_batches(batch_size=batch_size, columns=list(columns), use_threads=False):
        try:
            records = batch.to_pylist()
        except UnicodeDecodeError as error:  # read the rows one by one to find the bad one
            records = []
            with contextlib.suppress(UnicodeDecodeError):
                for offset in range(batch.num_rows):
                    records += batch.slice(offset, 1).to_pylist()
            found = f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})"
            line, action = num_before + len(records) + 1, "write the file again from its source"
            raise error_at(name, line, 1, found, "UTF-8 text", action) from None
        for line, values in enumerate(records, start=num_before + 1):
            for column, value in values.items():
                if isinstance(value, str):
                    num_chars += len(value)
                    if len(value) > max_field:
                        csv_jsonl_reader.check_field(name, line, column, value)
            if num_chars > max_chars:
                found = f"{name}, line {line}: more than {max_chars} characters up to here"
                raise input_files.over_limit_error(found, "a smaller table")
            yield TableRow(line=line, values=values)
        num_before += len(records)


_READERS: dict[str, Callable[[str, bytes], Iterable[PromptRow]]] = {
    "txt": _read_txt,
    "csv": _read_csv,
    "jsonl": lambda name, data: _parse_typed_rows(name, csv_jsonl_reader.json_rows(name, decode_blocks(data))),
    "parquet": _read_parquet,
}


def _check_separator(name: str, text: str) -> None:
    header = text.lstrip().partition("\n")[0]
    if "," in header:
        return
    for separator, word in _SEPARATORS.items():
        columns = [column.strip().strip('"').lower() for column in header.split(separator)]
        if len(columns) > 1 and set(PROMPT_COLUMNS) & set(columns):
            action = "save the file with commas, and with quotes around a field that has a comma in it"
            column = header.index(separator) + 1
            line = text.count("\n", 0, len(text) - len(text.lstrip())) + 1
            found = f"this file has {word} between the columns"
            raise error_at(name, line, column, found, "commas between the columns", action)


def _prompt_column(name: str, line: int, columns: Sequence[str]) -> str:
    present = [column for column in PROMPT_COLUMNS if column in columns]
    if "prompt" in present or len(present) == 1:
        return present[0]
    hints = []
    for column in columns[:_MAX_COLUMNS_SHOWN]:
        close = difflib.get_close_matches(column[: csv_jsonl_reader.MAX_PATH_SHOWN].lower(), PROMPT_COLUMNS, n=1)
        hints.append(format_value(column) + (f" (nearest: {close[0]!r})" if close and column not in present else ""))
    hints += [f"{len(columns) - len(hints)} more"] if len(columns) > len(hints) else []
    found = f"no prompt column among {', '.join(hints) or 'no columns'}"
    expected = "a column named 'prompt', or one of 'caption' and 'text'"
    raise error_at(name, line, 1, found, expected, "rename the column that holds the prompts to prompt")


def _map_columns(columns: Iterable[str]) -> dict[str, str]:
    """Map fields of PromptRow to the columns that are present."""
    found = {
        part: next((alias for alias in kind.names if alias in columns), None) for part, kind in _COLUMN_TYPES.items()
    }
    return {part: column for part, column in found.items() if column is not None}


def _parse_typed_rows(name: str, rows: Iterable[TableRow]) -> Iterator[PromptRow]:
    """Yield rows of typed values; texts are checked, as escapes can hold NULs and the like."""
    for row in rows:
        column = _prompt_column(name, row.line, list(row.values))
        prompt = row.values[column]
        if not isinstance(prompt, str):
            found = f"the {column} is {format_value(prompt)}"
            raise error_at(name, row.line, 1, found, "text", "write the prompt, or remove the line")
        _check_text(name, row.line, column, prompt)
        values = {}
        for part, source in _map_columns(row.values).items():
            try:
                values[part] = _parse_json_value(row.values[source], _COLUMN_TYPES[part])
            except (ValueError, OverflowError):
                raise _bad_value_error(name, row.line, source, row.values[source], _COLUMN_TYPES[part]) from None
            if isinstance(values[part], str):
                _check_text(name, row.line, source, values[part])
        yield PromptRow(prompt=prompt, line=row.line, **values)


def _check_text(name: str, line: int, column: str, text: str) -> None:
    if "\0" in text:
        found = f"a NUL character in {column}"
        raise error_at(name, line, 1, found, "text", "write it without the character U+0000")
    if damaged := csv_jsonl_reader.find_encoding_damage(text):
        raise error_at(name, line, 1, f"in {column}: {damaged.found}", "the text itself", damaged.action)


def _bad_value_error(name: str, line: int, column: str, value: Any, kind: _ColumnType) -> InputError:
    return error_at(name, line, 1, f"{column} is {format_value(value)}", kind.expected, "correct the line")


def _parse_number(value: str, kind: _ColumnType) -> Any:
    """Parse a number, or return None for an empty field."""
    if not value or value.isspace():
        return None
    # int() and float() also accept 1_000, full-width digits and "nan".
    if not (_WHOLE_NUMBER if kind.type is int else _NUMBER).fullmatch(value):
        raise ValueError(value)
    return _check_range(kind.type(value), kind)


def _parse_json_value(value: Any, kind: _ColumnType) -> Any:
    if value is None:
        return None
    if kind.type is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind.type is float else kind.type):
        raise ValueError(value)
    return value if kind.type is str else _check_range(kind.type(value), kind)


def _check_range(number: Any, kind: _ColumnType) -> Any:
    if not kind.minimum <= number <= kind.maximum:
        raise ValueError(number)
    return number
