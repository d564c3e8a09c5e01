"""From a folder a person names to a model: a run (its newest good checkpoint), a checkpoint, or an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.models.denoiser import DiTDenoiser
from halation.models.load import build, load_export, load_weights
from halation.world.checkpoint import COMMIT, Reader, damage, newest_good


def find(folder: Path) -> Path:
    """The checkpoint or export folder that is meant, with every byte checked where a commit file says what they are."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", "a run, a checkpoint or an export", "check the path")
    if (folder / "checkpoints").is_dir():
        found = newest_good(folder / "checkpoints")
        if found is not None:
            return found.folder
        folder = folder / "checkpoints"
    elif (folder / COMMIT).exists():
        problem = damage(folder)
        if problem:
            raise InputError(
                f"checkpoint {folder} is damaged: {problem}", "the bytes it was saved with", "use an older checkpoint"
            )
        return folder
    elif (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    raise InputError(
        f"no whole checkpoint in {folder}",
        "a run that has saved, a checkpoint or an export",
        "train it first, or name another folder",
    )


def load_denoiser(folder: Path, *, raw: bool) -> DiTDenoiser:
    """The model, on the CPU: its averaged weights, or the raw ones."""
    folder = find(folder)
    if not (folder / COMMIT).exists():
        return load_export(folder, "model_raw.safetensors" if raw else "model.safetensors")
    reader = Reader(folder)
    denoiser = build(reader.state["denoiser"])
    load_weights(denoiser, dict(reader.whole("model" if raw else "ema")), source=str(folder))
    return denoiser


def sampling_of(folder: Path) -> dict[str, Any]:
    """How the run this model comes from drew its samples."""
    source = folder / ("state.json" if (folder / COMMIT).exists() else "config.json")
    settings: dict[str, Any] = json.loads(source.read_bytes()).get("sampling", {})
    return settings
