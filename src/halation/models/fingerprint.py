"""Which model this is: a word for a folder of weights that is another for other weights, found without reading them all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.input_files import (
    MAX_MODEL_ENTRIES,
    RefusedFileError,
    check_numbers,
    open_regular_file,
    read_bytes,
    walk_folder,
)

EXPORT_FILE = "halation.json"
"""What Halation leaves in a pipeline it exported: the step, and how its run drew samples. No model reads it."""
SMALL_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 16


SAMPLING_RANGES = {
    "height": (1, 16_384), "width": (1, 16_384), "steps": (1, 10_000), "seed": (0, 2**63 - 1), "sheet_size": (1, 65_536),
    "threads": (0, 4096), "guidance_scale": (0.0, 1e6), "time_shift": (0.0, 1e6),
}  # fmt: skip


def check_sampling_settings(source: str, sampling: Mapping[str, Any]) -> None:
    """Refuse numbers with which a model that was exported, or a checkpoint, cannot be drawn from."""
    check_numbers(source, sampling, SAMPLING_RANGES)
    kinds = {"sampler": str, "dtype": str, "prompts": list, "distilled": dict | None}
    for name, kind in kinds.items():
        if name in sampling and not isinstance(sampling[name], kind):
            raise InputError(
                f"{source}: {name} is a {type(sampling[name]).__name__}",
                "the settings that Halation wrote with the weights",
                "export the model again, or name another",
            )
    distilled = sampling.get("distilled") or {}
    if distilled.get("steps"):
        check_numbers(f"{source}: distilled", distilled, {"steps": SAMPLING_RANGES["steps"]})


def fingerprint(folder: Path) -> str:
    """A digest of every file's name and size, of small files whole, and of sixteen places in each large one.

    Weights that were trained on differ everywhere, so sixteen places tell them apart; reading a model of 30 GB at every
    resume would take minutes. Files that no model reads (images, READMEs, hidden ones, our own note) do not count.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(_model_files(folder), key=lambda path: path.relative_to(folder).as_posix()):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
            digest.update(_content_digest(path, size))
    except RefusedFileError as error:
        raise error.as_input_error() from error
    return digest.hexdigest()


def _model_files(folder: Path) -> list[Path]:
    endings = {".json", ".safetensors", ".txt", ".model", ".jinja", ".bin"}
    found = []
    for root, folders, names in walk_folder(folder, max_entries=MAX_MODEL_ENTRIES):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root) / name for name in names if not name.startswith(".") and Path(name).suffix in endings]
    return [path for path in found if path != folder / EXPORT_FILE]


def _content_digest(path: Path, size: int) -> bytes:
    if size <= SMALL_BYTES:
        return hashlib.sha256(read_bytes(path, SMALL_BYTES)).digest()
    digest = hashlib.sha256()
    with open_regular_file(path) as file:
        for number in range(NUM_SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
