"""Fast lossless PNG encoding with text chunks, and strict decoding.

It handles only pixels and text: no models, run folders or torch.
"""

from __future__ import annotations

import importlib.util
import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from halation import input_files
from halation.errors import InputError, install_command

Pixels: TypeAlias = npt.NDArray[np.uint8]
Coder: TypeAlias = Callable[[memoryview], bytes]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 1 << 26
AVERAGE_FILTER, PAETH_FILTER = 3, 4
BLOCK_BYTES = 1 << 18
"""Rows are filtered in blocks of about this size, so that intermediate results stay in the CPU cache."""
NUM_SAMPLED_ROWS = 32
_ONES = np.ones(16, np.float32)


def deflate(residuals: memoryview) -> bytes:
    """Compress with Python's zlib: Huffman, RLE for mostly zeros, matches for flat images.

    Pillow's default spends most of its time searching for matches, and finds hardly any in a photograph.
    """
    num_zeros = residuals.nbytes - np.count_nonzero(np.frombuffer(residuals, np.uint8))
    strategy = zlib.Z_RLE if 2 * num_zeros > residuals.nbytes else zlib.Z_HUFFMAN_ONLY
    return _shorter_stream(residuals, _zlib_stream(residuals, 1, strategy))


def igzip(residuals: memoryview) -> bytes:
    """Compress with ISA-L, three to six times as fast as `deflate`; needs the `isal` wheel.

    A window of two bytes allows only entropy coding and runs. With a wider window the matches in a photograph are short
    and distant: they take twice the time and make the file a tenth larger.
    """
    from isal import igzip_lib

    stream: bytes = igzip_lib.compress(residuals, 1, igzip_lib.COMP_ZLIB, igzip_lib.MEM_LEVEL_DEFAULT, 1)
    # ISA-L leaves the upper halves of the vector registers in use, which halves the speed of all SSE code of this
    # thread (zlib, Pillow, memcpy) until they are cleared. numpy clears them at the end of its vector loops.
    np.exp(_ONES)
    # Its header declares a window of 256 bytes, which is valid but rare; all readers accept the usual header.
    return _shorter_stream(residuals, b"\x78\x01" + stream[2:])


CODERS: dict[str, Coder] = {"zlib": deflate, "isal": igzip}


def fastest_coder() -> str:
    """Return the fastest installed coder; a run records it, as coders produce different bytes."""
    return "isal" if importlib.util.find_spec("isal") is not None else "zlib"


def get_coder(name: str) -> Coder:
    if name not in CODERS:
        raise InputError(f"PNG coder {name!r}", f"one of {', '.join(CODERS)}", "name one of these, or auto")
    if name == "isal" and fastest_coder() != "isal":
        raise InputError(
            "PNG coder 'isal', but the isal wheel is not installed",
            "an installed coder",
            f"{install_command('fast')}, or use the zlib coder",
        )
    return CODERS[name]


def _zlib_stream(residuals: memoryview, level: int, strategy: int) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    return stream.compress(residuals) + stream.flush()


def _shorter_stream(residuals: memoryview, stream: bytes) -> bytes:
    """Return `stream`, or for flat images, whose rows repeat, a shorter stream with matches."""
    if len(stream) * 20 > residuals.nbytes:
        return stream
    return min(stream, _zlib_stream(residuals, 5, zlib.Z_DEFAULT_STRATEGY), key=len)


