"""A folder with images of several sizes: original sizes, buckets and the first N alone."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest
from PIL import Image

from halation.data.decode import read_upright_size
from halation.data.image_folder import ImageFolder
from halation.errors import InputError


def wide(folder: Path, num: int) -> Path:
    for index in range(num):
        Image.new("RGB", (20, 12), (index, 0, 0)).save(folder / f"{index}.png")
    lines = [f"{index}.png,image {index}" for index in range(num)]
    (folder / "metadata.csv").write_text("file_name,text\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp"])
def test_a_image_says_how_large_its_upright_file_was(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (640, 300)).save(tmp_path / f"0.{suffix}")
    Image.new("RGB", (640, 300)).save(tmp_path / f"1.{suffix}", exif=exif)
    (tmp_path / "metadata.csv").write_text(f"file_name,text\n0.{suffix},lies\n1.{suffix},stands\n")
    source = ImageFolder(tmp_path, 32, 32)
    assert [source.train(index).original_size for index in range(2)] == [(300, 640), (640, 300)]
    assert [read_upright_size(tmp_path / f"{index}.{suffix}") for index in range(2)] == [(300, 640), (640, 300)]


SHAPES = ((40, 24), (32, 32), (24, 40))


def proportioned(folder: Path, num: int) -> Path:
    """Squares, wide images and those that stand by their EXIF alone; no tall file."""
    exif = Image.Exif()
    exif[0x0112] = 8
    sizes = [((60, 60), None), ((90, 50), None), ((120, 70), exif)]
    for index in range(num):
        size, turned = sizes[index % 3]
        Image.new("RGB", size, (index, 9, 9)).save(folder / f"{index:03d}.png", **({"exif": turned} if turned else {}))
    lines = [f"{index:03d}.png,image {index}" for index in range(num)]
    (folder / "metadata.csv").write_text("file_name,text\n" + "\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("checked", [False, True])
def test_each_train_image_is_cut_to_the_nearest_bucket(tmp_path: Path, checked: bool) -> None:
    source = ImageFolder(proportioned(tmp_path, 61), 32, 32, buckets=SHAPES)
    if checked:
        source.check()
    assert source.shapes == SHAPES
    assert source.bucket_of is not None
    for index in range(source.num_train):
        kind = int(source.file_name(index)[:3]) % 3
        expected = {0: (32, 32), 1: (24, 40), 2: (40, 24)}[kind]
        assert source.train(index).pixels.shape == (*expected, 3)
        assert source.shapes[source.bucket_of[index]] == expected
    assert source.num_validation
    assert source.validation(0).pixels.shape == (32, 32, 3)
    travelled = pickle.loads(pickle.dumps(source))
    assert travelled.train(1).pixels.tobytes() == source.train(1).pixels.tobytes()


def test_only_buckets_with_images_count_and_none_are_there_unasked(tmp_path: Path) -> None:
    folder = wide(tmp_path, 5)
    source = ImageFolder(folder, 32, 32, buckets=SHAPES)
    assert source.shapes == ((24, 40),)
    assert source.bucket_of is not None
    assert source.bucket_of.tolist() == [0] * 5
    plain = ImageFolder(folder, 32, 32)
    assert (plain.bucket_of, plain.shapes) == (None, ())
    assert source.fingerprint != plain.fingerprint
    assert "buckets" not in plain.fingerprint


def test_the_sizes_are_remembered_with_the_check(tmp_path: Path) -> None:
    folder, memory = tmp_path / "pictures", tmp_path / "memory"
    folder.mkdir()
    proportioned(folder, 12)
    assert not ImageFolder(folder, 32, 32).check(memory).from_cache
    assert not ImageFolder(folder, 32, 32, buckets=SHAPES).check(memory).from_cache  # the first has kept no sizes
    source = ImageFolder(folder, 32, 32, buckets=SHAPES)
    assert source.check(memory).from_cache
    assert source.shapes == SHAPES
    assert ImageFolder(folder, 32, 32).check(memory).from_cache


def test_a_image_that_cannot_be_sorted_is_named(tmp_path: Path) -> None:
    source = ImageFolder(wide(tmp_path, 3), 32, 32, buckets=SHAPES)
    (tmp_path / "1.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"1\.png cannot be read: the file is empty"):
        _ = source.bucket_of


def test_broken_images_are_in_no_bucket(tmp_path: Path) -> None:
    proportioned(tmp_path, 120)
    (tmp_path / "001.png").write_bytes(b"")
    source = ImageFolder(tmp_path, 32, 32, buckets=SHAPES, validation_images=0)
    source.check()
    assert source.bucket_of is not None
    assert len(source.bucket_of) == source.num_train == 119


def test_first_images_that_lack_whole_classes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bus", "car"):
        (tmp_path / name).mkdir()
        for index in range(3):
            Image.new("RGB", (20, 12)).save(tmp_path / name / f"{index}.png")
    with caplog.at_level(logging.WARNING):
        assert ImageFolder(tmp_path, 8, 8, max_images=4).num_train == 4
        assert not caplog.text
        assert ImageFolder(tmp_path, 8, 8, max_images=2).num_train == 2
    assert "the first 2 images of" in caplog.text
    assert "no example of 1 class" in caplog.text
