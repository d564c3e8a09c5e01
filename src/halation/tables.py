"""Text files of other people, read exactly or refused with file, line and column: UTF-8 text, CSV and JSON lines.

No torch and no pictures here. The csv module is not used: it cannot say where a fault is, and its limit on the length of
a field is a global.
"""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from halation.errors import InputError

_SAVE_AS_UTF8 = "save the file as UTF-8 and run again"
_FIELD = re.compile(r'(?:"((?:[^"]|"")*+)"|((?:[^",\r\n][^,\r\n]*+)?))(,|\r\n|\n|\Z)')
_CODE_PAGES = ("cp1252", "cp1253", "cp1251", "cp437", "cp850")
_SEQUENCE = re.compile("[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_LEAD = re.compile("[\xc2-\xf4]")
_FOLLOWED = re.compile("[\xc2-\xf4](?=[\x80-\xbf])")
_PUNCTUATION = frozenset("\xa0\xab\xbb\u2013\u2014\u2018\u2019\u201a\u201c\u201d\u201e\u2022\u2026\u2039\u203a")
_NUM_SEQUENCES = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record with the place where it begins."""

    line: int
    values: dict[str, Any]


def refuse(name: str, line: int, column: int, found: str, expected: str, action: str) -> InputError:
    """The error for one place in a file; lines and columns count from 1, columns in characters."""
    return InputError(f"{name}, line {line}, column {column}: {found}", expected, action)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint at the known name that looks most like this one, or nothing."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f" (nearest: {close[0]!r})" if close else ""


def decode(name: str, data: bytes) -> str:
    """UTF-8 with or without a byte order mark; the text is what the bytes say, NULs and re-encoded text are refused."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise refuse(name, 1, 1, "UTF-16 text (its byte order mark)", "UTF-8 text", _SAVE_AS_UTF8)
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = place(error.object[: error.start].decode("utf-8"), error.start)
        found = f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})"
        raise refuse(name, line, column, found, "UTF-8 text", _SAVE_AS_UTF8) from None
    nul = text.find("\0")
    if nul >= 0:
        found = "a NUL character (the file may be UTF-16 without its mark, or not text at all)"
        raise refuse(name, *place(text, nul), found, "UTF-8 text", _SAVE_AS_UTF8)
    _refuse_mojibake(name, text)
    return text


def place(text: str, offset: int) -> tuple[int, int]:
    """Line and column of a character, both from 1."""
    line_start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, line_start) + 1, min(offset, len(text)) - line_start + 1