def encode_png(pixels: Pixels, text: Mapping[str, str], compress: Coder = deflate) -> bytes:
    """Encode `pixels` (uint8, H x W x 3) as lossless PNG with a chunk for each item of `text`.

    `compress` returns a zlib stream. It is an argument, not the fastest installed coder, because the bytes of a file
    must not depend on installed packages.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"an image is uint8 of shape (height, width, 3), not {pixels.dtype} of shape {pixels.shape}")
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        [
            SIGNATURE,
            _make_chunk(b"IHDR", header),
            *(_make_text_chunk(key, value) for key, value in text.items()),
            _make_chunk(b"IDAT", compress(_filter_rows(pixels).data.cast("B"))),
            _make_chunk(b"IEND", b""),
        ]
    )


def _filter_rows(pixels: Pixels) -> Pixels:
    """Return the filtered rows, each after its filter type; the whole image uses one filter.

    Average is best for grain, because the mean of two neighbours has less noise; Paeth is best for edges and smooth
    areas. Equal images give equal bytes: the choice is a function of the pixels.
    """
    height, width, _ = pixels.shape
    padded = np.zeros((height + 1, width * 3 + 3), np.uint8)
    padded[1:, 3:] = pixels.reshape(height, width * 3)
    kind = _best_filter(padded)
    num_rows = max(1, min(height, BLOCK_BYTES // (width * 3)))
    scratch = np.empty((4, num_rows, width * 3), np.uint8)
    filtered = np.empty((height, width * 3 + 1), np.uint8)
    filtered[:, 0] = kind
    for start in range(0, height, num_rows):
        end = min(start + num_rows, height)
        FILTERS[kind](
            padded[start + 1 : end + 1], padded[start:end], filtered[start:end, 1:], scratch[:, : end - start]
        )
    return filtered


def _best_filter(padded: Pixels) -> int:
    """Return the filter with the lowest entropy of residuals on a sample of the rows."""
    step = max(1, (len(padded) - 1) // NUM_SAMPLED_ROWS)
    rows, above = padded[1 + step // 2 :: step], padded[step // 2 : -1 : step]
    scratch = np.empty((4, len(rows), rows.shape[1] - 3), np.uint8)
    num_bits = {}
    for kind, subtract in FILTERS.items():
        residuals = np.empty(scratch.shape[1:], np.uint8)
        subtract(rows, above, residuals, scratch)
        counts = np.bincount(residuals.ravel(), minlength=256)
        num_bits[kind] = -float(counts @ np.log2(np.maximum(counts, 1) / residuals.size))
    return min(num_bits, key=num_bits.__getitem__)


def _subtract_average(rows: Pixels, above: Pixels, out: Pixels, scratch: Pixels) -> None:
    """Subtract floor((left + up) / 2) within uint8: the common bits plus half of the others."""
    left, up = rows[:, :-3], above[:, 3:]
    common, others = scratch[0], scratch[1]
    np.bitwise_and(left, up, out=common)
    np.bitwise_xor(left, up, out=others)
    np.right_shift(others, 1, out=others)
    np.add(common, others, out=common)
    np.subtract(rows[:, 3:], common, out=out)


def _subtract_paeth(rows: Pixels, above: Pixels, out: Pixels, scratch: Pixels) -> None:
    """Subtract the one of left, up and corner that is nearest to left + up - corner.

    With the corner clipped to [low, high] of left and up, that is low if 2 (high - corner) <= corner - low, high
    if 2 (corner - low) <= high - corner, and else the corner. All of it fits into uint8.
    """
    left, up, corner = rows[:, :-3], above[:, 3:], above[:, :-3]
    to_low, to_high, middle, chosen = scratch
    np.minimum(left, up, out=to_low)
    np.maximum(left, up, out=to_high)
    np.maximum(corner, to_low, out=middle)
    np.minimum(middle, to_high, out=middle)
    np.subtract(middle, to_low, out=to_low)
    np.subtract(to_high, middle, out=to_high)
    np.subtract(rows[:, 3:], middle, out=out)
    for far, near, correct in ((to_low, to_high, np.add), (to_high, to_low, np.subtract)):
        np.right_shift(far, 1, out=middle)
        np.less_equal(near, middle, out=chosen.view(np.bool_))
        np.multiply(chosen, far, out=chosen)
        correct(out, chosen, out=out)


FILTERS = {AVERAGE_FILTER: _subtract_average, PAETH_FILTER: _subtract_paeth}


def _make_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def _make_text_chunk(key: str, value: str) -> bytes:
    keyword = key.encode("latin-1")
    if not 1 <= len(keyword) <= 79 or b"\0" in keyword:
        raise ValueError(f"a PNG text key has 1 to 79 Latin-1 characters, not {key!r}")
    value = sanitize_text(value)
    try:
        return _make_chunk(b"tEXt", keyword + b"\0" + value.encode("latin-1"))
    except UnicodeEncodeError:
        return _make_chunk(b"iTXt", keyword + b"\0\0\0\0\0" + value.encode("utf-8"))


def sanitize_text(text: str) -> str:
    """Replace characters that metadata cannot store by U+FFFD: NULs and unpaired surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def metadata_texts(spec_json: Mapping[str, Any], model: str = "", sampler: str = "") -> dict[str, str]:
    """Return the texts of every PNG: the spec as JSON, and `parameters` for other programs."""
    sampler = sampler or str(spec_json.get("sampler", ""))
    settings = {
        "Steps": spec_json.get("steps", ""),
        "Sampler": sampler,
        "CFG scale": spec_json.get("guidance_scale", ""),
        "Seed": spec_json["seed"],
        "Size": f"{spec_json['width']}x{spec_json['height']}" if "width" in spec_json else "",
        "Model": model,
    }
    lines = [str(spec_json["prompt"])]
    if spec_json.get("negative_prompt"):
        lines.append(f"Negative prompt: {spec_json['negative_prompt']}")
    values = {name: str(value) for name, value in settings.items() if value not in ("", None)}
    for name, value in values.items():
        if any(mark in value for mark in ",:\n"):  # readers split at these, except in a JSON string
            values[name] = json.dumps(value, ensure_ascii=False)
    lines.append(", ".join(f"{name}: {value}" for name, value in values.items()))
    return {"halation": json.dumps(dict(spec_json), sort_keys=True), "parameters": "\n".join(lines)}


