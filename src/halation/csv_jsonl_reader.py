"""Reads UTF-8 text, CSV and JSON lines; errors name the file, line and column.

A text is a string or an iterator of blocks that end with a line end. Blocks avoid decoding a file of a million rows as
a whole: a single emoji makes every character of a Python string take four bytes.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from halation import input_files
from halation.errors import MAX_NAMES_SHOWN, InputError, format_value, shorten

Text = str | Iterator[str]
CsvRecord = tuple[int, list[str]]
BLOCK_SIZE = 2**20
_SAVE_AS_UTF8 = "save the file as UTF-8 and run again"
_EMPTY_LINES = re.compile(r"(?:\r?\n)++")
_QUOTED_FIELD = re.compile(r'"(?:[^"]++|"")*+"')
_PLAIN_FIELD = re.compile(r"[^,\r\n]*")
_CODE_PAGES = ("cp1252", "cp1253", "cp1251", "cp437", "cp850")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PUNCTUATION = frozenset("\xa0\xab\xbb\u2013\u2014\u2018\u2019\u201a\u201c\u201d\u201e\u2022\u2026\u2039\u203a")
_MIN_SEQUENCES = 3
MAX_PATH_SHOWN = 300
_OTHER_MARKS = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_MAX_DIGITS = 1000


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One record and the line it begins on."""

    line: int
    values: dict[str, Any]


def error_at(name: str, line: int, column: int, found: str, expected: str, action: str) -> InputError:
    """Return the error for a position in a file; line and column (in characters) count from 1."""
    return InputError(f"{name}, line {line}, column {column}: {found}", expected, action)


def read_text_bytes(path: Path, *, within: str | None = None) -> bytes:
    """Read and check the bytes of a table, for `decode_blocks`; raises FileNotFoundError."""
    try:
        data = input_files.read_bytes(path, input_files.MAX_TABLE_BYTES, within=within)
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from None
    check_text(str(path), data)
    if path.suffix == ".jsonl":
        check_num_lines(str(path), data)
    return data


def check_text(name: str, data: bytes) -> None:
    """Raise InputError with the position of invalid UTF-8, a NUL or encoding damage."""
    for encoding, marks in _OTHER_MARKS.items():
        if data.startswith(marks):
            raise error_at(name, 1, 1, f"{encoding} text (its byte order mark)", "UTF-8 text", _SAVE_AS_UTF8)
    if data.startswith(2 * codecs.BOM_UTF8):
        found, action = "two byte order marks (U+FEFF)", "save the file as UTF-8 without a byte order mark"
        raise error_at(name, 1, 1, found, "one at most", action)
    num_lines, max_lines = data.count(b"\n"), input_files.limit(input_files.MAX_TABLE_LINES)
    if num_lines > max_lines:
        raise _limit_error(name, num_lines, f"{num_lines} lines", f"at most {max_lines}, blank ones included")
    line, max_bytes = 1, input_files.limit(input_files.MAX_ROW_BYTES)
    for block in _byte_blocks(data):
        if len(block) > max_bytes and len(block) > BLOCK_SIZE:  # then it is one line
            raise _limit_error(name, line, f"a line of {len(block)} bytes", f"at most {max_bytes}")
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            before = block[: error.start].decode("utf-8")
            found = f"byte 0x{block[error.start]:02x} is not UTF-8 ({error.reason})"
            raise error_at(
                name, *line_and_column(before, len(before), line), found, "UTF-8 text", _SAVE_AS_UTF8
            ) from None
        nul = text.find("\0")
        if nul >= 0:
            found = "a NUL character (the file may be UTF-16 without its mark, or not text at all)"
            raise error_at(name, *line_and_column(text, nul, line), found, "UTF-8 text", _SAVE_AS_UTF8)
        if damaged := find_encoding_damage(text):
            raise error_at(
                name, line + damaged.line - 1, damaged.column, damaged.found, "the text itself", damaged.action
            )
        line += text.count("\n")


def decode_blocks(data: bytes) -> Iterator[str]:
    """Yield the text of checked bytes block by block."""
    for block in _byte_blocks(data):
        yield block.decode("utf-8")


