"""Opens files that come from users: regular files only, within size and memory limits.

The limits of all readers are defined here. With the default limits, rejecting a file takes at most 2 GiB and 30 s.
`--input_limits SCALE` multiplies all limits (`--input_limits 4`) for all processes of a command. `--follow_links`
allows links in a folder of images to point outside of it. Both are passed to other processes in the environment and are
not recorded in a run's config.
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
"""Nested lists and objects; much deeper values cannot be serialised again."""
MAX_IMAGE_BYTES = 256 << 20
MAX_IMAGE_PIXELS = 64 * 10**6
"""Of one image, and of all images that the threads of a process decode at a time; a larger one is decoded alone."""
MAX_IMAGE_CHUNKS = 200_000
"""Chunks of a PNG, or segments before the pixels of a JPEG. Each takes microseconds; 256 MiB could hold 64 million."""
MAX_JPEG_SCANS = 100
MAX_JPEG_SCANNED_PIXELS = 2 * 10**9
"""Scans times pixels: each scan of a progressive JPEG covers the whole image. Cameras write at most 10."""
MAX_TABLE_BYTES = 512 << 20
"""Of a file, and of the text that a Parquet file unpacks to."""
MAX_TABLE_ROWS = 5_000_000
MAX_TABLE_LINES = 4 * MAX_TABLE_ROWS
"""Includes blank lines and lines inside quotes."""
MAX_TABLE_COLUMNS = 16_384
MAX_ROW_BYTES = 16 << 20
MAX_FIELD_CHARS = 1 << 20
"""Of one prompt, caption or id."""
MAX_PARQUET_FOOTER_BYTES = 16 << 20
MAX_PARQUET_PAGES = 1_000_000
"""Of the columns that are read, together."""
MAX_ARRAY_BYTES = 256 << 20
"""Of one array in a .npz file: a covariance of 5792 features."""
MAX_ZIP_DIRECTORY_BYTES = 1 << 20
MAX_SAFETENSORS_HEADER_BYTES = 32 << 20
MAX_VOCABULARY_BYTES = 16 << 20
"""Of a model file that is neither JSON nor weights: merges.txt, tokenizer.model."""
MAX_PICKLE_BYTES = 16 << 20
"""Of the pickle in a .pth file, which holds the names of the tensors but not their data."""
MAX_FOLDER_ENTRIES = 20_000_000
MAX_MODEL_ENTRIES = 100_000
"""MAX_FOLDER_ENTRIES: files and folders below a folder of images; MAX_MODEL_ENTRIES: below a model folder."""
MAX_SETTINGS_BYTES = 1 << 20
"""Of a hand-written file: --config, --student_config, --deepspeed_config."""
MAX_SETTINGS_DOTS = 256
"""In one line of a TOML file: the time to parse a dotted key is quadratic in its parts."""
MAX_SETTINGS_DIGITS = 1000

SCALE_VARIABLE = "HALATION_INPUT_LIMITS"
LINKS_VARIABLE = "HALATION_FOLLOW_LINKS"
RAISE_ACTION = "if this is intended, raise all limits with --input_limits 4 (or more)"
_REGULAR_ACTION = "give a regular file; to read from a pipe, use `-` if the option accepts standard input"
_LINK_ACTION = "copy the file into the folder, or give --follow_links"
_BLOCK_BYTES = 1 << 20
_ZIP_END_BYTES = 22 + 2**16
"""Size of the end record of a zip file with the longest comment."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class RefusedFileError(OSError):
    """A rejected file: not a regular file, outside of its folder, or over a limit."""

    def __init__(self, path: str | Path, reason: str, action: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))
        self.action = action

    def __reduce__(self) -> tuple[type[RefusedFileError], tuple[str, str, str]]:
        return type(self), (str(self.filename), str(self.strerror), self.action)

    def as_input_error(self) -> InputError:
        """Convert to an InputError for users."""
        return InputError(
            f"{self.filename} is not read: {self.strerror}", "a regular file within the limits", self.action
        )


def over_limit_error(found: str, expected: str) -> InputError:
    """Return the InputError for a value over one of the limits."""
    return InputError(found, expected, RAISE_ACTION)


def limit(value: int) -> int:
    """Return a limit of this module, multiplied by `--input_limits`."""
    return int(value * _parse_scale(os.environ.get(SCALE_VARIABLE) or "1"))


