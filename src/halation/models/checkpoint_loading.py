"""Loads the model of a run (its newest valid checkpoint), a checkpoint or an export."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from halation.distributed.checkpoint.reader import CheckpointReader
from halation.distributed.checkpoint.writer import find_damage, find_newest_valid
from halation.errors import InputError
from halation.input_files import check_numbers, file_sha256, read_json, read_safetensors_header
from halation.models.autoencoder import load_space
from halation.models.denoiser import Denoiser, ImageSpace
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.dit.network import DiT, DiTConfig
from halation.models.dit.tokenizer import WordTokenizer
from halation.models.model_folder import check_sampling_settings, resolve_model_path, suggest_model
from halation.models.pipelines.folder_safety_check import check_not_only_pickles
from halation.runs.run_folder import COMMIT_FILE


def build_denoiser(description: Mapping[str, Any]) -> Denoiser:
    """Build a DiT without weights, or load the pipeline as it was before fine-tuning."""
    if description.get("family") == "pipeline":
        # diffusers takes seconds to import, and a DiT does not need it
        from halation.models.pipelines.training.denoiser import PipelineDenoiser

        return PipelineDenoiser.from_description(description)
    return build_dit(description)


def build_dit(
    description: Mapping[str, Any],
    *,
    folder: Path | None = None,
    space: ImageSpace | None = None,
    stored: StoredShapes | None = None,
) -> DiTDenoiser:
    """Build the DiT of a description, with allocated but uninitialized weights.

    `folder` is the base of a relative autoencoder path. A loaded `space` replaces the described one. If `stored` shapes
    do not match the model, InputError is raised before memory is allocated.
    """
    if description.get("family") != "dit" or description.get("version") != 1:
        raise InputError(
            f"a model of family {description.get('family')!r}, version {description.get('version')!r}",
            "family 'dit', version 1",
            "load it with the release of Halation that wrote it",
        )
    try:
        config = _parse_config(description["config"])
        tokenizer = description.get("tokenizer")
        denoiser = DiTDenoiser(
            config=config,
            space=load_space(dict(description["space"]), folder) if space is None else space,
            tokenizer=None if tokenizer is None else WordTokenizer.from_json(tokenizer),
            class_names=[str(name) for name in description.get("class_names", ())],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"an invalid model description: {type(error).__name__}: {error}",
            "a description written by describe() of a denoiser",
            "use the config.json that was written with the weights",
        ) from error
    assert isinstance(denoiser.module, DiT)
    if stored is not None:
        _check_shapes(denoiser.module, stored)
    denoiser.module.materialize()
    return denoiser


def _parse_config(values: Mapping[str, Any]) -> DiTConfig:
    known = {field.name: field for field in dataclasses.fields(DiTConfig)}
    for name, value in values.items():
        wanted = str if name == "conditioning" else int
        if name not in known or not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{name} = {value!r} in the model's config")
    return DiTConfig(**values)


class StoredShapes(NamedTuple):
    """The shapes of stored tensors by name, and the file or folder that contains them."""

    source: str
    shapes: dict[str, tuple[int, ...]]


def load_weights(denoiser: Denoiser, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy tensors into the trained parameters; names and shapes must match exactly."""
    _check_shapes(
        denoiser.module, StoredShapes(source, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    )
    with torch.no_grad():
        for name, parameter in denoiser.module.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[name])


def _check_shapes(module: nn.Module, stored: StoredShapes) -> None:
    source, found = stored
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    expected = {name: tuple(parameter.shape) for name, parameter in trained.items()}
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        name = different[0]
        raise InputError(
            f"{source} does not fit the model: {len(different)} tensors differ, "
            f"first {name}: {found.get(name, 'missing')}",
            f"{name}: {expected.get(name, 'no such tensor')}",
            "use the config.json that was written with these weights",
        )


