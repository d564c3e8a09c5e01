"""One image file to pixels, of a given size or its own: PNG, JPEG and WebP by content, bounded before anything is decoded."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from halation import input_files

VERSION = 1
"""Counts changes of this file that change pixels; part of every fingerprint."""
FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
UNSUPPORTED_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".jp2", ".ppm", ".tga")
NOT_AN_IMAGE = "its content is not PNG, JPEG or WebP, whatever its name says, or it is cut off"
_ROTATED_ORIENTATIONS = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
# Pillow's plugins raise all of these, by format and by kind of damage.
_DECODE_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, MemoryError, struct.error, zlib.error,
)  # fmt: skip


class BrokenImageError(Exception):
    """A file that gives no image; the text says why."""


class DecodedFile(NamedTuple):
    """Pixels, and the height and width that the upright image had."""

    pixels: np.ndarray
    original_size: tuple[int, int]


def left_out_message(names: Sequence[str]) -> str:
    """What is said of images in a folder whose formats are not read."""
    first = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    verb = "image is" if len(names) == 1 else "images are"
    return f"{len(names)} {verb} left out, because only PNG, JPEG and WebP are read: {first}"


def decode(path: Path, height: int, width: int, within: str | None = None) -> np.ndarray:
    """(height, width, 3) uint8: turned as its EXIF says, over white, the middle cut to the shape, resampled."""
    return decode_with_size(path, height, width, within).pixels


def decode_with_size(path: Path, height: int, width: int, within: str | None = None) -> DecodedFile:
    """What `decode` gives, with the size it had before."""
    try:
        with _open_file(path, within) as file, _open_image(file) as image:
            across, down = image.size
            # JPEG can decode at 1/2, 1/4, 1/8 for a fraction of the time; twice the final size keeps the filter honest.
            image.draft(None, (2 * max(height, width),) * 2)
            upright = ImageOps.exif_transpose(image)
            if image.getexif().get(ExifTags.Base.Orientation) in _ROTATED_ORIENTATIONS:
                across, down = down, across
            return DecodedFile(np.asarray(_crop_and_resize(_to_rgb(upright), height, width)), (down, across))
    except BrokenImageError:
        raise
    except _DECODE_ERRORS as error:
        raise BrokenImageError(str(error) or type(error).__name__) from None


def read_upright_size(path: Path, within: str | None = None) -> tuple[int, int]:
    """Height and width as its EXIF turns it, mostly from the file's first bytes alone."""
    try:
        with _open_file(path, within) as file, _open_image(file) as image:
            across, down = image.size
            is_rotated = image.getexif().get(ExifTags.Base.Orientation) in _ROTATED_ORIENTATIONS
            return (across, down) if is_rotated else (down, across)
    except _DECODE_ERRORS as error:
        raise BrokenImageError(str(error) or type(error).__name__) from None


def verify_image(path: Path, height: int, width: int, within: str | None = None) -> tuple[int, int]:
    """Its upright height and width, or BrokenImageError unless it is whole; `decode` takes a PNG that lacks its end."""
    original_size = decode_with_size(path, height, width, within).original_size
    try:
        with _open_file(path, within) as file, _open_image(file) as image:
            image.verify()
    except _DECODE_ERRORS as error:
        raise BrokenImageError(str(error) or type(error).__name__) from None
    return original_size


def decode_full_size(data: bytes) -> np.ndarray:
    """(height, width, 3) uint8 of a file's bytes at its own size: turned as its EXIF says, over white; damage anywhere is found."""
    try:
        with _open_image(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
            pixels = np.asarray(_to_rgb(upright))
        with _open_image(io.BytesIO(data)) as image:
            image.verify()  # a PNG that lacks its end is decoded without a word
        return pixels
    except BrokenImageError:
        raise
    except _DECODE_ERRORS as error:
        raise BrokenImageError(str(error) or type(error).__name__) from None


def read_image_bytes(path: str | Path, within: str | None = None) -> bytes:
    """The bytes of an image file; `within` is the folder that links may not lead out of."""
    try:
        return input_files.read_bytes(path, input_files.MAX_IMAGE_BYTES, within=within)
    except OSError as error:
        raise BrokenImageError(error.strerror or str(error)) from None


def _open_file(path: Path, within: str | None) -> BinaryIO:
    try:
        return input_files.open_regular_file(path, within=within, max_bytes=input_files.MAX_IMAGE_BYTES)
    except OSError as error:
        raise BrokenImageError(error.strerror or str(error)) from None


def _open_image(file: BinaryIO) -> Image.Image:
    max_pixels = input_files.limit(input_files.MAX_IMAGE_PIXELS)
    try:
        if max_pixels > (Image.MAX_IMAGE_PIXELS or max_pixels):
            Image.MAX_IMAGE_PIXELS = max_pixels  # Pillow's own limit, for images that --input_limits allows
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        is_empty = file.seek(0, io.SEEK_END) == 0
        raise BrokenImageError("the file is empty" if is_empty else NOT_AN_IMAGE) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BrokenImageError(str(error)) from None
    if image.width * image.height > max_pixels:
        image.close()
        raise BrokenImageError(f"{image.width} x {image.height} pixels; the limit is {max_pixels // 10**6} million")
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB with 8 bits; transparent parts become white before the resampling, or their hidden colours would bleed in."""
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int32).clip(0, 65535)  # 255 times that still fits
        deep *= 255
        deep += 32767
        deep //= 65535
        image = Image.fromarray(deep.astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


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
