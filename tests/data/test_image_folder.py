"""Folders of images: what is read, what is left out, and what is refused with which words."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import shutil
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halation import input_files
from halation.data.decode import BrokenImageError, decode, verify_image
from halation.data.image_annotations import ImageEntry
from halation.data.image_folder import ImageFolder, split_validation
from halation.errors import InputError
from halation.input_files import use_limits


def image(colour: tuple[int, ...] = (200, 30, 60), size: tuple[int, int] = (20, 12), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def captioned(folder: Path, num: int, suffix: str = ".png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(num):
        image((index % 256, 0, 0)).save(folder / f"{index:04d}{suffix}")
        lines.append(json.dumps({"file_name": f"{index:04d}{suffix}", "text": f"image {index}", "tags": "x"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def refused(folder: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        ImageFolder(folder, 8, 8)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize("below", ["", "train"])
def test_metadata_beside_the_images_gives_captions(tmp_path: Path, below: str) -> None:
    captioned(tmp_path / below, 5)
    source = ImageFolder(tmp_path, 8, 16)
    assert (source.num_train, source.num_validation, source.class_names) == (5, 0, ())
    seen = [source.train(index) for index in range(5)]
    assert [one.caption for one in seen] == list(source.captions()) == [f"image {index}" for index in range(5)]
    assert all(one.pixels.shape == (8, 16, 3) and one.pixels.dtype == np.uint8 and one.label == -1 for one in seen)
    assert [int(one.pixels[4, 4, 0]) for one in seen] == list(range(5))


def test_metadata_may_be_csv_with_commas_in_captions(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    image().save(tmp_path / "deep" / "a.png")
    (tmp_path / "metadata.csv").write_text('id,text,file_name\r\n1,"wet, shiny ""road""",deep/a.png\r\n')
    assert ImageFolder(tmp_path, 8, 8).train(0).caption == 'wet, shiny "road"'


@pytest.mark.parametrize("below", ["", "train"])
def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path, below: str) -> None:
    for name, suffix in (("fire_truck", ".png"), ("car", ".jpg"), ("train", ".webp")):
        (tmp_path / below / name).mkdir(parents=True)
        image().save(tmp_path / below / name / f"x{suffix}")
    source = ImageFolder(tmp_path, 8, 8)
    assert source.class_names == ("car", "fire_truck", "train")
    assert [(source.train(index).caption, source.train(index).label) for index in range(3)] == [
        ("car", 0),
        ("fire truck", 1),
        ("train", 2),
    ]


def test_a_validation_split_is_the_held_out_part(tmp_path: Path) -> None:
    captioned(tmp_path / "train", 30)
    captioned(tmp_path / "validation", 3)
    source = ImageFolder(tmp_path, 8, 8)
    assert (source.num_train, source.num_validation) == (30, 3)
    assert source.validation(2).caption == "image 2"


def test_held_out_classes_have_the_labels_of_the_train_part(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "train/c", "test/c"):
        (tmp_path / name).mkdir(parents=True)
        image().save(tmp_path / name / "x.png")
    assert ImageFolder(tmp_path, 8, 8).validation(0).label == 2
    (tmp_path / "test/z").mkdir()
    image().save(tmp_path / "test/z/x.png")
    assert "classes that train/ does not have: z" in refused(tmp_path).found


def entries(num: int) -> list[ImageEntry]:
    return [ImageEntry(name=f"image {index}.png", num_bytes=1, caption="") for index in range(num)]


def test_the_parts_do_not_meet_and_lose_nothing() -> None:
    for num in (1, 19, 20, 500, 5000):
        train, validation = split_validation(entries(num), 64)
        assert sorted([*train, *validation]) == sorted(entries(num))
        assert len(validation) <= 64
        assert num >= 20 or not validation
    assert len(validation) == 64


def test_added_images_move_no_image_from_training_to_held_out() -> None:
    """Added images move no other image below the limit, and none from training to held-out."""
    before = split_validation(entries(300), 64)
    for num in (301, 400, 900):
        train, validation = split_validation(entries(num), 64)
        assert set(before[1]) == set(validation) & set(entries(300))
        before_train = set(before[0])
        assert before_train <= set(train)
    large = set(split_validation(entries(5000), 64)[0])
    assert large <= set(split_validation(entries(9000), 64)[0])


