"""Plots show every point where it belongs, mark the best one, and keep words inside the image and off each other."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halation.images.line_plots import (
    COLOURS,
    PlotAxis,
    PlotPanel,
    PlotPoint,
    PlotSeries,
    best_direction,
    best_point,
    draw_panels,
    format_number,
    linear_axis,
    log_axis,
    metric_panels,
    step_axis,
)
from halation.images.png_codec import Pixels

NUMBERS = st.floats(-1e12, 1e12).map(lambda value: 0.0 if abs(value) < 1e-9 else value)


def series(*values: float, name: str = "", std: float | None = None) -> PlotSeries:
    points = tuple(PlotPoint(step=100 * (k + 1), value=value, std=std) for k, value in enumerate(values))
    return PlotSeries(name=name, points=points)


def panel(*values: float, **settings: Any) -> PlotPanel:
    return PlotPanel(title="FD-streets", series=(series(*values),), **settings)


def coloured(shown: Pixels, number: int = 0) -> np.ndarray:
    """Where a series was drawn, by its colour."""
    return np.abs(shown.astype(int) - np.array(COLOURS[number])).max(axis=2) < 30


def middle(mask: np.ndarray, left: float, right: float) -> float:
    """The row in the middle of what is set between two shares of the width."""
    rows, columns = np.nonzero(mask)
    chosen = rows[(columns >= left * mask.shape[1]) & (columns < right * mask.shape[1])]
    assert len(chosen)
    return float(chosen.mean())


# -- numbers and axes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (31.24, "31.2"), (12.0, "12"), (999, "999"), (999.6, "1k"), (1500, "1.5k"), (12_345, "12.35k"), (2_250_000, "2.25M"),
        (0.0123, "0.0123"), (0.5, "0.5"), (3.1e-5, "3.1e-5"), (-0.25, "-0.25"), (-1500, "-1.5k"), (-0.0, "0"), (999_999, "1M"), (3e20, "3e20"),
    ],
)  # fmt: skip
def test_a_number_is_written_as_people_read_it(value: float, text: str) -> None:
    assert format_number(value) == text


def assert_readable(axis: PlotAxis, low: float, high: float) -> None:
    hair = (abs(low) + abs(high)) * 1e-6
    assert axis.low <= low + hair
    assert axis.high >= high - hair
    assert 1 <= len(axis.ticks) <= 9
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert len(set(axis.labels)) == len(axis.labels), axis.labels
    assert all(-1e-6 <= axis.fraction(tick) <= 1 + 1e-6 for tick in axis.ticks)


@given(NUMBERS, NUMBERS)
def test_a_linear_axis_holds_its_numbers_between_round_ones_that_differ(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert_readable(linear_axis(low, high), low, high)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_a_logarithmic_axis_holds_its_numbers(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert_readable(log_axis(low, high), low, high)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(2, 8))
def test_steps_stand_on_whole_numbers_between_the_first_and_the_last(one: int, other: int, num: int) -> None:
    first, last = sorted((one, other))
    axis = step_axis(first, last, num)
    assert_readable(axis, first, last)
    assert all(tick == int(tick) and first <= tick <= last for tick in axis.ticks)
    assert 0 < axis.fraction(first) <= axis.fraction(last) < 1


def test_ticks_share_their_unit() -> None:
    assert step_axis(500, 12_000).labels == ("2k", "4k", "6k", "8k", "10k", "12k")
    assert linear_axis(0.00026, 0.00035).labels == ("2.6e-4", "2.8e-4", "3.0e-4", "3.2e-4", "3.4e-4", "3.6e-4")
    assert linear_axis(-1, 1).labels == ("-1.0", "-0.5", "0", "0.5", "1.0")
    assert log_axis(0.02, 4).labels == ("0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5")


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
    assert first.series == (PlotSeries(points=(PlotPoint(step=10, value=40.0), PlotPoint(step=20, value=31.0))),)
    assert second.series[0].points == (PlotPoint(step=10, value=0.1, std=0.01),)
    assert first.best == second.best == "lowest"


def test_named_series_of_a_metric_share_its_panel() -> None:
    rows = [
        {"step": step, "metric": "agreement", "series": name, "value": 0.5}
        for name in ("ema", "raw")
        for step in (1, 2)
    ]
    (only,) = metric_panels(rows)
    assert [each.name for each in only.series] == ["ema", "raw"]
    assert only.best == "highest"


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
    assert found == (0, PlotPoint(step=200, value=1.0))
    assert best_point(panel(1.0)) is None
    assert best_point(panel(1.0, best="lowest")) == (0, PlotPoint(step=100, value=1.0))
    assert best_point(panel(2.0, 2.0, best="lowest")) is None, "none of them is better than the other"
    two = PlotPanel(title="x", series=(series(1.0, 2.0), series(0.0, 5.0)), best="highest")
    assert best_point(two) == (1, PlotPoint(step=200, value=5.0))


# -- the image


def test_a_falling_line_falls_and_a_rising_one_rises() -> None:
    shown = draw_panels([panel(9, 8, 7, 6, 5, 4, 3, 2, 1)])
    mask = coloured(shown)
    assert middle(mask, 0.1, 0.3) + 100 < middle(mask, 0.45, 0.6) < middle(mask, 0.8, 1.0) - 100
    both = draw_panels([PlotPanel(title="x", series=(series(1, 2, 3, name="up"), series(3, 2, 1, name="down")))])
    top = both.shape[0] // 4  # below the legend
    up, down = coloured(both, 0)[top:], coloured(both, 1)[top:]
    assert middle(up, 0.1, 0.3) > middle(up, 0.8, 1.0)
    assert middle(down, 0.1, 0.3) < middle(down, 0.8, 1.0)


def test_the_best_point_has_a_ring_and_its_number() -> None:
    bare, marked = draw_panels([panel(3, 1, 2)]), draw_panels([panel(3, 1, 2, best="lowest")])
    changed = np.abs(bare.astype(int) - marked).max(axis=2) > 40
    columns = np.nonzero(changed)[1]
    assert 0.4 < columns.mean() / changed.shape[1] < 0.7, "the mark is not at the middle point"
    assert (marked[changed].max(axis=1) < 90).sum() > 50, "no words beside it"


def test_error_bars_reach_as_far_as_the_deviation() -> None:
    narrow = draw_panels([PlotPanel(title="x", series=(series(5, 5, std=1.0), series(0, 10)))])
    wide = draw_panels([PlotPanel(title="x", series=(series(5, 5, std=4.0), series(0, 10)))])
    faint = np.array([int(part * 0.5 + 127) for part in COLOURS[0]])
    reach = [np.ptp(np.nonzero(np.abs(shown.astype(int) - faint).max(axis=2) < 12)[0]) for shown in (narrow, wide)]
    assert reach[1] == pytest.approx(4 * reach[0], rel=0.1)


@pytest.mark.parametrize("num_panels", [1, 2, 3, 4, 5, 7])
def test_the_margins_stay_empty(num_panels: int) -> None:
    panels = [
        PlotPanel(
            title="a very long title that no panel can hold " * 4,
            series=tuple(series(-1e6 * k, 3e6, -2e6, name=f"the long name of series number {k}", std=1e5) for k in range(5)),
            best=best,
        )
        for best in ("lowest", "highest", "", "lowest", "highest", "", "lowest")[:num_panels]
    ]  # fmt: skip
    shown = draw_panels(panels, "the title of it all, which goes on and on " * 9)
    edge = shown[0, 0]
    for side in (shown[:, :20], shown[:, -20:], shown[:20], shown[-8:]):
        assert (side == edge).all()


@pytest.mark.parametrize(("value", "log"), [(5.0, False), (-3e-9, False), (1e14, False), (5.0, True), (1e14, True)])
def test_one_point_alone_stands_in_the_middle(value: float, log: bool) -> None:
    shown = draw_panels([panel(value, log=log)])
    rows, columns = np.nonzero(coloured(shown))
    assert 0.4 < columns.mean() / shown.shape[1] < 0.65
    assert 0.3 < rows.mean() / shown.shape[0] < 0.7


def test_a_number_that_is_not_finite_leaves_the_others_where_they_are() -> None:
    points = [PlotPoint(step=step, value=value) for step, value in ((1, 1.0), (2, math.nan), (3, math.inf), (4, 4.0))]
    whole = PlotPanel(title="x", series=(PlotSeries(points=tuple(points)),))
    without = PlotPanel(title="x", series=(PlotSeries(points=(points[0], points[3])),))
    assert np.array_equal(draw_panels([whole]), draw_panels([without]))


def test_a_thousand_points_are_a_line() -> None:
    shown = draw_panels([panel(*np.linspace(1, 100, 1000), log=True, best="lowest")])
    assert coloured(shown)[:, ::20].any(axis=0).mean() > 0.75


def test_what_cannot_be_plotted_is_refused() -> None:
    with pytest.raises(ValueError, match="without panels"):
        draw_panels([])
    with pytest.raises(ValueError, match="FD-streets: no finite number"):
        draw_panels([panel(math.nan)])
    with pytest.raises(ValueError, match="no finite number"):
        draw_panels([PlotPanel(title="empty", series=())])
    with pytest.raises(ValueError, match="FD-streets: 0 has no place on a logarithmic axis"):
        draw_panels([panel(0, 1, log=True)])


@pytest.mark.parametrize("text", ["", "\ud83d", "a\0b\nc", "雨の街", "é" * 400])
def test_any_words_can_be_drawn(text: str) -> None:
    named = PlotPanel(title=text, series=(series(1, 2, name=text),), best="lowest")
    assert draw_panels([named], text).shape[2] == 3


def test_the_module_is_there_without_torch() -> None:
    code = "import sys, halation.images.line_plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
