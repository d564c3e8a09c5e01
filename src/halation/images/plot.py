"""Line plots with matplotlib: the panels of metrics.png, and a loss curve.

The same input gives the same pixels: font, style and size are fixed here, and the user's matplotlibrc is ignored.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from halation.images.png_codec import Pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

BestDirection = Literal["", "lowest", "highest"]
LOWER_IS_BETTER = ("fid", "fd", "kid", "loss")
HIGHER_IS_BETTER = ("is", "precision", "recall", "density", "coverage", "clip", "agreement", "score")
PANEL_WIDTH, PANEL_HEIGHT = 460, 300
BACKGROUND, TEXT, MUTED, GRID_LINE = "#fcfcfb", "#20232a", "#707580", "#dee0e4"
CURVE, FAINT_CURVE = "#2563b0", "#b7ceea"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 8,
    "text.parse_math": False,
    "text.color": TEXT,
    "figure.facecolor": BACKGROUND,
    "axes.facecolor": BACKGROUND,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.spines.bottom": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-5, 7),
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelcolor": MUTED,
    "grid.color": GRID_LINE,
    "lines.linewidth": 1.4,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12,
}  # fmt: skip


def format_number(value: float) -> str:
    """Format a number with at most three or four digits: 31.2, 0.0123, 1.5k, 2.25M, 3.1e-5."""
    size = abs(value)
    if size and not 1e-4 <= size < 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if 0 < size < 1:
        return f"{value:.3g}"
    units = [(1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")]
    unit, letter = next(((unit, letter) for unit, letter in units if size < 999.5 * unit), units[-1])
    decimals = (4 if letter else 3) - len(str(int(size / unit)))
    text = f"{value / unit:.{max(0, decimals)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return ("0" if text == "-0" else text) + letter


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """One value; `std` is the length of its error bar on both sides."""

    step: int
    value: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlotPanel:
    """One plot: points joined by a line; `best` selects the point to mark, if any."""

    title: str
    points: tuple[PlotPoint, ...]
    best: BestDirection = ""


def best_direction(metric: str, better: object = None) -> BestDirection:
    """Return which value of a metric is best, from `better` or its name; empty if unknown."""
    if better in ("lower", "higher"):
        return "lowest" if better == "lower" else "highest"
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(word in LOWER_IS_BETTER for word in words):
        return "lowest"
    return "highest" if any(word in HIGHER_IS_BETTER for word in words) else ""


def metric_panels(lines: Iterable[Mapping[str, Any]]) -> list[PlotPanel]:
    """Return a panel for each metric of a metrics.jsonl, in order of first appearance.

    Other lines and values that are not finite numbers are skipped. Of two lines for a step the later counts: the step
    was repeated. A line may have a `name` to display and `better`, either "lower" or "higher".
    """
    titles: dict[str, str] = {}
    better: dict[str, Any] = {}
    found: dict[str, dict[int, PlotPoint]] = {}
    for line in lines:
        metric, step, value, std = (line.get(key) for key in ("metric", "step", "value", "std"))
        if not isinstance(metric, str) or not isinstance(step, int) or not _is_number(value):
            continue
        titles[metric] = str(line.get("name") or metric)
        better[metric] = line.get("better") or better.get(metric)
        point = PlotPoint(step=step, value=float(value or 0), std=float(std or 0) if _is_number(std) else None)
        found.setdefault(metric, {})[step] = point
    return [
        PlotPanel(
            title=titles[metric],
            points=tuple(points[step] for step in sorted(points)),
            best=best_direction(metric, better[metric]),
        )
        for metric, points in found.items()
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def best_point(panel: PlotPanel) -> PlotPoint | None:
    """Return the best point, the earliest of equals; None if all of several are equal."""
    points = _finite_points(panel)
    if not panel.best or not points or (len(points) > 1 and len({point.value for point in points}) == 1):
        return None
    sign = 1 if panel.best == "lowest" else -1
    return min(points, key=lambda point: (sign * point.value, point.step))


def _finite_points(panel: PlotPanel) -> list[PlotPoint]:
    return [point for point in panel.points if math.isfinite(point.value)]


def draw_panels(panels: Sequence[PlotPanel], title: str = "") -> Pixels:
    """Draw all panels in one image, at most three per row; non-finite values are skipped."""
    if not panels:
        raise ValueError("a plot without panels")
    for panel in panels:
        if not _finite_points(panel):
            raise ValueError(f"{panel.title}: no finite number to plot")
    columns = len(panels) if len(panels) < 4 else (2 if len(panels) == 4 else 3)
    rows = math.ceil(len(panels) / columns)
    width, height = columns * PANEL_WIDTH, rows * PANEL_HEIGHT + (30 if title else 0)

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        if title:
            heading = figure.suptitle(_printable(title), x=0.12 / figure.get_figwidth(), ha="left", size=12)
            _shorten(heading, width - 40)
        for number, panel in enumerate(panels):
            _draw_panel(figure.add_subplot(rows, columns, number + 1), panel)

    return _render(width, height, draw, pixels_per_unit=2)


def _draw_panel(axes: Axes, panel: PlotPanel) -> None:
    """Draw one panel; a lowest best point has its label below, a highest above."""
    points = _finite_points(panel)
    first, last = min(point.step for point in points), max(point.step for point in points)
    _shorten(axes.set_title(_printable(panel.title), pad=10), PANEL_WIDTH - 90)
    axes.set_xlabel("step", loc="right")
    axes.margins(0.04, 0.16 if panel.best else 0.06)
    axes.locator_params(axis="y", nbins=5, steps=(1, 2, 5, 10))
    axes.locator_params(axis="x", nbins=6, steps=(1, 2, 5, 10), integer=True)
    if first == last:
        axes.set_xticks([first])
        axes.set_xlim(first - 1, first + 1)
    # With many points, markers would overlap.
    marker = "o" if len(points) <= 50 else ""
    axes.plot([point.step for point in points], [point.value for point in points], color=CURVE, marker=marker, ms=4.5)
    bars = [(point.step, point.value, point.std) for point in points if point.std]
    if bars:
        steps, values, stds = zip(*bars, strict=True)
        axes.errorbar(steps, values, stds, fmt="none", ecolor=CURVE, elinewidth=1, capsize=3, alpha=0.5)
    best = best_point(panel)
    if best is not None:
        side = -1 if panel.best == "lowest" else 1
        place = (best.step - first) / (last - first) if last > first else 0.5
        axes.plot(best.step, best.value, "o", color=CURVE, ms=10, mfc=BACKGROUND, mew=1.4)
        axes.plot(best.step, best.value, "o", color=CURVE, ms=4)
        axes.annotate(
            f"{format_number(best.value)} at {format_number(best.step)}",
            (best.step, best.value + side * (best.std or 0)),
            xytext=(0, 8 * side),
            textcoords="offset points",
            ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
            va="top" if side < 0 else "bottom",
        )


def draw_loss_curve(
    points: Sequence[tuple[int, float]],
    step_marks: Sequence[int],
    size: tuple[int, int],
    box: tuple[int, int, int, int],
) -> Pixels:
    """Draw the loss by step: each value in a faint colour, the running mean in a strong one.

    `size` is (width, height) of the image. The axes fill `box`: left, top, width and height in pixels. Each of
    `step_marks` has a mark on the step axis.
    """
    steps = np.array([step for step, _ in points], dtype=np.float64)
    values = np.array([value for _, value in points], dtype=np.float64)
    # The mean over about a twentieth of the curve around each point, truncated at the ends.
    middle, half_window = np.arange(len(values)), len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start, end = np.maximum(middle - half_window, 0), np.minimum(middle + half_window + 1, len(values))
    smooth = (sums[end] - sums[start]) / (end - start)
    first, last = float(steps.min()), float(max(steps.max(), steps.min() + 1))
    # A single huge loss would flatten the rest of the curve.
    low, high = float(values.min()), float(max(np.quantile(values, 0.99), smooth.max()))

    def draw(figure: Figure) -> None:
        left, top, width, height = box
        axes = figure.add_axes(
            (left / size[0], 1 - (top + height) / size[1], width / size[0], height / size[1]),
            xlim=(first, last),
            ylim=(low, high) if high > low else (low - 0.1 * (abs(low) or 1), high + 0.1 * (abs(high) or 1)),
        )
        axes.grid(False, axis="x")
        axes.set_title(f"loss, {smooth[-1]:.4g} at the end", size=9)
        axes.locator_params(axis="y", nbins=5, steps=(1, 2, 5, 10))
        axes.set_xticks([first, last], [f"step {first:,.0f}", f"step {last:,.0f}"])
        axes.get_xticklabels()[0].set_horizontalalignment("left")
        axes.get_xticklabels()[1].set_horizontalalignment("right")
        axes.vlines(step_marks, 0, 0.05, color=MUTED, lw=0.8, transform=axes.get_xaxis_transform())
        axes.plot(steps, values, color=FAINT_CURVE, lw=0.8)
        axes.plot(steps, smooth, color=CURVE)

    return _render(*size, draw)


def _render(width: float, height: float, draw: Callable[[Figure], None], pixels_per_unit: int = 1) -> Pixels:
    """Render what `draw` adds to a figure, independent of the process's matplotlib settings."""
    # Imported here: it takes a second, and it logs the path of its font cache.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # matplotlib draws an empty box
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        canvas: Any = FigureCanvasAgg(Figure((width / 100, height / 100), dpi=100 * pixels_per_unit))
        draw(canvas.figure)
        canvas.draw()
        return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _printable(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text[:300]).split())


def _shorten(text: Text, width: float) -> None:
    """Shorten a text to `width` units on a figure with two pixels per unit."""
    words = text.get_text()
    while words and text.get_window_extent().width > 2 * width:
        words = words[:-1]
        text.set_text(words.rstrip() + "...")
