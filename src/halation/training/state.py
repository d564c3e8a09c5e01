"""Everything a checkpoint of a training run holds, and putting it back on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halation.distributed.checkpoint.reader import Piece, Reader
from halation.distributed.engines.ddp_fsdp import Engine
from halation.errors import InputError
from halation.flow.ema import Ema
from halation.models.autoencoder import LatentSpace, Space
from halation.runs.folder import publish_json, sync_folder
from halation.training.loop import MODEL, Part, Position


def parts(learning: Mapping[str, Part]) -> dict[str, dict[str, Piece]]:
    """This rank's pieces of model, EMA and optimizer; those of other parts go by the part's name, as `fake_model`."""
    result: dict[str, dict[str, Piece]] = {}
    for part, each in learning.items():
        pieces, start = each.engine.pieces(), prefix(part)
        result[f"{start}model"] = pieces["model"]
        if each.ema is not None:
            averages = each.ema.tensors()
            result[f"{start}ema"] = {
                name: replace(piece, local=averages[name]) for name, piece in pieces["model"].items()
            }
        result[f"{start}optimizer"] = pieces["optimizer"]
    return result


def prefix(part: str) -> str:
    return "" if part == MODEL else f"{part}_"


def state(position: Position, ema: Ema, denoiser: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same on all ranks; with it a checkpoint can be drawn from without the run around it."""
    return {
        "position": asdict(position),
        "ema_updates": ema.num_updates,
        "denoiser": dict(denoiser),
        "sampling": dict(sampling),
    }


def restore(reader: Reader, learning: Mapping[str, Part]) -> Position:
    """Fill everything from a checkpoint, whatever number of ranks wrote it."""
    for part, each in learning.items():
        mine = reader.seen_as(prefix(part))
        _refuse_other_weights(mine, each.engine)
        each.engine.fill(mine)
        if each.ema is not None:
            averages = {name: mine.piece("ema", name, piece) for name, piece in each.engine.pieces()["model"].items()}
            each.ema.load_tensors(averages, reader.state["ema_updates"])
    return Position(**reader.state["position"])


def _refuse_other_weights(reader: Reader, engine: Engine) -> None:
    """Accepted changes may make another model of a run; its checkpoints then have nothing to say to it."""
    found = reader.shapes("model")
    expected = engine.shapes
    different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if different:
        name = different[0]
        raise InputError(
            f"checkpoint {reader.folder} holds other weights than these settings train: {len(different)} tensors differ, "
            f"first {name} ({found.get(name, 'not saved')}, now {expected.get(name, 'not trained')})",
            "the model, adapters and sizes the run began with",
            "use its settings, or begin a new run in another --output_dir from its export",
        )


def export(reader: Reader, folder: Path, space: Space) -> None:
    """model.safetensors (EMA), model_raw.safetensors, config.json, and model.pth for loaders that want a torch file.

    An autoencoder is copied along, so that the folder can be taken elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in (("ema", "model"), ("model", "model_raw")):
        tensors: dict[str, Tensor] = dict(reader.whole(part))
        _replace(folder / f"{name}.safetensors", lambda path, tensors=tensors: save_file(tensors, path))
        if part == "ema":
            _replace(folder / "model.pth", lambda path, tensors=tensors: torch.save(tensors, path))
    description = reader.state["denoiser"] | {"sampling": reader.state["sampling"]}
    if isinstance(space, LatentSpace):
        space.save(folder / "vae")
        description["space"] = description["space"] | {"path": "vae"}
    publish_json(folder / "config.json", description)
    sync_folder(folder)


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
