"""Where pictures to score come from: files below a folder or embedded street scenes, by index, with captions where there are some."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from halation.data import image_listing
from halation.data.decode import SUFFIXES, VERSION, BrokenPictureError, whole
from halation.data.streets import Streets
from halation.errors import InputError
from halation.tables import csv_rows, decode, json_rows

log = logging.getLogger(__name__)
CAPTION_COLUMNS = ("text", "prompt", "caption")
OTHER_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".jp2", ".ppm", ".tga")


class Loaded(NamedTuple):
    """One picture at its own size, and the SHA-256 of what it was made from."""

    pixels: npt.NDArray[np.uint8]
    digest: bytes


class FileTicket(NamedTuple):
    """A picture file, and the SHA-256 that a ledger promises of it, if one does."""

    path: str
    sha256: str | None


class Source(Protocol):
    """Pictures by index; only `loader` and tickets travel to the processes that decode: it may name millions."""

    @property
    def captions(self) -> tuple[str, ...] | None:
        """What each picture was drawn for, where that is known."""

    def __len__(self) -> int: ...

    @property
    def key(self) -> str:
        """What its features are filed under: equal keys mean equal pictures."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says of it."""

    def name(self, index: int) -> str:
        """How a person finds picture `index`."""

    @property
    def loader(self) -> Callable[[Any], Loaded]:
        """Picture of a ticket, in any process: picklable and small; BrokenPictureError where there is no picture to be had."""

    def ticket(self, index: int) -> Any:
        """What `loader` needs to know of picture `index`: picklable and small."""

    def load(self, index: int) -> Loaded:
        """`loader` of `ticket`."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Picture files below one folder, in the order of their names or of a run's prompts."""

    kind: str
    folder: Path
    names: tuple[str, ...]
    stamps: tuple[tuple[int, ...], ...]
    """Size, times of change and number on the disk, by which a file that was replaced is known."""
    captions: tuple[str, ...] | None = None
    no_captions: str = ""
    """Why there are none, where there might have been."""
    num_left_out: int = 0
    """Pictures of formats that are not read."""
    digests: tuple[str, ...] | None = None
    """The SHA-256 that a ledger promises of each file."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def key(self) -> str:
        return hashed([VERSION, str(self.folder.resolve()), self.names, self.stamps, self.digests])

    @property
    def facts(self) -> dict[str, Any]:
        path = os.fsencode(self.folder).decode("utf-8", "replace")  # a name need not be text, but a result is
        return {"kind": self.kind, "path": path} | ({"num_left_out": self.num_left_out} if self.num_left_out else {})

    def name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    @property
    def loader(self) -> Callable[[FileTicket], Loaded]:
        return load_file

    def ticket(self, index: int) -> FileTicket:
        return FileTicket(self.name(index), None if self.digests is None else self.digests[index])

    def load(self, index: int) -> Loaded:
        return self.loader(self.ticket(index))

    def first(self, num: int) -> Files:
        """The first so many."""
        return replace(
            self,
            names=self.names[:num],
            stamps=self.stamps[:num],
            captions=self.captions and self.captions[:num],
            digests=self.digests and self.digests[:num],
        )


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """The first held-out street scenes, drawn at one size."""

    size: int
    num: int

    def __len__(self) -> int:
        return self.num

    @property
    def _streets(self) -> Streets:
        return Streets(self.size, self.size, num_heldout=self.num)

    @property
    def captions(self) -> tuple[str, ...] | None:
        return None  # a reference's captions are of no use to any number

    @property
    def key(self) -> str:
        return hashed([self._streets.fingerprint, "heldout"])

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "streets", "path": "streets", "size": self.size}

    def name(self, index: int) -> str:
        return f"held-out street scene {index}"

    @property
    def loader(self) -> Callable[[int], Loaded]:
        return partial(load_scene, self.size, self.num)

    def ticket(self, index: int) -> int:
        return index

    def load(self, index: int) -> Loaded:
        return self.loader(self.ticket(index))


def load_file(ticket: FileTicket) -> Loaded:
    """The whole picture of a file, as its ledger promises it."""
    try:
        data = Path(ticket.path).read_bytes()
    except OSError as error:
        raise BrokenPictureError(error.strerror or str(error)) from None
    digest = hashlib.sha256(data)
    if ticket.sha256 is not None and digest.hexdigest() != ticket.sha256:
        raise BrokenPictureError("it is not the file that its ledger names: it was changed or damaged")
    return Loaded(whole(data), digest.digest())


def load_scene(size: int, num: int, index: int) -> Loaded:
    """Held-out street scene `index` of `num`."""
    pixels = Streets(size, size, num_heldout=num).heldout(index).pixels
    return Loaded(pixels, hashlib.sha256(pixels.tobytes()).digest())


def hashed(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def files_below(folder: Path, what: str, *, captions: bool = True) -> Files:
    """Every picture of a folder and below it, by name; captions where they are wanted and a metadata file beside them has some."""
    if not folder.is_dir():
        why = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise InputError(f"{what}: {why}", "a folder of PNG, JPEG or WebP pictures", f"check {what}")
    listed = sorted(_below(folder, what))
    found = [name for name in listed if name.lower().endswith(SUFFIXES) and not _is_a_grid(folder / name)]
    others = [name for name in listed if name.lower().endswith(OTHER_SUFFIXES)]
    if not found:
        raise InputError(
            f"{what}: {folder} has no pictures", "PNG, JPEG or WebP files in it or below it", f"check {what}"
        )
    if others:
        log.warning(
            "%s: %d pictures are left out, because only PNG, JPEG and WebP are read: %s ...",
            what,
            len(others),
            others[0],
        )
    names = tuple(found)
    texts, why = _captions(folder, names) if captions else (None, "")
    return Files(
        kind="folder",
        folder=folder,
        names=names,
        stamps=stamps_of(folder, names),
        captions=texts,
        no_captions=why,
        num_left_out=len(others),
    )


def _is_a_grid(path: Path) -> bool:
    """The overview that samples and watched checkpoints have beside their pictures."""
    return path.name.endswith("grid.png") and any(
        path.with_name(path.name.removesuffix("grid.png") + name).is_file()
        for name in ("samples.json", "evaluation.json")
    )


def _below(folder: Path, what: str) -> Iterator[str]:
    """Files below a folder, linked folders too; one that cannot be read is no folder to leave out."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{what}: {error.filename}: {error.strerror}", "folders that can be read", f"check {what}")

    seen: set[tuple[int, int]] = set()
    for here, subfolders, files in os.walk(folder, followlinks=True, onerror=refuse):
        stat = os.stat(here)
        if (stat.st_dev, stat.st_ino) in seen:  # a link back to where it came from
            subfolders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        below = Path(here).relative_to(folder)
        yield from ((below / name).as_posix() for name in files if not name.startswith("."))


