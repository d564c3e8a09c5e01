"""Text files of other people, read exactly or refused with file, line and column: UTF-8 text, CSV and JSON lines.

No torch and no pictures here. The csv module is not used: it cannot say where a fault is, and its limit on the length of
a field is a global. A text is a string, or an iterator of blocks that end with a line end, so that a file of a million
rows is never decoded as a whole (one emoji makes every letter of a string take four bytes).
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

Text = str | Iterator[str]
Record = tuple[int, list[str]]
BLOCK_SIZE = 2**20
_SAVE_AS_UTF8 = "save the file as UTF-8 and run again"
_FIELD = re.compile(r'(?:"((?:[^"]++|"")*+)"|((?:[^",\r\n][^,\r\n]*+)?))(,|\r\n|\n|\Z)')
_QUOTED = re.compile(r'"(?:[^"]++|"")*+"')
_CODE_PAGES = ("cp1252", "cp1253", "cp1251", "cp437", "cp850")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PUNCTUATION = frozenset("\xa0\xab\xbb\u2013\u2014\u2018\u2019\u201a\u201c\u201d\u201e\u2022\u2026\u2039\u203a")
_NUM_SEQUENCES = 3
_NUM_SHOWN = 60
_NUM_DIGITS = 1000


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


def shown(value: object) -> str:
    """A value from a file, short enough for a message."""
    text = repr(value[: _NUM_SHOWN + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _NUM_SHOWN + 2 else text[:_NUM_SHOWN] + "..."


def decode(name: str, data: bytes) -> str:
    """UTF-8 with or without a byte order mark; the text is what the bytes say, NULs and re-encoded text are refused."""
    check(name, data)
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")


def check(name: str, data: bytes) -> None:
    """Refuse bytes that are not UTF-8, NULs and text that was once read in another code page, each with its place."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise refuse(name, 1, 1, "UTF-16 text (its byte order mark)", "UTF-8 text", _SAVE_AS_UTF8)
    line = 1
    for piece in _pieces(data):
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            before = piece[: error.start].decode("utf-8")
            found = f"byte 0x{piece[error.start]:02x} is not UTF-8 ({error.reason})"
            raise refuse(name, *place(before, len(before), line), found, "UTF-8 text", _SAVE_AS_UTF8) from None
        nul = text.find("\0")
        if nul >= 0:
            found = "a NUL character (the file may be UTF-16 without its mark, or not text at all)"
            raise refuse(name, *place(text, nul, line), found, "UTF-8 text", _SAVE_AS_UTF8)
        if hurt := damage(text):
            raise refuse(name, line + hurt.line - 1, hurt.column, hurt.found, "the text itself", hurt.action)
        line += text.count("\n")


def blocks(data: bytes) -> Iterator[str]:
    """The text of checked bytes, a block at a time."""
    for piece in _pieces(data):
        yield piece.decode("utf-8")


def _pieces(data: bytes) -> Iterator[bytes]:
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    while start < len(data):
        stop = data.rfind(b"\n", start, start + BLOCK_SIZE) + 1 or data.find(b"\n", start + BLOCK_SIZE) + 1 or len(data)
        yield data[start:stop]
        start = stop


def place(text: str, offset: int, first_line: int = 1) -> tuple[int, int]:
    """Line and column of a character, both from 1, in a text that begins with `first_line`."""
    line_start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, line_start) + first_line, min(offset, len(text)) - line_start + 1


def lines(name: str, text: Text) -> Iterator[tuple[int, str]]:
    """(number, line) of each line that is not blank; lines end with LF or CRLF and with nothing else."""
    number = 0
    for block in _whole_or_blocks(text):
        for line in block.removesuffix("\n").split("\n"):
            number += 1
            content = line
            if "\r" in line:
                content = line.removesuffix("\r")
                carriage = content.find("\r")
                if carriage >= 0:
                    found, expected = "a carriage return without a line feed", "lines that end with LF or CRLF"
                    raise refuse(name, number, carriage + 1, found, expected, "convert the line ends")
            if content and not content.isspace():
                yield number, content


