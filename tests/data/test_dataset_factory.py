"""What the words of --data, --max_images and --aspect_buckets open."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from halation.data.image_folder import ImageFolder
from halation.data.streets import Streets
from halation.errors import InputError
from halation.training.build_components import open_dataset


def table(folder: Path, num: int) -> Path:
    for index in range(num):
        Image.new("RGB", (40 + 40 * (index % 2), 40), (index, 0, 0)).save(folder / f"{index:03d}.png")
    lines = [f"{index:03d}.png,image {index}" for index in range(num)]
    (folder / "list.csv").write_text("image,caption\n" + "\n".join(lines) + "\n")
    return folder / "list.csv"


def test_the_first_street_scenes_are_a_prefix_with_few_held_out_ones() -> None:
    """The first N street scenes are a prefix of all scenes and have few held-out ones."""
    whole, few = open_dataset("streets", 32, 32, 64), open_dataset("streets", 32, 32, 64, max_images=10)
    assert whole.fingerprint == Streets(32, 32).fingerprint
    assert (few.num_train, few.num_validation) == (10, 64)
    assert few.train(9).pixels.tobytes() == whole.train(9).pixels.tobytes()
    assert few.validation(3).caption == whole.validation(3).caption
    assert len(list(few.all_captions())) == 74
    assert open_dataset("streets", 32, 32, 64, max_images=10**9).num_train == whole.num_train


def test_streets_are_square_and_need_no_buckets() -> None:
    assert getattr(open_dataset("streets", 32, 32, 64, bucket_multiple=8), "bucket_of", None) is None
    assert open_dataset("streets", 32, 32, 64).train(0).original_size == (32, 32)


def test_the_first_images_of_a_file_leave_the_held_out_ones_as_they_are(tmp_path: Path) -> None:
    path = table(tmp_path, 100)
    whole, few = (open_dataset(str(path), 16, 16, 4, max_images=num) for num in (0, 7))
    assert (few.num_train, few.num_validation) == (7, whole.num_validation)
    assert [few.train(index).caption for index in range(7)] == [whole.train(index).caption for index in range(7)]
    assert few.fingerprint["heldout"] == whole.fingerprint["heldout"]
    assert few.fingerprint != whole.fingerprint
    assert open_dataset(str(path), 16, 16, 4, max_images=5000).fingerprint == whole.fingerprint


def test_buckets_are_of_the_train_part_alone(tmp_path: Path) -> None:
    source = open_dataset(str(table(tmp_path, 60)), 64, 64, 4, bucket_multiple=16)
    assert isinstance(source, ImageFolder)
    assert source.bucket_of is not None
    assert source.shapes == ((64, 64), (48, 80))
    assert {source.train(index).pixels.shape[:2] for index in range(source.num_train)} == set(source.shapes)
    assert {source.validation(index).pixels.shape for index in range(source.num_validation)} == {(64, 64, 3)}


def test_fewer_than_no_images_are_refused() -> None:
    with pytest.raises(InputError, match="--max_images -1"):
        open_dataset("streets", 32, 32, 64, max_images=-1)
