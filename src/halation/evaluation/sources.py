"""Where pictures to score come from: files below a folder or embedded street scenes, by index, with captions where there are some."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from halation.data import folders
from halation.data.decode import SUFFIXES, VERSION, BrokenPictureError, whole
from halation.data.streets import Streets
from halation.errors import InputError
from halation.tables import csv_rows, decode, json_rows

CAPTION_COLUMNS = ("text", "prompt", "caption")


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
    stamps: tuple[tuple[int, int], ...]
    """Size and time of change, by which a file that was replaced is known."""
    captions: tuple[str, ...] | None = None
    digests: tuple[str, ...] | None = None
    """The SHA-256 that a ledger promises of each file."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def key(self) -> str:
        if self.digests is not None:
            return hashed([VERSION, *self.digests])
        return hashed([VERSION, str(self.folder.resolve()), self.names, self.stamps])

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": str(self.folder)}

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
        return Files(
            kind=self.kind,
            folder=self.folder,
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


def files_below(folder: Path, what: str) -> Files:
    """Every picture of a folder and below it, by name; captions where a metadata file beside them has some."""
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise InputError(f"{what}: {found}", "a folder of PNG, JPEG or WebP pictures", f"check {what}")
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not _hidden(path, folder) and path.is_file()
    )
    if not paths:
        raise InputError(
            f"{what}: {folder} has no pictures", "PNG, JPEG or WebP files in it or below it", f"check {what}"
        )
    names = tuple(path.relative_to(folder).as_posix() for path in paths)
    return Files(
        kind="folder",
        folder=folder,
        names=names,
        stamps=stamps_of(folder, names),
        captions=_captions(folder, names),
    )


def stamps_of(folder: Path, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    found = [(folder / name).stat() for name in names]
    return tuple((one.st_size, one.st_mtime_ns) for one in found)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _captions(folder: Path, names: Sequence[str]) -> tuple[str, ...] | None:
    """From a metadata file beside the pictures, where it has a text for every one of them."""
    path = next((folder / name for name in folders.METADATA if (folder / name).is_file()), None)
    if path is None:
        return None
    text = decode(str(path), path.read_bytes())
    rows = csv_rows(str(path), text) if path.suffix == ".csv" else json_rows(str(path), text)
    texts: dict[str, str] = {}
    for row in rows:
        caption = next((row.values[column] for column in CAPTION_COLUMNS if column in row.values), None)
        if isinstance(row.values.get("file_name"), str) and isinstance(caption, str):
            texts[row.values["file_name"]] = caption
    return tuple(texts[name] for name in names) if texts.keys() >= set(names) else None
