"""Lists images with captions or classes, from a table, text files or subfolders."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from halation.csv_jsonl_reader import (
    MAX_PATH_SHOWN,
    TableRow,
    check_field,
    csv_header,
    csv_rows,
    decode_blocks,
    error_at,
    json_rows,
    read_text_bytes,
)
from halation.data.decode import SUFFIXES, UNSUPPORTED_SUFFIXES
from halation.errors import InputError, format_count, format_names, format_value, shorten
from halation.input_files import data_folder

METADATA_FILES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMNS = ("file_name", "filename", "file", "image", "image_path", "path")
TEXT_COLUMNS = ("text", "caption", "prompt", "description")
"""Accepted names of the two columns of a table of images; the first has precedence."""
CAPTION_SUFFIXES = (".txt", ".caption")
"""Files with the caption of the image of the same name beside them, as other trainers read them."""
VALIDATION_SPLITS = ("validation", "valid", "val", "test")
_NUM_SHOWN = 10
_LAYOUT_ADVICE = (
    "put a metadata.jsonl or metadata.csv with the columns file_name and text next to the images, "
    "or a .txt file with its caption next to each image, or put the images of each class into a separate folder"
)


@dataclass(frozen=True, kw_only=True, order=True)
class ImageEntry:
    """One image of a folder."""

    name: str
    """The path relative to the given folder, with slashes."""
    num_bytes: int
    caption: str
    label: int = -1


@dataclass(frozen=True, kw_only=True)
class FolderListing:
    """All images of a folder; `validation` is None if the folder has no validation split."""

    train: tuple[ImageEntry, ...]
    validation: tuple[ImageEntry, ...] | None
    class_names: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Images of unsupported formats."""


def read_folder(folder: Path) -> FolderListing:
    """List a folder with a metadata file, a caption file per image, or one folder per class.

    Each may be in the folder itself, or in `train/` (with `validation/` or `test/`).
    """
    if not folder.exists():
        raise InputError(f"no such folder: {folder}", "a folder with images", "check the path")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file", "a folder with images", "give the folder that contains the images")
    if not any(folder.iterdir()):
        raise InputError(f"{folder} is empty", "a folder with images", _LAYOUT_ADVICE)
    # A `train/` with metadata or class folders is a split; one with only images is a class named train.
    train_folder = folder / "train"
    has_splits = (
        _find_metadata(folder) is None
        and train_folder.is_dir()
        and (
            _find_metadata(train_folder) is not None
            or any(path.is_dir() for path in train_folder.iterdir())
            or bool(_find_captions(_list_files(train_folder)))
        )
    )
    top = train_folder if has_splits else folder
    names: tuple[str, ...] = ()
    listed: Iterable[Path] = ()
    if _find_metadata(top) is not None:
        train = _read_metadata(folder, top)
    elif captions := _find_captions(listed := _list_files(top)):
        train = _read_captions(folder, top, listed, captions)
    else:
        train, names = _list_classes(folder, top)
        listed = itertools.chain.from_iterable(_list_files(top / name) for name in names)
    validation_folder = (
        next((folder / name for name in VALIDATION_SPLITS if (folder / name).is_dir()), None) if has_splits else None
    )
    validation = None if validation_folder is None else _list_validation(folder, validation_folder, names)
    left_out = tuple(
        path.relative_to(folder).as_posix() for path in listed if path.suffix.lower() in UNSUPPORTED_SUFFIXES
    )
    return FolderListing(train=train, validation=validation, class_names=names, left_out=left_out)


class _Columns(NamedTuple):
    """The names of the two columns."""

    file: str
    text: str


_DEFAULT_COLUMNS = _Columns("file_name", "text")


def is_table(path: Path) -> bool:
    """Return True for a CSV file of images, False for a folder."""
    return path.suffix.lower() == ".csv" and not path.is_dir()


def read_table(table: Path) -> FolderListing:
    """List the images of a CSV file with columns for paths (relative to it) and captions."""
    data = _read_table(table)
    header = csv_header(str(table), decode_blocks(data))
    columns = _Columns(
        _find_column(table, "files", FILE_COLUMNS, header), _find_column(table, "captions", TEXT_COLUMNS, header)
    )
    train = _read_entries(table.parent, table, csv_rows(str(table), decode_blocks(data)), columns)
    return FolderListing(train=train, validation=None, class_names=())


def has_file_column(table: Path) -> bool:
    """Return True if a CSV file has a column that could contain image paths."""
    return bool(_matching_columns(FILE_COLUMNS, csv_header(str(table), decode_blocks(_read_table(table)))))


def _read_table(table: Path) -> bytes:
    try:
        return read_text_bytes(table)
    except FileNotFoundError:
        raise InputError(f"no such file: {table}", "a CSV file of images and captions", "check the path") from None