def test_a_copy_has_the_same_fingerprint_and_any_change_another(tmp_path: Path) -> None:
    folder = captioned(tmp_path / "a", 25)
    first = ImageFolder(folder, 8, 8).fingerprint
    json.dumps(first)
    shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)
    assert ImageFolder(tmp_path / "b", 8, 8).fingerprint == first
    os.utime(folder / "0003.png", (1, 1))
    lines = (folder / "metadata.jsonl").read_text().split("\n")
    (folder / "metadata.jsonl").write_text("\n".join(reversed(lines)))
    assert ImageFolder(folder, 8, 8).fingerprint == first
    assert ImageFolder(folder, 8, 9).fingerprint != first
    (folder / "metadata.jsonl").write_text("\n".join(lines).replace("image 3", "image three"))
    assert ImageFolder(folder, 8, 8).fingerprint != first


@pytest.mark.parametrize("name", ["text", "caption", "prompt", "Caption"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_metadata_file_may_name_its_columns_as_other_trainers_do(tmp_path: Path, name: str, suffix: str) -> None:
    folder = captioned(tmp_path, 3)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    (folder / "metadata.jsonl").unlink()
    if suffix == "csv":
        lines = [f"image,{name}", *(f"{row['file_name']},{row['text']}" for row in rows)]
    else:
        lines = [json.dumps({"image": row["file_name"], name: row["text"]}) for row in rows]
    (folder / f"metadata.{suffix}").write_text("\n".join(lines))
    source = ImageFolder(folder, 8, 8)
    assert [source.train(index).caption for index in range(3)] == ["image 0", "image 1", "image 2"]


def with_text_files(folder: Path, num: int, suffix: str = ".txt") -> Path:
    captioned(folder, num)
    for line in (folder / "metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        (folder / row["file_name"]).with_suffix(suffix).write_text(f"  {row['text']}\r\n")
    (folder / "metadata.jsonl").unlink()
    return folder


@pytest.mark.parametrize("suffix", [".txt", ".caption"])
@pytest.mark.parametrize("below", ["", "train", "a/b"])
def test_captions_beside_the_images_are_those_of_a_metadata_file(tmp_path: Path, suffix: str, below: str) -> None:
    with_text_files(tmp_path / "files" / below, 12, suffix)
    (tmp_path / "files" / "README.txt").write_text("forty images of a car")
    captioned(tmp_path / "table" / below, 12)
    ours = ImageFolder(tmp_path / "files", 8, 8)
    assert [ours.train(index).caption for index in range(12)] == [f"image {index}" for index in range(12)]
    if below != "a/b":  # a metadata file is in the folder itself
        assert ours.fingerprint == ImageFolder(tmp_path / "table", 8, 8).fingerprint


def test_a_split_may_have_captions_beside_its_images(tmp_path: Path) -> None:
    with_text_files(tmp_path / "train", 5)
    with_text_files(tmp_path / "validation", 3)
    source = ImageFolder(tmp_path, 8, 8)
    assert (source.num_train, source.num_validation) == (5, 3)
    assert source.validation(2).caption == "image 2"


def test_captions_that_are_missing_doubled_or_not_text_are_refused(tmp_path: Path) -> None:
    folder = with_text_files(tmp_path / "some", 12)
    (folder / "0003.txt").unlink()
    assert "1 of 12 images" in refused(folder).found
    assert "have no caption file: 0003.png" in refused(folder).found
    (folder / "0003.txt").write_text("")
    assert ImageFolder(folder, 8, 8).train(3).caption == ""
    (folder / "0003.caption").write_text("a car")
    assert "0003.caption and 0003.txt" in refused(folder).found
    (folder / "0003.caption").unlink()
    (folder / "0003.txt").write_bytes(b"caf\xe9")
    assert "0003.txt, line 1" in refused(folder).found


def test_the_source_travels_to_another_process(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(ImageFolder(captioned(tmp_path, 3), 8, 8)))
    assert source.train(2).caption == "image 2"


def test_bad_folders_are_refused_with_what_was_found(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "missing").found
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file").found
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(tmp_path / "empty").found
    (tmp_path / "loose").mkdir()
    image().save(tmp_path / "loose" / "a.png")
    assert "neither a metadata file nor class folders (1 image without" in refused(tmp_path / "loose").found
    (tmp_path / "bare" / "train").mkdir(parents=True)
    image().save(tmp_path / "bare" / "train" / "a.png")
    assert "neither a metadata file nor class folders (1 image without" in refused(tmp_path / "bare").found
    (tmp_path / "texts" / "docs").mkdir(parents=True)
    (tmp_path / "texts" / "docs" / "a.txt").write_text("x")
    assert "no PNG, JPEG or WebP files" in refused(tmp_path / "texts").found
    both = captioned(tmp_path / "both", 1)
    (both / "metadata.csv").write_text("file_name,text\n")
    assert "both metadata.jsonl and metadata.csv" in refused(both).found


@pytest.mark.parametrize(
    ("columns", "nearest", "action"),
    [
        ("file_name,label,extra", "nearest is 'label'", "rename 'label' to 'text'"),
        ("file_name,extra,captions_en", "nearest is 'captions_en'", "rename 'captions_en' to 'text'"),
        ("image_files,text,extra", "nearest is 'image_files'", "rename 'image_files' to 'file_name'"),
        (
            "file_name,caption,prompt",
            "'caption' and 'prompt' could each be the column of captions",
            "rename the right one to 'text'",
        ),
        (
            "file_name,extra,more",
            "no column 'text' among 'file_name', 'extra', 'more'",
            "rename the right one to 'text'",
        ),
    ],
)
def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path, columns: str, nearest: str, action: str) -> None:
    (tmp_path / "metadata.csv").write_text(f"{columns}\na.png,b,c\n")
    error = refused(tmp_path)
    assert "metadata.csv, line 1" in error.found
    assert nearest in error.found
    assert error.action == action


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"file_name": "0000.png", "text"', "line 2, column 33: not JSON"),
        ('{"file_name": "0000.png", "label": "x"}', "line 2, column 1: no column 'text' among 'file_name', 'label'"),
        ('{"file_name": "0000.png", "text": null}', "line 2, column 1: text is None"),
        ('{"file_name": 3, "text": "x"}', "line 2, column 1: file_name is 3"),
        ('{"file_name": "../x.png", "text": "x"}', "line 2, column 1: file_name '../x.png' is outside the folder"),
        ('{"file_name": "a/../../x.png", "text": "x"}', "is outside the folder"),
        ('{"file_name": "..\\\\x.png", "text": "x"}', "is outside the folder"),
        ('{"file_name": "/etc/passwd", "text": "x"}', "is outside the folder"),
        ('{"file_name": "C:\\\\x.png", "text": "x"}', "is outside the folder"),
        ('{"file_name": "\\u0000", "text": "x"}', "is outside the folder"),
        ('{"file_name": "none.png", "text": "x"}', "lists 1 file that cannot be found: none.png (line 2)"),
    ],
)
def test_a_bad_line_of_metadata_is_refused_with_its_number(tmp_path: Path, line: str, found: str) -> None:
    captioned(tmp_path, 1)
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    error = refused(tmp_path)
    assert found in error.found
    assert "metadata.jsonl" in error.found


