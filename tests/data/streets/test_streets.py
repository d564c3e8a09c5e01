"""Street scenes are pure functions of their number, in two parts, with true captions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from halation.data.dataset_protocol import ImageDataset
from halation.data.streets import (
    CAR_COLOURS,
    DRIVING_PROMPTS,
    PLACES,
    TIMES,
    Attributes,
    Streets,
    caption,
    draw,
    mentioned,
    scene,
)
from halation.errors import InputError

DIGEST_SCRIPT = """
import hashlib
from halation.data.streets import Streets
streets = Streets(32, 32)
digest = hashlib.sha256()
for index in (7, 3, 49_999, 0):
    for image in (streets.train(index), streets.validation(index % 2_000)):
        digest.update(image.pixels.tobytes())
        digest.update(image.caption.encode())
print(digest.hexdigest())
"""


def scenes(num: int, part: str = "train") -> list[Attributes]:
    return [scene(part, index) for index in range(num)]  # type: ignore[arg-type]


def test_streets_are_a_source_of_images() -> None:
    streets: ImageDataset = Streets(32, 32, num_train=10, num_validation=4)
    assert (streets.num_train, streets.num_validation, streets.height, streets.width) == (10, 4, 32, 32)
    assert streets.class_names == ()
    image = streets.train(9)
    assert image.label == -1
    assert image.caption == caption(scene("train", 9))
    assert np.array_equal(image.pixels, draw(scene("train", 9), 32))
    assert np.array_equal(streets.validation(3).pixels, draw(scene("heldout", 3), 32))
    assert list(streets.captions()) == [caption(scene("train", index)) for index in range(10)]


@pytest.mark.parametrize("size", [32, 33, 64, 127, 128, 256, 257, 512])
def test_a_image_has_the_size_asked_for_and_bytes_for_pixels(size: int) -> None:
    pixels = Streets(size, size).train(5).pixels
    assert pixels.shape == (size, size, 3)
    assert pixels.dtype == np.uint8
    assert pixels.std() > 10


@pytest.mark.parametrize(("height", "width"), [(31, 31), (513, 513), (64, 32), (32, 64), (0, 0), (-64, -64)])
def test_a_size_that_is_not_a_square_from_32_to_512_is_refused(height: int, width: int) -> None:
    with pytest.raises(InputError, match=f"streets at {height} x {width} pixels") as refusal:
        Streets(height, width)
    assert "a square size from 32 to 512" in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_no_train_images_at_all_are_refused() -> None:
    with pytest.raises(InputError, match="0 train"):
        Streets(32, 32, num_train=0)


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_the_part_is_an_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"image {index} of the train split, which has 10"):
        Streets(32, 32, num_train=10).train(index)


def test_the_fingerprint_tells_sizes_and_numbers_apart() -> None:
    prints = [
        Streets(32, 32).fingerprint,
        Streets(64, 64).fingerprint,
        Streets(32, 32, num_train=7).fingerprint,
        Streets(32, 32, num_validation=7).fingerprint,
    ]
    assert prints[0]["data"] == "streets"
    assert prints[0]["version"] == 1
    assert prints[0] == Streets(32, 32).fingerprint
    assert all(prints[0] != other for other in prints[1:])


def test_another_process_with_another_hash_seed_draws_the_same_bytes() -> None:
    digests = []
    for hash_seed in ("1", "2718"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGEST_SCRIPT]
        digests.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    streets = Streets(32, 32)
    digest = hashlib.sha256()
    for index in (7, 3, 49_999, 0):
        for image in (streets.train(index), streets.validation(index % 2_000)):
            digest.update(image.pixels.tobytes())
            digest.update(image.caption.encode())
    assert digests == [digest.hexdigest() + "\n"] * 2


def test_the_module_does_not_bring_torch_along() -> None:
    script = "import sys, halation.data.streets; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


def test_the_stream_of_scenes_has_not_changed_under_this_version() -> None:
    told = "\n".join(f"{attributes} {caption(attributes)}" for attributes in scenes(500))
    assert (
        hashlib.sha256(told.encode()).hexdigest() == "401cab94ee2c74bea182e88f08d5f327532070d94f4c8eed08fb60292b1b9f0f"
    )


def test_train_and_validation_do_not_meet() -> None:
    train = {attributes.variation for attributes in scenes(3_000)}
    validation = {attributes.variation for attributes in scenes(3_000, "heldout")}
    assert len(train) == len(validation) == 3_000
    assert not train & validation
    streets = Streets(32, 32)
    images = [streets.train(index).pixels.tobytes() for index in range(1_000)]
    images += [streets.validation(index).pixels.tobytes() for index in range(1_000)]
    assert len(set(images)) == 2_000


def test_validation_scenes_are_of_the_same_kinds_as_train_scenes() -> None:
    for of in (lambda a: a.place, lambda a: a.time, lambda a: a.weather, lambda a: a.num_cars):
        train, validation = (
            Counter(of(attributes) for attributes in scenes(2_000, part)) for part in ("train", "heldout")
        )
        assert train.keys() == validation.keys()
        assert all(abs(train[value] - validation[value]) < 150 for value in train)


def test_every_place_has_every_time_and_both_weathers_but_a_rainy_street_is_wet() -> None:
    seen = {(a.place, a.time, a.weather) for a in scenes(3_000)}
    for place in PLACES:
        weathers = {"wet"} if place == "rainy street" else {"dry", "wet"}
        assert {(time, weather) for at, time, weather in seen if at == place} == {
            (time, weather) for time in TIMES for weather in weathers
        }


def test_captions_say_only_what_is_so() -> None:
    told = Counter[str]()
    for attributes in scenes(6_000):
        text = caption(attributes)
        said = mentioned(text)
        assert said["place"] == attributes.place
        assert said["time"] in (None, attributes.time), text
        assert said["weather"] in (None, attributes.weather), text
        assert said["cars"] is None or attributes.num_cars in said["cars"], text
        assert said["car_colours"] is None or set(said["car_colours"]) <= set(attributes.car_colours), text
        assert "houses" not in text or attributes.num_houses >= 2, text
        assert "buildings" not in text or attributes.num_houses >= 2, text
        assert "trees" not in text or attributes.num_trees >= 2, text
        assert "signs" not in text or attributes.num_signs >= 2, text
        assert "lights" not in text or attributes.num_traffic_lights >= 2, text
        assert "pedestrians" not in text or attributes.num_pedestrians >= 1, text
        told.update(key for key, value in said.items() if value is not None)
    # Each attribute is told often enough to be learned, and not always, so that silence is known too.
    assert all(1_500 < told[key] < 5_000 for key in ("time", "weather", "cars"))


def test_what_a_caption_says_of_cars_is_read_back() -> None:
    assert mentioned("A parking lot scene with two parked vehicles")["cars"] == range(2, 3)
    assert mentioned("A rural road with natural scenery and no cars")["cars"] == range(0, 1)
    assert mentioned("A highway scene with a red distant car at night")["car_colours"] == ("red",)
    assert mentioned("A city street at dusk") == {
        "place": "city crossing",
        "time": "dusk",
        "weather": None,
        "cars": None,
        "car_colours": None,
    }
    assert mentioned("A cat on a mat")["place"] is None


def test_the_prompts_say_what_they_say() -> None:
    said = [mentioned(prompt) for prompt in DRIVING_PROMPTS]
    assert [words["place"] for words in said] == list(PLACES)
    assert (said[0]["time"], said[0]["weather"], said[0]["cars"]) == ("day", "wet", range(2, 6))
    assert said[1]["cars"] == range(3, 6)
    assert said[7]["cars"] == range(0, 2)


def test_each_of_the_eight_prompts_is_the_caption_of_some_train_scene() -> None:
    captions = set(Streets(32, 32).captions())
    assert [prompt for prompt in DRIVING_PROMPTS if prompt not in captions] == []


def test_places_are_farther_apart_than_the_scenes_of_one_place() -> None:
    """The nearest mean image, of scenes by day, finds the place of scenes it was not made from."""
    shown: dict[str, list[np.ndarray]] = {place: [] for place in PLACES}
    for attributes in scenes(1_200):
        if attributes.time == "day":
            shown[attributes.place].append(draw(attributes, 32).astype(np.float64))
    means = np.stack([np.mean(shown[place][:30], axis=0) for place in PLACES])
    right = total = 0
    for number, place in enumerate(PLACES):
        for image in shown[place][30:60]:
            right += int(np.argmin(((means - image) ** 2).mean(axis=(1, 2, 3))) == number)
            total += 1
    assert total > 150
    assert right / total > 0.9


def test_day_is_brighter_than_dusk_and_dusk_than_night() -> None:
    for attributes in scenes(60):
        day, dusk, night = (draw(replace(attributes, time=time), 32).mean() for time in TIMES)
        assert day > dusk + 10 > night + 20, attributes


def test_a_wet_road_looks_other_than_a_dry_one() -> None:
    for attributes in scenes(80):
        if attributes.place != "rainy street":
            dry, wet = (draw(replace(attributes, weather=weather), 32) for weather in ("dry", "wet"))
            below = np.abs(dry[20:].astype(int) - wet[20:]).mean()
            assert below > 5, attributes


def test_every_car_can_be_seen_with_its_colour() -> None:
    """Repainting any one car changes the image where it stands, so no car is hidden behind something else."""
    for attributes in scenes(300):
        before = draw(attributes, 64).astype(int)
        for place, colour in enumerate(attributes.car_colours):
            other = "blue" if colour in ("red", "yellow", "white") else "yellow"
            colours = list(attributes.car_colours)
            colours[place] = other
            after = draw(replace(attributes, car_colours=tuple(colours)), 64)
            changed = np.abs(before - after).max(axis=2) > 20
            assert changed.sum() >= 6, (attributes, place)


def test_colours_of_cars_are_all_used() -> None:
    used = Counter(colour for attributes in scenes(1_000) for colour in attributes.car_colours)
    assert set(used) == set(CAR_COLOURS)


def test_the_same_scene_at_two_sizes_is_the_same_scene() -> None:
    for attributes in scenes(30):
        small = draw(attributes, 32).astype(np.float64)
        large = draw(attributes, 128).reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))
        assert np.abs(small - large).mean() < 10, attributes


def test_attributes_that_no_scene_of_the_place_has_are_refused() -> None:
    rural = next(attributes for attributes in scenes(100) if attributes.place == "rural")
    rainy = next(attributes for attributes in scenes(100) if attributes.place == "rainy street")
    with pytest.raises(ValueError, match="num_cars is 5 in a scene of place 'rural'"):
        replace(rural, car_colours=("red",) * 5)
    with pytest.raises(ValueError, match="always wet"):
        replace(rainy, weather="dry")


@pytest.mark.parametrize("size", [256, 512])
def test_a_large_image_shows_the_same_scene(size: int) -> None:
    for index in range(8):
        large, small = Streets(size, size).validation(index), Streets(64, 64).validation(index)
        shrunk = large.pixels.reshape(64, size // 64, 64, size // 64, 3).mean((1, 3))
        assert np.abs(shrunk - small.pixels).mean() < 4
        assert large.caption == small.caption
