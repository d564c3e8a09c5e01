"""What a checkpoint of a training run holds: save, find, restore, export."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halation.distributed.checkpoint.reader import CheckpointReader, TensorShard
from halation.distributed.checkpoint.writer import CommittedCheckpoint, find_newest_valid
from halation.distributed.engines.ddp_fsdp import Engine
from halation.errors import InputError
from halation.flow.ema import Ema
from halation.models.autoencoder import LatentSpace
from halation.models.denoiser import Denoiser, ImageSpace
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.model_folder import EXPORT_FILE
from halation.runs.run_folder import atomic_path, open_atomic, write_json_atomic
from halation.training.loop import MODEL, TrainedNetwork, TrainState

log = logging.getLogger(__name__)


def checkpoint_parts(networks: Mapping[str, TrainedNetwork]) -> dict[str, dict[str, TensorShard]]:
    """This rank's pieces of model, EMA and optimizer; those of other parts go by the part's name, as `fake_model`."""
    result: dict[str, dict[str, TensorShard]] = {}
    for network_name, network in networks.items():
        pieces, name_prefix = network.engine.state_shards(), network_prefix(network_name)
        result[f"{name_prefix}model"] = pieces["model"]
        if network.ema is not None:
            averages = network.ema.tensors()
            result[f"{name_prefix}ema"] = {
                name: replace(piece, local=averages[name]) for name, piece in pieces["model"].items()
            }
        result[f"{name_prefix}optimizer"] = pieces["optimizer"]
    return result


def pinned_tensor_bytes(networks: Mapping[str, TrainedNetwork]) -> Iterator[int]:
    """Bytes of the tensors of a checkpoint that are copied from a GPU: weights, averages, two moments of each
    weight."""
    for network in networks.values():
        pieces = [piece.local for piece in network.engine.state_shards()["model"].values()]
        weights = [(local.numel(), local.element_size()) for local in pieces if local.is_cuda]
        yield from (num * size for num, size in weights)
        yield from (num * 4 for num, _ in weights if network.ema is not None)
        yield from (num * size for num, size in weights for _ in range(2))


def find_checkpoint(folder: Path, *, restart: bool) -> CommittedCheckpoint | None:
    """The newest whole one, None for a new run; damaged ones get other names. Raises where there are only damaged
    ones."""
    damaged: list[tuple[CommittedCheckpoint, str]] = []
    found = find_newest_valid(folder, on_damage=lambda checkpoint, problem: damaged.append((checkpoint, problem)))
    names = [checkpoint.folder.name for checkpoint, _ in damaged]
    names += sorted(path.name for path in folder.glob("damaged_*"))
    if found is None and names and not restart:
        raise InputError(
            f"no checkpoint in {folder} is whole; damaged: {', '.join(names)}",
            "at least one whole checkpoint to go on from",
            "restore one of them from a copy; or give --restart to start over at step 0 "
            "(damaged ones stay, under other names)",
        )
    for checkpoint, problem in damaged:
        rename_damaged_checkpoint(checkpoint, problem)
    if found is None and names:
        log.warning("no checkpoint is whole: starting over at step 0, as --restart says")
    return found


def rename_damaged_checkpoint(checkpoint: CommittedCheckpoint, problem: str) -> None:
    """A damaged checkpoint keeps its bytes under another name and no longer counts."""
    target = checkpoint.folder.with_name(f"damaged_{checkpoint.folder.name}_{os.urandom(2).hex()}")
    os.rename(checkpoint.folder, target)
    log.error("set aside as %s (%s)", target, problem)


def network_prefix(network_name: str) -> str:
    return "" if network_name == MODEL else f"{network_name}_"


def shared_state(
    train_state: TrainState, ema: Ema, denoiser: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """What is the same on all ranks; with it a checkpoint can be drawn from without the run around it."""
    return {
        "position": train_state.as_json(),
        "ema_updates": ema.num_updates,
        "denoiser": dict(denoiser),
        "sampling": dict(sampling),
    }


def restore(reader: CheckpointReader, networks: Mapping[str, TrainedNetwork]) -> TrainState:
    """Fill everything from a checkpoint, whatever number of ranks wrote it."""
    for network_name, network in networks.items():
        network_reader = reader.with_prefix(network_prefix(network_name))
        _check_weights_match(network_reader, network.engine)
        network.engine.load_checkpoint(network_reader)
        if network.ema is not None:
            averages = {
                name: network_reader.read_shard("ema", name, piece)
                for name, piece in network.engine.state_shards()["model"].items()
            }
            network.ema.load_tensors(averages, reader.state["ema_updates"])
    return TrainState.from_json(reader.state["position"])


def _check_weights_match(reader: CheckpointReader, engine: Engine) -> None:
    """Accepted changes may make another model of a run; its checkpoints then have nothing to say to it."""
    found = reader.shapes("model")
    expected = engine.shapes
    different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if different:
        name = different[0]
        raise InputError(
            f"checkpoint {reader.folder} holds other weights than these settings train: "
            f"{len(different)} tensors differ, first {name} "
            f"({found.get(name, 'not saved')}, now {expected.get(name, 'not trained')})",
            "the model, adapters and sizes the run began with",
            "use its settings, or begin a new run in another --output_dir from its export",
        )


def export_dit(reader: CheckpointReader, folder: Path, space: ImageSpace) -> None:
    """model.safetensors (EMA), model_raw.safetensors, config.json, and model.pth for loaders that want a torch file.

    An autoencoder is copied along, so that the folder can be taken elsewhere.
    """
    folder.mkdir(exist_ok=True)
    for part, name in (("ema", "model"), ("model", "model_raw")):
        tensors: dict[str, Tensor] = dict(reader.read_part(part))
        with atomic_path(folder / f"{name}.safetensors", "export") as temporary:
            save_file(tensors, temporary)
        if part == "ema":
            # Into an open file: given a name, torch would write the temporary name into the archive.
            with open_atomic(folder / "model.pth", "export") as file:
                torch.save(tensors, file)
    description = reader.state["denoiser"] | {"sampling": reader.state["sampling"]}
    if isinstance(space, LatentSpace):
        space.save(folder / "vae")
        description["space"] = description["space"] | {"path": "vae"}
    write_json_atomic(folder / "config.json", description)


def export_checkpoint(reader: CheckpointReader, folder: Path, denoiser: Denoiser) -> None:
    """The export of a checkpoint of this denoiser."""
    if isinstance(denoiser, DiTDenoiser):
        export_dit(reader, folder, denoiser.space)
        return
    # Here, because diffusers takes seconds to import, and a DiT does without it.
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.models.pipelines.training.export import export_pipeline

    assert isinstance(denoiser, PipelineDenoiser)
    export_pipeline(denoiser, folder, averaged=reader.lazy_part("ema"), raw=reader.lazy_part("model"))
    facts = {"step": reader.state["position"]["step"], "sampling": reader.state["sampling"]}
    write_json_atomic(folder / EXPORT_FILE, facts)