def lines(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of each line that is not blank; lines end with LF or CRLF and with nothing else."""
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.removesuffix("\r")
        carriage = content.find("\r")
        if carriage >= 0:
            found = "a carriage return without a line feed"
            raise refuse(name, number, carriage + 1, found, "lines that end with LF or CRLF", "convert the line ends")
        if content.strip():
            yield number, content


def csv_rows(name: str, text: str) -> Iterator[Row]:
    """Records of a comma-separated file with a header; blank lines are skipped, every other line is read or refused.

    A field that begins with a quote ends with one; commas, line ends and doubled quotes inside are kept as they are.
    """
    records = _records(name, text)
    first = next(records, None)
    if first is None:
        raise refuse(name, 1, 1, "no line with text", "a header and one line for each record", "fill the file")
    header = [column.strip() for column in first[1]]
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        found = f"the column {twice[0]!r} is there twice"
        raise refuse(name, first[0], 1, found, "each column once", "rename or remove one of them")
    for line, fields in records:
        if len(fields) != len(header):
            found = f"{len(fields)} fields where the header has {len(header)} ({', '.join(header)})"
            action = "put quotes around a field that has a comma or a line end in it"
            raise refuse(name, line, 1, found, "the same number of fields in every line", action)
        yield Row(line=line, values=dict(zip(header, fields, strict=True)))


def csv_header(name: str, text: str) -> list[str]:
    """The columns a comma-separated file says it has."""
    first = next(_records(name, text), None)
    return [] if first is None else [column.strip() for column in first[1]]


def json_rows(name: str, text: str) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped."""
    for number, line in lines(name, text):
        try:
            values = json.loads(line, object_pairs_hook=_without_repetition, parse_constant=_not_a_number)
        except json.JSONDecodeError as error:
            found = f"not JSON ({error.msg})"
            raise refuse(name, number, error.colno, found, "one JSON object a line", "correct the line") from None
        except ValueError as error:
            raise refuse(name, number, 1, str(error), "one JSON object a line", "correct the line") from None
        if not isinstance(values, dict):
            found = f"JSON, but a {type(values).__name__}"
            raise refuse(name, number, 1, found, "one JSON object a line", "correct the line")
        yield Row(line=number, values=values)


def _records(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    offset, line, start, blank = 0, 1, 1, True
    fields: list[str] = []
    while offset < len(text) or fields:
        match = _FIELD.match(text, offset)
        if match is None:
            raise _csv_fault(name, text, offset)
        quoted, plain, end = match.groups()
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        blank = blank and quoted is None and not plain.strip()
        line += match.group().count("\n")
        offset = match.end()
        if end == ",":
            blank = False
            continue
        if not (blank and len(fields) == 1):
            yield start, fields
        fields, blank, start = [], True, line


def _csv_fault(name: str, text: str, offset: int) -> InputError:
    if text[offset] == '"':
        close = re.compile(r'"(?:[^"]|"")*+"').match(text, offset)
        if close is None:
            found, expected = "a quote that is never closed", "a closing quote"
            return refuse(
                name, *place(text, offset), found, expected, "close it, or double a quote that is meant as such"
            )
        found, expected = "text after a closing quote", "a comma or the end of the line"
        return refuse(name, *place(text, close.end()), found, expected, "double a quote that is meant as such")
    carriage = text.find("\r", offset)
    found, expected = "a carriage return without a line feed", "lines that end with LF or CRLF"
    return refuse(name, *place(text, carriage), found, expected, "convert the line ends, or quote the field")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in names if names.count(key) > 1)!r} is there twice")
    for key, value in pairs:
        if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            raise ValueError(f"half of a surrogate pair in {key!r}, which is no text")
    return values


def _not_a_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _refuse_mojibake(name: str, text: str) -> None:
    if text.isascii():
        return
    action = "go back to the original file: its UTF-8 bytes were read in another code page and saved again"
    for number, line in enumerate(text.split("\n"), start=1):
        if line.isascii():
            continue
        lost = line.find("\ufffd")
        if lost >= 0:
            found = "a replacement character (U+FFFD): a letter was lost when the file was converted"
            raise refuse(name, number, lost + 1, found, "the text itself", "go back to the original file")
        for page in _CODE_PAGES:
            column = _damaged_at(line, page)
            if column is not None:
                found = f"{line[column : column + 12]!r} looks like UTF-8 that was read as {page}"
                raise refuse(name, number, column + 1, found, "the text itself", action)


def _damaged_at(line: str, page: str) -> int | None:
    """Where a line begins to be UTF-8 bytes shown as letters of a code page, or None.

    Every letter of such a text is a lead byte and its continuation bytes. The latter stand for signs and rare letters, so
    in real text few letters have just the right number of them behind, once the punctuation that ends words is left out.
    """
    shown = line.translate(_bytes_of(page))
    odd = [
        match
        for match in _SEQUENCE.finditer(shown)
        if not _PUNCTUATION.issuperset(line[match.start() + 1 : match.end()])
    ]
    if page == "cp1252":
        for match in odd:
            if line[match.start()] in "ÃÂ" or line.startswith("â€", match.start()):  # no language writes these pairs
                return match.start()
    enough = len(odd) >= _NUM_SEQUENCES and 2 * len(_FOLLOWED.findall(shown)) >= len(_LEAD.findall(shown))
    return odd[0].start() if enough else None


@cache
def _bytes_of(page: str) -> dict[int, int]:
    """From the page's letters to characters with the number of their byte; for bytes it lacks, from the control codes."""
    letters = {byte: bytes([byte]).decode(page, errors="ignore") for byte in range(0x80, 0x100)}
    table = {ord(letter): byte for byte, letter in letters.items() if letter}
    # A letter that the page does not have must not pass for one of its bytes.
    return dict.fromkeys(range(0xA0, 0x100), 0x100) | table
