"""Numbers over steps as line plots, several small ones in an image; drawn by Pillow alone, so that a server without a plotting library has them.

It knows series of numbers and pixels: no run folder, no torch. Files are the affair of `halation.images.png_codec` and `halation.runs.run_folder`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from halation.images.grid import (
    BACKGROUND_COLOUR,
    GRID_LINE_COLOUR,
    MUTED_TEXT_COLOUR,
    TEXT_COLOUR,
    Colour,
    load_font,
    to_drawable,
)
from halation.images.png_codec import Pixels

SI_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BestDirection = Literal["", "lowest", "highest"]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
COLOURS: tuple[Colour, ...] = (
    (37, 99, 176),
    (206, 98, 24),
    (44, 132, 84),
    (140, 75, 160),
    (170, 52, 66),
    (90, 98, 112),
)
PIXELS_PER_UNIT = 2
"""Pixels in a unit of length, on a side: small type stays sharp on today's screens."""
SUPERSAMPLING = 2  # drawn larger and shrunk, because Pillow's lines have hard edges
PANEL_WIDTH, PANEL_HEIGHT = 440, 280
MARGIN, TITLE_SIZE, TYPE_SIZE, SMALL_SIZE = 20, 15, 12, 11
LOWER_IS_BETTER = ("fid", "fd", "kid", "loss")
BEST_DIRECTIONS: dict[str, BestDirection] = {"lower": "lowest", "higher": "highest"}
HIGHER_IS_BETTER = ("is", "precision", "recall", "density", "coverage", "clip", "agreement", "score")
LABEL_OFFSETS = (
    *((0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1), (1, 0), (-1, 0)),
    *((0, -2), (0, 2), (0, -3), (0, 3), (-1, -2), (1, -2)),
)
"""Where a label may stand beside its point, in its own widths and heights; the first ones are the nicest."""


@dataclass(frozen=True, kw_only=True)
class PlotAxis:
    """From `low` to `high`, with the ticks and their words in between."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def fraction(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        low, high, value = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return (value - low) / (high - low)


def format_number(value: float) -> str:
    """Three or four figures and no more: 31.2, 0.0123, 1.5k, 2.25M, 3.1e-5."""
    size = abs(value)
    if size and not 1e-4 <= size < 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size < 999.5:
        if size and size < 1:
            return f"{value:.3g}"
        return _strip_zeros(f"{value:.{max(0, 3 - len(str(int(size))))}f}")
    for unit, letter in reversed(SI_PREFIXES):
        if size < 999.5 * unit or unit == SI_PREFIXES[0][0]:
            scaled = value / unit
            return _strip_zeros(f"{scaled:.{max(0, 4 - len(str(int(abs(scaled)))))}f}") + letter
    raise AssertionError("every size has its unit")


def _strip_zeros(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _tick_labels(ticks: tuple[float, ...], unit: float) -> tuple[str, ...]:
    """All ticks written alike, with as many decimals as tell neighbours apart."""
    largest = max(map(abs, ticks))
    scale, letter = next(((size, letter) for size, letter in SI_PREFIXES if largest >= size), (1.0, ""))
    if largest and largest < 1e-3:
        power = math.floor(math.log10(largest))
        scale, letter = 10.0**power, f"e{power}"
    if largest >= 1e15:
        return tuple(format_number(tick) for tick in ticks)
    decimals = max(0, -math.floor(math.log10(unit / scale) + 1e-9))
    texts = [f"{tick / scale:.{decimals}f}" for tick in ticks]
    return tuple("0" if float(text) == 0 else text + letter for text in texts)


def _tick_unit(span: float, max_steps: int, is_integer: bool = False) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that needs at most `max_steps` steps for `span`."""
    power = 10.0 ** math.floor(math.log10(span / max_steps))
    units = [power * factor for factor in (1, 2, 5, 10, 20)]
    unit = next(unit for unit in units if span / unit <= max_steps + 1e-9)
    return max(1.0, unit) if is_integer else unit