def read_png(path: str | Path) -> tuple[Pixels, dict[str, str]]:
    """Read pixels and texts of a file of `encode_png`; raises InputError if a byte is damaged."""
    path = Path(path)
    try:
        return _decode_png(input_files.read_bytes(path, input_files.MAX_IMAGE_BYTES))
    except FileNotFoundError:
        found = f"{path}: no such file"
    except (ValueError, struct.error, zlib.error, OSError) as error:
        found = f"{path}: {error}"
    raise InputError(found, "a complete 8-bit RGB PNG", "generate the image again, or name another file")


def read_texts(data: bytes) -> dict[str, str]:
    """Read the texts of a PNG of `encode_png` without decoding the pixels."""
    texts = {}
    for kind, body in _iter_chunks(data):
        if kind == b"IDAT":
            break
        if kind in (b"tEXt", b"iTXt"):
            key, value = _decode_text(kind, body)
            texts[key] = value
    return texts


def _decode_png(data: bytes) -> tuple[Pixels, dict[str, str]]:
    chunks = list(_iter_chunks(data))
    kinds = [kind for kind, _ in chunks]
    if kinds[:1] != [b"IHDR"] or kinds[-1:] != [b"IEND"] or b"IDAT" not in kinds:
        raise ValueError("the PNG is not complete (no header, no pixels or no end)")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if (depth, colour, interlaced) != (8, 2, 0):
        raise ValueError(f"bit depth {depth}, colour type {colour}, interlacing {interlaced}")
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS} or none")
    stream = b"".join(body for kind, body in chunks if kind == b"IDAT")
    expected = height * (width * 3 + 1)
    inflater = zlib.decompressobj()
    if len(inflater.decompress(stream, expected + 1)) != expected or not inflater.eof or inflater.unused_data:
        raise ValueError("the number of pixels does not match the header")
    # Pillow gets only the chunks that decide the pixels, because it limits the length of texts.
    bare = SIGNATURE + _make_chunk(b"IHDR", chunks[0][1]) + _make_chunk(b"IDAT", stream) + _make_chunk(b"IEND", b"")
    with Image.open(io.BytesIO(bare), formats=["PNG"]) as image:
        pixels = np.array(image, dtype=np.uint8)
    return pixels, dict(_decode_text(kind, body) for kind, body in chunks if kind in (b"tEXt", b"iTXt"))


def _iter_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if not data.startswith(SIGNATURE):
        raise ValueError("not a PNG (or its first bytes are damaged)")
    position, num_chunks = len(SIGNATURE), 0
    while position < len(data):
        num_chunks += 1
        if num_chunks > input_files.limit(input_files.MAX_IMAGE_CHUNKS):
            raise ValueError(f"more than {num_chunks - 1} chunks; {input_files.RAISE_ACTION}")
        if position + 12 > len(data):
            raise ValueError("cut off inside a chunk")
        (length,) = struct.unpack_from(">I", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            raise ValueError("cut off inside a chunk, or a damaged length")
        (checksum,) = struct.unpack_from(">I", data, end)
        if zlib.crc32(data[position + 4 : end]) != checksum:
            raise ValueError(f"the checksum of the chunk at byte {position} is wrong")
        yield data[position + 4 : position + 8], data[position + 8 : end]
        position = end + 4


def _decode_text(kind: bytes, body: bytes) -> tuple[str, str]:
    key, _, rest = body.partition(b"\0")
    if kind == b"tEXt":
        return key.decode("latin-1"), rest.decode("latin-1")
    _language, _translated, value = rest[2:].split(b"\0", 2)
    value = zlib.decompress(value) if rest[:1] == b"\1" else value
    return key.decode("latin-1"), value.decode("utf-8")
