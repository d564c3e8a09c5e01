"""Text files of other people, read exactly or refused with file, line and column: UTF-8 text, CSV and JSON lines.

No torch and no images here. The csv module is not used: it cannot say where a fault is, and its limit on the length of
a field is a global. A text is a string, or an iterator of blocks that end with a line end, so that a file of a million
rows is never decoded as a whole (one emoji makes every letter of a string take four bytes).
"""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from halation import input_files
from halation.errors import InputError

Text = str | Iterator[str]
CsvRecord = tuple[int, list[str]]
BLOCK_SIZE = 2**20
_SAVE_AS_UTF8 = "save the file as UTF-8 and run again"
_FIELD = re.compile(r'(?:"((?:[^"]++|"")*+)"|((?:[^",\r\n][^,\r\n]*+)?))(,|\r\n|\n|\Z)')
_EMPTY_LINES = re.compile(r"(?:\r?\n)++")
_QUOTED = re.compile(r'"(?:[^"]++|"")*+"')
_CODE_PAGES = ("cp1252", "cp1253", "cp1251", "cp437", "cp850")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PUNCTUATION = frozenset("\xa0\xab\xbb\u2013\u2014\u2018\u2019\u201a\u201c\u201d\u201e\u2022\u2026\u2039\u203a")
_MIN_SEQUENCES = 3
MAX_PATH_SHOWN = 300
_MAX_NAMES_SHOWN = 20
_OTHER_MARKS = {  # UTF-32's first mark begins with that of UTF-16
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_MAX_DIGITS = 1000


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One record with the place where it begins."""

    line: int
    values: dict[str, Any]


def error_at(name: str, line: int, column: int, found: str, expected: str, action: str) -> InputError:
    """The error for one place in a file; lines and columns count from 1, columns in characters."""
    return InputError(f"{name}, line {line}, column {column}: {found}", expected, action)


def nearest_hint(name: str, known: Sequence[str]) -> str:
    """A hint at the known name that looks most like this one, or nothing."""
    close = difflib.get_close_matches(name[:MAX_PATH_SHOWN].lower(), known, n=1)
    return f" (nearest: {close[0]!r})" if close else ""


def shorten(text: object, max_chars: int = 60) -> str:
    """A name from a file, short enough for a message and without characters that a terminal would not show."""
    shown = str(text)
    shown = shown if len(shown) <= max_chars else shown[:max_chars] + "..."
    return shown if shown.isprintable() else repr(shown)[1:-1]


def format_names(names: Sequence[str]) -> str:
    """Names of columns, the first of them where there are many."""
    more = [f"{len(names) - _MAX_NAMES_SHOWN} more"] if len(names) > _MAX_NAMES_SHOWN else []
    return ", ".join([*map(format_value, names[:_MAX_NAMES_SHOWN]), *more])


def format_value(value: object, max_chars: int = 60) -> str:
    """A value from a file, short enough for a message."""
    text = repr(value[: max_chars + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= max_chars + 2 else text[:max_chars] + "..."


def read_text_bytes(path: Path, *, within: str | None = None) -> bytes:
    """The bytes of a table that `check_text` finds nothing wrong with, for `decode_blocks`; FileNotFoundError where there is none."""
    try:
        data = input_files.read_bytes(path, input_files.MAX_TABLE_BYTES, within=within)
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from None
    check_text(str(path), data)
    if path.suffix == ".jsonl":
        check_num_lines(str(path), data)
    return data


def check_text(name: str, data: bytes) -> None:
    """Refuse bytes that are not UTF-8, NULs and text that was once read in another code page, each with its place."""
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
    """The text of checked bytes, a block at a time."""
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
    """Refuse a text that no prompt, caption or id is as long as."""
    max_chars = input_files.limit(input_files.MAX_FIELD_CHARS)
    if len(text) > max_chars:
        found = f"{format_value(column)} has {len(text)} characters"
        raise _limit_error(name, line, found, f"at most {max_chars}")


def check_num_rows(name: str, line: int, num_rows: int) -> None:
    max_rows = input_files.limit(input_files.MAX_TABLE_ROWS)
    if num_rows > max_rows:
        raise _limit_error(name, line, f"row {num_rows}", f"at most {max_rows} rows")


def check_num_lines(name: str, data: bytes) -> None:
    """Refuse checked bytes with a row a line that have too many, before any of them is parsed."""
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
    """Line and column of a character, both from 1, in a text that begins with `first_line`."""
    line_start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, line_start) + first_line, min(offset, len(text)) - line_start + 1


def iter_lines(name: str, text: Text) -> Iterator[tuple[int, str]]:
    """(number, line) of each line that is not blank; lines end with LF or CRLF and with nothing else."""
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
    """Records of a comma-separated file with a header; blank lines are skipped, every other line is read or refused.

    A field that begins with a quote ends with one; commas, line ends and doubled quotes inside are kept as they are.
    """
    header, records = csv_table(name, text)
    for line, fields in records:
        yield TableRow(line=line, values=dict(zip(header, fields, strict=True)))


def csv_table(name: str, text: Text) -> tuple[list[str], Iterator[CsvRecord]]:
    """The header, and the records with the line they begin on; each record has a field for each column."""
    records = _parse_records(name, text)
    first = next(records, None)
    if first is None:
        raise error_at(name, 1, 1, "no line with text", "a header and one line for each record", "fill the file")
    header = [column.strip() for column in first[1]]
    check_num_columns(name, first[0], len(header))
    if twice := find_duplicate(header):
        found = f"the column {format_value(twice[0])} is there twice"
        raise error_at(name, first[0], 1, found, "each column once", "rename or remove one of them")
    return header, _check_num_fields(name, header, records)


def find_duplicate(names: Sequence[str]) -> list[str]:
    """The first of the names that is there twice, or an empty list."""
    counts = Counter(names)
    return sorted(name for name, count in counts.items() if count > 1)[:1] if len(counts) < len(names) else []


def _check_num_fields(name: str, header: Sequence[str], records: Iterator[CsvRecord]) -> Iterator[CsvRecord]:
    max_rows, max_chars = input_files.limit(input_files.MAX_TABLE_ROWS), input_files.limit(input_files.MAX_FIELD_CHARS)
    for num_rows, record in enumerate(records, start=1):
        if len(record[1]) != len(header):
            names = ", ".join(shorten(column) for column in header[:_MAX_NAMES_SHOWN])
            names += ", ..." if len(header) > _MAX_NAMES_SHOWN else ""
            found = f"{len(record[1])} fields where the header has {len(header)} ({names})"
            action = "put quotes around a field that has a comma or a line end in it"
            raise error_at(name, record[0], 1, found, "the same number of fields in every line", action)
        if num_rows > max_rows:
            check_num_rows(name, record[0], num_rows)
        if max(map(len, record[1])) > max_chars:
            for column, text in zip(header, record[1], strict=True):
                check_field(name, record[0], column, text)
        yield record


def csv_header(name: str, text: Text) -> list[str]:
    """The columns a comma-separated file says it has."""
    first = next(_parse_records(name, text), None)
    if first is None:
        return []
    check_num_columns(name, first[0], len(first[1]))
    return [column.strip() for column in first[1]]


def json_rows(name: str, text: Text) -> Iterator[TableRow]:
    """One JSON object a line; blank lines are skipped."""
    expected, action = "one JSON object a line", "correct the line"
    max_rows, max_chars = input_files.limit(input_files.MAX_TABLE_ROWS), input_files.limit(input_files.MAX_FIELD_CHARS)
    for num_rows, (number, line) in enumerate(iter_lines(name, text), start=1):
        if num_rows > max_rows:
            check_num_rows(name, number, num_rows)
        try:
            values = _JSON.decode(line)
        except json.JSONDecodeError as error:
            raise error_at(name, number, error.colno, f"not JSON ({error.msg})", expected, action) from None
        except ValueError as error:
            raise error_at(name, number, 1, str(error), expected, action) from None
        except RecursionError:
            raise error_at(name, number, 1, "JSON that is nested too deep", expected, action) from None
        if not isinstance(values, dict):
            raise error_at(name, number, 1, f"JSON, but a {type(values).__name__}", expected, action)
        check_num_columns(name, number, len(values))
        if len(line) > max_chars:
            for column, value in values.items():
                check_field(name, number, column, value if isinstance(value, str) else "")
        yield TableRow(line=number, values=values)


def _iter_blocks(text: Text) -> Iterator[str]:
    return iter([text]) if isinstance(text, str) else text


def _parse_records(name: str, text: Text) -> Iterator[CsvRecord]:
    """Records that are not blank lines, each with the line it begins on."""
    blocks_left = _iter_blocks(text)
    block, offset, line = next(blocks_left, ""), 0, 1
    while block:
        if block[offset] in "\r\n" and (empty := _EMPTY_LINES.match(block, offset)):
            line += block.count("\n", offset, empty.end())
            offset = empty.end()
            if offset == len(block):
                block, offset = next(blocks_left, ""), 0
                continue
        stop = block.find("\n", offset) + 1 or len(block)
        content = block[offset:stop]
        content = content[:-2] if content.endswith("\r\n") else content.removesuffix("\n")
        if '"' not in content and "\r" not in content:
            if content and not content.isspace():
                yield line, content.split(",")
            line += 1
        else:
            fields, stop, complete = _parse_fields(block, offset)
            if not complete:
                if len(block) - offset > input_files.limit(input_files.MAX_ROW_BYTES):
                    found = f"a record of more than {input_files.limit(input_files.MAX_ROW_BYTES)} characters"
                    raise _limit_error(name, line, f"{found}; perhaps a quote that is never closed", "shorter ones")
                more = _read_at_least_as_much(blocks_left, block, offset) if _is_unclosed_quote(block, stop) else ""
                if not more:
                    raise _csv_error(name, block[offset:], stop - offset, line)
                block, offset = block[offset:] + more, 0
                continue
            yield line, fields
            line += block.count("\n", offset, stop)
        offset = stop
        if offset == len(block):
            block, offset = next(blocks_left, ""), 0


def _parse_fields(text: str, offset: int) -> tuple[list[str], int, bool]:
    """The fields of the record that begins here, where it ends, and True; or where it cannot be read on, and False."""
    fields: list[str] = []
    while match := _FIELD.match(text, offset):
        quoted, plain, end = match.groups()
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        offset = match.end()
        if end != ",":
            return fields, offset, True
    return fields, offset, False


def _is_unclosed_quote(text: str, offset: int) -> bool:
    return text.startswith('"', offset) and _QUOTED.match(text, offset) is None


def _read_at_least_as_much(blocks_left: Iterator[str], block: str, offset: int) -> str:
    # A field of many blocks is scanned again each time it grows: doubling keeps the sum of these scans small.
    more: list[str] = []
    num_wanted = len(block) - offset
    while num_wanted > 0 and (following := next(blocks_left, "")):
        more.append(following)
        num_wanted -= len(following)
    return "".join(more)


def _csv_error(name: str, text: str, offset: int, line: int) -> InputError:
    if _is_unclosed_quote(text, offset):
        found, action = "a quote that is never closed", "close it, or double a quote that is meant as such"
        return error_at(name, *line_and_column(text, offset, line), found, "a closing quote", action)
    close = _QUOTED.match(text, offset)
    if close is not None:
        found, expected = "text after a closing quote", "a comma or the end of the line"
        return error_at(
            name, *line_and_column(text, close.end(), line), found, expected, "double a quote that is meant as such"
        )
    carriage = text.find("\r", offset)
    found, expected = "a carriage return without a line feed", "lines that end with LF or CRLF"
    return error_at(
        name, *line_and_column(text, carriage, line), found, expected, "convert the line ends, or quote the field"
    )


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = find_duplicate([key for key, _ in pairs])[0]
        raise ValueError(f"the key {format_value(twice)} is there twice")
    for key, value in pairs:
        if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
            raise ValueError(f"half of a surrogate pair in {format_value(key)}, which is no text")
    return values


def _parse_int(digits: str) -> int:
    # Beyond this Python refuses to convert, and says so in words that are about Python.
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
    """Where a text stopped being itself, line and column from 1, and what to say about it."""

    line: int
    column: int
    found: str
    action: str


@dataclass(frozen=True, kw_only=True)
class _CodePage:
    """A code page in which UTF-8 bytes may have been read: how they look in its letters."""

    name: str
    sequence: re.Pattern[str]
    """A lead byte with all its continuation bytes."""
    lead: re.Pattern[str]
    lead_before_continuation: re.Pattern[str]
    """A lead byte before a continuation byte, which every damaged line has somewhere."""


def find_encoding_damage(text: str) -> EncodingDamage | None:
    """The first place where a text is UTF-8 that was read in another code page, or has lost a letter; None for sound text."""
    if text.isascii():
        return None
    pages = [page for page in _code_pages() if page.lead_before_continuation.search(text)]
    if not pages and "\ufffd" not in text:
        return None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.isascii():
            continue
        lost = line.find("\ufffd")
        if lost >= 0:
            found = "a replacement character (U+FFFD): a letter was lost when the file was converted"
            return EncodingDamage(line=number, column=lost + 1, found=found, action="go back to the original file")
        for page in pages:
            column = _damaged_column(line, page)
            if column is not None:
                found = f"{line[column : column + 12]!r} looks like UTF-8 that was read as {page.name}"
                action = "go back to the original file: its UTF-8 bytes were read in another code page and saved again"
                return EncodingDamage(line=number, column=column + 1, found=found, action=action)
    return None


def _damaged_column(line: str, page: _CodePage) -> int | None:
    """Where a line begins to be UTF-8 bytes shown as letters of a code page, or None.

    Every letter of such a text is a lead byte and its continuation bytes. The latter stand for signs and rare letters, so
    in real text few letters have just the right number of them behind, once the punctuation that ends words is left out.
    """
    suspicious = [
        match
        for match in page.sequence.finditer(line)
        if not _PUNCTUATION.issuperset(line[match.start() + 1 : match.end()])
    ]
    if page.name == "cp1252":
        for match in suspicious:
            if line[match.start()] in "ÃÂ" or line.startswith("â€", match.start()):  # no language writes these pairs
                return match.start()
    if len(suspicious) < _MIN_SEQUENCES or 2 * len(page.lead_before_continuation.findall(line)) < len(
        page.lead.findall(line)
    ):
        return None
    return suspicious[0].start()


@cache
def _code_pages() -> tuple[_CodePage, ...]:
    return tuple(_make_code_page(name) for name in _CODE_PAGES)


def _make_code_page(name: str) -> _CodePage:
    letters = {byte: bytes([byte]).decode(name, errors="ignore") for byte in range(0x80, 0x100)}
    # Some programs show a byte that the page does not have as the control code of the same number.
    controls = [chr(code) for code in range(0x80, 0xA0)]

    def char_class(first: int, last: int, others: Sequence[str] = ()) -> str:
        return "[" + re.escape("".join([*(letters[byte] for byte in range(first, last + 1)), *others])) + "]"

    lead, more = char_class(0xC2, 0xF4), char_class(0x80, 0xBF, controls)
    two, three, four = char_class(0xC2, 0xDF), char_class(0xE0, 0xEF), char_class(0xF0, 0xF4)
    return _CodePage(
        name=name,
        sequence=re.compile(f"{two}{more}|{three}{more}{{2}}|{four}{more}{{3}}"),
        lead=re.compile(lead),
        lead_before_continuation=re.compile(f"{lead}(?={more})"),
    )
