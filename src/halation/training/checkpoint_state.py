"""The contents of a training checkpoint: save, find, restore, export."""

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
from halation.runs.run_folder import atomic_path, open_atomic, remove_path, write_json_atomic
from halation.training.loop import MODEL, TrainedNetwork, TrainState

log = logging.getLogger(__name__)


def checkpoint_parts(networks: Mapping[str, TrainedNetwork]) -> dict[str, dict[str, TensorShard]]:
    """Return this rank's shards of model, EMA and optimizer.

    Names of networks other than MODEL are prefixed, as in `fake_model`.
    """
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
    """Yield the size in bytes of each checkpoint tensor that is copied from a GPU.

    These are the weights, the EMA and two moments per weight.
    """
    for network in networks.values():
        pieces = [piece.local for piece in network.engine.state_shards()["model"].values()]
        weights = [(local.numel(), local.element_size()) for local in pieces if local.is_cuda]
        yield from (num * size for num, size in weights)
        yield from (num * 4 for num, _ in weights if network.ema is not None)
        yield from (num * size for num, size in weights for _ in range(2))


def find_checkpoint(folder: Path, *, restart: bool) -> CommittedCheckpoint | None:
    """Return the newest valid checkpoint, or None for a new run.

    Damaged checkpoints are renamed. Raises if all checkpoints are damaged, unless `restart` is set.
    """
    damaged: list[tuple[CommittedCheckpoint, str]] = []
    found = find_newest_valid(folder, on_damage=lambda checkpoint, problem: damaged.append((checkpoint, problem)))
    names = [checkpoint.folder.name for checkpoint, _ in damaged]
    names += sorted(path.name for path in folder.glob("damaged_*"))
    if found is None and names and not restart:
        raise InputError(
            f"no checkpoint in {folder} is valid; damaged: {', '.join(names)}",
            "at least one valid checkpoint to resume from",
            "restore one of them from a copy; or give --restart to start over at step 0 "
            "(damaged checkpoints are renamed, not deleted)",
        )
    for checkpoint, problem in damaged:
        rename_damaged_checkpoint(checkpoint, problem)
    if found is None and names:
        log.warning("no checkpoint is valid: starting over at step 0 (--restart)")
    return found


def rename_damaged_checkpoint(checkpoint: CommittedCheckpoint, problem: str) -> None:
    """Rename a damaged checkpoint so that it no longer counts as one; its files are kept."""
    target = checkpoint.folder.with_name(f"damaged_{checkpoint.folder.name}_{os.urandom(2).hex()}")
    os.rename(checkpoint.folder, target)
    log.error("damaged checkpoint renamed to %s (%s)", target, problem)


def network_prefix(network_name: str) -> str:
    return "" if network_name == MODEL else f"{network_name}_"


def shared_state(
    train_state: TrainState, ema: Ema | None, denoiser: Mapping[str, Any], sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state that is the same on all ranks.

    With it, a checkpoint can be sampled from without its run folder.
    """
    return {
        "position": train_state.as_json(),
        "ema_updates": 0 if ema is None else ema.num_updates,
        "denoiser": dict(denoiser),
        "sampling": dict(sampling),
    }


def restore(reader: CheckpointReader, networks: Mapping[str, TrainedNetwork]) -> TrainState:
    """Load all networks from a checkpoint, which any number of ranks may have written."""
    for network_name, network in networks.items():
        network_reader = reader.with_prefix(network_prefix(network_name))
        _check_weights_match(network_reader, network.engine)
        network.engine.load_checkpoint(network_reader)
        if network.ema is not None:
            part = network_reader.sampled_part()  # the weights if --accept_changes switched the EMA on
            averages = {
                name: network_reader.read_shard(part, name, piece)
                for name, piece in network.engine.state_shards()["model"].items()
            }
            network.ema.load_tensors(averages, reader.state["ema_updates"])
    return TrainState.from_json(reader.state["position"])


def _check_weights_match(reader: CheckpointReader, engine: Engine) -> None:
    """Raise if names or shapes differ, as they may after --accept_changes changed the model."""
    found = reader.shapes("model")
    expected = engine.shapes
    different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if different:
        name = different[0]
        raise InputError(
            f"checkpoint {reader.folder} does not match the model of these settings: "
            f"{len(different)} tensors differ, first {name} "
            f"({found.get(name, 'not saved')}, now {expected.get(name, 'not trained')})",
            "the model, adapters and sizes that the run was started with",
            "use its settings, or start a new run in another --output_dir from its export",
        )


def export_dit(reader: CheckpointReader, folder: Path, space: ImageSpace) -> None:
    """Write model.safetensors (EMA), model_raw.safetensors, config.json and model.pth.

    Without an EMA, the raw weights are model.safetensors. model.pth is for loaders that need a torch file. An
    autoencoder is copied too, so that the folder can be moved.
    """
    folder.mkdir(exist_ok=True)
    remove_path(folder / "model_raw.safetensors")
    for part, name in ((reader.sampled_part(), "model"), *([("model", "model_raw")] if reader.has_part("ema") else [])):
        tensors: dict[str, Tensor] = dict(reader.read_part(part))
        with atomic_path(folder / f"{name}.safetensors", "export") as temporary:
            save_file(tensors, temporary)
        if name == "model":
            # Pass an open file: given a path, torch would write the temporary name into the archive.
            with open_atomic(folder / "model.pth", "export") as file:
                torch.save(tensors, file)
    description = reader.state["denoiser"] | {"sampling": reader.state["sampling"]}
    if isinstance(space, LatentSpace):
        space.save(folder / "vae")
        description["space"] = description["space"] | {"path": "vae"}
    write_json_atomic(folder / "config.json", description)


def export_checkpoint(reader: CheckpointReader, folder: Path, denoiser: Denoiser) -> None:
    """Export a checkpoint of this denoiser to `folder`."""
    if isinstance(denoiser, DiTDenoiser):
        export_dit(reader, folder, denoiser.space)
        return
    # Imported here: diffusers takes seconds to import, and a DiT does not need it.
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.models.pipelines.training.export import export_pipeline

    assert isinstance(denoiser, PipelineDenoiser)
    raw = reader.lazy_part("model") if reader.has_part("ema") else None
    export_pipeline(denoiser, folder, averaged=reader.lazy_part(reader.sampled_part()), raw=raw)
    facts = {"step": reader.state["position"]["step"], "sampling": reader.state["sampling"]}
    write_json_atomic(folder / EXPORT_FILE, facts)
