"""Pictures as bytes and as figures: fast lossless PNG with text, strict reading, grids, the progress of a training.

It knows pixels and text alone: no model, no run folder, no torch. Publishing the bytes is `halation.runs`' affair.
"""

from __future__ import annotations

import io
import json
import math
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from halation.errors import InputError

Pixels: TypeAlias = npt.NDArray[np.uint8]
Colour: TypeAlias = tuple[int, int, int]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 1 << 26
UP_FILTER, AVERAGE_FILTER = 2, 3

PAPER: Colour = (252, 252, 251)
INK: Colour = (32, 35, 42)
SOFT_INK: Colour = (112, 117, 128)
RULE: Colour = (222, 224, 228)
EMPTY: Colour = (240, 240, 238)
ALARM: Colour = (176, 58, 46)
CURVE: Colour = (37, 99, 176)
FAINT_CURVE: Colour = (183, 206, 234)


def deflate(residuals: bytes) -> bytes:
    """Compress filtered rows: those of a photograph by the entropy coder alone, those of a drawing with matches too.

    Searching for matches is where Pillow's default spends its time, and it finds next to none in a photograph.
    """
    drawing = residuals[0] == UP_FILTER
    level, strategy = (4, zlib.Z_DEFAULT_STRATEGY) if drawing else (1, zlib.Z_HUFFMAN_ONLY)
    coder = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    return coder.compress(residuals) + coder.flush()


