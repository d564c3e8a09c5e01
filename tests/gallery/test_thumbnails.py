"""Laws of thumbnails: small, made once, of the current image, and only of images."""

from __future__ import annotations

import io
import os
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from benchmarks.big_folders import images
from PIL import Image

from halation.gallery import thumbnails
from halation.gallery.thumbnails import ThumbnailCache
from halation.images.png_codec import encode_png


def opened(data: bytes | None) -> Image.Image:
    assert data is not None
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def image(path: Path, width: int, height: int, colour: tuple[int, int, int] = (200, 30, 60)) -> Path:
    path.write_bytes(encode_png(np.full((height, width, 3), colour, np.uint8), {}))
    return path


def flip_bit(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 4]) + data[101:]


@pytest.fixture
def small(tmp_path: Path) -> ThumbnailCache:
    return ThumbnailCache(tmp_path / "cache")


@pytest.mark.parametrize(("size", "expected"), [(256, (256, 128)), (512, (512, 256))])
def test_the_longest_side_is_what_was_asked_for_and_the_colours_stay(
    tmp_path: Path, small: ThumbnailCache, size: int, expected: tuple[int, int]
) -> None:
    thumbnail = opened(small.get(image(tmp_path / "a.png", 800, 400), size))
    assert thumbnail.format == "WEBP"
    assert thumbnail.size == expected
    assert np.abs(np.asarray(thumbnail.convert("RGB"), float).mean(axis=(0, 1)) - (200, 30, 60)).max() < 4


def test_a_small_image_is_not_made_larger(tmp_path: Path, small: ThumbnailCache) -> None:
    assert opened(small.get(image(tmp_path / "a.png", 64, 48))).size == (64, 48)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_images_of_the_three_kinds_are_shown_and_transparency_is_kept(
    tmp_path: Path, small: ThumbnailCache, kind: str
) -> None:
    mode = "RGB" if kind == "JPEG" else "RGBA"
    Image.new(mode, (300, 300)).save(tmp_path / "a", kind)
    image = opened(small.get(tmp_path / "a"))
    assert (image.size, image.mode) == ((256, 256), mode)


def test_the_second_time_the_image_is_not_decoded_and_another_process_finds_it_too(
    tmp_path: Path, small: ThumbnailCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = image(tmp_path / "a.png", 300, 300)
    first = small.get(path)
    monkeypatch.setattr(Image, "open", None)
    assert small.get(path) == first
    assert ThumbnailCache(small.folder).get(path) == first


def test_another_image_under_the_same_name_gets_its_own_thumbnail(tmp_path: Path, small: ThumbnailCache) -> None:
    path = image(tmp_path / "a.png", 64, 64)
    before = small.get(path)
    image(path, 64, 64, (0, 200, 0))
    os.utime(path, ns=(1, 1))
    after = small.get(path)
    assert after is not None
    assert after != before


def _header(width: int, height: int) -> bytes:
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", body) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bad_files() -> Iterator[tuple[str, bytes]]:
    whole = images(64, 1)[0]
    gif = io.BytesIO()
    Image.new("RGB", (8, 8)).save(gif, "GIF")
    yield "empty", b""
    yield "text", b"<script>alert(1)</script>"
    yield "cut off", whole[: len(whole) // 2]
    yield "another kind", gif.getvalue()
    yield "a bomb", _header(60_000, 60_000)
    yield "a smaller bomb", _header(10_000, 10_000)
    yield "damaged pixels", whole[:3000] + bytes(64) + whole[3064:]


@pytest.mark.parametrize(("what", "data"), list(bad_files()))
def test_what_is_no_whole_image_of_sensible_size_has_no_thumbnail(
    tmp_path: Path, small: ThumbnailCache, what: str, data: bytes
) -> None:
    (tmp_path / "a.png").write_bytes(data)
    assert small.get(tmp_path / "a.png") is None, what


def test_a_image_that_is_gone_or_a_folder_has_no_thumbnail(tmp_path: Path, small: ThumbnailCache) -> None:
    assert small.get(tmp_path / "none.png") is None
    assert small.get(tmp_path) is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], flip_bit, lambda data: b""])
def test_a_damaged_thumbnail_is_made_again(
    tmp_path: Path, small: ThumbnailCache, damage: Callable[[bytes], bytes]
) -> None:
    path = image(tmp_path / "a.png", 300, 300)
    first = small.get(path)
    assert first is not None
    (kept,) = small.folder.glob("*/*.webp")
    written = kept.read_bytes()
    kept.write_bytes(damage(written))
    assert small.get(path) == first
    assert kept.read_bytes() == written


def test_the_oldest_are_removed_when_there_are_too_many_and_leftovers_with_them(tmp_path: Path) -> None:
    data = images(64, 12)
    small = ThumbnailCache(tmp_path / "cache", max_bytes=1 << 30)
    for number, file in enumerate(data):
        (tmp_path / f"{number}.png").write_bytes(file)
        assert small.get(tmp_path / f"{number}.png") is not None
    kept = list(small.folder.glob("*/*.webp"))
    assert len(kept) == 12
    for number, path in enumerate(kept):
        os.utime(path, (1000 + number, 1000 + number))
    leftover = kept[0].with_name(".x.host-1-1.tmp")
    leftover.touch()
    os.utime(leftover, (1, 1))
    small.max_bytes = sum(path.stat().st_size for path in kept) // 2
    small.evict_oldest()
    left = list(small.folder.glob("*/*.webp"))
    assert 0 < sum(path.stat().st_size for path in left) <= small.max_bytes
    assert set(left) == set(kept[-len(left) :])
    assert not leftover.exists()


def test_many_threads_that_want_one_image_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = image(tmp_path / "a.png", 600, 600)
    decoded = []
    real = thumbnails.make_thumbnail
    together = threading.Barrier(8)

    def counting(path: Path, size: int) -> bytes | None:
        decoded.append(path)
        return real(path, size)

    monkeypatch.setattr(thumbnails, "make_thumbnail", counting)
    small = ThumbnailCache(tmp_path / "cache")

    def ask() -> bytes | None:
        together.wait()
        return small.get(path)

    with ThreadPoolExecutor(8) as threads:
        answers = [future.result() for future in [threads.submit(ask) for _ in range(8)]]
    assert len(decoded) == 1
    assert len(set(answers)) == 1
    assert answers[0] is not None


def test_the_cache_is_for_its_owner_alone(tmp_path: Path) -> None:
    ThumbnailCache(tmp_path / "cache/thumbnails").get(image(tmp_path / "a.png", 8, 8))
    assert {
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache/thumbnails").rglob("*") if path.is_dir()
    } == {0o700}
    assert stat.S_IMODE((tmp_path / "cache/thumbnails").stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_costs_speed_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert ThumbnailCache(tmp_path / "cache").get(image(tmp_path / "a.png", 64, 64)) is not None


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALATION_CACHE", str(tmp_path))
    assert ThumbnailCache().folder == tmp_path / "thumbnails"
    monkeypatch.delenv("HALATION_CACHE")
    assert ThumbnailCache().folder == Path.home() / ".cache" / "halation" / "thumbnails"
