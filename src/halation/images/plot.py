"""Numbers over steps as line plots, several small ones in a picture; drawn by Pillow alone, so that a server without a plotting library has them.

It knows series of numbers and pixels: no run folder, no torch. Files are the affair of `halation.images.png` and `halation.runs.folder`.
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

from halation.images.axes import Axis, linear_axis, log_axis, short_number, step_axis
from halation.images.grid import INK, PAPER, RULE, SOFT_INK, Colour, drawable, typeface
from halation.images.png import Pixels

Best = Literal["", "lowest", "highest"]
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
DENSITY = 2
"""Pixels in a unit of length, on a side: small type stays sharp on today's screens."""
FINER = 2  # drawn larger and shrunk, because Pillow's lines have hard edges
PANEL_WIDTH, PANEL_HEIGHT = 440, 280
MARGIN, TITLE_SIZE, TYPE_SIZE, SMALL_SIZE = 20, 15, 12, 11
LOWER_IS_BETTER = ("fid", "fd", "kid", "loss")
BETTER: dict[str, Best] = {"lower": "lowest", "higher": "highest"}
HIGHER_IS_BETTER = ("is", "precision", "recall", "density", "coverage", "clip", "agreement", "score")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number; `std` draws a bar of that length on both sides of it."""

    step: int
    value: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Numbers that belong together, joined by a line; the name is shown where a panel has several."""

    points: tuple[Point, ...]
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot; `best` says which of its points is marked, if any."""

    title: str
    series: tuple[Series, ...]
    log: bool = False
    best: Best = ""


def direction(metric: str, better: object = None) -> Best:
    """Whether less or more of a metric is better: as somebody said (lower, higher), or else by its name; empty where nobody knows."""
    if better in ("lower", "higher"):
        return BETTER[str(better)]
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(word in LOWER_IS_BETTER for word in words):
        return "lowest"
    return "highest" if any(word in HIGHER_IS_BETTER for word in words) else ""


def metric_panels(lines: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """A panel for each metric of a metrics.jsonl, in the order they first appear; other lines, and numbers that are none, are left out.

    Of two lines for a step the later counts: the step was done again. A line may name its `series`, a `name` for people to read, and which
    numbers are `better`: lower or higher.
    """
    titles: dict[str, str] = {}
    better: dict[str, Any] = {}
    found: dict[str, dict[str, dict[int, Point]]] = {}
    for line in lines:
        metric, step, value = line.get("metric"), line.get("step"), line.get("value")
        if not isinstance(metric, str) or not isinstance(step, int) or not _is_number(value):
            continue
        std = line.get("std")
        titles[metric] = str(line.get("name") or metric)
        better[metric] = line.get("better") or better.get(metric)
        series = found.setdefault(metric, {}).setdefault(str(line.get("series") or ""), {})
        series[step] = Point(step=step, value=float(value or 0), std=float(std or 0) if _is_number(std) else None)
    return [
        Panel(
            title=titles[metric],
            series=tuple(
                Series(name=name, points=tuple(points[step] for step in sorted(points)))
                for name, points in by_name.items()
            ),
            best=direction(metric, better[metric]),
        )
        for metric, by_name in found.items()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def best_point(panel: Panel) -> tuple[int, Point] | None:
    """The number of the series and the point that is best, the earliest of equals; none where all of several are equal."""
    points = [(number, point) for number, series in enumerate(panel.series) for point in _finite(series)]
    if not panel.best or not points or (len(points) > 1 and len({point.value for _, point in points}) == 1):
        return None
    sign = 1 if panel.best == "lowest" else -1
    return min(points, key=lambda item: (sign * item[1].value, item[1].step))


def _finite(series: Series) -> list[Point]:
    return [point for point in series.points if math.isfinite(point.value)]


def plot(panels: Sequence[Panel], title: str = "") -> Pixels:
    """All panels in one picture, two or three in a row; a number that is not finite is left out."""
    if not panels:
        raise ValueError("a plot without panels")
    for panel in panels:
        values = [point.value for series in panel.series for point in _finite(series)]
        if not values:
            raise ValueError(f"{panel.title}: no finite number to plot")
        if panel.log and min(values) <= 0:
            raise ValueError(f"{panel.title}: {min(values)} has no place on a logarithmic axis")
    columns = len(panels) if len(panels) < 4 else (2 if len(panels) == 4 else 3)
    top = MARGIN + (TITLE_SIZE + 14 if title else 0)
    width = columns * PANEL_WIDTH + (columns + 1) * MARGIN
    height = top + math.ceil(len(panels) / columns) * (PANEL_HEIGHT + MARGIN)
    sheet = _Sheet(width, height)
    if title:
        sheet.write(MARGIN, MARGIN, _shortened(title, TITLE_SIZE + 2, width - 2 * MARGIN), TITLE_SIZE + 2, INK, "la")
    for number, panel in enumerate(panels):
        x = MARGIN + number % columns * (PANEL_WIDTH + MARGIN)
        y = top + number // columns * (PANEL_HEIGHT + MARGIN)
        _draw_panel(sheet, panel, x, y)
    return sheet.pixels()


def _width(text: str, size: int) -> float:
    return typeface(size * DENSITY).getlength(drawable(text)) / DENSITY


def _shortened(text: str, size: int, width: float) -> str:
    text = " ".join(drawable(text[:300]).split())
    if _width(text, size) <= width:
        return text
    while text and _width(text + "...", size) > width:
        text = text[:-1]
    return text.rstrip() + "..."


class _Sheet:
    """A canvas in units of length: shapes are drawn at once, finer than they are shown; words after them, at the size they are shown."""

    def __init__(self, width: float, height: float) -> None:
        self.unit = DENSITY * FINER
        self.size = (round(width * DENSITY), round(height * DENSITY))
        self.canvas = Image.new("RGB", (self.size[0] * FINER, self.size[1] * FINER), PAPER)
        self.pen = ImageDraw.Draw(self.canvas)
        self.words: list[tuple[float, float, str, int, Colour, str, int]] = []

    def line(self, path: Sequence[tuple[float, float]], colour: Colour, weight: float) -> None:
        scaled = [(x * self.unit, y * self.unit) for x, y in path]
        self.pen.line(scaled, fill=colour, width=max(1, round(weight * self.unit)), joint="curve")

    def dot(self, x: float, y: float, radius: float, fill: Colour, outline: Colour | None = None) -> None:
        box = [(x - radius) * self.unit, (y - radius) * self.unit, (x + radius) * self.unit, (y + radius) * self.unit]
        self.pen.ellipse(box, fill=fill, outline=outline, width=round(1.6 * self.unit) if outline else 0)

    def write(self, x: float, y: float, text: str, size: int, colour: Colour, anchor: str, halo: int = 0) -> None:
        self.words.append((x, y, drawable(text), size, colour, anchor, halo))

    def pixels(self) -> Pixels:
        shown = self.canvas.resize(self.size, Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(shown)
        for x, y, text, size, colour, anchor, halo in self.words:
            place = (round(x * DENSITY), round(y * DENSITY))
            face = typeface(size * DENSITY)
            draw.text(
                place, text, font=face, fill=colour, anchor=anchor, stroke_width=halo * DENSITY, stroke_fill=PAPER
            )
        return np.array(shown, dtype=np.uint8)


def _draw_panel(sheet: _Sheet, panel: Panel, x: float, y: float) -> None:
    points = [_finite(series) for series in panel.series]
    vertical = _value_axis(panel, [point for series in points for point in series])
    label_width = max(_width(text, SMALL_SIZE) for text in vertical.labels)
    sheet.write(x, y, _shortened(panel.title, TITLE_SIZE, PANEL_WIDTH), TITLE_SIZE, INK, "la")
    below_legend = _draw_legend(sheet, panel, x, y + TITLE_SIZE + 10)
    box = (x + label_width + 10, below_legend + 8, x + PANEL_WIDTH - 12, y + PANEL_HEIGHT - 36)
    steps = [point.step for series in points for point in series]
    horizontal = step_axis(min(steps), max(steps), num_most=max(2, int((box[2] - box[0]) / 55)))
    _draw_axes(sheet, box, horizontal, vertical)

    def place(step: float, value: float) -> tuple[float, float]:
        across, up = horizontal.share(step), vertical.share(value)
        return box[0] + across * (box[2] - box[0]), box[3] - up * (box[3] - box[1])

    for number, series in enumerate(points):
        _draw_series(sheet, series, COLOURS[number % len(COLOURS)], place, vertical)
    best = best_point(panel)
    if best is not None:
        paths = [[place(point.step, point.value) for point in series] for series in points]
        paths += [
            [place(point.step, max(vertical.low, point.value + side * point.std)) for side in (-1, 1)]
            for series in points
            for point in series
            if point.std
        ]
        _mark_best(sheet, best[1], COLOURS[best[0] % len(COLOURS)], place(best[1].step, best[1].value), box, paths)


def _value_axis(panel: Panel, points: Sequence[Point]) -> Axis:
    low = min(point.value - (point.std or 0) for point in points)
    high = max(point.value + (point.std or 0) for point in points)
    if not panel.log:
        return linear_axis(low, high)
    return log_axis(low if low > 0 else min(point.value for point in points), high)


def _draw_legend(sheet: _Sheet, panel: Panel, x: float, y: float) -> float:
    """The names of the series under the title, in as many lines as they need; returns where the last line ends."""
    named = [(number, series) for number, series in enumerate(panel.series) if series.name]
    if not named:
        return y
    left = x
    for number, series in named:
        name = _shortened(series.name, TYPE_SIZE, PANEL_WIDTH / 2)
        width = 20 + _width(name, TYPE_SIZE) + 16
        if left > x and left + width - 16 > x + PANEL_WIDTH:
            left, y = x, y + TYPE_SIZE + 6
        colour = COLOURS[number % len(COLOURS)]
        sheet.line([(left, y + 6), (left + 14, y + 6)], colour, 2)
        sheet.dot(left + 7, y + 6, 3, colour)
        sheet.write(left + 20, y + 6, name, TYPE_SIZE, INK, "lm")
        left += width
    return y + TYPE_SIZE + 4


def _draw_axes(sheet: _Sheet, box: Box, horizontal: Axis, vertical: Axis) -> None:
    left, top, right, bottom = box
    for tick, text in zip(vertical.ticks, vertical.labels, strict=True):
        y = bottom - vertical.share(tick) * (bottom - top)
        sheet.line([(left, y), (right, y)], RULE, 1)
        sheet.write(left - 8, y, text, SMALL_SIZE, SOFT_INK, "rm")
    for tick, text in zip(horizontal.ticks, horizontal.labels, strict=True):
        x = left + horizontal.share(tick) * (right - left)
        sheet.line([(x, top), (x, bottom)], RULE, 1)
        sheet.write(x, bottom + 7, text, SMALL_SIZE, SOFT_INK, "ma")
    sheet.write(right, bottom + 23, "step", SMALL_SIZE, SOFT_INK, "ra")


def _draw_series(sheet: _Sheet, points: Sequence[Point], colour: Colour, place: Any, vertical: Axis) -> None:
    path = [place(point.step, point.value) for point in points]
    faint = (int(colour[0] * 0.5 + 127), int(colour[1] * 0.5 + 127), int(colour[2] * 0.5 + 127))
    for point, (x, _) in zip(points, path, strict=True):
        if point.std:
            _, top = place(point.step, min(point.value + point.std, vertical.high))
            _, bottom = place(point.step, max(point.value - point.std, vertical.low))
            sheet.line([(x, top), (x, bottom)], faint, 1.2)
            for end in (top, bottom):
                sheet.line([(x - 3.5, end), (x + 3.5, end)], faint, 1.2)
    if len(path) > 1:
        sheet.line(path, colour, 1.8)
    # Where points stand closer than they are wide the line says it all.
    width = path[-1][0] - path[0][0] if len(path) > 1 else math.inf
    if width / len(path) >= 7:
        for x, y in path:
            sheet.dot(x, y, 3, colour)


PLACES = (
    *((0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1), (1, 0), (-1, 0)),
    *((0, -2), (0, 2), (0, -3), (0, 3), (-1, -2), (1, -2)),
)
"""Where a label may stand beside its point, in its own widths and heights; the first ones are the nicest."""


def _mark_best(
    sheet: _Sheet,
    point: Point,
    colour: Colour,
    place: tuple[float, float],
    box: Box,
    paths: Sequence[Sequence[tuple[float, float]]],
) -> None:
    """A ring around the best point, and its number where it hides least of the lines."""
    x, y = place
    sheet.dot(x, y, 5.5, PAPER, colour)
    sheet.dot(x, y, 2.2, colour)
    text = f"{short_number(point.value)} at {short_number(point.step)}"
    width, height = _width(text, TYPE_SIZE), TYPE_SIZE
    dense = [each for path in paths for each in _along(path)]
    options: list[tuple[float, Box]] = []
    for rank, (dx, dy) in enumerate(PLACES):
        middle = x + dx * (width / 2 + 11), y + dy * (height / 2 + 11)
        centre = min(max(middle[0], box[0] + width / 2 + 2), box[2] - width / 2)
        spot = (centre - width / 2, middle[1] - height / 2, centre + width / 2, middle[1] + height / 2)
        hidden = sum(spot[0] - 3 <= px <= spot[2] + 3 and spot[1] - 3 <= py <= spot[3] + 3 for px, py in dense)
        outside = spot[1] < box[1] - 2 or spot[3] > box[3] - 1
        on_ring = spot[0] - 1 < x + 6 and spot[2] + 1 > x - 6 and spot[1] < y + 6 and spot[3] > y - 6
        options.append((hidden + rank * 0.3 + 1000 * outside + 200 * on_ring, spot))
    _, spot = min(options)
    sheet.write((spot[0] + spot[2]) / 2, (spot[1] + spot[3]) / 2, text, TYPE_SIZE, INK, "mm", halo=2)


def _along(path: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points on a line about two units apart."""
    found = list(path)
    for (x, y), (next_x, next_y) in itertools.pairwise(path):
        num = int(math.hypot(next_x - x, next_y - y) / 2)
        found += [(x + (next_x - x) * k / num, y + (next_y - y) * k / num) for k in range(1, num)]
    return found
