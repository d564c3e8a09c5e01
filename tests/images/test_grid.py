"""Grids and figures show every image, failed ones too."""

from __future__ import annotations

import numpy as np
import pytest

from halation.images.grid import make_grid, progress_figure
from halation.images.png_codec import Pixels


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_grid_holds_every_image_enlarged_by_a_whole_factor() -> None:
    images = [noise(32, 32, seed) for seed in range(5)]
    shown = make_grid(images, columns=3)
    assert shown.shape == (12 + 2 * (128 + 12), 12 + 3 * (128 + 12), 3)
    for number, image in enumerate(images):
        y, x = 12 + number // 3 * 140, 12 + number % 3 * 140
        assert np.array_equal(shown[y : y + 128 : 4, x : x + 128 : 4], image)


def test_images_that_belong_together_stand_closer_than_the_others() -> None:
    images = [noise(32, 32, seed) for seed in range(8)]
    shown = make_grid(images, columns=4, group=2)
    assert shown.shape == (12 + 2 * 140, 12 + 4 * 140 + 16, 3)
    for number, image in enumerate(images):
        y, x = 12 + number // 4 * 140, 12 + number % 4 * 140 + number % 4 // 2 * 16
        assert np.array_equal(shown[y : y + 128 : 4, x : x + 128 : 4], image)


def test_a_failed_image_is_a_marked_cell_and_the_others_keep_their_places() -> None:
    shown = make_grid([None, noise(64, 64)], columns=2)
    assert np.array_equal(shown[12:140:2, 152:280:2], noise(64, 64))
    cell = shown[12:140, 12:140].astype(int)
    assert (cell[..., 0] - cell[..., 1] > 80).any(), "the word in red is missing"


@pytest.mark.parametrize(
    "label",
    [
        "",
        "x" * 5000,
        "\u96e8\u306e\u8857",
        "\u0645\u0631\u062d\u0628\u0627",
        "\U0001f697\U0001f3fd",
        "a\0b\nc",
        "\ud83d",
        "w " * 400,
    ],
)
def test_any_caption_can_be_drawn_and_stays_in_its_cell(label: str) -> None:
    shown = make_grid([noise(128, 128), noise(128, 128)], columns=2, labels=[label, "short"])
    assert shown.shape[1] == 12 + 2 * 140
    assert (shown[140:, 140:152] == shown[0, 0]).all(), "the caption runs into the gutter"


def test_a_caption_changes_what_is_under_its_image_only() -> None:
    one = make_grid([noise(128, 128)] * 2, columns=2, labels=["one", "two"])
    other = make_grid([noise(128, 128)] * 2, columns=2, labels=["one", "six"])
    rows, columns = np.nonzero((one != other).any(axis=2))
    assert rows.min() >= 140
    assert columns.min() >= 150  # a letter may lean a pixel to the left


def test_labels_that_do_not_match_the_images_are_refused() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 images"):
        make_grid([None, None], columns=2, labels=["one"])


def test_no_image_at_all_is_still_a_grid() -> None:
    assert make_grid([], columns=4).size > 0


def test_large_images_are_shrunk_so_that_a_grid_stays_a_preview() -> None:
    assert make_grid([noise(1024, 2048)] * 2, columns=2).shape == (12 + 256 + 12, 12 + 2 * (512 + 12), 3)


def progress(loss: list[tuple[int, float]] | None = None) -> Pixels:
    rows = [(step, [noise(32, 32, step + column) for column in range(4)]) for step in (0, 10, 20)]
    return progress_figure(rows, ["a highway", "a rainy street", "", "w " * 300], loss, "a training")


def test_the_progress_figure_holds_each_image_in_its_row_and_column() -> None:
    shown = progress()
    firsts = []
    for step in (0, 10, 20):
        for column in range(4):
            large = noise(32, 32, step + column).repeat(4, axis=0).repeat(4, axis=1)
            corners = np.argwhere((shown[:-127, :-127] == large[0, 0]).all(axis=2))
            places = [(y, x) for y, x in corners if np.array_equal(shown[y : y + 128, x : x + 128], large)]
            assert len(places) == 1
            firsts.append(places[0])
    places = np.array(firsts).reshape(3, 4, 2)
    assert (places[..., 0] == places[:, :1, 0]).all(), "a row is not level"
    assert (places[..., 1] == places[:1, :, 1]).all(), "a column is not upright"
    assert (np.diff(places[:, 0, 0]) == 136).all()
    assert (np.diff(places[0, :, 1]) == 136).all()


def test_a_loss_curve_is_added_below_and_changes_nothing_above() -> None:
    bare, curve = progress(), progress([(step, 1 / (1 + step)) for step in range(21)])
    assert curve.shape[0] > bare.shape[0] + 100
    end = bare.shape[0] - 28
    assert np.array_equal(curve[:end], bare[:end])
    blue = curve[end:].astype(int)
    assert (blue[..., 2] - blue[..., 0] > 100).any()


@pytest.mark.parametrize(
    "loss",
    [
        [],
        [(1, 0.5)],
        [(1, 0.5), (2, 0.5)],
        [(1, float("nan")), (2, 1.0), (3, float("inf"))],
        [(5, 0.0), (5, 0.0)],
        [(1, -2.0), (2, 1e30)],
        [(step, 1e-9 * step) for step in range(5000)],
    ],
)
def test_any_loss_can_be_drawn(loss: list[tuple[int, float]]) -> None:
    assert progress(loss).ndim == 3


def test_a_step_without_images_and_a_figure_without_steps_can_be_drawn() -> None:
    assert progress_figure([(0, [None, None])], ["a", "b"], None, "all failed").ndim == 3
    assert progress_figure([], [], [(0, 1.0), (9, 0.5)], "no samples yet").ndim == 3