def _find_column(table: Path, what: str, names: Sequence[str], header: Sequence[str]) -> str:
    if names[0] in header:
        return names[0]
    found = _matching_columns(names, header)
    if len(found) == 1:
        return found[0]
    listed = format_names(header) or "none"
    problem = (
        f"{' and '.join(map(format_value, found))} could each be the column of {what}"
        if found
        else f"no column of {what}"
    )
    other_separator = len(header) == 1 and re.search(r"[;\t|]", header[0])
    action = "put commas between the columns" if other_separator else f"rename the right one to {names[0]!r}"
    raise error_at(str(table), 1, 1, f"{problem} among {listed}", f"one column named {' or '.join(names)}", action)


def _matching_columns(names: Sequence[str], header: Sequence[str]) -> list[str]:
    plain = {name.replace("_", "") for name in names}
    return [column for column in header if re.sub(r"[\s_-]", "", column.lower()) in plain]


def _list_validation(folder: Path, other: Path, names: tuple[str, ...]) -> tuple[ImageEntry, ...]:
    if not names:
        captions = {} if _find_metadata(other) else _find_captions(listed := _list_files(other))
        return _read_captions(folder, other, listed, captions) if captions else _read_metadata(folder, other)
    entries, own = _list_classes(folder, other)
    unknown = sorted(set(own) - set(names))
    if unknown:
        raise InputError(
            f"{other} has classes that train/ does not have: {', '.join(unknown[:10])}",
            f"some of the {len(names)} classes of train/",
            "rename or remove them",
        )
    return tuple(
        ImageEntry(
            name=entry.name, num_bytes=entry.num_bytes, caption=entry.caption, label=names.index(own[entry.label])
        )
        for entry in entries
    )


def _find_metadata(folder: Path) -> Path | None:
    existing = [folder / name for name in METADATA_FILES if (folder / name).is_file()]
    if len(existing) > 1:
        raise InputError(f"{folder} has both {' and '.join(METADATA_FILES)}", "one of them", "remove the wrong one")
    return existing[0] if existing else None