def load_export(folder: str | Path, weights: str = "model.safetensors") -> DiTDenoiser:
    """Load the denoiser of an export folder (`config.json` and safetensors), on the CPU."""
    path = Path(folder)
    description = _read_description(path / "config.json")
    file = path / weights
    if not file.is_file() or file.suffix != ".safetensors":
        raise InputError(
            f"no weights at {file}", "a safetensors file", "give a file of this folder that ends in .safetensors"
        )
    denoiser = build_dit(description, folder=path, stored=_read_stored_shapes(file))
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} cannot be read: {error}", "a whole safetensors file", "copy or export it again"
        ) from error
    load_weights(denoiser, tensors, source=str(file))
    return denoiser


def _read_stored_shapes(file: Path) -> StoredShapes:
    try:
        header = read_safetensors_header(file)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{file} cannot be read: {error}", "a whole safetensors file", "copy or export it again"
        ) from error
    return StoredShapes(str(file), {n: tuple(entry["shape"]) for n, entry in header.items() if n != "__metadata__"})


def check_model(folder: Path, *, raw: bool) -> None:
    """Reject a DiT whose weights do not match its config, before a worker is started.

    Other models are checked by their loaders.
    """
    is_checkpoint = (folder / COMMIT_FILE).exists()
    weights = folder / ("model_raw.safetensors" if raw else "model.safetensors")
    try:
        if is_checkpoint:
            reader = CheckpointReader(folder)
            description = dict(reader.state["denoiser"])
        else:
            description = _read_description(folder / "config.json")
        if description.get("family") != "dit" or "config" not in description:
            return
        shapes = reader.shapes(reader.sampled_part(raw=raw)) if is_checkpoint else {}
        stored = StoredShapes(str(folder), shapes) if is_checkpoint else _read_stored_shapes(weights)
        _check_shapes(DiT(_parse_config(description["config"])), stored)
        tokenizer = description.get("tokenizer")
        check_numbers(f"the tokenizer of {folder}", tokenizer or {}, {"max_tokens": (3, 8192)})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable_error(folder, error) from error


