"""Sources of images to score: files, street scenes, and images of a training run."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from halation.csv_jsonl_reader import csv_rows, decode_blocks, json_rows, read_text_bytes
from halation.data import decode, image_annotations
from halation.data.image_folder import ImageFolder
from halation.data.streets import Streets
from halation.errors import InputError, format_count
from halation.input_files import MAX_FOLDER_ENTRIES, data_folder, walk_folder
from halation.runs.run_folder import hash_json

log = logging.getLogger(__name__)
CAPTION_COLUMNS = ("text", "prompt", "caption")


class LoadedImage(NamedTuple):
    """One image at its original size, and the SHA-256 of its file or pixels."""

    pixels: npt.NDArray[np.uint8]
    digest: bytes


class ImageFileRef(NamedTuple):
    """An image file, its SHA-256 in a ledger, and the folder that links must stay in."""

    path: str
    sha256: str | None
    within: str | None = None


class ImageSource(Protocol):
    """Images by index.

    Decoder processes receive only `loader` and image refs, because a source may list millions of images.
    """

    @property
    def captions(self) -> tuple[str, ...] | None:
        """The prompt of each image, if known."""

    def __len__(self) -> int: ...

    @property
    def key(self) -> str:
        """The key of its features in the cache; equal keys mean equal images."""

    @property
    def facts(self) -> dict[str, Any]:
        """The description of the source in the report."""

    def name(self, index: int) -> str:
        """Return the name of an image, for messages."""

    @property
    def loader(self) -> Callable[[Any], LoadedImage]:
        """A small, picklable function that loads the image of a ref in any process.

        It raises BrokenImageError if the image cannot be read.
        """

    def image_ref(self, index: int) -> Any:
        """Return the argument of `loader` for an image; small and picklable."""

    def load(self, index: int) -> LoadedImage:
        """Load one image in this process."""


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Image files below one folder, in the order of their names or of the run's prompts."""

    kind: str
    folder: Path
    names: tuple[str, ...]
    stamps: tuple[tuple[int, ...], ...]
    """Size, mtime, ctime and inode of each file, to detect replaced files."""
    captions: tuple[str, ...] | None = None
    no_captions: str = ""
    """Why captions could not be read from a metadata file; else empty."""
    num_left_out: int = 0
    """Number of images in unsupported formats."""
    digests: tuple[str, ...] | None = None
    """The SHA-256 of each file in the ledger."""
    missing: tuple[str, ...] = ()
    """File names of the run's images that do not exist; only with --allow_missing."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def key(self) -> str:
        return hash_json([decode.VERSION, str(self.folder.resolve()), self.names, self.stamps, self.digests])

    @property
    def facts(self) -> dict[str, Any]:
        path = os.fsencode(self.folder).decode(
            "utf-8", "replace"
        )  # file names may not be valid UTF-8, but the report is
        facts: dict[str, Any] = {"kind": self.kind, "path": path}
        if self.num_left_out:
            facts["num_left_out"] = self.num_left_out
        return facts | ({"num_missing": len(self.missing), "missing": list(self.missing)} if self.missing else {})

    def name(self, index: int) -> str:
        return str(self.folder / self.names[index])

    @property
    def loader(self) -> Callable[[ImageFileRef], LoadedImage]:
        return self._load_file

    @staticmethod
    def _load_file(file_ref: ImageFileRef) -> LoadedImage:
        """Load an image file and check its SHA-256 in the ledger, if there is one."""
        data = decode.read_image_bytes(file_ref.path, file_ref.within)
        digest = hashlib.sha256(data)
        if file_ref.sha256 is not None and digest.hexdigest() != file_ref.sha256:
            raise decode.BrokenImageError("its SHA-256 differs from the ledger: it was changed or damaged")
        return LoadedImage(decode.decode_full_size(data), digest.digest())

    def image_ref(self, index: int) -> ImageFileRef:
        sha256 = None if self.digests is None else self.digests[index]
        return ImageFileRef(self.name(index), sha256, self._within)

    @cached_property
    def _within(self) -> str | None:
        return data_folder(self.folder)

    def load(self, index: int) -> LoadedImage:
        return self.loader(self.image_ref(index))

    def first(self, num: int) -> ImageFiles:
        """Return the first `num` images."""
        return replace(
            self,
            names=self.names[:num],
            stamps=self.stamps[:num],
            captions=self.captions and self.captions[:num],
            digests=self.digests and self.digests[:num],
        )


@dataclass(frozen=True, kw_only=True)
class StreetImages:
    """The first validation street scenes, rendered at one size."""

    size: int
    num: int

    def __len__(self) -> int:
        return self.num

    @property
    def _streets(self) -> Streets:
        return Streets(self.size, self.size, num_validation=self.num)

    @property
    def captions(self) -> tuple[str, ...] | None:
        return None  # no metric needs the captions of a reference

    @property
    def key(self) -> str:
        return hash_json([self._streets.fingerprint, "heldout"])

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "streets", "path": "streets", "size": self.size}

    def name(self, index: int) -> str:
        return f"validation street scene {index}"

    @property
    def loader(self) -> Callable[[int], LoadedImage]:
        return self.load

    def image_ref(self, index: int) -> int:
        return index

    def load(self, index: int) -> LoadedImage:
        return with_digest(self._streets.validation(index).pixels)


@dataclass(frozen=True, kw_only=True)
class TrainingImages:
    """The first training images of a run, cropped and resized as in training."""

    image_folder: ImageFolder
    num_images: int

    @property
    def captions(self) -> tuple[str, ...] | None:
        return None  # no metric needs the captions of a reference

    def __len__(self) -> int:
        return self.num_images

    @property
    def key(self) -> str:
        return hash_json([self.image_folder.fingerprint, "train", self.num_images])

    @property
    def facts(self) -> dict[str, Any]:
        size = [self.image_folder.height, self.image_folder.width]
        return {"kind": "training pictures", "path": self.image_folder.name, "size": size}

    def name(self, index: int) -> str:
        return str(self.image_folder.folder / self.image_folder.file_name(index))

    @property
    def loader(self) -> Callable[[str], LoadedImage]:
        return partial(self._load_file, self.image_folder.height, self.image_folder.width)

    @staticmethod
    def _load_file(height: int, width: int, path: str) -> LoadedImage:
        """Load an image file, cropped and resized as in training."""
        return with_digest(decode.decode(Path(path), height, width))

    def image_ref(self, index: int) -> str:
        return self.name(index)

    def load(self, index: int) -> LoadedImage:
        return self.loader(self.image_ref(index))


def with_digest(pixels: npt.NDArray[np.uint8]) -> LoadedImage:
    """Return an image that was not read from a file, with the SHA-256 of its pixels."""
    return LoadedImage(pixels, hashlib.sha256(np.ascontiguousarray(pixels).data).digest())


def find_image_files(folder: Path, flag: str, *, captions: bool = True) -> ImageFiles:
    """Find all images below a folder, sorted by name.

    With `captions`, also read their captions from a metadata file in the folder.
    """
    if not folder.is_dir():
        why = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise InputError(f"{flag}: {why}", "a folder of PNG, JPEG or WebP images", f"check {flag}")
    listed = sorted(_walk_files(folder, flag))
    # Exclude the grid that sample folders and watched checkpoints have beside their images.
    indexes = ("samples.json", "evaluation.json")
    grids = {
        name
        for name in listed
        if name.endswith("grid.png")
        and any(os.path.isfile(folder / (name.removesuffix("grid.png") + index)) for index in indexes)
    }
    supported = [name for name in listed if name.lower().endswith(decode.SUFFIXES) and name not in grids]
    unsupported = [name for name in listed if name.lower().endswith(decode.UNSUPPORTED_SUFFIXES)]
    if not supported:
        others = f" ({decode.left_out_message(unsupported)})" if unsupported else ""
        raise InputError(
            f"{flag}: {folder} has no images{others}", "PNG, JPEG or WebP files in it or in subfolders", f"check {flag}"
        )
    if unsupported:
        log.warning("%s: %s", flag, decode.left_out_message(unsupported))
    names = tuple(supported)
    texts, why = _read_captions(folder, names) if captions else (None, "")
    return ImageFiles(
        kind="folder",
        folder=folder,
        names=names,
        stamps=read_stamps(folder, names),
        captions=texts,
        no_captions=why,
        num_left_out=len(unsupported),
    )


def _walk_files(folder: Path, flag: str) -> Iterator[str]:
    """Yield the files below a folder, including linked folders.

    Raises for links that leave the data folder, because their targets may be anything, and endless.
    """

    def raise_unreadable(error: OSError) -> None:
        raise InputError(f"{flag}: {error.filename}: {error.strerror}", "folders that can be read", f"check {flag}")

    within = data_folder(folder)
    walk = walk_folder(folder, max_entries=MAX_FOLDER_ENTRIES, once=True, onerror=raise_unreadable)
    for current, subfolders, files in walk:
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in subfolders:
            path = os.path.join(current, name)
            if within is None or not os.path.islink(path):
                continue
            if not os.path.join(os.path.realpath(path), "").startswith(os.path.join(within, "")):
                raise InputError(
                    f"{flag}: {path} is a link that leads out of {within}",
                    "links that stay inside that folder",
                    "copy the target into the folder, or give --follow_links",
                )
        relative = Path(current).relative_to(folder)
        yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def read_stamps(folder: Path, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    try:
        stats = [os.stat(folder / name) for name in names]
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename} is a broken link, or was just removed",
            "existing image files",
            "repair or remove the link",
        ) from error
    return tuple((one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for one in stats)


def _read_captions(folder: Path, names: Sequence[str]) -> tuple[tuple[str, ...] | None, str]:
    """Read captions from a metadata file beside the images.

    Returns None and the reason unless the file has a caption for every image.
    """
    path = next((folder / name for name in image_annotations.METADATA_FILES if (folder / name).is_file()), None)
    if path is None:
        return None, ""
    texts: dict[str, str] = {}
    try:
        text = decode_blocks(read_text_bytes(path, within=data_folder(folder)))
        for row in csv_rows(str(path), text) if path.suffix == ".csv" else json_rows(str(path), text):
            caption = next((row.values[column] for column in CAPTION_COLUMNS if column in row.values), None)
            if isinstance(row.values.get("file_name"), str) and isinstance(caption, str):
                texts[row.values["file_name"]] = caption
    except InputError as error:
        return None, error.found
    absent = texts.keys() - set(names)
    if absent:
        log.warning("%s lists %s without a file, such as %s", path, format_count(len(absent), "image"), min(absent))
    missing = [name for name in names if name not in texts]
    if missing:
        return (
            None,
            f"{path} has no text for {len(missing)} of {format_count(len(names), 'image')}, such as {missing[0]}",
        )
    return tuple(texts[name] for name in names), ""
