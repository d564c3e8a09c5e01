"""Decodes PNG, JPEG and WebP files, with limits that are checked before decoding."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from halation import input_files

VERSION = 1
"""Incremented by changes to this file that change pixels; part of every fingerprint."""
FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
UNSUPPORTED_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".jp2", ".ppm", ".tga")
NOT_AN_IMAGE = "its content is not PNG, JPEG or WebP, whatever its name says, or it is cut off"
_ROTATED_ORIENTATIONS = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_STRIP_PIXELS = 1 << 20
_BLOCK_BYTES = 1 << 20
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])")
_JPEG_SCAN = b"\xff\xda"
# Pillow's plugins raise all of these, depending on the format and the damage.
_DECODE_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, MemoryError, struct.error, zlib.error,
)  # fmt: skip


class BrokenImageError(Exception):
    """A file that cannot be decoded; the message has the reason."""


class _Gate:
    """A semaphore over an amount: threads wait while the total would exceed the capacity.

    A thread that needs more than the capacity runs alone.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # the threads that hold an amount do not exist in the child

    def reset(self) -> None:
        self._used = 0
        self._turn, self._changed = threading.Lock(), threading.Condition()

    @contextlib.contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        amount = min(amount, self._capacity)
        with self._turn, self._changed:  # first come, first served
            self._changed.wait_for(lambda: self._used + amount <= self._capacity)
            self._used += amount
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify()


# Always acquired in this order: bytes of the file, which a decoder may read as a whole, then pixels.
_bytes_gate = _Gate(input_files.MAX_IMAGE_BYTES)
_pixels_gate = _Gate(input_files.MAX_IMAGE_PIXELS)
# The allocator may keep freed blocks below 32 MiB (Pillow's default is 16) for the thread that freed them.
Image.core.set_block_size(64 << 20)


@contextlib.contextmanager
def _hold_pixels(image: Image.Image, num_pixels: int) -> Iterator[None]:
    """Hold this many pixels of the limit; the image is closed at the end."""
    with _pixels_gate.hold(num_pixels):
        try:
            yield
        finally:
            image.close()


class DecodedFile(NamedTuple):
    """Pixels, and height and width of the upright image before cropping and resizing."""

    pixels: np.ndarray
    original_size: tuple[int, int]


def left_out_message(names: Sequence[str]) -> str:
    """Return the warning for images of unsupported formats in a folder."""
    first = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    verb = "image is" if len(names) == 1 else "images are"
    return f"{len(names)} {verb} left out, because only PNG, JPEG and WebP are supported: {first}"


def decode(path: Path, height: int, width: int, within: str | None = None) -> np.ndarray:
    """Decode to (height, width, 3) uint8: EXIF orientation, over white, centre crop, resize."""
    return decode_with_size(path, height, width, within).pixels


def decode_with_size(path: Path, height: int, width: int, within: str | None = None) -> DecodedFile:
    """Decode an image like `decode` and return its original size too."""
    with _as_broken_image(), _open_file(path, within) as file, _open_image(file) as image:
        across, down = image.size
        # JPEG can decode at 1/2, 1/4, 1/8 in a fraction of the time; twice the final size keeps the filter accurate.
        image.draft(None, (2 * max(height, width),) * 2)
        # A progressive JPEG takes memory for its full size anyway.
        with _hold_pixels(image, across * down if "progressive" in image.info else image.width * image.height):
            if image.getexif().get(ExifTags.Base.Orientation) in _ROTATED_ORIENTATIONS:
                across, down = down, across
            ImageOps.exif_transpose(image, in_place=True)
            pixels = np.asarray(_crop_and_resize(_to_rgb(image), height, width))
        return DecodedFile(pixels, (down, across))


@contextlib.contextmanager
def _as_broken_image() -> Iterator[None]:
    """Convert Pillow's errors for damaged files to BrokenImageError."""
    try:
        yield
    except _DECODE_ERRORS as error:
        raise BrokenImageError(str(error) or type(error).__name__) from None


def read_upright_size(path: Path, within: str | None = None) -> tuple[int, int]:
    """Return the upright height and width (EXIF), usually from the first bytes of the file."""
    with _as_broken_image(), _open_file(path, within) as file, _open_image(file) as image:
        across, down = image.size
        with _hold_pixels(image, across * down):  # the EXIF of a PNG may follow its pixels
            is_rotated = image.getexif().get(ExifTags.Base.Orientation) in _ROTATED_ORIENTATIONS
        return (across, down) if is_rotated else (down, across)


def verify_image(path: Path, height: int, width: int, within: str | None = None) -> tuple[int, int]:
    """Return the upright height and width; raises BrokenImageError for any damage.

    `decode` alone accepts a PNG without its last bytes.
    """
    original_size = decode_with_size(path, height, width, within).original_size
    with _as_broken_image(), _open_file(path, within) as file, _open_image(file) as image:
        image.verify()
    return original_size


def decode_full_size(data: bytes) -> np.ndarray:
    """Decode at full size to (height, width, 3) uint8, upright, over white; finds any damage."""
    with _as_broken_image():
        with _open_image(io.BytesIO(data)) as image, _hold_pixels(image, image.width * image.height):
            ImageOps.exif_transpose(image, in_place=True)
            pixels = np.asarray(_to_rgb(image))
        with _open_image(io.BytesIO(data)) as image:
            image.verify()  # a PNG without its last bytes decodes without an error
        return pixels


def read_image_bytes(path: str | Path, within: str | None = None) -> bytes:
    """Read the bytes of an image file; `within` is the folder that links must not leave."""
    try:
        return input_files.read_bytes(path, input_files.MAX_IMAGE_BYTES, within=within)
    except OSError as error:
        raise _unreadable_error(error) from None


