"""Encodes images and publishes them: a final name never stands for half of a file.

Encoding and publishing are apart because on a cluster the one happens beside the GPU and the other where the folder is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halation.errors import RESOURCE_ERRNOS, HalationError
from halation.generation.image_requests import ImageRequest
from halation.generation.metadata_and_summary import combined_digest, file_names
from halation.images.mp4_writer import encode_mp4
from halation.images.png_codec import encode_png, get_coder, metadata_texts
from halation.runs import run_folder as runs
from halation.runs.lock import WatchedPath

RETRY_WAITS_S = (0.1, 0.5, 2.0)


class DiskWriteError(HalationError):
    """The disk takes no images; another batch would fare no better."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How images become files; part of the run, because it decides their bytes."""

    model: str
    sampler: str
    coder: str
    fps: int


@dataclass(frozen=True, kw_only=True)
class EncodedImage:
    """The files of one image by name, ready to be published; a video's frames stand before the video."""

    files: tuple[tuple[str, bytes], ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.files)


def encode_image(request: ImageRequest, frames: object, options: EncodeOptions) -> EncodedImage:
    """Encode one image, or one video with all its frames."""
    import numpy as np

    assert isinstance(frames, np.ndarray)
    text = metadata_texts(request.spec.as_json(), model=options.model, sampler=options.sampler)
    compress = get_coder(options.coder)
    names = file_names(request.name, len(frames))
    if len(frames) == 1:
        data = encode_png(frames[0], text, compress)
        return EncodedImage(files=((names[0], data),), sha256=combined_digest([data]))
    video = encode_mp4(frames, options.fps, text)
    images = [encode_png(frame, text, compress) for frame in frames]
    # The video is published last: where it stands, its frames stand too.
    return EncodedImage(
        files=(*zip(names[1:], images, strict=True), (names[0], video)), sha256=combined_digest([video, *images])
    )


class ImageStore:
    """Publishes encoded images into a folder, with a few retries for errors of the disk that may pass.

    Not retried: a folder that was removed, moved, replaced or made read-only.
    """

    def __init__(self, folder: Path, identity: Sequence[int] | None = None) -> None:
        """`identity` is the folder's device and inode when the command began; by default what they are now."""
        self.folder = folder
        self.watched = WatchedPath(folder, (identity[0], identity[1]) if identity else None)
        self.has_given_up = False
        """Set when the disk has failed for good: no other thread retries, the run is about to end."""

    def __call__(self, encoded_image: EncodedImage) -> None:
        for wait_s in (*RETRY_WAITS_S, None):
            self._check_folder()
            try:
                _publish_image(self.folder, encoded_image)
                return
            except OSError as error:
                self._check_folder()
                if error.errno not in RESOURCE_ERRNOS:
                    raise
                if wait_s is None or self.has_given_up:
                    self.has_given_up = True
                    path = error.filename or self.folder
                    raise DiskWriteError(
                        f"cannot write {path}: {error.strerror}; fix the cause (for a full disk, free some space) "
                        "and run the same command again"
                    ) from error
                time.sleep(wait_s)

    def _check_folder(self) -> None:
        problem = self.watched.find_problem()
        if problem:
            self.has_given_up = True
            raise DiskWriteError(problem)


def _publish_image(folder: Path, encoded_image: EncodedImage) -> None:
    *frames, (name, data) = encoded_image.files
    if frames:
        _publish_frames(folder / Path(frames[0][0]).parent, frames)
    runs.write_atomic(folder / name, data, point="picture")


def _publish_frames(target: Path, files: list[tuple[str, bytes]]) -> None:
    """Frames appear together; equal ones stay, as another command that shares the folder may have drawn them."""
    temporary = runs.temporary_path(target)
    temporary.mkdir()
    try:
        for name, data in files:
            (temporary / Path(name).name).write_bytes(data)
        if not _has_same_files(target, files):
            runs.publish_folder(temporary, target, "frames")
    finally:
        runs.remove_path(temporary)


def _has_same_files(target: Path, files: list[tuple[str, bytes]]) -> bool:
    """Whether these files, and no others, are there already."""
    try:
        return (
            not target.is_symlink()
            and len(os.listdir(target)) == len(files)
            and all((target / Path(name).name).read_bytes() == data for name, data in files)
        )
    except OSError:
        return False
