"""Prompt agreement counts what captions mention and ignores what they leave out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halation.data.streets import PLACES, TIMES, WEATHERS, Attributes, caption, draw, scene
from halation.errors import InputError
from halation.evaluation.extractors import streets_classifier
from halation.evaluation.extractors.resize import resize_to_square
from halation.evaluation.metrics.caption_agreement import caption_agreement

Outputs = dict[str, npt.NDArray[np.float32]]
NUM_REAL = 150


def one_hot(columns: Sequence[int], num: int) -> npt.NDArray[np.float32]:
    return np.eye(num, dtype=np.float32)[list(columns)]


def told(*scenes: tuple[str, str, str, int]) -> Outputs:
    """Outputs that find these places, times, weathers and numbers of cars."""
    return {
        "place": one_hot([PLACES.index(place) for place, _, _, _ in scenes], 8),  # type: ignore[arg-type]
        "time": one_hot([TIMES.index(time) for _, time, _, _ in scenes], 3),  # type: ignore[arg-type]
        "weather": one_hot([WEATHERS.index(weather) for _, _, weather, _ in scenes], 2),  # type: ignore[arg-type]
        "cars": one_hot([cars for _, _, _, cars in scenes], 6),
    }


def true_of(scenes: Sequence[Attributes]) -> Outputs:
    return told(*((each.place, each.time, each.weather, each.num_cars) for each in scenes))


@pytest.fixture(scope="module")
def real() -> tuple[Outputs, list[str]]:
    """What the shipped network finds in real validation images, and their captions."""
    scenes = [scene("heldout", 70_000 + index) for index in range(NUM_REAL)]
    images = np.stack([resize_to_square(draw(each, 64), 64, "clean") for each in scenes])
    outputs = {
        name: output.numpy() for name, output in streets_classifier.load_network()(torch.from_numpy(images)).items()
    }
    return outputs, [caption(each) for each in scenes]


def test_a_share_is_of_all_mentioned_attributes_of_all_images() -> None:
    captions = [
        "A rural road with dry roads and two cars at night",  # place, weather, cars, time
        "A highway scene with clear lane markings",  # place
        "A parking lot scene with various parked vehicles at dusk",  # place, cars, time
    ]
    found = caption_agreement(
        told(("rural", "day", "dry", 2), ("highway", "day", "wet", 0), ("suburban", "dusk", "dry", 2)), captions
    )
    assert found.num_mentioned == {"place": 3, "time": 2, "weather": 1, "cars": 2}
    assert found.by_attribute == {"place": 2 / 3, "time": 1 / 2, "weather": 1.0, "cars": 1 / 2}
    assert found.value == 5 / 8


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("An urban intersection with multiple vehicles", {3, 4, 5}),
        ("A rural road with minimal traffic", {0, 1}),
        ("A highway scene with distant cars", {2, 3, 4, 5}),
        ("A suburban road with a red car", {1}),
        ("A city street with no vehicles", {0}),
    ],
)
def test_a_number_of_cars_agrees_where_it_lies_in_the_mentioned_range(text: str, allowed: set[int]) -> None:
    agreeing = {
        cars
        for cars in range(6)
        if caption_agreement(told(("rural", "day", "dry", cars)), [text]).by_attribute["cars"] == 1.0
    }
    assert agreeing == allowed


def test_an_attribute_that_no_caption_mentions_is_none_and_not_a_share() -> None:
    found = caption_agreement(told(("rural", "night", "wet", 5)), ["A rural road"])
    assert found.value == 1.0
    assert found.by_attribute == {"place": 1.0, "time": None, "weather": None, "cars": None}
    assert found.num_mentioned == {"place": 1, "time": 0, "weather": 0, "cars": 0}


def test_a_caption_of_something_else_counts_neither_way() -> None:
    outputs = told(("rural", "day", "dry", 0), ("rural", "day", "dry", 0))
    found = caption_agreement(outputs, ["A rural road during daytime", "a cat on a sofa"])
    assert found.value == 1.0
    assert sum(found.num_mentioned.values()) == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_whoever_sees_everything_agrees_with_every_caption(indices: list[int]) -> None:
    scenes = [scene("heldout", index) for index in indices]
    found = caption_agreement(true_of(scenes), [caption(each) for each in scenes])
    assert found.value == 1.0
    assert found.num_mentioned["place"] == len(scenes)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(30)))
def test_the_order_of_images_does_not_matter(order: list[int]) -> None:
    scenes = [scene("train", index) for index in range(30)]
    others = [caption(scene("train", index + 1)) for index in range(30)]
    found = caption_agreement(true_of(scenes), others)
    assert caption_agreement(true_of([scenes[index] for index in order]), [others[index] for index in order]) == found
    assert 0.0 < found.value < 1.0


def test_real_images_agree_with_their_own_captions(real: tuple[Outputs, list[str]]) -> None:
    found = caption_agreement(*real)
    assert found.value > 0.95
    assert found.value == pytest.approx(streets_classifier.read_record().agreement, abs=0.03)


def test_real_images_do_not_agree_with_captions_of_others(real: tuple[Outputs, list[str]]) -> None:
    outputs, captions = real
    found = caption_agreement(outputs, captions[1:] + captions[:1])
    assert found.value < 0.5
    assert found.by_attribute["place"] is not None
    assert found.by_attribute["place"] < 0.3


def test_captions_without_a_street_in_them_are_an_error() -> None:
    with pytest.raises(InputError, match="none of 2 captions names a place") as caught:
        caption_agreement(told(("rural", "day", "dry", 0), ("rural", "day", "dry", 0)), ["a cat on a sofa", "a dog"])
    assert "a cat on a sofa" in caught.value.found
    assert "embedded street captions" in caught.value.action
    assert "CLIP score" in caught.value.action


def test_no_captions_at_all_are_an_error() -> None:
    empty = {name: np.zeros((0, num), dtype=np.float32) for name, num in streets_classifier.HEADS.items()}
    with pytest.raises(InputError, match="none of 0 captions"):
        caption_agreement(empty, [])


def test_more_images_than_captions_are_an_error() -> None:
    with pytest.raises(InputError, match="2 images and 1 caption"):
        caption_agreement(told(("rural", "day", "dry", 0), ("rural", "day", "dry", 0)), ["A rural road"])


def test_outputs_of_another_extractor_are_an_error() -> None:
    with pytest.raises(InputError, match="without logits for 'place', only features") as caught:
        caption_agreement({"features": np.zeros((1, 4), dtype=np.float32)}, ["A rural road"])
    assert "streets extractor" in caught.value.action


def test_logits_that_are_not_finite_are_an_error_that_names_the_image() -> None:
    outputs = told(("rural", "day", "dry", 0), ("rural", "day", "dry", 0))
    outputs["time"][1, 0] = np.nan
    with pytest.raises(InputError, match="'time' that are not finite, first for image 1"):
        caption_agreement(outputs, ["A rural road", "A rural road"])