def _read_description(file: Path) -> dict[str, Any]:
    """Read `config.json`: a description, or a document with one under `model`."""
    try:
        value = read_json(file)
    except FileNotFoundError as error:
        raise InputError(
            f"no {file.name} in {file.parent}",
            "an export folder with config.json and model.safetensors",
            "check the path",
        ) from error
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}", "the config.json of an export", "export the model again"
        ) from error
    except ValueError as error:
        raise InputError(
            f"{file} is not JSON: {error}", "the config.json of an export", "export the model again"
        ) from error
    inner = value.get("model", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        raise InputError(f"{file} does not describe a model", "the config.json of an export", "export the model again")
    return inner


def find_checkpoint(folder: Path) -> Path:
    """Find the checkpoint or export of a path; checkpoints are verified against COMMIT.json."""
    folder = resolve_model_path(folder)
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}", "a run, a checkpoint or an export", suggest_model(folder, "check the path")
        )
    if (folder / "checkpoints").is_dir():
        found = find_newest_valid(folder / "checkpoints")
        if found is not None:
            return found.folder
        folder = folder / "checkpoints"
    elif (folder / COMMIT_FILE).exists():
        problem = find_damage(folder)
        if problem:
            raise InputError(
                f"checkpoint {folder} is damaged: {problem}", "the files as they were saved", "use an older checkpoint"
            )
        return folder
    elif (folder / "model_index.json").exists():
        raise InputError(
            f"{folder} is a diffusers pipeline",
            "a run, a checkpoint or an export of a DiT",
            f"use `halation generate --model_path {folder}`",
        )
    elif (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    check_not_only_pickles(folder)
    raise InputError(
        f"no complete checkpoint in {folder}",
        "a run with a saved checkpoint, a checkpoint or an export",
        "train it first, or give another folder",
    )


def check_base_exists(folder: Path) -> Path | None:
    """Return the base pipeline of a fine-tuning checkpoint; raise if it is missing."""
    if not (folder / COMMIT_FILE).exists():
        return None
    try:
        description = dict(read_json(folder / "state.json")["denoiser"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable_error(folder, error) from error
    base = Path(str(description.get("path", "")))
    if description.get("family") != "pipeline":
        return None
    if not (base / "model_index.json").is_file():
        raise _missing_base_error(folder, base, "which no longer exists")
    return base


def _missing_base_error(folder: Path, base: Path, why: str) -> InputError:
    folder = folder.resolve()
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    export, action = run / "export", f"put {base} back as it was"
    if (export / "model_index.json").exists():
        action = f"generate from its export, a whole pipeline: `halation generate --model_path {export}`; or {action}"
    return InputError(f"{run} was fine-tuned from {base}, {why}", "the model it started from, or an export", action)


def load_denoiser(folder: Path, *, raw: bool, checked: bool = False) -> Denoiser:
    """Load the model on the CPU: its EMA weights, or with `raw` or without an EMA the trained ones.

    `checked` means that the folder comes from `find_checkpoint`.
    """
    folder = folder if checked else find_checkpoint(folder)
    if not (folder / COMMIT_FILE).exists():
        return load_export(folder, "model_raw.safetensors" if raw else "model.safetensors")
    try:
        reader = CheckpointReader(folder)
        part = reader.sampled_part(raw=raw)
        denoiser = _build_from_checkpoint(
            folder, dict(reader.state["denoiser"]), StoredShapes(str(folder), reader.shapes(part))
        )
        tensors = dict(reader.read_part(part))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable_error(folder, error) from error
    load_weights(denoiser, tensors, source=str(folder))
    return denoiser


def _build_from_checkpoint(folder: Path, description: dict[str, Any], stored: StoredShapes) -> Denoiser:
    try:
        if description.get("family") == "dit":
            return build_dit(description, stored=stored)
        return build_denoiser(description)
    except InputError as error:
        if description.get("family") != "pipeline":
            raise
        raise _missing_base_error(folder, Path(str(description.get("path"))), f"and now: {error.found}") from error


def _unreadable_error(folder: Path, error: Exception) -> InputError:
    """Error for files that another program wrote; their checksums may be correct."""
    return InputError(
        f"{folder} cannot be read: {type(error).__name__}: {error}",
        "a checkpoint or an export as Halation wrote it",
        "give another folder, or train or export it again",
    )


def weights_digest(folder: Path, *, raw: bool) -> str:
    """Hash of the weights that images are generated from."""
    if (folder / COMMIT_FILE).exists():
        sums = read_json(folder / COMMIT_FILE)["sha256"]
        parts = {name: name.split(".")[0].split("-")[0] for name in sums}
        part = "model" if raw or "ema" not in parts.values() else "ema"
        digests = sorted(value for name, value in sums.items() if parts[name] == part)
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()
    file = folder / ("model_raw.safetensors" if raw else "model.safetensors")
    if not file.is_file():
        raise InputError(
            f"{folder} has no {file.name}", "these weights in it", "leave --raw out" if raw else "export it again"
        )
    return file_sha256(file)


def read_sampling_settings(folder: Path) -> dict[str, Any]:
    """Read the sampling settings of the run that this model comes from."""
    source = folder / ("state.json" if (folder / COMMIT_FILE).exists() else "config.json")
    try:
        sampling = dict(read_json(source).get("sampling", {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable_error(folder, error) from error
    check_sampling_settings(str(source), sampling)
    return sampling


def read_space_description(folder: Path) -> dict[str, Any]:
    """Read the description of a DiT's image space, with the full path of its autoencoder."""
    committed = (folder / COMMIT_FILE).exists()
    source = folder / ("state.json" if committed else "config.json")
    try:
        value = read_json(source)
        space = dict((value["denoiser"] if committed else value)["space"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable_error(folder, error) from error
    return space | {"path": str(folder / space["path"])} if space.get("path") else space
