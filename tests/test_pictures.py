"""PNG bytes are lossless, quick, small and strict to read; grids and figures show every picture, failed ones too."""

from __future__ import annotations

import io
import json
import statistics
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from halation.errors import InputError
from halation.pictures import Pixels, encode_png, grid, picture_text, progress_figure, read_png

SPEC = {
    "index": 3,
    "id": "a",
    "prompt": "a rainy street",
    "seed": 42,
    "height": 32,
    "width": 48,
    "steps": 10,
    "guidance_scale": 4.0,
    "negative_prompt": "",
    "num_frames": 1,
}


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def landscape(size: int) -> Pixels:
    """A smooth picture with detail at every scale and a little grain, as cameras and models give it."""
    generator = np.random.default_rng(7)
    y, x = np.mgrid[0:size, 0:size] / size
    picture = np.stack(
        [120 + 90 * np.sin(3 * x + 2 * y), 110 + 80 * np.cos(4 * y - x), 100 + 70 * np.sin(5 * x * y)], -1
    )
    for cells in (4, 16, 64):
        rough = generator.normal(size=(cells, cells, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(rough[..., channel]).resize((size, size), Image.Resampling.BICUBIC)
            picture[..., channel] += np.asarray(layer) * 60 / cells**0.6
    return np.clip(picture + generator.normal(size=picture.shape) * 2, 0, 255).astype(np.uint8)


def pillow_default(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from(["noise", "flat", "black"]))
@settings(max_examples=60, deadline=None)
def test_pixels_survive_encoding_whatever_they_are(height: int, width: int, seed: int, kind: str) -> None:
    pixels = noise(height, width, seed)
    if kind == "flat":
        pixels[:] = pixels[0, 0]
    if kind == "black":
        pixels[:] = 0
    with Image.open(io.BytesIO(encode_png(pixels, {}))) as image:
        assert image.mode == "RGB"
        assert np.array_equal(np.array(image), pixels)


def test_equal_pictures_give_equal_bytes_also_from_a_view_with_strides() -> None:
    pixels = noise(32, 64)
    assert encode_png(pixels[:, ::2], {"k": "v"}) == encode_png(np.ascontiguousarray(pixels[:, ::2]), {"k": "v"})


def test_encoding_is_five_times_as_fast_as_pillow_and_at_most_fifteen_percent_larger() -> None:
    pixels = landscape(1024)
    ours, theirs = [], []
    for _ in range(3):
        start = time.perf_counter()
        encoded = encode_png(pixels, {})
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        reference = pillow_default(pixels)
        theirs.append(time.perf_counter() - start)
    assert len(encoded) <= 1.15 * len(reference)
    assert statistics.median(theirs) >= 5 * statistics.median(ours)


def test_a_flat_picture_stays_a_small_file() -> None:
    pixels = np.full((512, 512, 3), 200, np.uint8)
    pixels[100:300, 100:300] = (10, 90, 30)
    assert len(encode_png(pixels, {})) <= 1.15 * len(pillow_default(pixels))


def test_a_drawing_with_shapes_is_at_most_fifteen_percent_larger_than_pillows_file() -> None:
    image = Image.new("RGB", (512, 512), (120, 170, 210))
    draw = ImageDraw.Draw(image)
    for number, (x, y, red) in enumerate(np.random.default_rng(3).integers(0, 256, (150, 3)).tolist()):
        shape = draw.ellipse if number % 2 else draw.rectangle
        shape((2 * x - 20, 2 * y - 20, 2 * x + red // 4, 2 * y + 30), fill=(red, x, y))
    pixels = np.array(image)
    assert len(encode_png(pixels, {})) <= 1.15 * len(pillow_default(pixels))


@pytest.mark.parametrize(
    "shape_and_type", [((4, 4), np.uint8), ((4, 4, 4), np.uint8), ((4, 4, 3), np.float32), ((0, 4, 3), np.uint8)]
)
def test_what_is_not_a_picture_is_not_encoded(shape_and_type: tuple[tuple[int, ...], type]) -> None:
    shape, dtype = shape_and_type
    with pytest.raises(ValueError, match="a picture is uint8"):
        encode_png(np.zeros(shape, dtype), {})


@pytest.mark.parametrize(
    "value", ["plain", "caf\u00e9 au lait", "\u96e8\u306e\u8857 \U0001f697", "line\nline", "", "x" * (1 << 20)]
)
def test_texts_come_back_from_our_reader_and_from_pillow(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode_png(noise(8, 8), {"halation": value}))
    assert read_png(path)[1] == {"halation": value}
    with Image.open(path) as image:
        assert image.text["halation"] == value  # type: ignore[attr-defined]


def test_text_that_png_cannot_hold_does_not_break_the_file_and_stays_exact_in_the_spec(tmp_path: Path) -> None:
    prompt = "half a pair \ud83d and a \0 inside"
    path = tmp_path / "a.png"
    path.write_bytes(encode_png(noise(8, 8), picture_text({**SPEC, "prompt": prompt})))
    _, text = read_png(path)
    assert json.loads(text["halation"])["prompt"] == prompt
    assert text["parameters"].startswith("half a pair \ufffd and a \ufffd inside\n")


@pytest.mark.parametrize("key", ["", "k" * 80, "a\0b", "\u8857"])
def test_a_text_key_that_png_forbids_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"1 to 79|latin-1"):
        encode_png(noise(4, 4), {key: "value"})


def test_the_texts_of_a_picture_are_its_spec_and_the_usual_parameters() -> None:
    text = picture_text({**SPEC, "negative_prompt": "blurry"}, model="tiny, step: 10", sampler="euler")
    assert json.loads(text["halation"]) == {**SPEC, "negative_prompt": "blurry"}
    assert list(json.loads(text["halation"])) == sorted(SPEC)
    assert text["parameters"].split("\n") == [
        "a rainy street",
        "Negative prompt: blurry",
        'Steps: 10, Sampler: euler, CFG scale: 4.0, Seed: 42, Size: 48x32, Model: "tiny, step: 10"',
    ]


def test_without_negative_prompt_sampler_or_model_their_places_are_left_out() -> None:
    assert picture_text(SPEC)["parameters"] == "a rainy street\nSteps: 10, CFG scale: 4.0, Seed: 42, Size: 48x32"


def test_a_whole_file_is_read_with_its_pixels(tmp_path: Path) -> None:
    pixels = noise(33, 17)
    (tmp_path / "a.png").write_bytes(encode_png(pixels, picture_text(SPEC)))
    assert np.array_equal(read_png(tmp_path / "a.png")[0], pixels)


@pytest.mark.parametrize("num_cut", [1, 4, 11, 12, 13, 20, 600])
def test_a_file_cut_at_its_end_is_refused(tmp_path: Path, num_cut: int) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode_png(noise(16, 16), picture_text(SPEC))[:-num_cut])
    with pytest.raises(InputError) as refusal:
        read_png(path)
    assert str(path) in refusal.value.found
    assert refusal.value.exit_code == 2


def test_every_single_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    data = encode_png(noise(4, 4), {"halation": "{}", "parameters": "\u8857"})
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(InputError):
            read_png(path)


def test_an_empty_file_a_missing_one_and_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with pytest.raises(InputError, match="no such file"):
        read_png(path)
    for data in (b"", b"GIF89a", encode_png(noise(4, 4), {}) + b"\0"):
        path.write_bytes(data)
        with pytest.raises(InputError):
            read_png(path)


def test_a_header_that_promises_other_pixels_than_there_are_is_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    def bomb(residuals: bytes) -> bytes:
        return zlib.compress(residuals + bytes(1 << 20))

    path = tmp_path / "a.png"
    path.write_bytes(encode_png(noise(4, 4), {}, compress=bomb))
    with pytest.raises(InputError, match="not as many"):
        read_png(path)


def test_another_kind_of_png_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("L", (8, 8)).save(path)
    with pytest.raises(InputError, match="colour type 0"):
        read_png(path)


def test_a_grid_holds_every_picture_enlarged_by_a_whole_factor() -> None:
    pictures = [noise(32, 32, seed) for seed in range(5)]
    shown = grid(pictures, columns=3)
    assert shown.shape == (12 + 2 * (128 + 12), 12 + 3 * (128 + 12), 3)
    for number, picture in enumerate(pictures):
        y, x = 12 + number // 3 * 140, 12 + number % 3 * 140
        assert np.array_equal(shown[y : y + 128 : 4, x : x + 128 : 4], picture)


def test_a_failed_picture_is_a_marked_cell_and_the_others_keep_their_places() -> None:
    shown = grid([None, noise(64, 64)], columns=2)
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
    shown = grid([noise(128, 128), noise(128, 128)], columns=2, labels=[label, "short"])
    assert shown.shape[1] == 12 + 2 * 140
    assert (shown[140:, 140:152] == shown[0, 0]).all(), "the caption runs into the gutter"


def test_a_caption_changes_what_is_under_its_picture_only() -> None:
    one = grid([noise(128, 128)] * 2, columns=2, labels=["one", "two"])
    other = grid([noise(128, 128)] * 2, columns=2, labels=["one", "six"])
    rows, columns = np.nonzero((one != other).any(axis=2))
    assert rows.min() >= 140
    assert columns.min() >= 150  # a letter may lean a pixel to the left


def test_labels_that_do_not_match_the_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 pictures"):
        grid([None, None], columns=2, labels=["one"])


def test_no_picture_at_all_is_still_a_grid() -> None:
    assert grid([], columns=4).size > 0


def test_large_pictures_are_shrunk_so_that_a_grid_stays_a_preview() -> None:
    assert grid([noise(1024, 2048)] * 2, columns=2).shape == (12 + 256 + 12, 12 + 2 * (512 + 12), 3)


def progress(loss: list[tuple[int, float]] | None = None) -> Pixels:
    rows = [(step, [noise(32, 32, step + column) for column in range(4)]) for step in (0, 10, 20)]
    return progress_figure(rows, ["a highway", "a rainy street", "", "w " * 300], loss, "a training")


def test_the_progress_figure_holds_each_picture_in_its_row_and_column() -> None:
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


def test_a_step_without_pictures_and_a_figure_without_steps_can_be_drawn() -> None:
    assert progress_figure([(0, [None, None])], ["a", "b"], None, "all failed").ndim == 3
    assert progress_figure([], [], [(0, 1.0), (9, 0.5)], "no samples yet").ndim == 3
