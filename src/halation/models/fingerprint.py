"""Which model this is: a word for a folder of weights that is another for other weights, found without reading them all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

EXPORT_FILE = "halation.json"
"""What Halation leaves in a pipeline it exported: the step, and how its run drew samples. No model reads it."""
SMALL_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16


def fingerprint(folder: Path) -> str:
    """A digest of every file's name and size, of small files whole, and of sixteen places in each large one.

    Weights that were trained on differ everywhere, so sixteen places tell them apart; reading a model of 30 GB at every
    resume would take minutes. Files that no model reads (images, READMEs, hidden ones, our own note) do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(_model_files(folder), key=lambda path: path.relative_to(folder).as_posix()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        digest.update(_content_digest(path, size))
    return digest.hexdigest()


def _model_files(folder: Path) -> list[Path]:
    endings = {".json", ".safetensors", ".txt", ".model", ".jinja", ".bin"}
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root) / name for name in names if not name.startswith(".") and Path(name).suffix in endings]
    return [path for path in found if path != folder / EXPORT_FILE]


def _content_digest(path: Path, size: int) -> bytes:
    if size <= SMALL_BYTES:
        return hashlib.sha256(path.read_bytes()).digest()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for number in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