def encode_png(pixels: Pixels, text: Mapping[str, str], compress: Callable[[bytes], bytes] = deflate) -> bytes:
    """A lossless PNG of `pixels` (uint8, H x W x 3) with a text chunk for each item of `text`.

    `compress` makes a zlib stream. It is an argument, and not whatever is the fastest installed, because the bytes of a
    file must not depend on what else is installed.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"a picture is uint8 of shape (height, width, 3), not {pixels.dtype} of shape {pixels.shape}")
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        [
            SIGNATURE,
            _chunk(b"IHDR", header),
            *(_text_chunk(key, value) for key, value in text.items()),
            _chunk(b"IDAT", compress(_filtered(pixels).tobytes())),
            _chunk(b"IEND", b""),
        ]
    )


def _filtered(pixels: Pixels) -> Pixels:
    """Each byte less the mean of its left and upper neighbours; in drawings, where rows repeat, less the upper one.

    A drawing has more bytes that equal the one above than bytes that equal the mean. The choice is a function of the
    pixels, so equal pictures give equal bytes.
    """
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels).reshape(height, width * 3)
    above, left = np.zeros_like(rows), np.zeros_like(rows)
    above[1:], left[:, 3:] = rows[:-1], rows[:, :-3]
    filtered = np.empty((height, width * 3 + 1), np.uint8)
    filtered[:, 0] = AVERAGE_FILTER
    # floor((a + b) / 2) without leaving uint8: the common bits, and half of the others.
    np.subtract(rows, (above & left) + ((above ^ left) >> 1), out=filtered[:, 1:])
    num_repeats = np.count_nonzero(rows == above)
    if num_repeats * 4 > rows.size and num_repeats > np.count_nonzero(filtered[:, 1:] == 0):
        filtered[:, 0] = UP_FILTER
        np.subtract(rows, above, out=filtered[:, 1:])
    return filtered


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def _text_chunk(key: str, value: str) -> bytes:
    keyword = key.encode("latin-1")
    if not 1 <= len(keyword) <= 79 or b"\0" in keyword:
        raise ValueError(f"a PNG text key has 1 to 79 Latin-1 characters, not {key!r}")
    # A NUL would end the text early and a lone surrogate has no UTF-8 form; neither can be kept in a text chunk.
    value = value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    try:
        return _chunk(b"tEXt", keyword + b"\0" + value.encode("latin-1"))
    except UnicodeEncodeError:
        return _chunk(b"iTXt", keyword + b"\0\0\0\0\0" + value.encode("utf-8"))


def picture_text(spec_json: Mapping[str, Any], model: str = "", sampler: str = "") -> dict[str, str]:
    """The texts every PNG carries: the spec as JSON, and the `parameters` text that other programs read."""
    sampler = sampler or str(spec_json.get("sampler", ""))
    settings = {
        "Steps": spec_json["steps"],
        "Sampler": sampler,
        "CFG scale": spec_json["guidance_scale"],
        "Seed": spec_json["seed"],
        "Size": f"{spec_json['width']}x{spec_json['height']}",
        "Model": model,
    }
    lines = [str(spec_json["prompt"])]
    if spec_json.get("negative_prompt"):
        lines.append(f"Negative prompt: {spec_json['negative_prompt']}")
    lines.append(", ".join(f"{name}: {_quoted(str(value))}" for name, value in settings.items() if value != ""))
    return {"halation": json.dumps(dict(spec_json), sort_keys=True), "parameters": "\n".join(lines)}


def _quoted(value: str) -> str:
    """Readers of `parameters` split at commas and colons, and take a JSON string as one value."""
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ",:\n") else value


def read_png(path: str | Path) -> tuple[Pixels, dict[str, str]]:
    """Pixels and texts of a picture as `encode_png` writes it; a file with any byte cut off or changed is refused."""
    path = Path(path)
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        found = f"{path}: no such file"
    except (ValueError, struct.error, zlib.error, OSError) as error:
        found = f"{path}: {error}"
    raise InputError(found, "a whole 8-bit RGB PNG", "draw the picture again, or name another file")


def _decode(data: bytes) -> tuple[Pixels, dict[str, str]]:
    chunks = list(_chunks(data))
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
        raise ValueError("the pixels are not as many as the header says")
    # Only the chunks that decide the pixels go to Pillow, which limits the length of texts.
    bare = SIGNATURE + _chunk(b"IHDR", chunks[0][1]) + _chunk(b"IDAT", stream) + _chunk(b"IEND", b"")
    with Image.open(io.BytesIO(bare), formats=["PNG"]) as image:
        pixels = np.array(image, dtype=np.uint8)
    return pixels, dict(_text(kind, body) for kind, body in chunks if kind in (b"tEXt", b"iTXt"))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if not data.startswith(SIGNATURE):
        raise ValueError("not a PNG (or its first bytes are damaged)")
    position = len(SIGNATURE)
    while position < len(data):
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


def _text(kind: bytes, body: bytes) -> tuple[str, str]:
    key, _, rest = body.partition(b"\0")
    if kind == b"tEXt":
        return key.decode("latin-1"), rest.decode("latin-1")
    _language, _translated, value = rest[2:].split(b"\0", 2)
    value = zlib.decompress(value) if rest[:1] == b"\1" else value
    return key.decode("latin-1"), value.decode("utf-8")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _drawable(text: str) -> str:
    """What the built-in type can show: accents are left off; a letter it does not have becomes an empty box."""
    bare = (
        mark for mark in unicodedata.normalize("NFKD", text.replace("\u00df", "ss")) if not unicodedata.combining(mark)
    )
    return "".join(bare).encode("utf-8", "replace").decode("utf-8").replace("\0", " ")


def _wrap(text: str, size: int, width: int, max_lines: int) -> list[str]:
    """`text` in at most `max_lines` lines of `width` pixels; what does not fit ends in an ellipsis."""
    font = _font(size)
    words = _drawable(text[:600]).split()
    lines: list[str] = []
    line = ""
    while words:
        word = words.pop(0)
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= width:
            line = longer
        elif line:
            lines.append(line)
            line = ""
            words.insert(0, word)
        else:  # one word wider than the line
            fits = next((end for end in range(1, len(word)) if font.getlength(word[: end + 1]) > width), len(word))
            lines.append(word[:fits])
            words[:0] = [word[fits:]] if word[fits:] else []
        if len(lines) == max_lines:
            break
    if line:
        lines.append(line)
    if words:
        last = lines[-1]
        while last and font.getlength(last + "...") > width:
            last = last[:-1]
        lines[-1] = last.rstrip() + "..."
    return lines


def _write_lines(draw: ImageDraw.ImageDraw, x: int, y: int, lines: Sequence[str], size: int, colour: Colour) -> None:
    for number, line in enumerate(lines):
        draw.text((x, y + number * _line_height(size)), line, font=_font(size), fill=colour)


def _line_height(size: int) -> int:
    return math.ceil(size * 1.3)


def _shown_size(pictures: Sequence[Pixels | None], smallest: int, largest: int) -> tuple[int, int]:
    """Height and width of a cell: the largest picture's, by a whole factor up or by any factor down."""
    shapes = [picture.shape for picture in pictures if picture is not None] or [(smallest, smallest, 3)]
    height, width = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    if max(height, width) > largest:
        scale = largest / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))
    factor = max(1, math.ceil(smallest / min(height, width)))
    return height * factor, width * factor