def _list_classes(folder: Path, top: Path) -> tuple[tuple[ImageEntry, ...], tuple[str, ...]]:
    folders = sorted(path for path in top.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = {path.name: [image for image in _list_files(path) if image.suffix.lower() in SUFFIXES] for path in folders}
    names = tuple(name for name, images in found.items() if images)
    bare_splits = bool(names) and set(names) <= {"train", *VALIDATION_SPLITS}
    if not names or bare_splits:
        num_unlabeled = sum(path.suffix.lower() in SUFFIXES for path in _list_files(folder))
        images = format_count(num_unlabeled, "image")
        what = f"{images} without captions or classes" if num_unlabeled else "no PNG, JPEG or WebP files"
        raise InputError(
            f"{top}: neither a metadata file nor class folders ({what})", "captions or classes", _LAYOUT_ADVICE
        )
    entries = [
        _list_image(folder, path, name.replace("_", " "), label)
        for label, name in enumerate(names)
        for path in found[name]
    ]
    return tuple(entries), names


def _list_image(folder: Path, path: Path, caption: str, label: int = -1) -> ImageEntry:
    num_bytes = path.lstat().st_size if path.is_symlink() and not path.exists() else path.stat().st_size
    return ImageEntry(name=path.relative_to(folder).as_posix(), num_bytes=num_bytes, caption=caption, label=label)


def _find_captions(listed: Sequence[Path]) -> dict[Path, Path]:
    """Return the caption files among these files by their image."""
    by_stem: dict[Path, Path] = {}
    for path in listed:
        if path.suffix.lower() in CAPTION_SUFFIXES:
            other = by_stem.setdefault(path.with_suffix(""), path)
            if other != path and any(other.with_suffix(suffix).exists() for suffix in SUFFIXES):
                raise InputError(f"{other} and {path.name}", "one caption file for an image", "remove one of them")
    images = (path for path in listed if path.suffix.lower() in SUFFIXES)
    return {path: by_stem[stem] for path in images if (stem := path.with_suffix("")) in by_stem}


def _read_captions(
    folder: Path, top: Path, listed: Sequence[Path], captions: Mapping[Path, Path]
) -> tuple[ImageEntry, ...]:
    """Read the caption of each image: the text of its file in one line."""
    images = [path for path in listed if path.suffix.lower() in SUFFIXES]
    missing = [path.relative_to(top).as_posix() for path in images if path not in captions]
    if missing:
        shown = ", ".join(shorten(name, MAX_PATH_SHOWN) for name in missing[:_NUM_SHOWN])
        raise InputError(
            f"{len(missing)} of {format_count(len(images), 'image')} in {top} have no caption file: {shown}",
            f"a file with the name of the image and the ending {' or '.join(CAPTION_SUFFIXES)} for each image",
            "add the files (an empty one trains without a caption), or remove these images",
        )
    within = data_folder(folder)
    entries = []
    for path in images:
        text = " ".join("".join(decode_blocks(read_text_bytes(captions[path], within=within))).split())
        check_field(str(captions[path]), 1, "caption", text)
        entries.append(_list_image(folder, path, text))
    return tuple(entries)


def _list_files(folder: Path) -> list[Path]:
    """List all non-folders: a pipe or dangling link named like an image is a broken image."""
    return sorted(path for path in folder.rglob("*") if not path.name.startswith(".") and not path.is_dir())


def _read_metadata(folder: Path, top: Path) -> tuple[ImageEntry, ...]:
    metadata = _find_metadata(top)
    if metadata is None:
        raise InputError(f"{top} has no metadata file", " or ".join(METADATA_FILES), _LAYOUT_ADVICE)
    data = read_text_bytes(metadata, within=data_folder(folder))
    is_csv = metadata.suffix == ".csv"
    rows = iter((csv_rows if is_csv else json_rows)(str(metadata), decode_blocks(data)))
    first = next(rows, None)
    header = csv_header(str(metadata), decode_blocks(data)) if is_csv else [*first.values] if first else []
    columns = _Columns(
        *(
            expected if expected in header or not _matching_columns(names, header)
            else _find_column(metadata, what, names, header)
            for expected, what, names in zip(
                _DEFAULT_COLUMNS, ("files", "captions"), (FILE_COLUMNS, TEXT_COLUMNS), strict=True
            )
        )
    )  # fmt: skip
    if is_csv:
        _check_columns(metadata, 1, header, columns)
    return _read_entries(folder, metadata, itertools.chain([first] if first else [], rows), columns)


def _read_entries(folder: Path, table: Path, rows: Iterable[TableRow], columns: _Columns) -> tuple[ImageEntry, ...]:
    entries, missing, num_missing = [], [], 0
    tops = tuple(f"{top}/" for top in (table.parent.absolute(), table.parent.resolve()))
    for row in rows:
        path = table.parent / _parse_file_name(table, row, columns, tops)
        try:
            num_bytes = path.stat().st_size
        except OSError:
            num_missing += 1
            missing += [row] if num_missing <= _NUM_SHOWN else []
            continue
        caption = row.values[columns.text]
        if not isinstance(caption, str):
            found = f"{columns.text} is {format_value(caption)}"
            raise error_at(str(table), row.line, 1, found, "a caption", "correct the line")
        name = path.relative_to(folder).as_posix()
        entries.append(ImageEntry(name=name, num_bytes=num_bytes, caption=caption))
    if missing:
        names = ", ".join(f"{shorten(row.values[columns.file], MAX_PATH_SHOWN)} (line {row.line})" for row in missing)
        raise InputError(
            f"{table} lists {format_count(num_missing, 'file')} that cannot be found: {names}",
            f"every {columns.file} to be a file in that folder",
            "add the files, or remove their lines",
        )
    if not entries:
        raise InputError(f"{table} lists no images", "one line for each image", _LAYOUT_ADVICE)
    return tuple(entries)


def _check_columns(metadata: Path, line: int, columns: Iterable[str], wanted: _Columns) -> None:
    columns = list(columns)
    for expected, synonyms in (
        (wanted.file, ("filename", "file", "image", "path")),
        (wanted.text, ("caption", "prompt", "label")),
    ):
        if expected not in columns:
            guess = _closest_column(expected, synonyms, columns)
            hint = f"; the nearest is {format_value(guess)}" if guess else ""
            raise error_at(
                str(metadata), line, 1, f"no column {expected!r} among {format_names(columns) or 'none'}{hint}",
                f"the columns {wanted.file} and {wanted.text}",
                f"rename {format_value(guess) if guess else 'the right one'} to {expected!r}",
            )  # fmt: skip


def _closest_column(expected: str, synonyms: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the most likely column: another spelling, a synonym, or a name that contains one."""
    rules = (
        lambda column: column.lower().replace("_", "") == expected.replace("_", ""),
        lambda column: column.lower() in synonyms,
        lambda column: any(word in column.lower() for word in (expected, *synonyms)),
    )
    return next((column for rule in rules for column in columns if rule(column)), None)


def _parse_file_name(table: Path, row: TableRow, columns: _Columns, tops: Sequence[str]) -> str:
    """Return the path relative to the table's folder; absolute paths must start with a `tops`."""
    if not row.values.keys() >= {*columns}:
        _check_columns(table, row.line, row.values, columns)
    name = row.values[columns.file]
    if not isinstance(name, str) or not name.strip():
        found = f"{columns.file} is {format_value(name)}"
        raise error_at(str(table), row.line, 1, found, "the name of a file", "correct the line")
    below = next((name.removeprefix(top) for top in tops if name.startswith(top)), name)
    parts = below.replace("\\", "/").split("/")
    if "" in parts[:1] or ".." in parts or "\0" in below or re.match(r"[A-Za-z]:[\\/]", below):
        found = f"{columns.file} {format_value(name, MAX_PATH_SHOWN)} is outside the folder"
        action = (
            f"move {table.name} into a folder above all its images, or link to their folder and give --follow_links"
        )
        raise error_at(str(table), row.line, 1, found, "a file in the folder or below it", action)
    return below
