"""Encodes frames as MP4 files (H.264) that play everywhere, with texts in the metadata."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from halation.errors import InputError, install_command
from halation.images.png_codec import Pixels, sanitize_text

CRF = "17"
"""x264's constant rate factor: visually almost lossless."""
METADATA_KEYS = {"halation": "comment", "parameters": "description"}
"""MP4 metadata keys for the texts of an image."""
ENCODER_OPTIONS = {"crf": CRF, "preset": "medium", "threads": "1", "x264-params": "mbtree=0"}
"""One thread, because x264 partitions an image by the number of threads. No macroblock tree: its vector code reads
uninitialised memory, so that equal frames gave different bytes between calls (seen with x264 165 in PyAV 18.1)."""
BT709 = 1
"""The HD colour space, written into the file: without it, players guess from the frame size."""


def encode_mp4(frames: Pixels, fps: int, text: Mapping[str, str]) -> bytes:
    """Encode `frames` (uint8, F x H x W x 3) as H.264 in yuv420p.

    Browsers and phones play it. For a side of odd length the last row or column is repeated, because yuv420p stores
    colours per 2x2 pixels. Equal frames give equal bytes.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"a video is uint8 of shape (frames, height, width, 3), not {frames.dtype}, {frames.shape}")
    if fps < 1:
        raise ValueError(f"a video has one or more frames per second, not {fps}")
    av = import_av()
    unknown = text.keys() - METADATA_KEYS.keys()
    if unknown:
        raise ValueError(f"an MP4 can store the texts {', '.join(METADATA_KEYS)}, not {unknown.pop()!r}")
    metadata = {METADATA_KEYS[key]: sanitize_text(value) for key, value in text.items()}
    even = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    # The index is at the front, so that playback starts before the whole file has arrived. Moving it there afterwards
    # needs a file with a name, so space is reserved instead; a frame takes at most 32 bytes of it.
    num_index_bytes = 8192 + 40 * len(frames) + sum(len(value.encode()) for value in metadata.values())
    options = {"moov_size": str(num_index_bytes), "fflags": "+bitexact"}
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", container_options=options) as container:
        container.metadata.update(metadata)
        stream = container.add_stream("libx264", rate=fps, options=ENCODER_OPTIONS)
        stream.height, stream.width, stream.pix_fmt = even.shape[1], even.shape[2], "yuv420p"
        codec = stream.codec_context
        codec.thread_count = 1
        codec.colorspace = codec.color_primaries = codec.color_trc = BT709
        for pixels in even:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709")))
        container.mux(stream.encode())
    return file.getvalue()


def import_av() -> ModuleType:
    """Import PyAV or raise InputError; call it before sampling a video, not after."""
    try:
        import av
    except ImportError:
        raise InputError(
            "a video to write, but PyAV is not installed",
            "PyAV, which has the H.264 encoder",
            f"{install_command('video')}, or request a single frame",
        ) from None
    return av
