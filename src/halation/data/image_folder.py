"""A folder or table of images as a dataset: checked once, cropped and resized on access."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np

from halation.data import decode
from halation.data.aspect_buckets import BucketAssignment, ImageShape, nearest_shape_indices
from halation.data.dataset_protocol import JSON, CaptionedImage
from halation.data.image_annotations import ImageEntry, is_table, read_folder, read_table
from halation.errors import InputError, format_count
from halation.input_files import data_folder, limit
from halation.runs.run_folder import DIGEST_KEY, json_digest, write_atomic

_log = logging.getLogger(__name__)

_VALIDATION_FRACTION = 0.05
_MIN_IMAGES_TO_SPLIT = 20
_MAX_BROKEN_FRACTION = 0.01
_MAX_CAPTIONS = 100_000
_SORT_KEY = attrgetter("name", "num_bytes", "caption", "label")
"""Gives the same order as comparing entries, three times as fast."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of decoding every image once."""

    num_checked: int
    broken: dict[str, str]
    """File name to reason; these are left out."""
    from_cache: bool
    """True if the result of an earlier check of the same files was used."""


@dataclass(frozen=True, kw_only=True)
class _CheckResult:
    """Broken images and sizes, as cached."""

    broken: dict[str, str]
    sizes: list[ImageShape]
    """In order of file names; (0, 0) for a broken image."""

    @classmethod
    def load(cls, cache_file: Path, num: int, with_sizes: bool) -> _CheckResult | None:
        try:
            record = json.loads(cache_file.read_bytes())
            if record.pop(DIGEST_KEY, None) not in (None, json_digest(record)):
                return None
            sizes: list[ImageShape] = [(int(high), int(wide)) for high, wide in record["sizes"]] if with_sizes else []
            result = cls(broken=record["broken"], sizes=sizes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return result if isinstance(result.broken, dict) and len(sizes) == (num if with_sizes else 0) else None

    def save(self, cache_file: Path, with_sizes: bool) -> None:
        record = {"broken": self.broken} | ({"sizes": self.sizes} if with_sizes else {})
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps(record | {DIGEST_KEY: json_digest(record)}).encode()
            write_atomic(cache_file, content, "image_check", durable=False)
        except OSError as error:  # the next start only has to check again
            _log.warning("cannot cache the check of the images: %s: %s", cache_file, error)


class ImageFolder:
    """The images of a folder or CSV file at one size, or in `buckets`.

    With `buckets`, each train image has the nearest of these shapes. Validation images are those in `validation/` or
    `test/` next to `train/`. Otherwise they are the images whose name hashes into the lowest 5 %, at most
    `validation_images`, and none if there are fewer than 20 images. So adding images never turns a train image into a
    validation image, and moves no image while there are fewer validation images than allowed. `max_images` keeps the
    first train images by name.
    """

    def __init__(
        self,
        folder: str | Path,
        height: int,
        width: int,
        *,
        validation_images: int = 64,
        max_images: int = 0,
        buckets: Sequence[ImageShape] = (),
    ) -> None:
        path = Path(folder)
        self.folder = path.parent if is_table(path) else path
        self._within = data_folder(self.folder)
        self.name = str(folder)
        self.height = height
        self.width = width
        self._bucket_shapes = tuple(buckets)
        self._sizes: dict[str, ImageShape] = {}
        self._bucket_assignment: BucketAssignment | None = None
        listing = read_table(path) if is_table(path) else read_folder(path)
        self.class_names = listing.class_names
        self._left_out = listing.left_out
        if listing.validation is not None:
            self._train, self._validation = (
                sorted(listing.train, key=_SORT_KEY),
                sorted(listing.validation, key=_SORT_KEY),
            )
        else:
            self._train, self._validation = split_validation(sorted(listing.train, key=_SORT_KEY), validation_images)
        if max_images:
            self._truncate_train(max_images)

    def _truncate_train(self, num: int) -> None:
        self._train = self._train[:num]
        num_missing_classes = len(self.class_names) - len({entry.label for entry in self._train})
        if self.class_names and num_missing_classes:
            _log.warning(
                "the first %s of %s have no example of %s",
                format_count(num, "image"),
                self.name,
                format_count(num_missing_classes, "class"),
            )

    @property
    def num_train(self) -> int:
        """Number of train images."""
        return len(self._train)

    @property
    def num_validation(self) -> int:
        """Number of validation images."""
        return len(self._validation)

    @property
    def fingerprint(self) -> dict[str, JSON]:
        """Everything that decides pixels and captions; a copy of the folder has the same."""
        facts: dict[str, JSON] = {
            "kind": "images",
            "train": _digest_entries(self._train),
            "heldout": _digest_entries(self._validation),
            "num_train": self.num_train,
            "num_heldout": self.num_validation,
            "height": self.height,
            "width": self.width,
            "crop": "centre",
            "decoder": decode.VERSION,
        }
        if self._bucket_shapes:
            facts["buckets"] = [list(shape) for shape in self._bucket_shapes]
        return facts

    @property
    def bucket_of(self) -> np.ndarray | None:
        """The bucket of each train image, an index into `shapes`; None without buckets."""
        return self._assign_buckets().bucket_indices if self._bucket_shapes else None

    @property
    def shapes(self) -> tuple[ImageShape, ...]:
        """The shapes of the buckets that have images."""
        return self._assign_buckets().shapes if self._bucket_shapes else ()

    def _assign_buckets(self) -> BucketAssignment:
        if self._bucket_assignment is None:
            sizes = [self._sizes.get(entry.name) or self._read_size(entry) for entry in self._train]
            used, of = np.unique(nearest_shape_indices(np.array(sizes), self._bucket_shapes), return_inverse=True)
            self._bucket_assignment = BucketAssignment(
                of.astype(np.int64), tuple(self._bucket_shapes[bucket] for bucket in used)
            )
        return self._bucket_assignment

    def _read_size(self, entry: ImageEntry) -> ImageShape:
        try:
            return decode.read_upright_size(self.folder / entry.name, self._within)
        except decode.BrokenImageError as error:
            raise self._unreadable_error(entry, error) from None

    def train(self, index: int) -> CaptionedImage:
        """Return train image `index`."""
        shape = (self.height, self.width)
        if self._bucket_shapes and 0 <= index < self.num_train:
            of, shapes = self._assign_buckets()
            shape = shapes[of[index]]
        return self._load_image(self._train, index, shape)

    def validation(self, index: int) -> CaptionedImage:
        """Return validation image `index`."""
        return self._load_image(self._validation, index, (self.height, self.width))

    def captions(self) -> Iterable[str]:
        """Return train captions, at most 100,000."""
        return [entry.caption for entry in self._train[:_MAX_CAPTIONS]]

    def all_captions(self) -> Iterable[str]:
        """Return the captions of all images of both splits."""
        return (entry.caption for entry in (*self._train, *self._validation))

    def file_name(self, index: int) -> str:
        """Return the file of train image `index`, relative to the folder."""
        return self._train[index].name

    def prompt(self, index: int) -> str:
        """Return the caption or class name of train image `index` without decoding it."""
        entry = self._train[index]
        return self.class_names[entry.label] if self.class_names else entry.caption

    def _load_image(self, entries: Sequence[ImageEntry], index: int, shape: ImageShape) -> CaptionedImage:
        if not 0 <= index < len(entries):
            raise IndexError(f"{self.folder} has {len(entries)} such images; requested {index}")
        entry = entries[index]
        try:
            pixels, original_size = decode.decode_with_size(self.folder / entry.name, *shape, self._within)
        except decode.BrokenImageError as error:
            raise self._unreadable_error(entry, error) from None
        return CaptionedImage(pixels=pixels, caption=entry.caption, label=entry.label, original_size=original_size)

    def _unreadable_error(self, entry: ImageEntry, error: decode.BrokenImageError) -> InputError:
        return InputError(
            f"{self.folder / entry.name} cannot be read: {error}",
            "a complete PNG, JPEG or WebP file, as when the folder was checked",
            "replace or remove the file; the next start checks the folder again",
        )

    def check(
        self,
        cache_folder: str | Path | None = None,
        *,
        num_threads: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        quiet: bool = False,
    ) -> CheckReport:
        """Decode every image once and exclude broken ones; raises InputError from 1 % on.

        The result is cached in `cache_folder`, keyed by names, sizes and times of the files, so that the next start
        decodes nothing.
        """
        names = sorted({entry.name for entry in (*self._train, *self._validation)})
        cache_file = None if cache_folder is None else Path(cache_folder) / f"checked-{self._cache_key(names)}.json"
        with_sizes = bool(self._bucket_shapes)
        result = None if cache_file is None else _CheckResult.load(cache_file, len(names), with_sizes)
        from_cache = result is not None
        if result is None:
            result = self._check_files(names, num_threads or min(8, os.cpu_count() or 1), on_progress)
            if cache_file is not None:
                result.save(cache_file, with_sizes)
        broken = result.broken
        self._check_num_broken(broken, len(names), quiet)
        if not quiet:
            self._warn_of_empty_captions()
            if self._left_out:
                _log.warning("%s: %s", self.folder, decode.left_out_message(self._left_out))
        self._sizes = dict(zip(names, result.sizes, strict=True)) if with_sizes else {}
        self._bucket_assignment = None
        self._train = [entry for entry in self._train if entry.name not in broken]
        self._validation = [entry for entry in self._validation if entry.name not in broken]
        return CheckReport(num_checked=len(names), broken=broken, from_cache=from_cache)

    def _check_files(
        self, names: Sequence[str], num_threads: int, on_progress: Callable[[int, int], None] | None
    ) -> _CheckResult:
        result = _CheckResult(broken={}, sizes=[])
        with ThreadPoolExecutor(num_threads) as threads:
            for done, (name, found) in enumerate(
                zip(names, threads.map(self._check_file, names), strict=True), start=1
            ):
                result.sizes.append((0, 0) if isinstance(found, str) else found)
                if isinstance(found, str):
                    result.broken[name] = found
                if on_progress is not None:
                    on_progress(done, len(names))
        return result

    def _check_file(self, name: str) -> ImageShape | str:
        """Return the size of an image, or what is wrong with it."""
        try:
            return decode.verify_image(self.folder / name, self.height, self.width, self._within)
        except decode.BrokenImageError as error:
            return str(error)

    def _check_num_broken(self, broken: dict[str, str], num: int, quiet: bool) -> None:
        examples = "".join(f"\n    {name}: {reason}" for name, reason in list(broken.items())[:10])
        more = f"\n    and {len(broken) - 10} more" if len(broken) > 10 else ""
        if len(broken) >= _MAX_BROKEN_FRACTION * num and broken:
            raise InputError(
                f"{len(broken)} of {format_count(num, 'image')} of {self.folder} cannot be read:{examples}{more}",
                f"fewer than {_MAX_BROKEN_FRACTION:.0%} unreadable images",
                "follow the advice for each; replace the others, or remove them and their lines in the metadata",
            )
        if broken and not quiet:
            _log.warning(
                "left out %d of %s of %s, which cannot be read:%s%s",
                len(broken),
                format_count(num, "image"),
                self.folder,
                examples,
                more,
            )

    def _warn_of_empty_captions(self) -> None:
        if not self.class_names and not any(entry.caption.strip() for entry in self._train):
            _log.warning("all captions of %s are empty: nothing is learned about prompts", self.folder)

    def _cache_key(self, names: Sequence[str]) -> str:
        """Return a key that changes if a file or the reading rules have changed since the check."""
        allowed = [] if self._within and limit(1000) == 1000 else [self._within is None, limit(1000)]
        digest = hashlib.sha256(json.dumps([str(self.folder.resolve()), decode.VERSION, *allowed]).encode())
        for name in names:
            path = self.folder / name
            stat = path.stat() if path.exists() else path.lstat()
            digest.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode())
        return digest.hexdigest()[:32]


def split_validation(entries: Sequence[ImageEntry], max_validation: int) -> tuple[list[ImageEntry], list[ImageEntry]]:
    """Split entries into (train, validation) by a hash of each file name."""
    if len(entries) < _MIN_IMAGES_TO_SPLIT:
        return list(entries), []
    hashes = {int.from_bytes(hashlib.sha256(entry.name.encode()).digest()[:8], "big"): entry.name for entry in entries}
    chosen = {name for rank, name in sorted(hashes.items())[:max_validation] if rank < _VALIDATION_FRACTION * 2**64}
    train = [entry for entry in entries if entry.name not in chosen]
    return train, [entry for entry in entries if entry.name in chosen]


def _digest_entries(entries: Sequence[ImageEntry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps([entry.name, entry.num_bytes, entry.caption, entry.label]).encode())
    return digest.hexdigest()