def csv_rows(name: str, text: Text) -> Iterator[Row]:
    """Records of a comma-separated file with a header; blank lines are skipped, every other line is read or refused.

    A field that begins with a quote ends with one; commas, line ends and doubled quotes inside are kept as they are.
    """
    header, records = csv_table(name, text)
    for line, fields in records:
        yield Row(line=line, values=dict(zip(header, fields, strict=True)))


def csv_table(name: str, text: Text) -> tuple[list[str], Iterator[Record]]:
    """The header, and the records with the line they begin on; each record has a field for each column."""
    records = _records(name, text)
    first = next(records, None)
    if first is None:
        raise refuse(name, 1, 1, "no line with text", "a header and one line for each record", "fill the file")
    header = [column.strip() for column in first[1]]
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        found = f"the column {twice[0]!r} is there twice"
        raise refuse(name, first[0], 1, found, "each column once", "rename or remove one of them")
    return header, _even(name, header, records)


def _even(name: str, header: Sequence[str], records: Iterator[Record]) -> Iterator[Record]:
    for record in records:
        if len(record[1]) != len(header):
            found = f"{len(record[1])} fields where the header has {len(header)} ({', '.join(header)})"
            action = "put quotes around a field that has a comma or a line end in it"
            raise refuse(name, record[0], 1, found, "the same number of fields in every line", action)
        yield record


def csv_header(name: str, text: str) -> list[str]:
    """The columns a comma-separated file says it has."""
    first = next(_records(name, text), None)
    return [] if first is None else [column.strip() for column in first[1]]


def json_rows(name: str, text: Text) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped."""
    expected, action = "one JSON object a line", "correct the line"
    for number, line in lines(name, text):
        try:
            values = _JSON.decode(line)
        except json.JSONDecodeError as error:
            raise refuse(name, number, error.colno, f"not JSON ({error.msg})", expected, action) from None
        except ValueError as error:
            raise refuse(name, number, 1, str(error), expected, action) from None
        except RecursionError:
            raise refuse(name, number, 1, "JSON that is nested too deep", expected, action) from None
        if not isinstance(values, dict):
            raise refuse(name, number, 1, f"JSON, but a {type(values).__name__}", expected, action)
        yield Row(line=number, values=values)


def _whole_or_blocks(text: Text) -> Iterator[str]:
    return iter([text]) if isinstance(text, str) else text


def _records(name: str, text: Text) -> Iterator[Record]:
    """Records that are not blank lines, each with the line it begins on."""
    coming = _whole_or_blocks(text)
    block, offset, line = next(coming, ""), 0, 1
    while block:
        stop = block.find("\n", offset) + 1 or len(block)
        content = block[offset:stop]
        content = content[:-2] if content.endswith("\r\n") else content.removesuffix("\n")
        if '"' not in content and "\r" not in content:
            if content and not content.isspace():
                yield line, content.split(",")
            line += 1
        else:
            fields, stop, complete = _fields(block, offset)
            if not complete:
                more = _as_long_again(coming, block, offset) if _never_closed(block, stop) else ""
                if not more:
                    raise _csv_fault(name, block[offset:], stop - offset, line)
                block, offset = block[offset:] + more, 0
                continue
            yield line, fields
            line += block.count("\n", offset, stop)
        offset = stop
        if offset == len(block):
            block, offset = next(coming, ""), 0


def _fields(text: str, offset: int) -> tuple[list[str], int, bool]:
    """The fields of the record that begins here, where it ends, and True; or where it cannot be read on, and False."""
    fields: list[str] = []
    while match := _FIELD.match(text, offset):
        quoted, plain, end = match.groups()
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        offset = match.end()
        if end != ",":
            return fields, offset, True
    return fields, offset, False


def _never_closed(text: str, offset: int) -> bool:
    return text.startswith('"', offset) and _QUOTED.match(text, offset) is None


def _as_long_again(coming: Iterator[str], block: str, offset: int) -> str:
    # A field of many blocks is scanned again each time it grows: doubling keeps the sum of these scans small.
    more: list[str] = []
    num_wanted = len(block) - offset
    while num_wanted > 0 and (following := next(coming, "")):
        more.append(following)
        num_wanted -= len(following)
    return "".join(more)


def _csv_fault(name: str, text: str, offset: int, line: int) -> InputError:
    if _never_closed(text, offset):
        found, action = "a quote that is never closed", "close it, or double a quote that is meant as such"
        return refuse(name, *place(text, offset, line), found, "a closing quote", action)
    close = _QUOTED.match(text, offset)
    if close is not None:
        found, expected = "text after a closing quote", "a comma or the end of the line"
        return refuse(name, *place(text, close.end(), line), found, expected, "double a quote that is meant as such")
    carriage = text.find("\r", offset)
    found, expected = "a carriage return without a line feed", "lines that end with LF or CRLF"
    return refuse(name, *place(text, carriage, line), found, expected, "convert the line ends, or quote the field")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in names if names.count(key) > 1)!r} is there twice")
    for key, value in pairs:
        if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
            raise ValueError(f"half of a surrogate pair in {key!r}, which is no text")
    return values


def _whole_number(digits: str) -> int:
    # Beyond this Python refuses to convert, and says so in words that are about Python.
    if len(digits) > _NUM_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _not_a_number(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_without_repetition, parse_int=_whole_number, parse_constant=_not_a_number)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Where a text stopped being itself, line and column from 1, and what to say about it."""

    line: int
    column: int
    found: str
    action: str