@contextlib.contextmanager
def _open_file(path: Path, within: str | None) -> Iterator[BinaryIO]:
    try:
        file = input_files.open_regular_file(path, within=within, max_bytes=input_files.MAX_IMAGE_BYTES)
    except OSError as error:
        raise _unreadable_error(error) from None
    with file, _bytes_gate.hold(os.fstat(file.fileno()).st_size):
        yield file


def _unreadable_error(error: OSError) -> BrokenImageError:
    reason = error.strerror or str(error)
    return BrokenImageError(f"{reason}; {error.action}" if isinstance(error, input_files.RefusedFileError) else reason)


def _open_image(file: BinaryIO) -> Image.Image:
    max_pixels = input_files.limit(input_files.MAX_IMAGE_PIXELS)
    _check_num_chunks(file)
    try:
        if max_pixels > (Image.MAX_IMAGE_PIXELS or max_pixels):
            Image.MAX_IMAGE_PIXELS = max_pixels  # raise Pillow's limit for images that --input_limits allows
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        is_empty = file.seek(0, io.SEEK_END) == 0
        raise BrokenImageError("the file is empty" if is_empty else NOT_AN_IMAGE) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BrokenImageError(str(error)) from None
    if image.width * image.height > max_pixels:
        image.close()
        raise BrokenImageError(
            f"{image.width} x {image.height} pixels; the limit is {max_pixels // 10**6} million; "
            f"{input_files.RAISE_ACTION}"
        )
    if image.format not in ("PNG", "WEBP"):  # JPEG, or MPO: a JPEG followed by others
        _check_num_scans(file, image.width * image.height)
    return image


def _check_num_chunks(file: BinaryIO) -> None:
    """Reject files with too many chunks before Pillow spends a long time on them."""
    max_chunks = input_files.limit(input_files.MAX_IMAGE_CHUNKS)
    start, num_chunks = file.read(8), 0
    is_png, is_jpeg = start.startswith(b"\x89PNG"), start.startswith(b"\xff\xd8")
    if is_jpeg:
        file.seek(2)
    while (is_png and _skip_png_chunk(file)) or (is_jpeg and _skip_jpeg_segment(file)):
        num_chunks += 1
        if num_chunks > max_chunks:
            raise BrokenImageError(f"it has more than {max_chunks} chunks; {input_files.RAISE_ACTION}")
    file.seek(0)


def _skip_png_chunk(file: BinaryIO) -> bool:
    head = file.read(8)
    if len(head) < 8:
        return False
    file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
    return True


def _skip_jpeg_segment(file: BinaryIO) -> bool:
    """Skip a segment; False at the pixels or the end. A byte outside segments counts as one."""
    head = file.read(4)
    if len(head) < 4 or head.startswith(_JPEG_SCAN):
        return False
    if head[0] != 0xFF or head[1] in (0, 0xFF):
        file.seek(-3, io.SEEK_CUR)
    elif head[1] == 1 or 0xD0 <= head[1] <= 0xD9:  # these have no length
        file.seek(-2, io.SEEK_CUR)
    else:
        file.seek(max(0, int.from_bytes(head[2:], "big") - 2), io.SEEK_CUR)
    return True


def _check_num_scans(file: BinaryIO, num_pixels: int) -> None:
    """Reject a JPEG with too many scans over its pixels; the file position is restored."""
    max_scans = min(
        input_files.limit(input_files.MAX_JPEG_SCANS),
        input_files.limit(input_files.MAX_JPEG_SCANNED_PIXELS) // max(1, num_pixels),
    )
    position = file.tell()
    file.seek(0)
    num_found, last = 0, b""
    while block := file.read(_BLOCK_BYTES):
        num_found += block.count(_JPEG_SCAN) + (last + block[:1] == _JPEG_SCAN)
        last = block[-1:]
    file.seek(0)
    # A video after the pixels, as phones write it, contains these two bytes by chance.
    if num_found > max_scans and _has_more_scans(file.read(), max_scans):
        raise BrokenImageError(
            f"a JPEG of {num_pixels} pixels with more than {max_scans} scans; {input_files.RAISE_ACTION}"
        )
    file.seek(position)


def _has_more_scans(data: bytes, max_scans: int) -> bool:
    num_scans, offset = 0, 2
    while num_scans <= max_scans and (marker := _JPEG_MARKER.search(data, offset)) and marker[1] != b"\xd9":
        offset = marker.end()
        num_scans += marker[0] == _JPEG_SCAN
        if marker[1] != b"\x01" and not b"\xd0" <= marker[1] <= b"\xd8":
            offset += int.from_bytes(data[offset : offset + 2], "big")
    return num_scans > max_scans


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB over white; before resizing, or hidden colours would bleed in."""
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int32)
        deep.clip(0, 65535, out=deep)  # 255 times that fits into int32
        deep *= 255
        deep += 32767
        deep //= 65535
        image = Image.fromarray(deep.astype(np.uint8))
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    flat = Image.new("RGB", image.size)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):  # in strips: full-size intermediate images would take much memory
        strip = image.crop((0, top, image.width, min(top + num_rows, image.height)))
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        flat.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return flat


def _crop_and_resize(image: Image.Image, height: int, width: int) -> Image.Image:
    scale = min(image.width / width, image.height / height)
    left, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    box = (
        max(0.0, left),
        max(0.0, top),
        min(image.width, left + width * scale),
        min(image.height, top + height * scale),
    )
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=3.0)
