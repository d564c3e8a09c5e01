"""Thumbnails, cached on disk by source and evicted when the cache is full."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from halation.images.png_codec import MAX_PIXELS
from halation.runs.run_folder import cache_folder, write_atomic

log = logging.getLogger(__name__)

THUMBNAIL_SIZES = (256, 512)
FORMATS = ("PNG", "JPEG", "WEBP")
QUALITY = 80
MAX_BYTES = 2 << 30
EVICT_EVERY = 2_000
"""Thumbnails written between two checks of the folder's size."""
EVICT_TO_FRACTION = 0.9
"""Eviction frees a little more than needed, so that the next one is not due immediately."""
STALE_TEMPORARY_S = 3600.0
NUM_DECODERS = 2
NUM_NAME_LOCKS = 256


class ThumbnailCache:
    """WebP thumbnails of images by path; safe for several threads and processes."""

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder or cache_folder() / "thumbnails"
        self.max_bytes = max_bytes
        self._decoders = threading.BoundedSemaphore(NUM_DECODERS)
        self._lock = threading.Lock()
        self._name_locks = [threading.Lock() for _ in range(NUM_NAME_LOCKS)]
        # Evict at the first write: earlier processes may have left too many.
        self._num_written = EVICT_EVERY - 1

    def get(self, path: Path, size: int = 256) -> bytes | None:
        """Return a thumbnail with sides of at most `size` pixels; None if there is no valid image."""
        assert size in THUMBNAIL_SIZES, size
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return None
        name = _cache_key(path, status, size)
        cached_path = self.folder / name[:2] / f"{name}.webp"
        data = _read_cached(cached_path)
        if data is not None:
            return data
        with self._name_locks[int(name, 16) % NUM_NAME_LOCKS]:  # one thread makes it, the others read it
            data = _read_cached(cached_path)
            if data is not None:
                return data
            with self._decoders:
                data = make_thumbnail(path, size)
            if data is not None:
                self._write_cached(cached_path, data)
        return data

    def _write_cached(self, cached_path: Path, data: bytes) -> None:
        """Write a thumbnail, not durably because it can be made again; errors are only logged."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the images may be private to their owner
            cached_path.parent.mkdir(exist_ok=True, mode=0o700)
            write_atomic(cached_path, data + _checksum(data), "thumbnail", durable=False)
        except OSError as error:
            log.debug("cannot cache thumbnails in %s: %s", self.folder, error)
            return
        with self._lock:
            self._num_written += 1
            due = self._num_written >= EVICT_EVERY
            if due:
                self._num_written = 0
        if due:
            self.evict_oldest()

    def evict_oldest(self) -> None:
        """Remove the oldest thumbnails while the cache is too large, and files of killed writers."""
        now = time.time()
        cached: list[tuple[float, int, str]] = []
        for path, status in _list_files(self.folder):
            if path.endswith(".tmp"):
                if now - status.st_mtime > STALE_TEMPORARY_S:
                    _remove(path)
            elif path.endswith(".webp"):
                cached.append((status.st_mtime, status.st_size, path))
        num_bytes = sum(size for _, size, _ in cached)
        if num_bytes <= self.max_bytes:
            return
        for _, size, path in sorted(cached):
            _remove(path)
            num_bytes -= size
            if num_bytes <= EVICT_TO_FRACTION * self.max_bytes:
                return


def _list_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield files of the subfolders; skip those that another process removes meanwhile."""
    try:
        subfolders = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for subfolder in subfolders:
        with contextlib.suppress(OSError), os.scandir(subfolder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.path, entry.stat(follow_symlinks=False)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _cache_key(path: Path, status: os.stat_result, size: int) -> str:
    """Cache key of a thumbnail; another image at the same path has another size or time."""
    identity = f"{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}\0{size}\0{QUALITY}"
    return hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()


def _read_cached(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    image, checksum = data[:-4], data[-4:]
    return image if image and checksum == _checksum(image) else None


def _checksum(image: bytes) -> bytes:
    """Checksum stored after the image, so that truncated or damaged thumbnails are rebuilt."""
    return zlib.crc32(image).to_bytes(4, "little")


def make_thumbnail(path: Path, size: int) -> bytes | None:
    """Make a thumbnail, never larger than the image; None if it is damaged or too large."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            if not 0 < image.width * image.height <= MAX_PIXELS:
                return None
            image.draft("RGB", (2 * size, 2 * size))  # a JPEG can be decoded at 1/2, 1/4 or 1/8 of its size
            has_alpha = "A" in image.getbands() or "transparency" in image.info
            thumbnail = image.convert("RGBA" if has_alpha else "RGB")
        thumbnail.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=2.0)
        file = io.BytesIO()
        thumbnail.save(file, "WEBP", quality=QUALITY, method=1)
        return file.getvalue()
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
