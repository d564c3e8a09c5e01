"""From what a person names to a model: a run (its newest good checkpoint), a checkpoint, an export, or a model of the package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from halation.distributed.checkpoint.reader import Reader
from halation.distributed.checkpoint.writer import COMMIT, damage, digest, newest_good
from halation.errors import InputError
from halation.models.bundled import advice, meant
from halation.models.denoiser import Denoiser
from halation.models.load import build, load_export, load_weights


def find(folder: Path) -> Path:
    """The checkpoint or export folder that is meant, with every byte checked where a commit file says what they are."""
    folder = meant(folder)
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}", "a run, a checkpoint or an export", advice(folder, "check the path")
        )
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
    elif (folder / "model_index.json").exists():
        raise InputError(
            f"{folder} is a diffusers pipeline",
            "a run, a checkpoint or an export of a DiT",
            f"draw from it with `halation generate --model_path {folder}`",
        )
    elif (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    raise InputError(
        f"no whole checkpoint in {folder}",
        "a run that has saved, a checkpoint or an export",
        "train it first, or name another folder",
    )


def refuse_lost_base(folder: Path) -> None:
    """A checkpoint of a fine-tuning needs the pipeline it began with; said before anything is started for it."""
    if not (folder / COMMIT).exists():
        return
    try:
        description = dict(json.loads((folder / "state.json").read_bytes())["denoiser"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(folder, error) from error
    base = Path(str(description.get("path", "")))
    if description.get("family") == "pipeline" and not (base / "model_index.json").is_file():
        raise _without_base(folder, base, "which is not there any more")


def _without_base(folder: Path, base: Path, why: str) -> InputError:
    folder = folder.resolve()
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    export, action = run / "export", f"put {base} back as it was"
    if (export / "model_index.json").exists():
        action = f"draw from its export, which is whole: `halation generate --model_path {export}`; or {action}"
    return InputError(f"{run} was fine-tuned from {base}, {why}", "the model it began with, or a whole one", action)


def load_denoiser(folder: Path, *, raw: bool, checked: bool = False) -> Denoiser:
    """The model, on the CPU: its averaged weights, or the raw ones. `checked` says that `find` gave this folder already."""
    folder = folder if checked else find(folder)
    if not (folder / COMMIT).exists():
        return load_export(folder, "model_raw.safetensors" if raw else "model.safetensors")
    try:
        reader = Reader(folder)
        denoiser = _built(folder, dict(reader.state["denoiser"]))
        tensors = dict(reader.whole("model" if raw else "ema"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(folder, error) from error
    load_weights(denoiser, tensors, source=str(folder))
    return denoiser


def _built(folder: Path, description: dict[str, Any]) -> Denoiser:
    try:
        return build(description)
    except InputError as error:
        if description.get("family") != "pipeline":
            raise
        raise _without_base(folder, Path(str(description.get("path"))), f"and now: {error.found}") from error


def _unreadable(folder: Path, error: Exception) -> InputError:
    """Sums keep out damage, not files that were made by something else."""
    return InputError(
        f"{folder} cannot be read: {type(error).__name__}: {error}",
        "a checkpoint or an export as Halation wrote it",
        "name another folder, or train or export it again",
    )


def digest_of(folder: Path, *, raw: bool) -> str:
    """One word for the very weights that are drawn from."""
    part = "model" if raw else "ema"
    if (folder / COMMIT).exists():
        sums = json.loads((folder / COMMIT).read_bytes())["sha256"]
        mine = sorted(value for name, value in sums.items() if name.split(".")[0].split("-")[0] == part)
        return hashlib.sha256(" ".join(mine).encode()).hexdigest()
    file = folder / ("model_raw.safetensors" if raw else "model.safetensors")
    if not file.is_file():
        raise InputError(
            f"{folder} has no {file.name}", "those weights in it", "leave --raw out" if raw else "export it again"
        )
    return digest(file)


def sampling_of(folder: Path) -> dict[str, Any]:
    """How the run this model comes from drew its samples."""
    source = folder / ("state.json" if (folder / COMMIT).exists() else "config.json")
    try:
        return dict(json.loads(source.read_bytes()).get("sampling", {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(folder, error) from error


def space_of(folder: Path) -> dict[str, Any]:
    """The description of the space a DiT works in, its autoencoder's folder written out."""
    committed = (folder / COMMIT).exists()
    source = folder / ("state.json" if committed else "config.json")
    try:
        value = json.loads(source.read_bytes())
        space = dict((value["denoiser"] if committed else value)["space"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(folder, error) from error
    return space | {"path": str(folder / space["path"])} if space.get("path") else space
