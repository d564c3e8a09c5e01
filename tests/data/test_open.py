"""What the words of --data, --max_pictures and --aspect_buckets open."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from halation.data.image_folder import ImageFolder
from halation.data.open import open_pictures
from halation.data.streets import Streets
from halation.errors import InputError


def table(folder: Path, num: int) -> Path:
    for index in range(num):
        Image.new("RGB", (40 + 40 * (index % 2), 40), (index, 0, 0)).save(folder / f"{index:03d}.png")
    lines = [f"{index:03d}.png,picture {index}" for index in range(num)]
    (folder / "list.csv").write_text("image,caption\n" + "\n".join(lines) + "\n")
    return folder / "list.csv"


def test_the_first_street_scenes_are_those_of_all_of_them_and_come_with_few_held_out_ones() -> None:
    whole, few = open_pictures("streets", 32, 32, 64), open_pictures("streets", 32, 32, 64, max_pictures=10)
    assert whole.fingerprint == Streets(32, 32).fingerprint
    assert (few.num_train, few.num_heldout) == (10, 64)
    assert few.train(9).pixels.tobytes() == whole.train(9).pixels.tobytes()
    assert few.heldout(3).caption == whole.heldout(3).caption
    assert len(list(few.every_caption())) == 74
    assert open_pictures("streets", 32, 32, 64, max_pictures=10**9).num_train == whole.num_train


def test_streets_are_square_and_need_no_buckets() -> None:
    assert getattr(open_pictures("streets", 32, 32, 64, bucket_multiple=8), "bucket_of", None) is None
    assert open_pictures("streets", 32, 32, 64).train(0).original == (32, 32)


def test_the_first_pictures_of_a_file_leave_the_held_out_ones_as_they_are(tmp_path: Path) -> None:
    path = table(tmp_path, 100)
    whole, few = (open_pictures(str(path), 16, 16, 4, max_pictures=num) for num in (0, 7))
    assert (few.num_train, few.num_heldout) == (7, whole.num_heldout)
    assert [few.train(index).caption for index in range(7)] == [whole.train(index).caption for index in range(7)]
    assert few.fingerprint["heldout"] == whole.fingerprint["heldout"]
    assert few.fingerprint != whole.fingerprint
    assert open_pictures(str(path), 16, 16, 4, max_pictures=5000).fingerprint == whole.fingerprint


def test_buckets_are_of_the_train_part_alone(tmp_path: Path) -> None:
    source = open_pictures(str(table(tmp_path, 60)), 64, 64, 4, bucket_multiple=16)
    assert isinstance(source, ImageFolder)
    assert source.bucket_of is not None
    assert source.shapes == ((64, 64), (48, 80))
    assert {source.train(index).pixels.shape[:2] for index in range(source.num_train)} == set(source.shapes)
    assert {source.heldout(index).pixels.shape for index in range(source.num_heldout)} == {(64, 64, 3)}


def test_fewer_than_no_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="--max_pictures -1"):
        open_pictures("streets", 32, 32, 64, max_pictures=-1)
