"""Plots place every point, mark the best one, and keep labels inside and apart."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halation.images.plot import (
    CURVE,
    PlotPanel,
    PlotPoint,
    best_direction,
    best_point,
    draw_panels,
    format_number,
    metric_panels,
)
from halation.images.png_codec import Pixels

NUMBERS = st.floats(-1e12, 1e12).map(lambda value: 0.0 if abs(value) < 1e-9 else value)
CURVE_COLOUR = np.array([int(CURVE[at : at + 2], 16) for at in (1, 3, 5)])


def panel(*values: float, std: float | None = None, **fields: Any) -> PlotPanel:
    points = tuple(PlotPoint(step=100 * (k + 1), value=value, std=std) for k, value in enumerate(values))
    return PlotPanel(**{"title": "FD-streets", "points": points} | fields)


def coloured(shown: Pixels) -> np.ndarray:
    """Where the curve was drawn, by its colour."""
    return np.abs(shown.astype(int) - CURVE_COLOUR).max(axis=2) < 30


def middle(mask: np.ndarray, left: float, right: float) -> float:
    """The row in the middle of what is set between two shares of the width."""
    rows, columns = np.nonzero(mask)
    chosen = rows[(columns >= left * mask.shape[1]) & (columns < right * mask.shape[1])]
    assert len(chosen)
    return float(chosen.mean())


# -- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (31.24, "31.2"), (12.0, "12"), (999, "999"), (999.6, "1k"), (1500, "1.5k"),
        (12_345, "12.35k"), (2_250_000, "2.25M"),
        (0.0123, "0.0123"), (0.5, "0.5"), (3.1e-5, "3.1e-5"), (-0.25, "-0.25"), (-1500, "-1.5k"), (-0.0, "0"),
        (999_999, "1M"), (3e20, "3e20"),
    ],
)  # fmt: skip
def test_a_number_is_written_as_people_read_it(value: float, text: str) -> None:
    assert format_number(value) == text


# -- from metrics.jsonl


def test_the_lines_of_a_run_become_a_panel_for_each_metric() -> None:
    lines = [
        {"step": 10, "loss": 0.5, "lr": 1e-3},
        {"step": 20, "metric": "fd", "name": "FD-streets", "value": 30.0},
        {"step": 10, "metric": "fd", "name": "FD-streets", "value": 40.0, "std": None},
        {"step": 10, "metric": "kid", "name": "KID-streets", "value": 0.1, "std": 0.01},
        {"step": 20, "metric": "fd", "name": "FD-streets", "value": 31.0},
        {"step": 30, "metric": "fd", "value": None},
        {"step": 30, "metric": "fd", "value": math.nan},
        {"step": 30, "metric": "precision", "value": None},
        {"metric": "fd", "value": 1.0},
    ]
    first, second = metric_panels(lines)
    assert (first.title, second.title) == ("FD-streets", "KID-streets")
    assert first.points == (PlotPoint(step=10, value=40.0), PlotPoint(step=20, value=31.0))
    assert second.points == (PlotPoint(step=10, value=0.1, std=0.01),)
    assert first.best == second.best == "lowest"


def test_a_line_may_say_itself_which_numbers_are_better() -> None:
    lines = [{"step": 1, "metric": "speed", "value": 1.0, "better": "higher"}]
    assert metric_panels(lines)[0].best == "highest"
    later = {"step": 2, "metric": "speed", "value": 2.0}
    assert metric_panels([*lines, later])[0].best == "highest", "a line that says nothing takes nothing back"
    assert metric_panels([{"step": 1, "metric": "clip", "value": 1.0, "better": "lower"}])[0].best == "lowest"


def test_what_is_better_is_known_by_the_name() -> None:
    assert {best_direction(name) for name in ("fid", "fd", "kid", "heldout_loss", "KID-streets", "FD-DINOv2")} == {
        "lowest"
    }
    names = ("is", "precision", "recall", "density", "coverage", "clip", "agreement", "Inception score", "CLIP score")
    assert {best_direction(name) for name in names} == {"highest"}
    assert best_direction("pictures_per_s") == ""


def test_the_best_point_is_the_earliest_of_equals_and_never_one_that_is_not_finite() -> None:
    found = best_point(panel(3.0, 1.0, math.nan, 1.0, 2.0, best="lowest"))
    assert found == PlotPoint(step=200, value=1.0)
    assert best_point(panel(1.0)) is None
    assert best_point(panel(1.0, best="lowest")) == PlotPoint(step=100, value=1.0)
    assert best_point(panel(2.0, 2.0, best="lowest")) is None, "none of them is better than the other"
    assert best_point(panel(1.0, 5.0, best="highest")) == PlotPoint(step=200, value=5.0)


# -- the image


def test_a_falling_line_falls_and_a_rising_one_rises() -> None:
    shown = draw_panels([panel(9, 8, 7, 6, 5, 4, 3, 2, 1)])
    mask = coloured(shown)
    assert middle(mask, 0.1, 0.3) + 100 < middle(mask, 0.45, 0.6) < middle(mask, 0.8, 1.0) - 100
    rising = coloured(draw_panels([panel(1, 2, 3)]))
    assert middle(rising, 0.1, 0.3) > middle(rising, 0.8, 1.0) + 100


def test_the_best_point_has_a_ring_and_its_number() -> None:
    lowest, highest = (draw_panels([panel(3, 1, 5, 3, best=best)]) for best in ("lowest", "highest"))
    changed = np.abs(lowest.astype(int) - highest).max(axis=2) > 40
    for shown, place in ((lowest, 0.39), (highest, 0.69)):
        marked = changed & (shown.max(axis=2) < 90)
        rows, columns = np.nonzero(marked)
        assert marked.sum() > 50, "no words beside it"
        assert columns.mean() / shown.shape[1] == pytest.approx(place, abs=0.05), "the label is not at the best point"
        curve_rows = np.nonzero(coloured(shown))[0]
        assert rows.min() > curve_rows.max() if shown is lowest else rows.max() < curve_rows.min(), "it hides the line"


def test_error_bars_reach_as_far_as_the_deviation() -> None:
    points = [
        PlotPoint(step=step, value=step / 10, std=std) for step, std in ((0, None), (25, 1), (75, 4), (100, None))
    ]
    shown = draw_panels([panel(points=tuple(points))])
    faint = np.abs(shown.astype(int) - (CURVE_COLOUR * 0.5 + 126)).max(axis=2) < 12
    half = shown.shape[1] // 2
    reach = [np.ptp(np.nonzero(part.sum(axis=1) >= 6)[0]) for part in (faint[:, :half], faint[:, half:])]  # the caps
    assert reach[1] == pytest.approx(4 * reach[0], rel=0.1)


@pytest.mark.parametrize("num_panels", [1, 2, 3, 4, 5, 7])
def test_the_margins_stay_empty(num_panels: int) -> None:
    panels = [
        PlotPanel(
            title="a very long title that no panel can hold " * 4,
            points=panel(-1e6, 3e6, -2e6, std=1e5).points,
            best=best,
        )
        for best in ("lowest", "highest", "", "lowest", "highest", "", "lowest")[:num_panels]
    ]  # fmt: skip
    shown = draw_panels(panels, "the title of it all, which goes on and on " * 9)
    edge = shown[0, 0]
    for side in (shown[:, :20], shown[:, -20:], shown[:20], shown[-8:]):
        assert (side == edge).all()


@pytest.mark.parametrize("value", [5.0, -3e-9, 1e14, 0.0])
def test_one_point_alone_stands_in_the_middle(value: float) -> None:
    shown = draw_panels([panel(value)])
    rows, columns = np.nonzero(coloured(shown))
    assert 0.4 < columns.mean() / shown.shape[1] < 0.65
    assert 0.3 < rows.mean() / shown.shape[0] < 0.7


def test_a_number_that_is_not_finite_leaves_the_others_where_they_are() -> None:
    whole = panel(1.0, math.nan, math.inf, 4.0)
    without = panel(points=(whole.points[0], whole.points[3]))
    assert np.array_equal(draw_panels([whole]), draw_panels([without]))


def test_a_thousand_points_are_a_line() -> None:
    shown = draw_panels([panel(*np.linspace(1, 100, 1000), best="lowest")])
    assert coloured(shown)[:, ::20].any(axis=0).mean() > 0.75


def test_what_cannot_be_plotted_is_refused() -> None:
    with pytest.raises(ValueError, match="without panels"):
        draw_panels([])
    with pytest.raises(ValueError, match="FD-streets: no finite number"):
        draw_panels([panel(math.nan)])
    with pytest.raises(ValueError, match="no finite number"):
        draw_panels([PlotPanel(title="empty", points=())])


@pytest.mark.parametrize("text", ["", "\ud83d", "a\0b\nc", "雨の街", "é" * 400, "$x$ {} \\frac", "مرحبا"])
def test_any_words_can_be_drawn(text: str) -> None:
    assert draw_panels([panel(1, 2, title=text, best="lowest")], text).shape[2] == 3


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_any_numbers_can_be_drawn(values: list[float], first: int) -> None:
    points = tuple(PlotPoint(step=first + k, value=value, std=abs(value)) for k, value in enumerate(values))
    assert coloured(draw_panels([panel(points=points, best="lowest")])).any()


def test_only_drawing_imports_matplotlib_and_nothing_imports_torch() -> None:
    code = (
        "import sys; from halation.images import grid, plot; early = 'matplotlib' in sys.modules;"
        "plot.draw_panels([plot.PlotPanel(title='x', points=(plot.PlotPoint(step=1, value=1.0),))]);"
        "sys.exit(early or 'torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_pixels_do_not_depend_on_matplotlib_settings_or_its_folder(tmp_path: Path) -> None:
    """Pixels are the same for any settings of matplotlib, and without its folder."""
    rc_file = tmp_path / "matplotlibrc"
    rc_file.write_text(
        "lines.linewidth: 9\nfont.family: serif\nsavefig.dpi: 30\nno.such.setting: 1\ntext.usetex: True\n"
    )
    code = (
        "import hashlib; from halation.images.plot import *;"
        "panel = PlotPanel(title='x', points=(PlotPoint(step=1, value=1.0),));"
        "print(hashlib.sha256(draw_panels([panel], 'y')).hexdigest())"
    )
    hashes = set()
    for variables in ({}, {"MATPLOTLIBRC": str(rc_file)}, {"MPLCONFIGDIR": "/proc/none"}):
        environment = {**os.environ, **variables}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        hashes.add(done.stdout)
    assert len(hashes) == 1


def test_drawing_leaves_the_settings_of_matplotlib_as_they_are() -> None:
    matplotlib.rcParams["lines.linewidth"] = 7
    try:
        before = dict(matplotlib.rcParams)
        draw_panels([panel(1, 2)])
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcdefaults()
