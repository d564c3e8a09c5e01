"""The bundled network recognises street scenes, and its features rank damaged images."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFilter
from safetensors import SafetensorError, safe_open

from halation.data.streets import PLACES, TIMES, WEATHERS, draw, scene
from halation.evaluation.extractors import streets_classifier
from halation.evaluation.extractors.resize import resize_to_square
from halation.evaluation.extractors.streets_classifier import HEADS, StreetsNet
from halation.evaluation.metrics.frechet import frechet_distance
from halation.evaluation.metrics.moments import Moments, moments
from halation.input_files import file_sha256

Pixels = npt.NDArray[np.uint8]
FIRST_FRESH = 50_000
"""Validation scenes from here on took no part in any number that the network's record holds."""
NUM_IN_SET = 300


@pytest.fixture(scope="module")
def net() -> StreetsNet:
    return streets_classifier.load_network()


def batch_of(images: Sequence[Pixels]) -> torch.Tensor:
    return torch.from_numpy(np.stack([resize_to_square(image, 64, "clean") for image in images]))


def features_of(net: StreetsNet, images: Sequence[Pixels]) -> Moments:
    rows = [net(batch_of(images[first : first + 100]))["features"].numpy() for first in range(0, len(images), 100)]
    return moments(np.concatenate(rows))


@pytest.fixture(scope="module")
def reference(net: StreetsNet) -> Moments:
    return features_of(net, [draw(scene("heldout", FIRST_FRESH + index), 64) for index in range(NUM_IN_SET)])


@pytest.fixture(scope="module")
def others() -> list[Pixels]:
    """Good images of other scenes than the reference's."""
    return [draw(scene("heldout", FIRST_FRESH + NUM_IN_SET + index), 64) for index in range(NUM_IN_SET)]


def test_the_weights_fit_in_two_mebibytes() -> None:
    assert 0 < streets_classifier.WEIGHTS_FILE.stat().st_size <= 2 * 2**20


@pytest.mark.parametrize(("size", "bar_for_cars"), [(32, 0.80), (64, 0.88), (128, 0.88)])
def test_attributes_of_fresh_scenes_are_found(net: StreetsNet, size: int, bar_for_cars: float) -> None:
    scenes = [scene("heldout", FIRST_FRESH + index) for index in range(200)]
    outputs = net(batch_of([draw(attributes, size) for attributes in scenes]))
    labels = {
        "place": [PLACES.index(attributes.place) for attributes in scenes],
        "time": [TIMES.index(attributes.time) for attributes in scenes],
        "weather": [WEATHERS.index(attributes.weather) for attributes in scenes],
        "cars": [attributes.num_cars for attributes in scenes],
    }
    shares = {head: float((outputs[head].argmax(1) == torch.tensor(labels[head])).float().mean()) for head in HEADS}
    assert shares["place"] >= 0.97
    assert shares["time"] >= 0.97
    assert shares["weather"] >= 0.97
    assert shares["cars"] >= bar_for_cars
    recorded = streets_classifier.read_record().accuracy[str(size)]
    assert shares == pytest.approx(recorded, abs=0.06)


def test_outputs_have_a_column_for_every_answer(net: StreetsNet) -> None:
    outputs = net(torch.zeros(2, 64, 64, 3))
    assert {name: tuple(output.shape) for name, output in outputs.items()} == {
        "features": (2, streets_classifier.NUM_FEATURES),
        "place": (2, len(PLACES)),
        "time": (2, len(TIMES)),
        "weather": (2, len(WEATHERS)),
        "cars": (2, 6),
    }
    assert streets_classifier.NUM_FEATURES <= 256
    assert all(output.dtype == torch.float32 for output in outputs.values())


def test_a_image_is_seen_alike_among_any_neighbours(net: StreetsNet, others: list[Pixels]) -> None:
    among_some = net(batch_of(others[:16]))
    among_others = net(batch_of([others[0], *others[31:16:-1]]))
    assert all(torch.equal(among_some[name][0], among_others[name][0]) for name in among_some)