def _byte_blocks(data: bytes) -> Iterator[bytes]:
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    while start < len(data):
        stop = data.rfind(b"\n", start, start + BLOCK_SIZE) + 1 or data.find(b"\n", start + BLOCK_SIZE) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _limit_error(name: str, line: int, found: str, expected: str) -> InputError:
    return input_files.over_limit_error(f"{name}, line {line}: {found}", expected)


def check_field(name: str, line: int, column: str, text: str) -> None:
    """Raise InputError if a prompt, caption or id is longer than MAX_FIELD_CHARS."""
    max_chars = input_files.limit(input_files.MAX_FIELD_CHARS)
    if len(text) > max_chars:
        found = f"{format_value(column)} has {len(text)} characters"
        raise _limit_error(name, line, found, f"at most {max_chars}")


def check_num_rows(name: str, line: int, num_rows: int) -> None:
    max_rows = input_files.limit(input_files.MAX_TABLE_ROWS)
    if num_rows > max_rows:
        raise _limit_error(name, line, f"row {num_rows}", f"at most {max_rows} rows")


def check_num_lines(name: str, data: bytes) -> None:
    """Raise InputError if checked bytes with one row per line have too many rows."""
    max_rows = input_files.limit(input_files.MAX_TABLE_ROWS)
    if data.count(b"\n") < max_rows:
        return
    for num_rows, (line, _) in enumerate(iter_lines(name, decode_blocks(data)), start=1):
        if num_rows > max_rows:
            check_num_rows(name, line, num_rows)


def check_num_columns(name: str, line: int, num_columns: int) -> None:
    max_columns = input_files.limit(input_files.MAX_TABLE_COLUMNS)
    if num_columns > max_columns:
        raise _limit_error(name, line, f"{num_columns} columns", f"at most {max_columns}")


def line_and_column(text: str, offset: int, first_line: int = 1) -> tuple[int, int]:
    """Return line and column, both from 1, of an offset in a text that starts at `first_line`."""
    line_start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, line_start) + first_line, min(offset, len(text)) - line_start + 1


def iter_lines(name: str, text: Text) -> Iterator[tuple[int, str]]:
    """Yield (number, line) for each line that is not blank; only LF and CRLF end a line."""
    number = 0
    for block in _iter_blocks(text):
        for line in block.removesuffix("\n").split("\n"):
            number += 1
            content = line
            if "\r" in line:
                content = line.removesuffix("\r")
                carriage = content.find("\r")
                if carriage >= 0:
                    found, expected = "a carriage return without a line feed", "lines that end with LF or CRLF"
                    raise error_at(name, number, carriage + 1, found, expected, "convert the line ends")
            if content and not content.isspace():
                yield number, content


def csv_rows(name: str, text: Text) -> Iterator[TableRow]:
    """Yield the records of a comma-separated file with a header.

    Blank lines are skipped; a malformed line raises InputError. A field that begins with a quote must end with one and
    may contain commas, line ends and doubled quotes.
    """
    header, records = csv_table(name, text)
    for line, fields in records:
        yield TableRow(line=line, values=dict(zip(header, fields, strict=True)))


def csv_table(name: str, text: Text) -> tuple[list[str], Iterator[CsvRecord]]:
    """Return the header and the records, each with its first line; the field count is checked."""
    records = _parse_records(name, text)
    line, columns = next(records, (1, []))
    if not columns:
        raise error_at(name, 1, 1, "no line with text", "a header and one line per record", "add them to the file")
    header = [column.strip() for column in columns]
    check_num_columns(name, line, len(header))
    if twice := find_duplicate(header):
        found = f"the column {format_value(twice[0])} appears twice"
        raise error_at(name, line, 1, found, "each column once", "rename or remove one of them")
    return header, _check_records(name, header, records)


def csv_header(name: str, text: Text) -> list[str]:
    """Return the column names in the header of a comma-separated file."""
    line, columns = next(_parse_records(name, text), (1, []))
    check_num_columns(name, line, len(columns))
    return [column.strip() for column in columns]


def find_duplicate(names: Sequence[str]) -> list[str]:
    """Return a list with the first duplicate name (in sorted order), or an empty list."""
    return sorted(name for name, count in Counter(names).items() if count > 1)[:1]


