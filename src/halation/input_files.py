"""Opens files that come from users: regular files only, within size and memory limits.

The limits of all readers stand here. `--input_limits SCALE` multiplies them (`--input_limits 4`), for all processes
of a command; with them, nothing that is refused takes more than 2 GiB or 30 s. `--follow_links` allows links in a
folder of images to lead out of it. Both reach other processes in the environment, and are no part of what a run is.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO

from halation.errors import InputError

MAX_JSON_BYTES = 64 << 20
MAX_JSON_VALUES = 4_000_000
"""Counted by commas and brackets: 64 MiB of `[[],[],...` would take 2 GiB."""
MAX_JSON_DEPTH = 64
"""Of lists in lists: what is much deeper cannot be written again."""
MAX_IMAGE_BYTES = 256 << 20
MAX_IMAGE_PIXELS = 64 * 10**6
"""Of one image, and of all that the threads of a process decode at a time; one that is larger is decoded alone."""
MAX_IMAGE_CHUNKS = 200_000
"""Of a PNG, or segments before the pixels of a JPEG: each takes microseconds, 256 MiB could hold 64 million."""
MAX_JPEG_SCANS = 100
MAX_JPEG_SCANNED_PIXELS = 2 * 10**9
"""Scans times pixels: each scan of a progressive JPEG covers the whole image. Cameras write at most 10."""
MAX_TABLE_BYTES = 512 << 20
"""Of a file, and of the text that a Parquet file unpacks to."""
MAX_TABLE_ROWS = 5_000_000
MAX_TABLE_LINES = 4 * MAX_TABLE_ROWS
"""With the blank ones, and those inside of quotes."""
MAX_TABLE_COLUMNS = 16_384
MAX_ROW_BYTES = 16 << 20
MAX_FIELD_CHARS = 1 << 20
"""Of one prompt, caption or id."""
MAX_PARQUET_FOOTER_BYTES = 16 << 20
MAX_PARQUET_PAGES = 1_000_000
"""Of the columns that are read."""
MAX_ARRAY_BYTES = 256 << 20
"""Of one array in a .npz file: a covariance of 5792 features."""
MAX_ZIP_DIRECTORY_BYTES = 1 << 20
MAX_SAFETENSORS_HEADER_BYTES = 32 << 20
MAX_VOCABULARY_BYTES = 16 << 20
"""Of a file beside a model's weights that is neither JSON nor weights: merges.txt, tokenizer.model."""
MAX_PICKLE_BYTES = 16 << 20
"""Of the pickle in a .pth file, which names the tensors and holds none."""
MAX_FOLDER_ENTRIES = 20_000_000
MAX_MODEL_ENTRIES = 100_000
"""Files and folders below a folder of images, and below a model."""
MAX_SETTINGS_BYTES = 1 << 20
"""Of a file that is typed by hand: --config, --student_config, --deepspeed_config."""
MAX_SETTINGS_DOTS = 256
"""In a line of a TOML file: the time for a key grows with the square of its parts."""
MAX_SETTINGS_DIGITS = 1000