def test_features_of_real_images_have_about_unit_variance(reference: Moments) -> None:
    variance = reference.covariance.diagonal()
    assert variance.min() > 0.2
    assert variance.max() < 5.0


def test_a_saved_network_comes_back_with_the_numbers_of_its_file(net: StreetsNet, tmp_path: Path) -> None:
    path = tmp_path / "again.safetensors"
    streets_classifier.save_network(net, streets_classifier.read_record(), path)
    images = torch.rand(2, 64, 64, 3, generator=torch.Generator().manual_seed(0)) * 255
    before, after = net(images), streets_classifier.load_network(path)(images)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert streets_classifier.read_record(path) == streets_classifier.read_record()
    assert file_sha256(path) == file_sha256(streets_classifier.WEIGHTS_FILE)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("heads.cars.0.weight").dtype == torch.float16


def test_one_changed_byte_changes_the_hash(tmp_path: Path) -> None:
    path = tmp_path / "changed.safetensors"
    content = bytearray(streets_classifier.WEIGHTS_FILE.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert file_sha256(path) != file_sha256(streets_classifier.WEIGHTS_FILE)


class Touching:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_none_of_its_code_runs(tmp_path: Path) -> None:
    trap, path = tmp_path / "ran", tmp_path / "weights.safetensors"
    path.write_bytes(pickle.dumps(Touching(trap)))
    pickle.loads(path.read_bytes())
    assert trap.exists()
    trap.unlink()
    with pytest.raises(SafetensorError):
        streets_classifier.load_network(path)
    assert not trap.exists()


def test_the_record_says_how_it_was_trained_and_what_can_be_asked_for() -> None:
    record = streets_classifier.read_record()
    assert record.num_trained_on > 1_000
    assert record.num_validated_on >= 500
    assert set(record.accuracy) == {"32", "48", "64", "96", "128"}
    assert all(set(shares) == set(HEADS) for shares in record.accuracy.values())
    assert set(record.agreement_by_attribute) == set(HEADS)
    assert 0.95 < record.agreement <= 1.0


@pytest.fixture(scope="module")
def floor(net: StreetsNet, reference: Moments, others: list[Pixels]) -> float:
    """How far good images are from good images of other scenes, there being so few."""
    return frechet_distance(reference, features_of(net, others))


def test_more_blur_is_further_away(net: StreetsNet, reference: Moments, others: list[Pixels], floor: float) -> None:
    little, much = (
        [np.asarray(Image.fromarray(each).filter(ImageFilter.GaussianBlur(sigma))) for each in others]
        for sigma in (1, 3)
    )
    distance = frechet_distance(reference, features_of(net, little))
    assert distance > 2 * floor
    assert frechet_distance(reference, features_of(net, much)) > 5 * distance


def test_more_noise_is_further_away(net: StreetsNet, reference: Moments, others: list[Pixels], floor: float) -> None:
    noise = np.random.default_rng(0).standard_normal((len(others), 64, 64, 3))
    little, much = (list(np.clip(np.rint(others + sigma * noise), 0, 255).astype(np.uint8)) for sigma in (15, 40))
    distance = frechet_distance(reference, features_of(net, little))
    assert distance > 1.5 * floor
    assert frechet_distance(reference, features_of(net, much)) > 3 * distance


def test_missing_places_are_further_away(
    net: StreetsNet, reference: Moments, others: list[Pixels], floor: float
) -> None:
    places = [scene("heldout", FIRST_FRESH + NUM_IN_SET + index).place for index in range(NUM_IN_SET)]
    kept = [each for each, place in zip(others, places, strict=True) if place in PLACES[4:]]
    assert frechet_distance(reference, features_of(net, kept)) > 3 * floor


def test_the_same_few_images_over_and_over_are_further_away(
    net: StreetsNet, reference: Moments, others: list[Pixels], floor: float
) -> None:
    few = features_of(net, others[:20])
    repeated = Moments(num=15 * few.num, mean=few.mean, scatter=15 * few.scatter)
    assert frechet_distance(reference, repeated) > 3 * floor
