"""An MP4 keeps frames close, plays from the start, carries its spec and is deterministic."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from halation.errors import InputError
from halation.images.mp4_writer import encode_mp4
from halation.images.png_codec import Pixels, metadata_texts

SPEC: dict[str, Any] = {
    "index": 0,
    "id": "a",
    "prompt": 'rain; "half = full" # \u96e8\nnext',
    "seed": 1,
    "height": 64,
    "width": 96,
    "steps": 10,
    "guidance_scale": 4.0,
    "negative_prompt": "",
    "num_frames": 9,
}


def moving(num_frames: int, height: int, width: int) -> Pixels:
    """A smooth image that moves a few pixels each frame, its three colours in three directions."""
    time, y, x = np.mgrid[0:num_frames, 0:height, 0:width]
    colours = [np.sin((x + 3 * time) / 25), np.cos((y + 2 * time) / 19), np.sin((x + y - time) / 31)]
    return (128 + 100 * np.stack(colours, -1)).astype(np.uint8)


def decoded(data: bytes) -> tuple[Pixels, Any]:
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(data)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        stream = container.streams.video[0]
        facts = {
            "fps": stream.average_rate,
            "format": stream.codec_context.pix_fmt,
            "codec": stream.codec_context.name,
            "metadata": dict(container.metadata),
        }
    return frames, facts


def noise_in_decibels(found: Pixels, expected: Pixels) -> float:
    return float(10 * np.log10(255**2 / np.square(found.astype(np.float64) - expected).mean()))


def boxes(data: bytes) -> list[bytes]:
    """The kinds of an MP4's outermost boxes, in their order; they must fill the file."""
    kinds, position = [], 0
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        kinds.append(kind)
        position += length
    assert position == len(data)
    return kinds


@pytest.mark.parametrize("num_frames", [1, 2, 17])
def test_every_frame_comes_back_in_its_place_and_close_to_what_it_was(num_frames: int) -> None:
    frames = moving(num_frames, 128, 192)
    found, facts = decoded(encode_mp4(frames, 16, {}))
    assert found.shape == frames.shape
    assert (facts["fps"], facts["format"], facts["codec"]) == (16, "yuv420p", "h264")
    for number in range(num_frames):
        assert noise_in_decibels(found[number], frames[number]) > 35
    if num_frames > 2:
        assert noise_in_decibels(found[1], frames[2]) < 35


@pytest.mark.parametrize("size", [(33, 47), (32, 47), (33, 48), (1, 1)])
def test_odd_sides_are_padded_and_the_image_stays_where_it_was(size: tuple[int, int]) -> None:
    height, width = size
    frames = moving(3, height, width)
    found, _ = decoded(encode_mp4(frames, 8, {}))
    assert found.shape == (3, height + height % 2, width + width % 2, 3)
    assert noise_in_decibels(found[:, :height, :width], frames) > 35


def test_plain_colours_keep_their_hue() -> None:
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (255, 255, 255), (0, 0, 0)]
    frames = np.array(colours, np.uint8)[:, None, None].repeat(32, 1).repeat(32, 2)
    found, _ = decoded(encode_mp4(frames, 1, {}))
    assert np.abs(found.astype(int) - frames).max() <= 5


def test_the_spec_is_in_the_comment_letter_by_letter() -> None:
    _, facts = decoded(encode_mp4(moving(2, 16, 16), 8, metadata_texts(SPEC, model="tiny")))
    assert json.loads(facts["metadata"]["comment"]) == SPEC
    assert facts["metadata"]["description"].startswith(SPEC["prompt"] + "\nSteps: 10")


def test_a_prompt_no_file_can_hold_and_one_of_a_megabyte_do_not_break_it() -> None:
    for prompt in ("half a pair \ud83d and a \0 inside", "x\u96e8" * (1 << 19)):
        _, facts = decoded(encode_mp4(moving(2, 16, 16), 8, metadata_texts({**SPEC, "prompt": prompt})))
        assert json.loads(facts["metadata"]["comment"])["prompt"] == prompt


@pytest.mark.parametrize("num_frames", [1, 700])
def test_the_index_stands_before_the_frames_so_that_playing_begins_at_once(num_frames: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (num_frames, 16, 16, 3), np.uint8)
    kinds = boxes(encode_mp4(noise, 24, {}))
    assert kinds[0] == b"ftyp"
    assert kinds.index(b"moov") < kinds.index(b"mdat")


@pytest.mark.parametrize("size", [(48, 64), (50, 34), (240, 416)])
def test_equal_frames_give_equal_bytes_in_other_processes(
    size: tuple[int, int],
) -> None:
    """Equal frames give equal bytes in other processes, whatever their memory held before."""
    shape = (7, *size, 3)
    frames = moving(*shape[:3])
    data = encode_mp4(frames, 16, metadata_texts(SPEC))
    assert encode_mp4(np.asfortranarray(frames), 16, metadata_texts(SPEC)) == data
    script = (
        "import hashlib, sys, numpy as np; from halation.images.png_codec import metadata_texts\n"
        "from halation.images.mp4_writer import encode_mp4\n"
        f"frames = np.frombuffer(sys.stdin.buffer.read(), np.uint8).reshape({shape})\n"
        f"print(hashlib.sha256(encode_mp4(frames, 16, metadata_texts({SPEC!r}))).hexdigest())"
    )
    for filling in ("0", "1", "170", "254"):
        other = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"MALLOC_PERTURB_": filling},  # glibc fills fresh memory with it
            input=frames.tobytes(),
            capture_output=True,
            check=True,
            timeout=60,
        )
        assert other.stdout.decode().strip() == hashlib.sha256(data).hexdigest()


def test_other_frames_and_another_spec_give_other_bytes() -> None:
    frames = moving(5, 48, 64)
    data = encode_mp4(frames, 16, metadata_texts(SPEC))
    assert encode_mp4(frames[::-1], 16, metadata_texts(SPEC)) != data
    assert encode_mp4(frames, 16, metadata_texts({**SPEC, "seed": 2})) != data
    assert encode_mp4(frames, 8, metadata_texts(SPEC)) != data


def test_without_pyav_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r'pip install "av>=') as refusal:
        encode_mp4(moving(2, 16, 16), 8, {})
    assert refusal.value.exit_code == 2


def test_what_is_not_a_video_is_not_encoded() -> None:
    for frames in (moving(2, 16, 16)[0], moving(2, 16, 16).astype(np.float32), moving(2, 16, 16)[:0]):
        with pytest.raises(ValueError, match="a video is uint8"):
            encode_mp4(frames, 8, {})
    with pytest.raises(ValueError, match="one or more frames per second"):
        encode_mp4(moving(2, 16, 16), 0, {})
    with pytest.raises(ValueError, match="not 'colour'"):
        encode_mp4(moving(2, 16, 16), 8, {"colour": "red"})