SCALE_VARIABLE = "HALATION_INPUT_LIMITS"
LINKS_VARIABLE = "HALATION_FOLLOW_LINKS"
RAISE_ACTION = "where it is meant, raise all limits with --input_limits 4 (or more)"
_REGULAR_ACTION = "give a regular file; what a pipe brings can be given as `-` where standard input is read"
_LINK_ACTION = "copy the file into the folder, or give --follow_links"
_BLOCK_BYTES = 1 << 20
_ZIP_END_BYTES = 22 + 2**16
"""The record that ends a zip file, and the longest comment after it."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class RefusedFileError(OSError):
    """A file that is not read: it is no regular file, lies outside of its folder, or is beyond a limit."""

    def __init__(self, path: str | Path, reason: str, action: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))
        self.action = action

    def __reduce__(self) -> tuple[type[RefusedFileError], tuple[str, str, str]]:
        return type(self), (str(self.filename), str(self.strerror), self.action)

    def as_input_error(self) -> InputError:
        """The sentence for a command that has nothing more to add."""
        return InputError(
            f"{self.filename} is not read: {self.strerror}", "a regular file within the limits", self.action
        )


def over_limit_error(found: str, expected: str) -> InputError:
    """What is said of a value that is beyond one of the limits."""
    return InputError(found, expected, RAISE_ACTION)


def limit(value: int) -> int:
    """One of the limits of this module, as `--input_limits` raises it."""
    return int(value * _parse_scale(os.environ.get(SCALE_VARIABLE) or "1"))


def check_numbers(source: str, values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a number of a model's config that is none or beyond its range; a range of whole numbers wants whole ones.

    What is not there is not looked at. `--input_limits` raises the upper ends.
    """
    for name, (low, high) in ranges.items():
        if name not in values:
            continue
        value, whole = values[name], isinstance(low, int)
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        high = limit(high) if isinstance(high, int) else high
        if not is_number or not low <= value <= high:
            shown = repr(value) if isinstance(value, float) else json.dumps(value, default=str)
            raise InputError(
                f"{source}: {name} is {shown if len(shown) <= 60 else shown[:60] + '...'}",
                f"a {'whole ' * whole}number from {low} to {high}",
                "take the config that was written with the weights",
            )


@contextlib.contextmanager
def use_limits(scale: str | None, follow_links: bool) -> Iterator[None]:
    """What `--input_limits` and `--follow_links` ask for, in this process and those it starts."""
    wanted = {SCALE_VARIABLE: scale, LINKS_VARIABLE: "1" if follow_links else None}
    before = {name: os.environ.get(name) for name in wanted}
    _parse_scale(before[SCALE_VARIABLE] or "1" if scale is None else scale)
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def _parse_scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 1 <= scale <= 1e6:
        raise InputError(
            f"--input_limits {text[:40]}", "a number from 1 to 1000000", "give for instance --input_limits 4"
        )
    return scale


def format_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes >= 2**20 else f"{num_bytes} bytes"


def open_regular_file(
    path: str | Path, *, within: str | Path | None = None, max_bytes: int | None = None
) -> BufferedReader:
    """A regular file, opened; RefusedFileError where it is something else, or another OSError.

    A pipe or a device would keep its reader waiting, or give bytes without end. `within` is a folder that the file
    must really lie in, whatever links lead to it; `max_bytes` the largest size, one of the limits above.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a name that no file can have
        raise FileNotFoundError(errno.ENOENT, str(error), repr(path)) from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise RefusedFileError(path, "it is a socket, not a regular file", _REGULAR_ACTION) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular_error(path, status.st_mode)
        if max_bytes is not None and status.st_size > limit(max_bytes):
            reason = f"it has {format_size(status.st_size)}, and the limit is {format_size(limit(max_bytes))}"
            raise RefusedFileError(path, reason, RAISE_ACTION)
        if within is not None:
            try:
                real_path = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:  # not on Linux
                real_path = os.path.realpath(path)
            if not real_path.startswith(os.path.join(within, "")) and not real_path.startswith(
                os.path.join(os.path.realpath(within), "")
            ):
                raise RefusedFileError(path, f"it is a link that leads out of {within}", _LINK_ACTION)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def _not_regular_error(path: str | Path, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    return RefusedFileError(path, f"it is {kind}, not a regular file", _REGULAR_ACTION)


def walk_folder(
    folder: str | Path,
    *,
    max_entries: int,
    once: bool = False,
    onerror: Callable[[OSError], object] | None = None,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that follows links and comes to an end: a folder is not entered again below itself.

    With `once`, a folder that has several names is entered under the first one alone. RefusedFileError beyond
    `max_entries`.
    """
    above: dict[str, frozenset[tuple[int, int]]] = {os.fspath(folder): frozenset()}
    seen: set[tuple[int, int]] = set()
    num_entries = 0
    for current, subfolders, names in os.walk(folder, followlinks=True, onerror=onerror):
        status = os.stat(current)
        own, outer = (status.st_dev, status.st_ino), above.pop(current)
        if own in (seen if once else outer):  # a link back to where it came from
            subfolders.clear()
            continue
        seen.add(own)
        num_entries += len(subfolders) + len(names)
        if num_entries > limit(max_entries):
            reason = f"it has more than {limit(max_entries)} files and folders, links followed"
            raise RefusedFileError(folder, reason, RAISE_ACTION)
        yield current, subfolders, names
        above.update((os.path.join(current, name), outer | {own}) for name in subfolders)