def test_broken_images_below_one_percent_are_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    captioned(tmp_path, 201)
    (tmp_path / "0007.png").write_bytes((tmp_path / "0007.png").read_bytes()[:40])
    (tmp_path / "0100.png").write_bytes(b"")
    source = ImageFolder(tmp_path, 8, 8)
    before = source.num_train + source.num_validation
    with caplog.at_level(logging.WARNING):
        report = source.check()
    assert report.num_checked == 201
    assert set(report.broken) == {"0007.png", "0100.png"}
    assert report.broken["0100.png"] == "the file is empty"
    assert source.num_train + source.num_validation == before - 2
    assert "0007.png" in caplog.text
    assert "0100.png" in caplog.text
    for index in range(source.num_train):
        source.train(index)


def test_captions_that_are_all_empty_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    captioned(tmp_path, 2)
    lines = (tmp_path / "metadata.jsonl").read_text()
    for text, times in ((lines, 0), (lines.replace("image 0", " "), 0), (re.sub(r"image \d", "", lines), 1)):
        caplog.clear()
        (tmp_path / "metadata.jsonl").write_text(text)
        with caplog.at_level(logging.WARNING):
            ImageFolder(tmp_path, 8, 8).check()
            ImageFolder(tmp_path, 8, 8).check(quiet=True)
        assert caplog.text.count("all captions of") == times


