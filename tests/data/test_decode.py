"""Decoding keeps the pixels; files that take too much time or memory are refused or wait."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halation import input_files
from halation.data import decode
from halation.data.decode import BrokenImageError

DECODE_IN_THREADS = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from halation.data import decode
def check(_):
    try:
        return decode.verify_image(Path(sys.argv[1]), 64, 64)
    except decode.BrokenImageError as error:
        return str(error)
with ThreadPoolExecutor(8) as threads:
    assert set(threads.map(check, range(8))) == {sys.argv[2]}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def jpeg(size: tuple[int, int], **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new("L", size, 128).save(stream, "JPEG", **options)
    return stream.getvalue()


def refusal(path: Path) -> str:
    start = time.process_time()
    with pytest.raises(BrokenImageError) as caught:
        decode.decode(path, 8, 8)
    assert time.process_time() - start < 5
    with pytest.raises(BrokenImageError, match="--input_limits"):
        decode.decode_full_size(path.read_bytes())
    return str(caught.value)


def test_a_jpeg_with_many_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    data = jpeg((2000, 2000), progressive=True)
    last_scan = data[data.rfind(b"\xff\xda") : -2]
    path = tmp_path / "scans.jpg"
    path.write_bytes(data[:-2] + last_scan * 20_000 + data[-2:])
    assert "a JPEG of 4000000 pixels with more than 100 scans" in refusal(path)
    path.write_bytes(data[:-2] + last_scan * 20 + data[-2:])
    assert decode.decode(path, 8, 8).shape == (8, 8, 3)


def test_bytes_that_look_like_scans_do_not_count_behind_the_pixels_or_in_a_segment(tmp_path: Path) -> None:
    data = jpeg((64, 64), progressive=True)
    segment = b"\xff\xe5" + struct.pack(">H", 60_002) + b"\xff\xda" * 30_000
    (tmp_path / "phone.jpg").write_bytes(data[:2] + segment + data[2:] + b"\xff\xda" * 10_000)
    assert (decode.decode(tmp_path / "phone.jpg", 64, 64) == decode.decode_full_size(data)).all()


@pytest.mark.parametrize("kind", [b"tEXt", b"IDAT"])
def test_a_png_of_very_many_chunks_is_refused(tmp_path: Path, kind: bytes) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    data = stream.getvalue()
    at = data.index(b"IDAT") - 4
    body = chunk(kind, b"k\0a" if kind == b"tEXt" else b"")
    (tmp_path / "chunks.png").write_bytes(data[:at] + body * 250_000 + data[at:])
    assert "more than 200000 chunks" in refusal(tmp_path / "chunks.png")
    (tmp_path / "chunks.png").write_bytes(data[:at] + body * 1000 + data[at:])
    assert decode.verify_image(tmp_path / "chunks.png", 8, 8) == (8, 8)


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xe0\0\x02", b"\xff\xfe\0\0"])
def test_a_jpeg_of_very_many_segments_is_refused(tmp_path: Path, filler: bytes) -> None:
    data = jpeg((8, 8))
    (tmp_path / "segments.jpg").write_bytes(data[:2] + filler * 1_000_000 + data[2:])
    assert "more than 200000 chunks" in refusal(tmp_path / "segments.jpg")


def test_transparency_over_white_has_the_same_pixels_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (53, 37, 4), dtype=np.uint8))
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    monkeypatch.setattr(decode, "_STRIP_PIXELS", 100)
    for source in (image, image.convert("LA"), image.quantize(16)):
        stream = io.BytesIO()
        source.save(stream, "PNG")
        expected = Image.alpha_composite(white, source.convert("RGBA")).convert("RGB")
        assert (decode.decode_full_size(stream.getvalue()) == np.asarray(expected)).all()


def test_a_gate_bounds_the_memory_of_all_threads_and_passes_a_larger_one_alone() -> None:
    """All threads together hold at most the limit of the gate; a larger image passes alone."""
    gate, held, most = decode._Gate(100), [0], [0]

    def work(amount: int) -> None:
        for _ in range(20):
            with gate.hold(amount):
                held[0] += min(amount, 100)
                most[0] = max(most[0], held[0])
                time.sleep(0.0005)
                held[0] -= min(amount, 100)

    threads = [threading.Thread(target=work, args=(amount,)) for amount in (30, 30, 40, 60, 100, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert 0 < most[0] <= 100


def test_an_image_over_the_limit_of_all_threads_passes_with_raised_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image larger than the limit of all threads is decoded if the limits are raised."""
    Image.new("L", (9000, 8000)).save(tmp_path / "large.png")
    with pytest.raises(BrokenImageError, match=r"the limit is 64 million; .*--input_limits"):
        decode.decode(tmp_path / "large.png", 8, 8)
    monkeypatch.setenv(input_files.SCALE_VARIABLE, "2")
    assert decode.decode_with_size(tmp_path / "large.png", 8, 8).original_size == (8000, 9000)


@pytest.mark.slow
def test_eight_threads_take_the_memory_of_one_large_image(tmp_path: Path) -> None:
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(8000 * 4 + 1)) for _ in range(8000)) + packer.flush()
    header = struct.pack(">IIBBBBB", 8000, 8000, 8, 6, 0, 0, 0)
    path = tmp_path / "endless.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows))
    words = [sys.executable, "-c", DECODE_IN_THREADS, str(path), "truncated PNG file"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 20, f"{int(done.stdout) >> 10} MiB"