def _place(canvas: Image.Image, picture: Pixels | None, x: int, y: int, height: int, width: int) -> None:
    """Put a picture into its cell, or a marked empty cell where there is none."""
    if picture is None:
        draw = ImageDraw.Draw(canvas)
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=EMPTY, outline=RULE)
        draw.line((x + 1, y + 1, x + width - 2, y + height - 2), fill=RULE)
        draw.line((x + 1, y + height - 2, x + width - 2, y + 1), fill=RULE)
        draw.text((x + width / 2, y + height / 2), "failed", font=_font(12), fill=ALARM, anchor="mm")
        return
    image = Image.fromarray(picture)
    scale = min(height / picture.shape[0], width / picture.shape[1])
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    if size != image.size:
        way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        image = image.resize(size, way)
    canvas.paste(image, (x + (width - size[0]) // 2, y + (height - size[1]) // 2))


def grid(pictures: Sequence[Pixels | None], columns: int, labels: Sequence[str] | None = None) -> Pixels:
    """All pictures in rows of `columns`, with a caption under each; None is a picture that failed."""
    if labels is not None and len(labels) != len(pictures):
        raise ValueError(f"{len(labels)} labels for {len(pictures)} pictures")
    gutter, type_size = 12, 12
    columns = max(1, min(columns, len(pictures)))
    num_rows = max(1, math.ceil(len(pictures) / columns))
    height, width = _shown_size(pictures, smallest=128, largest=512)
    captions = [_wrap(label, type_size, width, 3) for label in labels or ()]
    caption_height = 6 + _line_height(type_size) * max(map(len, captions)) if any(captions) else 0
    row_height = height + caption_height + gutter
    size = (gutter + columns * (width + gutter), gutter + num_rows * row_height)
    canvas = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    for number, picture in enumerate(pictures):
        x = gutter + (number % columns) * (width + gutter)
        y = gutter + (number // columns) * row_height
        _place(canvas, picture, x, y, height, width)
        if captions:
            _write_lines(draw, x, y + height + 6, captions[number], type_size, INK)
    return np.array(canvas, dtype=np.uint8)


def progress_figure(
    rows: Sequence[tuple[int, Sequence[Pixels | None]]],
    prompts: Sequence[str],
    loss: Sequence[tuple[int, float]] | None,
    title: str,
) -> Pixels:
    """How a training went, in one picture: a row for each step, a column for each prompt, and the loss below."""
    margin, gutter, gap, type_size, title_size = 28, 8, 48, 12, 20
    height, width = _shown_size([picture for _, pictures in rows for picture in pictures], smallest=128, largest=256)
    label_width = 16 + max((int(_font(14).getlength(f"{step:,}")) for step, _ in rows), default=0)
    label_width = max(label_width, 44)
    captions = [_wrap(prompt, type_size, width, 4) for prompt in prompts]
    caption_height = _line_height(type_size) * max(map(len, captions), default=0)
    picture_width = max(len(prompts) * (width + gutter) - gutter, 420)
    heading = _wrap(title, title_size, label_width + picture_width, 2)
    top = margin + len(heading) * _line_height(title_size) + 14 + caption_height + 8
    bottom = top + len(rows) * (height + gutter) - gutter
    points = [(step, value) for step, value in loss or () if math.isfinite(value)]
    plot_height = 150 if len(points) > 1 else 0
    left = margin + label_width
    size = (left + picture_width + margin, bottom + (gap + plot_height + 24 if plot_height else 0) + margin)
    canvas = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    _write_lines(draw, margin, margin, heading, title_size, INK)
    draw.text((left - 14, top - 8), "step", font=_font(type_size), fill=SOFT_INK, anchor="rd")
    for column, lines in enumerate(captions):
        y = top - 8 - _line_height(type_size) * len(lines)
        _write_lines(draw, left + column * (width + gutter), y, lines, type_size, INK)
    for number, (step, pictures) in enumerate(rows):
        y = top + number * (height + gutter)
        draw.text((left - 14, y + height / 2), f"{step:,}", font=_font(14), fill=INK, anchor="rm")
        for column, picture in enumerate(pictures):
            _place(canvas, picture, left + column * (width + gutter), y, height, width)
    if plot_height:
        _draw_loss(canvas, (left, bottom + gap, picture_width, plot_height), points, [step for step, _ in rows])
    return np.array(canvas, dtype=np.uint8)


def _draw_loss(
    canvas: Image.Image, box: tuple[int, int, int, int], points: Sequence[tuple[int, float]], marks: Sequence[int]
) -> None:
    """The loss over the steps in `box` (x, y, width, height): each value faint, the running mean clear."""
    x, y, width, height = box
    steps = np.array([step for step, _ in points], dtype=np.float64)
    values = np.array([value for _, value in points], dtype=np.float64)
    smooth = _running_mean(values)
    # A single huge loss would press the rest of the curve flat against the axis.
    low, high = float(values.min()), float(max(np.quantile(values, 0.99), smooth.max()))
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = float(steps.min()), float(max(steps.max(), steps.min() + 1))

    def across(step: float) -> float:
        return (step - first) / (last - first) * (width - 1)

    def down(value: float) -> float:
        return float(height - 1 - (np.clip(value, low, high) - low) / ((high - low) or 1.0) * (height - 1))

    finer = 3  # drawn larger and shrunk, because Pillow's lines have hard edges
    plot = Image.new("RGB", (width * finer, height * finer), PAPER)
    pen = ImageDraw.Draw(plot)
    for tick in ticks:
        pen.line((0, down(tick) * finer, width * finer, down(tick) * finer), fill=RULE, width=finer)
    for mark in marks:
        if first <= mark <= last:
            pen.line(
                (across(mark) * finer, (height - 7) * finer, across(mark) * finer, height * finer), SOFT_INK, finer
            )
    for series, colour, weight in ((values, FAINT_CURVE, finer), (smooth, CURVE, 2 * finer)):
        path = [(across(step) * finer, down(value) * finer) for step, value in zip(steps, series, strict=True)]
        pen.line(path, fill=colour, width=weight, joint="curve")
    canvas.paste(plot.resize((width, height), Image.Resampling.LANCZOS), (x, y))
    draw = ImageDraw.Draw(canvas)
    draw.text((x, y - 8), f"loss, {smooth[-1]:.4g} at the end", font=_font(12), fill=INK, anchor="ld")
    for tick in ticks:
        draw.text((x - 14, y + down(tick)), f"{tick:g}", font=_font(11), fill=SOFT_INK, anchor="rm")
    draw.text((x, y + height + 6), f"step {first:,.0f}", font=_font(11), fill=SOFT_INK, anchor="la")
    draw.text((x + width, y + height + 6), f"step {last:,.0f}", font=_font(11), fill=SOFT_INK, anchor="ra")


def _running_mean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean over about a twentieth of the curve around each point; at the ends, over the part that is there."""
    reach = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    middle = np.arange(len(values))
    start, end = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    return np.asarray((sums[end] - sums[start]) / (end - start), dtype=np.float64)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers within [low, high]."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 3))
    unit = next(power * factor for factor in (5, 2, 1) if span / (power * factor) >= 2.5 or factor == 1)
    start = math.ceil(low / unit - 1e-9)
    return [round(number * unit, 12) for number in range(start, math.floor(high / unit + 1e-9) + 1)] or [low]
