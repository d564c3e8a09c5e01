"""Laws of aspect buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from halation.data.aspect_buckets import bucket_shapes, describe_buckets, nearest_shape_indices
from halation.errors import InputError
from halation.training.build_components import check_dataset, open_dataset

multiples = st.sampled_from([8, 16, 32, 64])
sides = st.integers(2, 24)


@settings(max_examples=80, deadline=None)
@given(multiple=multiples, high=sides, wide=sides)
def test_shapes_are_of_multiples_about_the_area_between_one_to_two_and_two_to_one(
    multiple: int, high: int, wide: int
) -> None:
    height, width = high * multiple, wide * multiple
    shapes = bucket_shapes(height, width, multiple)
    assert (height, width) in shapes
    for shape in shapes:
        assert shape[0] % multiple == shape[1] % multiple == 0
        assert shape[0] * shape[1] <= height * width
        assert shape == (height, width) or max(shape) <= 2 * min(shape)
        assert shape[::-1] in shapes or max(height, width) > 2 * min(height, width)
        # Not one multiple more would fit in either direction.
        for longer in ((shape[0] + multiple, shape[1]), (shape[0], shape[1] + multiple)):
            assert longer[0] * longer[1] > height * width or max(longer) > 2 * min(longer)
    ratios = [shape[1] / shape[0] for shape in shapes]
    assert ratios == sorted(set(ratios))


def test_the_shapes_of_usual_sizes_are_the_usual_ones() -> None:
    assert bucket_shapes(512, 512, 64) == ((640, 384), (576, 448), (512, 512), (448, 576), (384, 640))
    assert bucket_shapes(64, 64, 64) == ((64, 64),)
    large = bucket_shapes(1024, 1024, 64)
    assert large[0] == (1408, 704)
    assert {(1024, 1024), (832, 1216), (896, 1152)} <= set(large)


def test_a_size_that_is_no_multiple_has_shapes_around_it() -> None:
    assert bucket_shapes(500, 500, 64) == ((640, 384), (512, 448), (448, 512), (384, 640))


def test_too_little_room_for_one_multiple_is_refused() -> None:
    with pytest.raises(InputError, match="aspect buckets of the area 32 x 32") as caught:
        bucket_shapes(32, 32, 64)
    assert "larger --image_size" in caught.value.action


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=30))
def test_each_image_goes_where_the_least_of_it_is_cut_off(sizes: list[tuple[int, int]]) -> None:
    shapes = bucket_shapes(512, 512, 32)
    chosen = nearest_shape_indices(np.array(sizes).reshape(-1, 2), shapes)
    assert len(chosen) == len(sizes)

    def kept(size: tuple[int, int], shape: tuple[int, int]) -> float:
        scale = min(size[0] / shape[0], size[1] / shape[1])
        return scale**2 * shape[0] * shape[1] / (size[0] * size[1])

    for size, bucket in zip(sizes, chosen.tolist(), strict=True):
        assert kept(size, shapes[bucket]) >= max(kept(size, shape) for shape in shapes) - 1e-6


def test_of_two_shapes_that_are_equally_near_the_first_is_taken() -> None:
    assert nearest_shape_indices(np.array([[7, 7], [300, 300]]), ((20, 10), (10, 20))).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("side", "sizes", "words"),
    [
        (128, [(60, 120), (40, 80), (90, 90)], ["2 buckets (height x width: images): 128 x 128: 1, 96 x 160: 2"]),
        (64, [(60, 120), (90, 90)], ["1 bucket (height x width: images): 64 x 64: 2", "multiples of 32"]),
        (128, [(90, 90)], ["1 bucket (height x width: images): 128 x 128: 1", "of 3 shapes"]),
    ],
)
def test_people_are_told_the_shapes_and_where_there_is_but_one(
    tmp_path: Path, side: int, sizes: list[tuple[int, int]], words: list[str]
) -> None:
    (tmp_path / "data/cat").mkdir(parents=True)
    for number, (high, wide) in enumerate(sizes):
        Image.new("RGB", (wide, high)).save(tmp_path / f"data/cat/{number}.png")
    source = open_dataset(str(tmp_path / "data"), side, side, 0, bucket_multiple=32)
    check_dataset(source, tmp_path / "cache")
    told = describe_buckets(source, 32)
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True)), told
    assert describe_buckets(open_dataset(str(tmp_path / "data"), side, side, 0), 32) == []