def linear_axis(low: float, high: float, max_ticks: int = 5) -> PlotAxis:
    """Round numbers at both ends; numbers that are all equal stand in the middle, zeros at the bottom."""
    size = max(abs(low), abs(high))
    if size == 0:  # a score of nothing at all: most of them have no numbers below
        low, high = 0.0, 1.0
    elif high - low <= size * 1e-9:
        low, high = low - size * 0.1, high + size * 0.1
    unit = _tick_unit(high - low, max_ticks)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    ticks = tuple(round(number * unit, 15 - math.floor(math.log10(size or 1.0))) for number in range(first, last + 1))
    return PlotAxis(low=first * unit, high=last * unit, ticks=ticks, labels=_tick_labels(ticks, unit))


def log_axis(low: float, high: float) -> PlotAxis:
    """Powers of ten, with 2 and 5 between them where there are few; the ends are the ticks around the numbers."""
    if high / low < 1.0001:
        low, high = low / 1.5, high * 1.5
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    every = max(1, math.ceil(math.log10(high / low) / 6)) if factors == (1,) else 1
    steps = [factor * 10.0**decade for decade in decades for factor in factors if decade % every == 0]
    below = max((step for step in steps if step <= low * 1.0001), default=low)
    above = min((step for step in steps if step >= high / 1.0001), default=high)
    ticks = tuple(float(f"{step:.3g}") for step in steps if below <= step <= above)
    labels = tuple(format_number(tick) for tick in ticks)
    return PlotAxis(low=min(below, low), high=max(above, high), ticks=ticks, labels=labels, log=True)


def step_axis(first: int, last: int, max_ticks: int = 6) -> PlotAxis:
    """Whole numbers between the first and the last step, with a little room beside them; one step alone stands in the middle."""
    if first == last:
        return PlotAxis(low=first - 1, high=first + 1, ticks=(float(first),), labels=(format_number(first),))
    unit = _tick_unit(last - first, max_ticks, is_integer=True)
    ticks = tuple(number * unit for number in range(math.ceil(first / unit), math.floor(last / unit) + 1))
    if not ticks:  # no round number lies between them
        ticks, unit = (float(first), float(last)), 1.0
    room = (last - first) * 0.03
    return PlotAxis(low=first - room, high=last + room, ticks=ticks, labels=_tick_labels(ticks, unit))


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """One number; `std` draws a bar of that length on both sides of it."""

    step: int
    value: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlotSeries:
    """Numbers that belong together, joined by a line; the name is shown where a panel has several."""

    points: tuple[PlotPoint, ...]
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class PlotPanel:
    """One plot; `best` says which of its points is marked, if any."""

    title: str
    series: tuple[PlotSeries, ...]
    log: bool = False
    best: BestDirection = ""


def best_direction(metric: str, better: object = None) -> BestDirection:
    """Whether less or more of a metric is better: as somebody said (lower, higher), or else by its name; empty where nobody knows."""
    if better in ("lower", "higher"):
        return BEST_DIRECTIONS[str(better)]
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(word in LOWER_IS_BETTER for word in words):
        return "lowest"
    return "highest" if any(word in HIGHER_IS_BETTER for word in words) else ""