def stamps_of(folder: Path, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    try:
        found = [os.stat(folder / name) for name in names]
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename} is a link to nothing, or was removed just now",
            "pictures that are there",
            "mend or remove the link",
        ) from error
    return tuple((one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for one in found)


def _captions(folder: Path, names: Sequence[str]) -> tuple[tuple[str, ...] | None, str]:
    """From a metadata file beside the pictures, where it has a text for every one of them; else why there are none."""
    path = next((folder / name for name in image_listing.METADATA if (folder / name).is_file()), None)
    if path is None:
        return None, ""
    texts: dict[str, str] = {}
    try:
        text = decode(str(path), path.read_bytes())
        for row in csv_rows(str(path), text) if path.suffix == ".csv" else json_rows(str(path), text):
            caption = next((row.values[column] for column in CAPTION_COLUMNS if column in row.values), None)
            if isinstance(row.values.get("file_name"), str) and isinstance(caption, str):
                texts[row.values["file_name"]] = caption
    except InputError as error:
        return None, error.found
    absent = texts.keys() - set(names)
    if absent:
        log.warning("%s names %d pictures that are not there, such as %s", path, len(absent), min(absent))
    lacking = [name for name in names if name not in texts]
    if lacking:
        return None, f"{path} has no text for {len(lacking)} of {len(names)} pictures, such as {lacking[0]}"
    return tuple(texts[name] for name in names), ""