def data_folder(folder: str | Path) -> str | None:
    """The real path of a folder of images, for `within`; None where --follow_links lets its links lead anywhere."""
    return None if os.environ.get(LINKS_VARIABLE) else os.path.realpath(folder)


def read_bytes(path: str | Path, max_bytes: int, *, within: str | Path | None = None) -> bytes:
    """A whole file of at most `max_bytes`; RefusedFileError, or another OSError."""
    with open_regular_file(path, within=within, max_bytes=max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
        return data if len(data) <= size else data + read_stream(file, str(path), max_bytes, len(data))  # it grew


def file_sha256(*paths: str | Path) -> str:
    """The SHA-256 of files' bytes, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open_regular_file(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def read_stream(stream: IO[bytes], name: str, max_bytes: int, num_before: int = 0) -> bytes:
    """What comes from a stream whose size is not known, such as standard input, up to its end."""
    data = bytearray()
    while block := stream.read(_BLOCK_BYTES):
        data += block
        if num_before + len(data) > limit(max_bytes):
            raise RefusedFileError(name, f"it has more than {format_size(limit(max_bytes))}", RAISE_ACTION)
    return bytes(data)


def read_json(path: str | Path, *, within: str | Path | None = None, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """What a JSON file says. OSError or ValueError, in a few words, where it cannot be read."""
    return parse_json(read_bytes(path, max_bytes, within=within))


def parse_json(data: bytes) -> Any:
    """JSON of bounded size and depth; ValueError for everything else."""
    if len(data) > limit(MAX_JSON_BYTES):
        raise ValueError(f"JSON of {format_size(len(data))}, and the limit is {format_size(limit(MAX_JSON_BYTES))}")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limit(MAX_JSON_VALUES):
        raise ValueError(f"JSON of more than {limit(MAX_JSON_VALUES)} values")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"JSON that is nested deeper than {limit(MAX_JSON_DEPTH)}") from None
    if is_too_deep(data, value):
        raise ValueError(f"JSON that is nested deeper than {limit(MAX_JSON_DEPTH)}")
    return value


def is_too_deep(data: bytes, value: object) -> bool:
    """Whether lists and objects are nested deeper than MAX_JSON_DEPTH in the value that was read from `data`."""
    max_depth = limit(MAX_JSON_DEPTH)
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
    level = [value]
    for _ in range(max_depth):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def check_zip_directory(stream: BinaryIO) -> None:
    """Refuse a list of members that would take much memory to read."""
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, end - _ZIP_END_BYTES))
    tail = stream.read()
    at = tail.rfind(b"PK\x05\x06")
    size = int.from_bytes(tail[at + 12 : at + 16], "little")
    if at >= 0 and size > limit(MAX_ZIP_DIRECTORY_BYTES):
        raise ValueError(f"a zip file with a directory of {size} bytes")


def read_safetensors_header(path: str | Path) -> dict[str, Any]:
    """The header of a whole safetensors file: ValueError where the file is shorter or longer than the header says."""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(limit(MAX_SAFETENSORS_HEADER_BYTES), size - 8):
            raise ValueError(f"a safetensors header of {length} bytes in a file of {size}")
        data = file.read(length)
    try:
        header = parse_json(data)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        shapes_are_lists = all(
            isinstance(entry["shape"], list) for name, entry in header.items() if name != "__metadata__"
        )
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"a damaged safetensors header: {type(error).__name__}: {error}") from None
    if not shapes_are_lists:
        raise ValueError("a damaged safetensors header: a shape that is no list")
    if end != size - 8 - length:
        raise ValueError(f"{size - 8 - length} bytes of weights where its header says {end}")
    return dict(header)