@dataclass(frozen=True, kw_only=True)
class _Page:
    """A code page in which UTF-8 bytes may have been read: how they look in its letters."""

    name: str
    sequence: re.Pattern[str]
    """A lead byte with all its continuation bytes."""
    lead: re.Pattern[str]
    followed: re.Pattern[str]
    """A lead byte before a continuation byte, which every damaged line has somewhere."""


def damage(text: str) -> Damage | None:
    """The first place where a text is UTF-8 that was read in another code page, or has lost a letter; None for sound text."""
    if text.isascii():
        return None
    pages = [page for page in _pages() if page.followed.search(text)]
    if not pages and "\ufffd" not in text:
        return None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.isascii():
            continue
        lost = line.find("\ufffd")
        if lost >= 0:
            found = "a replacement character (U+FFFD): a letter was lost when the file was converted"
            return Damage(line=number, column=lost + 1, found=found, action="go back to the original file")
        for page in pages:
            column = _damaged_at(line, page)
            if column is not None:
                found = f"{line[column : column + 12]!r} looks like UTF-8 that was read as {page.name}"
                action = "go back to the original file: its UTF-8 bytes were read in another code page and saved again"
                return Damage(line=number, column=column + 1, found=found, action=action)
    return None


def _damaged_at(line: str, page: _Page) -> int | None:
    """Where a line begins to be UTF-8 bytes shown as letters of a code page, or None.

    Every letter of such a text is a lead byte and its continuation bytes. The latter stand for signs and rare letters, so
    in real text few letters have just the right number of them behind, once the punctuation that ends words is left out.
    """
    odd = [
        match
        for match in page.sequence.finditer(line)
        if not _PUNCTUATION.issuperset(line[match.start() + 1 : match.end()])
    ]
    if page.name == "cp1252":
        for match in odd:
            if line[match.start()] in "ÃÂ" or line.startswith("â€", match.start()):  # no language writes these pairs
                return match.start()
    if len(odd) < _NUM_SEQUENCES or 2 * len(page.followed.findall(line)) < len(page.lead.findall(line)):
        return None
    return odd[0].start()


@cache
def _pages() -> tuple[_Page, ...]:
    return tuple(_page(name) for name in _CODE_PAGES)


def _page(name: str) -> _Page:
    letters = {byte: bytes([byte]).decode(name, errors="ignore") for byte in range(0x80, 0x100)}
    # Some programs show a byte that the page does not have as the control code of the same number.
    controls = [chr(code) for code in range(0x80, 0xA0)]

    def either(first: int, last: int, others: Sequence[str] = ()) -> str:
        return "[" + re.escape("".join([*(letters[byte] for byte in range(first, last + 1)), *others])) + "]"

    lead, more = either(0xC2, 0xF4), either(0x80, 0xBF, controls)
    two, three, four = either(0xC2, 0xDF), either(0xE0, 0xEF), either(0xF0, 0xF4)
    return _Page(
        name=name,
        sequence=re.compile(f"{two}{more}|{three}{more}{{2}}|{four}{more}{{3}}"),
        lead=re.compile(lead),
        followed=re.compile(f"{lead}(?={more})"),
    )
