"""Combines images: grids with captions, and a figure of the progress of a training.

It handles only pixels and text: no files, models, run folders or torch.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from halation.images.plot import draw_loss_curve
from halation.images.png_codec import Pixels

Colour: TypeAlias = tuple[int, int, int]

BACKGROUND_COLOUR: Colour = (252, 252, 251)
TEXT_COLOUR: Colour = (32, 35, 42)
MUTED_TEXT_COLOUR: Colour = (112, 117, 128)
GRID_LINE_COLOUR: Colour = (222, 224, 228)
EMPTY_CELL_COLOUR: Colour = (240, 240, 238)
ERROR_COLOUR: Colour = (176, 58, 46)


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Load the font that comes with Pillow, so that images are the same on every machine."""
    return ImageFont.load_default(size)


def _wrap(text: str, size: int, width: int, max_lines: int) -> list[str]:
    """Wrap `text` to at most `max_lines` lines of `width` pixels, with an ellipsis if cut."""
    font = load_font(size)
    # Accents are removed, as the built-in font has none; a missing character becomes an empty box.
    letters = unicodedata.normalize("NFKD", text[:600].replace("\u00df", "ss"))
    bare = "".join(letter for letter in letters if not unicodedata.combining(letter))
    words = bare.encode("utf-8", "replace").decode("utf-8").replace("\0", " ").split()
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
        draw.text((x, y + number * _line_height(size)), line, font=load_font(size), fill=colour)


def _line_height(size: int) -> int:
    return math.ceil(size * 1.3)


def _cell_size(images: Sequence[Pixels | None], smallest: int, largest: int) -> tuple[int, int]:
    """Return height and width of a cell: the largest image, enlarged by an integer or reduced."""
    shapes = [image.shape for image in images if image is not None] or [(smallest, smallest, 3)]
    height, width = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    if max(height, width) > largest:
        scale = largest / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))
    factor = max(1, math.ceil(smallest / min(height, width)))
    return height * factor, width * factor


def _paste_into_cell(canvas: Image.Image, image: Pixels | None, x: int, y: int, height: int, width: int) -> None:
    """Paste an image into its cell, or mark the cell as failed if there is none."""
    if image is None:
        draw = ImageDraw.Draw(canvas)
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=EMPTY_CELL_COLOUR, outline=GRID_LINE_COLOUR)
        draw.line((x + 1, y + 1, x + width - 2, y + height - 2), fill=GRID_LINE_COLOUR)
        draw.line((x + 1, y + height - 2, x + width - 2, y + 1), fill=GRID_LINE_COLOUR)
        draw.text((x + width / 2, y + height / 2), "failed", font=load_font(12), fill=ERROR_COLOUR, anchor="mm")
        return
    tile = Image.fromarray(image)
    scale = min(height / image.shape[0], width / image.shape[1])
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    if size != tile.size:
        resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        tile = tile.resize(size, resampling)
    canvas.paste(tile, (x + (width - size[0]) // 2, y + (height - size[1]) // 2))


def make_grid(
    images: Sequence[Pixels | None], columns: int, labels: Sequence[str] | None = None, group: int = 1
) -> Pixels:
    """Return a grid of images with a caption under each; None is a failed image.

    There is a wider gap after every `group` columns.
    """
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(labels)} labels for {len(images)} images")
    gutter, type_size = 12, 12
    gap = 16 if group > 1 else 0
    columns = max(1, min(columns, len(images)))
    num_rows = max(1, math.ceil(len(images) / columns))
    height, width = _cell_size(images, smallest=128, largest=512)
    captions = [_wrap(label, type_size, width, 3) for label in labels or ()]
    caption_height = 6 + _line_height(type_size) * max(map(len, captions)) if any(captions) else 0
    row_height = height + caption_height + gutter
    size = (gutter + columns * (width + gutter) + (columns - 1) // group * gap, gutter + num_rows * row_height)
    canvas = Image.new("RGB", size, BACKGROUND_COLOUR)
    draw = ImageDraw.Draw(canvas)
    for number, image in enumerate(images):
        x = gutter + (number % columns) * (width + gutter) + number % columns // group * gap
        y = gutter + (number // columns) * row_height
        _paste_into_cell(canvas, image, x, y, height, width)
        if captions:
            _write_lines(draw, x, y + height + 6, captions[number], type_size, TEXT_COLOUR)
    return np.array(canvas, dtype=np.uint8)


def progress_figure(
    rows: Sequence[tuple[int, Sequence[Pixels | None]]],
    prompts: Sequence[str],
    loss: Sequence[tuple[int, float]] | None,
    title: str,
) -> Pixels:
    """Return a figure of a training: a row per step, a column per prompt, and the loss below."""
    margin, gutter, gap, type_size, title_size = 28, 8, 48, 12, 20
    height, width = _cell_size([image for _, images in rows for image in images], smallest=128, largest=256)
    label_width = 16 + max((int(load_font(14).getlength(f"{step:,}")) for step, _ in rows), default=0)
    label_width = max(label_width, 44)
    captions = [_wrap(prompt, type_size, width, 4) for prompt in prompts]
    caption_height = _line_height(type_size) * max(map(len, captions), default=0)
    image_width = max(len(prompts) * (width + gutter) - gutter, 420)
    heading = _wrap(title, title_size, label_width + image_width, 2)
    top = margin + len(heading) * _line_height(title_size) + 14 + caption_height + 8
    bottom = top + len(rows) * (height + gutter) - gutter
    points = [(step, value) for step, value in loss or () if math.isfinite(value)]
    plot_height = 150 if len(points) > 1 else 0
    left = margin + label_width
    size = (left + image_width + margin, bottom + (gap + plot_height + 24 if plot_height else 0) + margin)
    canvas = Image.new("RGB", size, BACKGROUND_COLOUR)
    draw = ImageDraw.Draw(canvas)
    _write_lines(draw, margin, margin, heading, title_size, TEXT_COLOUR)
    draw.text((left - 14, top - 8), "step", font=load_font(type_size), fill=MUTED_TEXT_COLOUR, anchor="rd")
    for column, lines in enumerate(captions):
        y = top - 8 - _line_height(type_size) * len(lines)
        _write_lines(draw, left + column * (width + gutter), y, lines, type_size, TEXT_COLOUR)
    for number, (step, images) in enumerate(rows):
        y = top + number * (height + gutter)
        draw.text((left - 14, y + height / 2), f"{step:,}", font=load_font(14), fill=TEXT_COLOUR, anchor="rm")
        for column, image in enumerate(images):
            _paste_into_cell(canvas, image, left + column * (width + gutter), y, height, width)
    if plot_height:
        # The plot starts at the left edge of the figure to leave room for the axis labels.
        curve_box = (left, 30, image_width, plot_height)
        curve = draw_loss_curve(points, [step for step, _ in rows], (size[0], 30 + plot_height + 30), curve_box)
        canvas.paste(Image.fromarray(curve), (0, bottom + gap - 30))
    return np.array(canvas, dtype=np.uint8)