def metric_panels(lines: Iterable[Mapping[str, Any]]) -> list[PlotPanel]:
    """A panel for each metric of a metrics.jsonl, in the order they first appear; other lines, and numbers that are none, are left out.

    Of two lines for a step the later counts: the step was done again. A line may name its `series`, a `name` for people to read, and which
    numbers are `better`: lower or higher.
    """
    titles: dict[str, str] = {}
    better: dict[str, Any] = {}
    found: dict[str, dict[str, dict[int, PlotPoint]]] = {}
    for line in lines:
        metric, step, value = line.get("metric"), line.get("step"), line.get("value")
        if not isinstance(metric, str) or not isinstance(step, int) or not _is_number(value):
            continue
        std = line.get("std")
        titles[metric] = str(line.get("name") or metric)
        better[metric] = line.get("better") or better.get(metric)
        series = found.setdefault(metric, {}).setdefault(str(line.get("series") or ""), {})
        series[step] = PlotPoint(step=step, value=float(value or 0), std=float(std or 0) if _is_number(std) else None)
    return [
        PlotPanel(
            title=titles[metric],
            series=tuple(
                PlotSeries(name=name, points=tuple(points[step] for step in sorted(points)))
                for name, points in by_name.items()
            ),
            best=best_direction(metric, better[metric]),
        )
        for metric, by_name in found.items()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def best_point(panel: PlotPanel) -> tuple[int, PlotPoint] | None:
    """The number of the series and the point that is best, the earliest of equals; none where all of several are equal."""
    points = [(number, point) for number, series in enumerate(panel.series) for point in _finite_points(series)]
    if not panel.best or not points or (len(points) > 1 and len({point.value for _, point in points}) == 1):
        return None
    sign = 1 if panel.best == "lowest" else -1
    return min(points, key=lambda item: (sign * item[1].value, item[1].step))


def _finite_points(series: PlotSeries) -> list[PlotPoint]:
    return [point for point in series.points if math.isfinite(point.value)]


def draw_panels(panels: Sequence[PlotPanel], title: str = "") -> Pixels:
    """All panels in one image, two or three in a row; a number that is not finite is left out."""
    if not panels:
        raise ValueError("a plot without panels")
    for panel in panels:
        values = [point.value for series in panel.series for point in _finite_points(series)]
        if not values:
            raise ValueError(f"{panel.title}: no finite number to plot")
        if panel.log and min(values) <= 0:
            raise ValueError(f"{panel.title}: {min(values)} has no place on a logarithmic axis")
    columns = len(panels) if len(panels) < 4 else (2 if len(panels) == 4 else 3)
    top = MARGIN + (TITLE_SIZE + 14 if title else 0)
    width = columns * PANEL_WIDTH + (columns + 1) * MARGIN
    height = top + math.ceil(len(panels) / columns) * (PANEL_HEIGHT + MARGIN)
    canvas = _PlotCanvas(width, height)
    if title:
        canvas.add_text(
            MARGIN, MARGIN, _truncate(title, TITLE_SIZE + 2, width - 2 * MARGIN), TITLE_SIZE + 2, TEXT_COLOUR, "la"
        )
    for number, panel in enumerate(panels):
        x = MARGIN + number % columns * (PANEL_WIDTH + MARGIN)
        y = top + number // columns * (PANEL_HEIGHT + MARGIN)
        _draw_panel(canvas, panel, x, y)
    return canvas.render()


def _text_width(text: str, size: int) -> float:
    return load_font(size * PIXELS_PER_UNIT).getlength(to_drawable(text)) / PIXELS_PER_UNIT


def _truncate(text: str, size: int, width: float) -> str:
    text = " ".join(to_drawable(text[:300]).split())
    if _text_width(text, size) <= width:
        return text
    while text and _text_width(text + "...", size) > width:
        text = text[:-1]
    return text.rstrip() + "..."


class _PlotCanvas:
    """A canvas in units of length: shapes are drawn at once, finer than they are shown; words after them, at the size they are shown."""

    def __init__(self, width: float, height: float) -> None:
        self.unit = PIXELS_PER_UNIT * SUPERSAMPLING
        self.size = (round(width * PIXELS_PER_UNIT), round(height * PIXELS_PER_UNIT))
        self.image = Image.new("RGB", (self.size[0] * SUPERSAMPLING, self.size[1] * SUPERSAMPLING), BACKGROUND_COLOUR)
        self.draw = ImageDraw.Draw(self.image)
        self.texts: list[tuple[float, float, str, int, Colour, str, int]] = []

    def line(self, path: Sequence[tuple[float, float]], colour: Colour, weight: float) -> None:
        scaled = [(x * self.unit, y * self.unit) for x, y in path]
        self.draw.line(scaled, fill=colour, width=max(1, round(weight * self.unit)), joint="curve")

    def dot(self, x: float, y: float, radius: float, fill: Colour, outline: Colour | None = None) -> None:
        box = [(x - radius) * self.unit, (y - radius) * self.unit, (x + radius) * self.unit, (y + radius) * self.unit]
        self.draw.ellipse(box, fill=fill, outline=outline, width=round(1.6 * self.unit) if outline else 0)

    def add_text(self, x: float, y: float, text: str, size: int, colour: Colour, anchor: str, halo: int = 0) -> None:
        self.texts.append((x, y, to_drawable(text), size, colour, anchor, halo))

    def render(self) -> Pixels:
        shown = self.image.resize(self.size, Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(shown)
        for x, y, text, size, colour, anchor, halo in self.texts:
            position = (round(x * PIXELS_PER_UNIT), round(y * PIXELS_PER_UNIT))
            face = load_font(size * PIXELS_PER_UNIT)
            draw.text(
                position,
                text,
                font=face,
                fill=colour,
                anchor=anchor,
                stroke_width=halo * PIXELS_PER_UNIT,
                stroke_fill=BACKGROUND_COLOUR,
            )
        return np.array(shown, dtype=np.uint8)


def _draw_panel(canvas: _PlotCanvas, panel: PlotPanel, x: float, y: float) -> None:
    points = [_finite_points(series) for series in panel.series]
    vertical = _value_axis(panel, [point for series in points for point in series])
    label_width = max(_text_width(text, SMALL_SIZE) for text in vertical.labels)
    canvas.add_text(x, y, _truncate(panel.title, TITLE_SIZE, PANEL_WIDTH), TITLE_SIZE, TEXT_COLOUR, "la")
    below_legend = _draw_legend(canvas, panel, x, y + TITLE_SIZE + 10)
    box = (x + label_width + 10, below_legend + 8, x + PANEL_WIDTH - 12, y + PANEL_HEIGHT - 36)
    steps = [point.step for series in points for point in series]
    horizontal = step_axis(min(steps), max(steps), max_ticks=max(2, int((box[2] - box[0]) / 55)))
    _draw_axes(canvas, box, horizontal, vertical)

    def to_position(step: float, value: float) -> tuple[float, float]:
        across, up = horizontal.fraction(step), vertical.fraction(value)
        return box[0] + across * (box[2] - box[0]), box[3] - up * (box[3] - box[1])

    for number, series in enumerate(points):
        _draw_series(canvas, series, COLOURS[number % len(COLOURS)], to_position, vertical)
    best = best_point(panel)
    if best is not None:
        paths = [[to_position(point.step, point.value) for point in series] for series in points]
        paths += [
            [to_position(point.step, max(vertical.low, point.value + side * point.std)) for side in (-1, 1)]
            for series in points
            for point in series
            if point.std
        ]
        _mark_best(
            canvas, best[1], COLOURS[best[0] % len(COLOURS)], to_position(best[1].step, best[1].value), box, paths
        )


def _value_axis(panel: PlotPanel, points: Sequence[PlotPoint]) -> PlotAxis:
    low = min(point.value - (point.std or 0) for point in points)
    high = max(point.value + (point.std or 0) for point in points)
    if not panel.log:
        return linear_axis(low, high)
    return log_axis(low if low > 0 else min(point.value for point in points), high)


def _draw_legend(canvas: _PlotCanvas, panel: PlotPanel, x: float, y: float) -> float:
    """The names of the series under the title, in as many lines as they need; returns where the last line ends."""
    named = [(number, series) for number, series in enumerate(panel.series) if series.name]
    if not named:
        return y
    left = x
    for number, series in named:
        name = _truncate(series.name, TYPE_SIZE, PANEL_WIDTH / 2)
        width = 20 + _text_width(name, TYPE_SIZE) + 16
        if left > x and left + width - 16 > x + PANEL_WIDTH:
            left, y = x, y + TYPE_SIZE + 6
        colour = COLOURS[number % len(COLOURS)]
        canvas.line([(left, y + 6), (left + 14, y + 6)], colour, 2)
        canvas.dot(left + 7, y + 6, 3, colour)
        canvas.add_text(left + 20, y + 6, name, TYPE_SIZE, TEXT_COLOUR, "lm")
        left += width
    return y + TYPE_SIZE + 4


def _draw_axes(canvas: _PlotCanvas, box: Box, horizontal: PlotAxis, vertical: PlotAxis) -> None:
    left, top, right, bottom = box
    for tick, text in zip(vertical.ticks, vertical.labels, strict=True):
        y = bottom - vertical.fraction(tick) * (bottom - top)
        canvas.line([(left, y), (right, y)], GRID_LINE_COLOUR, 1)
        canvas.add_text(left - 8, y, text, SMALL_SIZE, MUTED_TEXT_COLOUR, "rm")
    for tick, text in zip(horizontal.ticks, horizontal.labels, strict=True):
        x = left + horizontal.fraction(tick) * (right - left)
        canvas.line([(x, top), (x, bottom)], GRID_LINE_COLOUR, 1)
        canvas.add_text(x, bottom + 7, text, SMALL_SIZE, MUTED_TEXT_COLOUR, "ma")
    canvas.add_text(right, bottom + 23, "step", SMALL_SIZE, MUTED_TEXT_COLOUR, "ra")


def _draw_series(
    canvas: _PlotCanvas, points: Sequence[PlotPoint], colour: Colour, to_position: Any, vertical: PlotAxis
) -> None:
    path = [to_position(point.step, point.value) for point in points]
    faint = (int(colour[0] * 0.5 + 127), int(colour[1] * 0.5 + 127), int(colour[2] * 0.5 + 127))
    for point, (x, _) in zip(points, path, strict=True):
        if point.std:
            _, top = to_position(point.step, min(point.value + point.std, vertical.high))
            _, bottom = to_position(point.step, max(point.value - point.std, vertical.low))
            canvas.line([(x, top), (x, bottom)], faint, 1.2)
            for end in (top, bottom):
                canvas.line([(x - 3.5, end), (x + 3.5, end)], faint, 1.2)
    if len(path) > 1:
        canvas.line(path, colour, 1.8)
    # Where points stand closer than they are wide the line says it all.
    width = path[-1][0] - path[0][0] if len(path) > 1 else math.inf
    if width / len(path) >= 7:
        for x, y in path:
            canvas.dot(x, y, 3, colour)


def _mark_best(
    canvas: _PlotCanvas,
    point: PlotPoint,
    colour: Colour,
    position: tuple[float, float],
    box: Box,
    paths: Sequence[Sequence[tuple[float, float]]],
) -> None:
    """A ring around the best point, and its number where it hides least of the lines."""
    x, y = position
    canvas.dot(x, y, 5.5, BACKGROUND_COLOUR, colour)
    canvas.dot(x, y, 2.2, colour)
    text = f"{format_number(point.value)} at {format_number(point.step)}"
    width, height = _text_width(text, TYPE_SIZE), TYPE_SIZE
    line_points = [each for path in paths for each in _interpolate_points(path)]
    options: list[tuple[float, Box]] = []
    for rank, (dx, dy) in enumerate(LABEL_OFFSETS):
        middle = x + dx * (width / 2 + 11), y + dy * (height / 2 + 11)
        centre = min(max(middle[0], box[0] + width / 2 + 2), box[2] - width / 2)
        label_box = (centre - width / 2, middle[1] - height / 2, centre + width / 2, middle[1] + height / 2)
        hidden = sum(
            label_box[0] - 3 <= px <= label_box[2] + 3 and label_box[1] - 3 <= py <= label_box[3] + 3
            for px, py in line_points
        )
        outside = label_box[1] < box[1] - 2 or label_box[3] > box[3] - 1
        on_ring = (
            label_box[0] - 1 < x + 6 and label_box[2] + 1 > x - 6 and label_box[1] < y + 6 and label_box[3] > y - 6
        )
        options.append((hidden + rank * 0.3 + 1000 * outside + 200 * on_ring, label_box))
    _, label_box = min(options)
    canvas.add_text(
        (label_box[0] + label_box[2]) / 2, (label_box[1] + label_box[3]) / 2, text, TYPE_SIZE, TEXT_COLOUR, "mm", halo=2
    )


def _interpolate_points(path: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points on a line about two units apart."""
    found = list(path)
    for (x, y), (next_x, next_y) in itertools.pairwise(path):
        num = int(math.hypot(next_x - x, next_y - y) / 2)
        found += [(x + (next_x - x) * k / num, y + (next_y - y) * k / num) for k in range(1, num)]
    return found
