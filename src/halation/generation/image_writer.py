"""From pixels to files: a picture encoded once into a parcel, and the parcel published so that its name never stands for half of it.

Encoding and publishing are apart because on a cluster the one happens beside the GPU and the other where the folder is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from halation.errors import REFUSALS, HalationError
from halation.generation.requests import Request
from halation.generation.results import digest, files_of
from halation.images.png import coder, encode_png, picture_text
from halation.images.video import encode_mp4
from halation.runs import folder as runs

WAITS_S = (0.1, 0.5, 2.0)


class Refused(HalationError):
    """The disk takes no pictures; another sheet would fare no better."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How pictures become files; part of the run, because it decides their bytes."""

    model: str
    sampler: str
    coder: str
    fps: int


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """The files of one picture by name, ready to be published; a video's frames stand before the video."""

    files: tuple[tuple[str, bytes], ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.files)


def pack(request: Request, frames: object, style: Style) -> Parcel:
    """Encode one picture, or one video with all its frames."""
    import numpy as np

    assert isinstance(frames, np.ndarray)
    text = picture_text(request.spec.as_json(), model=style.model, sampler=style.sampler)
    compress = coder(style.coder)
    names = files_of(request.name, len(frames))
    if len(frames) == 1:
        data = encode_png(frames[0], text, compress)
        return Parcel(files=((names[0], data),), sha256=digest([data]))
    video = encode_mp4(frames, style.fps, text)
    pictures = [encode_png(frame, text, compress) for frame in frames]
    # The video is published last: where it stands, its frames stand too.
    return Parcel(files=(*zip(names[1:], pictures, strict=True), (names[0], video)), sha256=digest([video, *pictures]))


class Store:
    """Publishes parcels into a folder; a disk that refuses is asked again a few times, because some refusals pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gave_up = False
        """Once the disk has refused for good, nobody waits for it again: the run is about to end."""

    def __call__(self, parcel: Parcel) -> None:
        for wait_s in (*WAITS_S, None):
            try:
                _publish(self.folder, parcel)
                return
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                if wait_s is None or self.gave_up:
                    self.gave_up = True
                    place = error.filename or self.folder
                    raise Refused(
                        f"cannot write {place}: {error.strerror}; mend that, for a full disk free some space, then run the same command again"
                    ) from error
                time.sleep(wait_s)


def _publish(folder: Path, parcel: Parcel) -> None:
    *frames, (name, data) = parcel.files
    if frames:
        _publish_folder(folder / Path(frames[0][0]).parent, frames)
    runs.publish(folder / name, data, point="picture")


def _publish_folder(target: Path, files: list[tuple[str, bytes]]) -> None:
    """Frames appear together, under a name that was empty before: a folder cannot be replaced in one step."""
    temporary = runs.temporary_for(target)
    temporary.mkdir()
    try:
        for name, data in files:
            with open(temporary / Path(name).name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        runs.sync_folder(temporary)
        if _holds(target, files):
            # Another command that shares the folder drew it too: removing the same frames would risk them for nothing.
            shutil.rmtree(temporary)
            return
        if target.is_symlink():
            target.unlink()
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
        raise
    runs.sync_folder(target.parent)


def _holds(target: Path, files: list[tuple[str, bytes]]) -> bool:
    """Whether these files, and no others, are there already."""
    try:
        return (
            not target.is_symlink()
            and len(os.listdir(target)) == len(files)
            and all((target / Path(name).name).read_bytes() == data for name, data in files)
        )
    except OSError:
        return False