def test_broken_images_from_one_percent_on_are_refused_and_ten_are_named(tmp_path: Path) -> None:
    captioned(tmp_path, 100)
    (tmp_path / "0005.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"1 of 100 images of .* cannot be read:\n    0005.png: its content is not"):
        ImageFolder(tmp_path, 8, 8).check()
    for index in range(20):
        (tmp_path / f"{index:04d}.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="20 of 100 images") as caught:
        ImageFolder(tmp_path, 8, 8).check()
    assert caught.value.found.count(".png: ") == 10
    assert "and 10 more" in caught.value.found


def test_a_check_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    folder, memory = captioned(tmp_path / "pictures", 210), tmp_path / "memory"
    (folder / "0100.png").write_bytes(b"")
    calls: list[tuple[int, int]] = []
    first = ImageFolder(folder, 8, 8).check(memory, on_progress=lambda *now: calls.append(now))
    assert calls[-1] == (210, 210)
    assert not first.from_cache
    source = ImageFolder(folder, 8, 8)
    second = source.check(memory)
    assert second.from_cache
    assert second.broken == first.broken
    assert source.num_train + source.num_validation == 209
    image().save(folder / "0100.png")
    third = ImageFolder(folder, 8, 8).check(memory)
    assert not third.from_cache
    assert not third.broken
    for index in memory.iterdir():
        index.write_text("{")
    assert not ImageFolder(folder, 8, 8).check(memory).from_cache


def test_a_image_that_breaks_after_the_check_is_named(tmp_path: Path) -> None:
    source = ImageFolder(captioned(tmp_path, 3), 8, 8)
    (tmp_path / "0001.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"0001\.png cannot be read: the file is empty"):
        source.train(1)
    with pytest.raises(IndexError, match="has 3 such images"):
        source.train(3)


@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp"])
def test_the_middle_is_kept_at_any_size(tmp_path: Path, suffix: str) -> None:
    pixels = np.zeros((90, 300, 3), np.uint8)
    pixels[:, 105:195] = (40, 200, 90)
    pixels[:, :105] = (250, 0, 0)
    Image.fromarray(pixels).save(tmp_path / f"wide.{suffix}", quality=95)
    for size in (7, 30, 90, 200):
        square = decode(tmp_path / f"wide.{suffix}", size, size).astype(int)
        inner = square[:, 1 + size // 8 : size - 1 - size // 8]  # the edge touches what is cut off
        assert np.abs(inner - (40, 200, 90)).max() < 25, size
    tall = decode(tmp_path / f"wide.{suffix}", 60, 20).astype(int)
    assert np.abs(tall - (40, 200, 90)).max() < 25


def test_a_image_of_the_right_size_is_not_resampled(tmp_path: Path) -> None:
    pixels = np.random.Generator(np.random.Philox(3)).integers(0, 256, (16, 24, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.array_equal(decode(tmp_path / "a.png", 16, 24), pixels)


def test_a_turned_photograph_is_upright(tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:32] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying: to be turned a quarter clockwise, so the bright top half becomes the right half
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    seen = decode(tmp_path / "a.jpg", 64, 64)
    assert seen[:, 40:].min() > 200
    assert seen[:, :24].max() < 50


@pytest.mark.parametrize("kind", ["rgba", "palette", "grey and alpha", "colour key"])
def test_transparent_parts_are_white_whatever_colour_hides_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.png"
    if kind == "rgba":
        image((255, 0, 0, 0), mode="RGBA").save(path)
    elif kind == "palette":
        indexed = Image.new("P", (20, 12), 1)
        indexed.putpalette([0, 0, 0, 255, 0, 0])
        indexed.save(path, transparency=1)
    elif kind == "grey and alpha":
        image((0, 0), mode="LA").save(path)
    else:
        image((9, 9, 9)).save(path, transparency=(9, 9, 9))
    assert decode(path, 8, 8).min() == 255


def test_hidden_colours_do_not_bleed_into_the_edge(tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 4), np.uint8)
    pixels[:, :, 2] = 255
    pixels[:, :32] = (255, 255, 255, 255)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", 9, 9).min() >= 254


def test_deep_grey_palette_and_print_colours_are_read(tmp_path: Path) -> None:
    Image.fromarray(np.full((10, 10), 0x80FF, np.uint16)).save(tmp_path / "deep.png")
    assert abs(int(decode(tmp_path / "deep.png", 5, 5)[2, 2, 1]) - 0x80) <= 1
    image((10, 200, 30)).quantize(4).save(tmp_path / "palette.png")
    assert np.abs(decode(tmp_path / "palette.png", 5, 5)[2, 2].astype(int) - (10, 200, 30)).max() <= 2
    image((0, 0, 0, 0), mode="CMYK").save(tmp_path / "print.jpg")
    assert decode(tmp_path / "print.jpg", 5, 5).min() > 250
    Image.new("1", (10, 10), 1).save(tmp_path / "bits.png")
    assert decode(tmp_path / "bits.png", 5, 5).min() == 255


def bomb(path: Path, width: int, height: int) -> Path:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize(("width", "height"), [(8001, 8000), (20000, 20000), (60000, 60000)])
def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path, width: int, height: int) -> None:
    start = time.process_time()
    with pytest.raises(BrokenImageError, match=r"pixels"):
        decode(bomb(tmp_path / "a.png", width, height), 8, 8)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused_under_any_name(tmp_path: Path, kind: str) -> None:
    image(size=(16, 16)).save(tmp_path / "a.png", format=kind)
    with pytest.raises(BrokenImageError, match="not PNG, JPEG or WebP"):
        decode(tmp_path / "a.png", 8, 8)


def test_a_name_that_lies_among_the_three_formats_does_no_harm(tmp_path: Path) -> None:
    image((10, 20, 30)).save(tmp_path / "a.jpg", format="PNG")
    assert decode(tmp_path / "a.jpg", 4, 4)[0, 0].tolist() == [10, 20, 30]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_cut_file_is_found_by_the_check(tmp_path: Path, kind: str) -> None:
    noise = np.random.Generator(np.random.Philox(1)).integers(0, 256, (40, 40, 3), np.uint8)
    whole = io.BytesIO()
    Image.fromarray(noise).save(whole, format=kind)
    for cut in (12, 20, len(whole.getvalue()) // 2):
        (tmp_path / "a").write_bytes(whole.getvalue()[:-cut])
        with pytest.raises(BrokenImageError):
            verify_image(tmp_path / "a", 8, 8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_no_damage_raises_anything_but_the_one_error(tmp_path: Path, kind: str) -> None:
    random = np.random.Generator(np.random.Philox(2))
    whole = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (24, 24, 3), np.uint8)).save(whole, format=kind)
    outcomes = set()
    for _ in range(150):
        content = bytearray(whole.getvalue())
        for at in random.integers(0, min(len(content), 200), 3):
            content[at] = random.integers(0, 256)
        (tmp_path / "a").write_bytes(content)
        try:
            verify_image(tmp_path / "a", 8, 8)
            outcomes.add("read")
        except BrokenImageError as error:
            outcomes.add("refused" if str(error) else "refused without a reason")
    assert "refused" in outcomes
    assert "refused without a reason" not in outcomes


def test_a_link_that_leads_out_names_the_remedy_and_the_remedy_helps(tmp_path: Path) -> None:
    folder, memory = captioned(tmp_path / "pictures", 3), tmp_path / "memory"
    (folder / "0001.png").rename(tmp_path / "outside.png")
    (folder / "0001.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(
        InputError, match=r"0001.png: it is a link that leads out of .*, or give --follow_links"
    ) as caught:
        ImageFolder(folder, 8, 8).check(memory)
    assert "broken" not in str(caught.value)
    with use_limits(None, follow_links=True):
        assert ImageFolder(folder, 8, 8).check(memory).broken == {}
    with pytest.raises(InputError):
        ImageFolder(folder, 8, 8).check(memory)


def test_an_image_that_raised_limits_allow_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, memory = captioned(tmp_path / "pictures", 3), tmp_path / "memory"
    monkeypatch.setattr(input_files, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(InputError, match="--input_limits 4"):
        ImageFolder(folder, 8, 8).check(memory)
    with use_limits("1.5", follow_links=False):
        assert ImageFolder(folder, 8, 8).check(memory).broken == {}