def _parse_records(name: str, text: Text) -> Iterator[CsvRecord]:
    """Yield the records, without blank lines, each with the line it begins on."""
    max_chars = input_files.limit(input_files.MAX_ROW_BYTES)
    csv.field_size_limit(max(csv.field_size_limit(), max_chars))
    record: list[str] = []  # lines of the current record
    next_line = first_line = 1

    def record_lines() -> Iterator[str]:
        nonlocal next_line, first_line
        num_chars = 0
        for block in _iter_blocks(text):
            offset = 0
            while offset < len(block):
                if not record:
                    empty = _EMPTY_LINES.match(block, offset) if block[offset] in "\r\n" else None
                    if empty is not None:  # skip all empty lines in one step: there may be millions
                        next_line += block.count("\n", offset, empty.end())
                        offset = empty.end()
                        continue
                    first_line, num_chars = next_line, 0
                stop = block.find("\n", offset) + 1 or len(block)
                num_chars += stop - offset
                if num_chars > max_chars and record:
                    found = f"a record of more than {max_chars} characters; perhaps a quote that is never closed"
                    raise _limit_error(name, first_line, found, "shorter records")
                record.append(block[offset:stop])
                next_line += 1
                yield record[-1]
                offset = stop

    # Strict mode rejects text after a closing quote and unclosed quotes.
    reader = csv.reader(record_lines(), strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error:
            raise _csv_error(name, "".join(record), first_line) from None
        if fields is None:
            return
        last = record[-1]
        if "\r" in last and last.removesuffix("\n").removesuffix("\r" * last.endswith("\n")).endswith("\r"):
            raise _csv_error(name, "".join(record), first_line)  # csv takes several carriage returns for one line end
        if not last.isspace() or len(record) > 1:
            yield first_line, fields
        record.clear()


def _csv_error(name: str, text: str, line: int) -> InputError:
    """Return the error for a malformed record, with the position of the defect."""
    offset = 0
    while True:
        field = (_QUOTED_FIELD if text.startswith('"', offset) else _PLAIN_FIELD).match(text, offset)
        if field is None or not text.startswith(",", field.end()):
            break
        offset = field.end() + 1
    if field is None:
        found, expected = "a quote that is never closed", "a closing quote"
        action = "close it, or double a quote that is part of the text"
    else:
        offset = field.end()
        found, expected = "text after a closing quote", "a comma or the end of the line"
        action = "double a quote that is part of the text"
        if text.startswith("\r", offset):
            found, expected = "a carriage return without a line feed", "lines that end with LF or CRLF"
            action = "convert the line ends, or quote the field"
    return error_at(name, *line_and_column(text, offset, line), found, expected, action)


def _check_records(name: str, header: Sequence[str], records: Iterator[CsvRecord]) -> Iterator[CsvRecord]:
    max_rows, max_chars = input_files.limit(input_files.MAX_TABLE_ROWS), input_files.limit(input_files.MAX_FIELD_CHARS)
    for num_rows, (line, fields) in enumerate(records, start=1):
        if len(fields) != len(header):
            names = ", ".join(shorten(column) for column in header[:MAX_NAMES_SHOWN])
            names += ", ..." if len(header) > MAX_NAMES_SHOWN else ""
            found = f"{len(fields)} fields, but the header has {len(header)} ({names})"
            action = "put quotes around a field that has a comma or a line end in it"
            raise error_at(name, line, 1, found, "the same number of fields in every line", action)
        if num_rows > max_rows:
            check_num_rows(name, line, num_rows)
        if max(map(len, fields)) > max_chars:
            for column, text in zip(header, fields, strict=True):
                check_field(name, line, column, text)
        yield line, fields


def json_rows(name: str, text: Text) -> Iterator[TableRow]:
    """Yield the objects of a file with one JSON object per line; blank lines are skipped.

    The number of rows is not checked here: call `check_num_lines` before parsing.
    """
    expected, action = "one JSON object per line", "correct the line"
    max_chars = input_files.limit(input_files.MAX_FIELD_CHARS)
    for number, line in iter_lines(name, text):
        try:
            values = _JSON.decode(line)
        except json.JSONDecodeError as error:
            raise error_at(name, number, error.colno, f"not JSON ({error.msg})", expected, action) from None
        except ValueError as error:
            raise error_at(name, number, 1, str(error), expected, action) from None
        except RecursionError:
            raise error_at(name, number, 1, "JSON that is nested too deep", expected, action) from None
        if not isinstance(values, dict):
            raise error_at(name, number, 1, f"a JSON {type(values).__name__}", expected, action)
        check_num_columns(name, number, len(values))
        if len(line) > max_chars:
            for column, value in values.items():
                check_field(name, number, column, value if isinstance(value, str) else "")
        yield TableRow(line=number, values=values)


def _iter_blocks(text: Text) -> Iterator[str]:
    return iter([text]) if isinstance(text, str) else text


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = find_duplicate([key for key, _ in pairs])[0]
        raise ValueError(f"the key {format_value(twice)} appears twice")
    for key, value in pairs:
        if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
            raise ValueError(f"half of a surrogate pair in {format_value(key)}, which is not valid text")
    return values


def _parse_int(digits: str) -> int:
    # Python rejects longer numbers too (over 4300 digits), with a message about Python internals.
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


_JSON = json.JSONDecoder(
    object_pairs_hook=_reject_duplicate_keys, parse_int=_parse_int, parse_constant=_reject_constant
)


@dataclass(frozen=True, kw_only=True)
class EncodingDamage:
    """Position (line and column from 1) of text damaged by a conversion, and its message."""

    line: int
    column: int
    found: str
    action: str


def find_encoding_damage(text: str) -> EncodingDamage | None:
    """Return the first UTF-8 text read in another code page or lost character, or None."""
    if text.isascii():
        return None
    pages = [page for page in _code_pages() if page.lead_before_continuation.search(text)]
    if not pages and "\ufffd" not in text:
        return None
    for number, line in enumerate(text.split("\n"), start=1):
        lost = line.find("\ufffd")
        if lost >= 0:
            found = "a replacement character (U+FFFD): a character was lost when the file was converted"
            return EncodingDamage(line=number, column=lost + 1, found=found, action="go back to the original file")
        for page in pages if not line.isascii() else ():
            column = _damaged_column(line, page)
            if column is not None:
                found = f"{line[column : column + 12]!r} looks like UTF-8 that was read as {page.name}"
                action = "go back to the original file: its UTF-8 bytes were read in another code page and saved again"
                return EncodingDamage(line=number, column=column + 1, found=found, action=action)
    return None


class _CodePage(NamedTuple):
    """A code page and patterns of UTF-8 bytes that were decoded with it."""

    name: str
    sequence: re.Pattern[str]
    """A lead byte with all its continuation bytes."""
    lead: re.Pattern[str]
    lead_before_continuation: re.Pattern[str]


@cache
def _code_pages() -> tuple[_CodePage, ...]:
    def make_page(name: str) -> _CodePage:
        def letters(first: int, last: int, others: str = "") -> str:
            return f"[{re.escape(bytes(range(first, last + 1)).decode(name, errors='ignore') + others)}]"

        # Some programs decode a byte that the page does not define to the control code of the same number.
        lead, more = letters(0xC2, 0xF4), letters(0x80, 0xBF, "".join(map(chr, range(0x80, 0xA0))))
        two, three, four = letters(0xC2, 0xDF), letters(0xE0, 0xEF), letters(0xF0, 0xF4)
        sequence = re.compile(f"{two}{more}|{three}{more}{{2}}|{four}{more}{{3}}")
        return _CodePage(name, sequence, re.compile(lead), re.compile(f"{lead}(?={more})"))

    return tuple(map(make_page, _CODE_PAGES))


def _damaged_column(line: str, page: _CodePage) -> int | None:
    """Return where a line begins to be UTF-8 decoded with this code page, or None.

    In such text each character shows as a lead byte and its continuation bytes. In these code pages continuation bytes
    are signs and rare letters. In real text few letters are followed by the right number of them, once the punctuation
    that ends words is left out.
    """
    sequences = page.sequence.finditer(line)
    starts = [match.start() for match in sequences if not _PUNCTUATION.issuperset(match.group()[1:])]
    if page.name == "cp1252":
        for start in starts:
            if line[start] in "ÃÂ" or line.startswith("â€", start):  # no language uses these pairs
                return start
    if len(starts) < _MIN_SEQUENCES:
        return None
    num_leads = len(page.lead.findall(line))
    return starts[0] if 2 * len(page.lead_before_continuation.findall(line)) >= num_leads else None