def check_numbers(source: str, values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise InputError for values of a model's config that are not numbers or out of range.

    A range of integers requires an integer. Missing keys are skipped. `--input_limits` raises integer upper limits.
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
    """Apply `--input_limits` and `--follow_links` to this process and its children."""
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
    """Open a regular file; raises RefusedFileError for anything else, or another OSError.

    Reading a pipe or a device could block or never end. `within` is a folder that must contain the file after links
    are resolved. `max_bytes` is the largest allowed size, one of the limits above.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # an invalid file name
        raise FileNotFoundError(errno.ENOENT, str(error), repr(path)) from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise RefusedFileError(path, "it is a socket, not a regular file", _REGULAR_ACTION) from None
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
            raise RefusedFileError(path, f"it is {kind}, not a regular file", _REGULAR_ACTION)
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


def walk_folder(
    folder: str | Path,
    *,
    max_entries: int,
    once: bool = False,
    onerror: Callable[[OSError], object] | None = None,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk like `os.walk`, following links but never entering a folder again below itself.

    With `once`, a folder with several paths is entered only by the first. Raises RefusedFileError if there are more
    than `max_entries` files and folders.
    """
    above: dict[str, frozenset[tuple[int, int]]] = {os.fspath(folder): frozenset()}
    seen: set[tuple[int, int]] = set()
    num_entries = 0
    for current, subfolders, names in os.walk(folder, followlinks=True, onerror=onerror):
        status = os.stat(current)
        own, outer = (status.st_dev, status.st_ino), above.pop(current)
        if own in (seen if once else outer):  # a link cycle, or with `once` a second path
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
    """Return the real path of a folder of images, for `within`; None with --follow_links."""
    return None if os.environ.get(LINKS_VARIABLE) else os.path.realpath(folder)


def read_bytes(path: str | Path, max_bytes: int, *, within: str | Path | None = None) -> bytes:
    """Read a whole file of at most `max_bytes`; raises RefusedFileError or another OSError."""
    with open_regular_file(path, within=within, max_bytes=max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1)
        return data if len(data) <= size else data + read_stream(file, str(path), max_bytes, len(data))  # it grew


def file_sha256(*paths: str | Path) -> str:
    """Return the SHA-256 of the concatenated bytes of the files."""
    digest = hashlib.sha256()
    for path in paths:
        with open_regular_file(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def read_stream(stream: IO[bytes], name: str, max_bytes: int, num_before: int = 0) -> bytes:
    """Read a stream of unknown size, such as standard input, to its end."""
    data = bytearray()
    while block := stream.read(_BLOCK_BYTES):
        data += block
        if num_before + len(data) > limit(max_bytes):
            raise RefusedFileError(name, f"it has more than {format_size(limit(max_bytes))}", RAISE_ACTION)
    return bytes(data)


def read_json(path: str | Path, *, within: str | Path | None = None, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; raises OSError or ValueError with a short message."""
    return parse_json(read_bytes(path, max_bytes, within=within))


def parse_json(data: bytes) -> Any:
    """Parse JSON of limited size and depth; raises ValueError otherwise."""
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
    """Return True if the value parsed from `data` is nested deeper than MAX_JSON_DEPTH."""
    max_depth = limit(MAX_JSON_DEPTH)
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
    level = [value]
    for _ in range(max_depth):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def check_zip_directory(stream: BinaryIO) -> None:
    """Raise ValueError for a zip directory that would take too much memory to read."""
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, end - _ZIP_END_BYTES))
    tail = stream.read()
    at = tail.rfind(b"PK\x05\x06")
    size = int.from_bytes(tail[at + 12 : at + 16], "little")
    if at >= 0 and size > limit(MAX_ZIP_DIRECTORY_BYTES):
        raise ValueError(f"a zip file with a directory of {size} bytes")


def read_safetensors_header(path: str | Path) -> dict[str, Any]:
    """Read the header of a safetensors file; raises ValueError if the file size is wrong."""
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
        raise ValueError("a damaged safetensors header: a shape that is not a list")
    if end != size - 8 - length:
        raise ValueError(f"{size - 8 - length} bytes of weights, but its header requires {end}")
    return dict(header)
