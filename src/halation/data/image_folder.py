"""A folder or table of somebody's pictures as a source: listed, checked once, cropped and resized when asked for."""

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
from halation.data.aspect_buckets import Buckets, Shape, nearest
from halation.data.dataset import JSON, Picture
from halation.data.image_listing import Entry, is_table, read_folder, read_table
from halation.errors import InputError

_log = logging.getLogger(__name__)

_HELDOUT_SHARE = 0.05
_MIN_TO_HOLD_OUT = 20
_MAX_BROKEN_SHARE = 0.01
_NUM_CAPTIONS = 100_000
_ENTRY = attrgetter("name", "num_bytes", "caption", "label")
"""Entries compare alike without it, in three times the time."""


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What decoding every picture once has shown."""

    num_checked: int
    broken: dict[str, str]
    """File name to reason; these are left out."""
    remembered: bool
    """True where an earlier check of the same files was found, and nothing was decoded."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a look at every picture has found."""

    broken: dict[str, str]
    sizes: list[Shape]
    """By name in order; (0, 0) of a broken one."""


class ImageFolder:
    """The pictures of a folder, or of a CSV file, at one size; where there are `buckets`, the train part in the nearest of them.

    Held out is what a `validation/` or `test/` beside `train/` holds, else the pictures whose name hashes into the lowest 5 %, at
    most `heldout_pictures` of them, none below 20 pictures. So more pictures never make a held-out one of one that
    was trained on, and move none at all while there are fewer held-out ones than allowed. `max_pictures` keeps the first ones
    of the train part, by name.
    """

    def __init__(
        self,
        folder: str | Path,
        height: int,
        width: int,
        *,
        heldout_pictures: int = 64,
        max_pictures: int = 0,
        buckets: Sequence[Shape] = (),
    ) -> None:
        path = Path(folder)
        self.folder = path.parent if is_table(path) else path
        self.name = str(folder)
        self.height = height
        self.width = width
        self._asked_shapes = tuple(buckets)
        self._sizes: dict[str, Shape] = {}
        self._sorted: Buckets | None = None
        listing = read_table(path) if is_table(path) else read_folder(path)
        self.class_names = listing.class_names
        if listing.heldout is not None:
            self._train, self._heldout = sorted(listing.train, key=_ENTRY), sorted(listing.heldout, key=_ENTRY)
        else:
            self._train, self._heldout = hold_out(sorted(listing.train, key=_ENTRY), heldout_pictures)
        if max_pictures:
            self._keep_first(max_pictures)

    def _keep_first(self, num: int) -> None:
        self._train = self._train[:num]
        num_absent = len(self.class_names) - len({entry.label for entry in self._train})
        if self.class_names and num_absent:
            _log.warning("the first %d pictures of %s are of %d classes fewer", num, self.name, num_absent)

    @property
    def num_train(self) -> int:
        """How many pictures there are to train on."""
        return len(self._train)

    @property
    def num_heldout(self) -> int:
        """How many pictures are kept aside."""
        return len(self._heldout)

    @property
    def fingerprint(self) -> dict[str, JSON]:
        """What decides pixels and captions; no times and no absolute paths, so a copy of the folder has the same."""
        facts: dict[str, JSON] = {
            "kind": "images",
            "train": _digest(self._train),
            "heldout": _digest(self._heldout),
            "num_train": self.num_train,
            "num_heldout": self.num_heldout,
            "height": self.height,
            "width": self.width,
            "crop": "centre",
            "decoder": decode.VERSION,
        }
        if self._asked_shapes:
            facts["buckets"] = [list(shape) for shape in self._asked_shapes]
        return facts

    @property
    def bucket_of(self) -> np.ndarray | None:
        """The bucket of each train picture, an index into `shapes`; None without buckets."""
        return self._buckets().of if self._asked_shapes else None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Those of the buckets that have pictures."""
        return self._buckets().shapes if self._asked_shapes else ()

    def _buckets(self) -> Buckets:
        if self._sorted is None:
            sizes = [self._sizes.get(entry.name) or self._size(entry) for entry in self._train]
            used, of = np.unique(nearest(np.array(sizes), self._asked_shapes), return_inverse=True)
            self._sorted = Buckets(of.astype(np.int64), tuple(self._asked_shapes[bucket] for bucket in used))
        return self._sorted

    def _size(self, entry: Entry) -> Shape:
        try:
            return decode.upright_size(self.folder / entry.name)
        except decode.BrokenPictureError as error:
            raise self._unreadable(entry, error) from None

    def train(self, index: int) -> Picture:
        """Picture `index` of the train part."""
        shape = (self.height, self.width)
        if self._asked_shapes and 0 <= index < self.num_train:
            of, shapes = self._buckets()
            shape = shapes[of[index]]
        return self._picture(self._train, index, shape)

    def heldout(self, index: int) -> Picture:
        """Picture `index` of the held-out part."""
        return self._picture(self._heldout, index, (self.height, self.width))

    def captions(self) -> Iterable[str]:
        """Captions of the train part, at most a hundred thousand."""
        return [entry.caption for entry in self._train[:_NUM_CAPTIONS]]

    def every_caption(self) -> Iterable[str]:
        """The captions of all pictures of both parts."""
        return (entry.caption for entry in (*self._train, *self._heldout))

    def file_name(self, index: int) -> str:
        """The file of train picture `index`, below the folder."""
        return self._train[index].name

    def prompt(self, index: int) -> str:
        """What train picture `index` is drawn for: its caption, or the name of its class; nothing is decoded."""
        entry = self._train[index]
        return self.class_names[entry.label] if self.class_names else entry.caption

    def _picture(self, entries: Sequence[Entry], index: int, shape: Shape) -> Picture:
        if not 0 <= index < len(entries):
            raise IndexError(f"{self.folder} has {len(entries)} such pictures; asked for {index}")
        entry = entries[index]
        try:
            pixels, original = decode.decode_sized(self.folder / entry.name, *shape)
        except decode.BrokenPictureError as error:
            raise self._unreadable(entry, error) from None
        return Picture(pixels=pixels, caption=entry.caption, label=entry.label, original=original)

    def _unreadable(self, entry: Entry, error: decode.BrokenPictureError) -> InputError:
        return InputError(
            f"{self.folder / entry.name} cannot be read: {error}",
            "a whole PNG, JPEG or WebP file, as when the folder was checked",
            "replace or remove the file; the next start checks the folder again",
        )

    def check(
        self,
        memory: str | Path | None = None,
        *,
        num_threads: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        quiet: bool = False,
    ) -> CheckReport:
        """Decode every picture once and leave the broken ones out; from 1 % on they are an InputError instead.

        The result is remembered in the folder `memory` under the names, sizes and times of the files, so that the next start
        decodes nothing.
        """
        names = sorted({entry.name for entry in (*self._train, *self._heldout)})
        index = None if memory is None else Path(memory) / f"checked-{self._state(names)}.json"
        with_sizes = bool(self._asked_shapes)
        seen = None if index is None else _remembered(index, len(names), with_sizes)
        remembered = seen is not None
        if seen is None:
            seen = self._seen(names, num_threads or min(8, os.cpu_count() or 1), on_progress)
            if index is not None:
                _remember(index, seen, with_sizes)
        broken = seen.broken
        self._judge(broken, len(names), quiet)
        if not quiet:
            self._warn_of_empty_captions()
        self._sizes = dict(zip(names, seen.sizes, strict=True)) if with_sizes else {}
        self._sorted = None
        self._train = [entry for entry in self._train if entry.name not in broken]
        self._heldout = [entry for entry in self._heldout if entry.name not in broken]
        return CheckReport(num_checked=len(names), broken=broken, remembered=remembered)

    def _seen(self, names: Sequence[str], num_threads: int, on_progress: Callable[[int, int], None] | None) -> _Seen:
        seen = _Seen(broken={}, sizes=[])
        with ThreadPoolExecutor(num_threads) as threads:
            for done, (name, found) in enumerate(zip(names, threads.map(self._look, names), strict=True), start=1):
                seen.sizes.append((0, 0) if isinstance(found, str) else found)
                if isinstance(found, str):
                    seen.broken[name] = found
                if on_progress is not None:
                    on_progress(done, len(names))
        return seen

    def _look(self, name: str) -> Shape | str:
        """Its size, or what is wrong with it."""
        try:
            return decode.check(self.folder / name, self.height, self.width)
        except decode.BrokenPictureError as error:
            return str(error)

    def _judge(self, broken: dict[str, str], num: int, quiet: bool) -> None:
        named = "".join(f"\n    {name}: {reason}" for name, reason in list(broken.items())[:10])
        more = f"\n    and {len(broken) - 10} more" if len(broken) > 10 else ""
        if len(broken) >= _MAX_BROKEN_SHARE * num and broken:
            raise InputError(
                f"{len(broken)} of the {num} pictures of {self.folder} are broken:{named}{more}",
                f"fewer than {_MAX_BROKEN_SHARE:.0%} broken ones",
                "replace them, or remove them and their lines in the metadata",
            )
        if broken and not quiet:
            _log.warning(
                "%d of the %d pictures of %s are broken and left out:%s%s", len(broken), num, self.folder, named, more
            )

    def _warn_of_empty_captions(self) -> None:
        if not self.class_names and not any(entry.caption.strip() for entry in self._train):
            _log.warning("all captions of %s are empty: nothing is learned about prompts", self.folder)

    def _state(self, names: Sequence[str]) -> str:
        """A key over everything that tells whether a file is still the one that was checked."""
        digest = hashlib.sha256(json.dumps([str(self.folder.resolve()), decode.VERSION]).encode())
        for name in names:
            stat = (self.folder / name).stat()
            digest.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode())
        return digest.hexdigest()[:32]


def hold_out(entries: Sequence[Entry], num_wanted: int) -> tuple[list[Entry], list[Entry]]:
    """(train, held out), by a hash of each file's name alone."""
    if len(entries) < _MIN_TO_HOLD_OUT:
        return list(entries), []
    ranked = sorted({_rank(entry.name): entry.name for entry in entries}.items())
    chosen = {name for rank, name in ranked[:num_wanted] if rank < _HELDOUT_SHARE * 2**64}
    train = [entry for entry in entries if entry.name not in chosen]
    return train, [entry for entry in entries if entry.name in chosen]


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _digest(entries: Sequence[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps([entry.name, entry.num_bytes, entry.caption, entry.label]).encode())
    return digest.hexdigest()


def _remembered(index: Path, num: int, with_sizes: bool) -> _Seen | None:
    try:
        note = json.loads(index.read_bytes())
        sizes: list[Shape] = [(int(high), int(wide)) for high, wide in note["sizes"]] if with_sizes else []
        seen = _Seen(broken=note["broken"], sizes=sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seen if isinstance(seen.broken, dict) and len(sizes) == (num if with_sizes else 0) else None


def _remember(index: Path, seen: _Seen, with_sizes: bool) -> None:
    note = {"broken": seen.broken} | ({"sizes": seen.sizes} if with_sizes else {})
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        temporary = index.with_name(f".{index.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(note))
        temporary.replace(index)
    except OSError as error:  # a memory that cannot be kept costs time at the next start, nothing else
        _log.warning("the check of the pictures is not remembered: %s: %s", index, error)
