"""Denoisers from JSON descriptions and safetensors; nothing here can run code that comes with a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from halation.errors import InputError
from halation.models.autoencoder import Space, space_from
from halation.models.denoiser import Denoiser
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.dit.network import DiT, DiTConfig
from halation.models.dit.tokenizer import WordTokenizer


def build(description: Mapping[str, Any]) -> Denoiser:
    """The denoiser a description names: a DiT with nothing in it yet, or the pipeline that was fine-tuned, as it was before."""
    if description.get("family") == "pipeline":
        # diffusers takes seconds to import, and a DiT does without; some of what it says, it says while it is imported
        from halation.models.pipelines.library_messages import silence

        silence()
        from halation.models.pipelines.training.denoiser import PipelineDenoiser

        return PipelineDenoiser.described(description)
    return build_dit(description)


def build_dit(description: Mapping[str, Any], *, folder: Path | None = None, space: Space | None = None) -> DiTDenoiser:
    """The DiT a description names, with memory for its weights and nothing in it yet.

    `folder` is where a relative autoencoder path starts; a `space` that is already loaded is used instead of the described one.
    """
    if description.get("family") != "dit" or description.get("version") != 1:
        raise InputError(
            f"a model of family {description.get('family')!r}, version {description.get('version')!r}",
            "family 'dit', version 1",
            "load it with the release of Halation that wrote it",
        )
    try:
        config = _config(description["config"])
        tokenizer = description.get("tokenizer")
        denoiser = DiTDenoiser(
            config=config,
            space=space_from(dict(description["space"]), folder) if space is None else space,
            tokenizer=None if tokenizer is None else WordTokenizer.from_json(tokenizer),
            class_names=[str(name) for name in description.get("class_names", ())],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"a model description that does not hold together: {type(error).__name__}: {error}",
            "what describe() of a denoiser wrote",
            "take the config.json that was written with the weights",
        ) from error
    assert isinstance(denoiser.module, DiT)
    denoiser.module.materialise()
    return denoiser


def _config(values: Mapping[str, Any]) -> DiTConfig:
    known = {field.name: field for field in dataclasses.fields(DiTConfig)}
    for name, value in values.items():
        wanted = str if name == "conditioning" else int
        if name not in known or not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{name} = {value!r} in the model's config")
    return DiTConfig(**values)


def load_weights(denoiser: Denoiser, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Put tensors into the trained parameters of the module; names and shapes must match exactly."""
    trained = {name: parameter for name, parameter in denoiser.module.named_parameters() if parameter.requires_grad}
    expected = {name: tuple(parameter.shape) for name, parameter in trained.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        name = different[0]
        raise InputError(
            f"{source} does not fit the model: {len(different)} tensors differ, first {name}: {found.get(name, 'missing')}",
            f"{name}: {expected.get(name, 'no such tensor')}",
            "use the config.json that was written with these weights",
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[name])


def load_export(folder: str | Path, weights: str = "model.safetensors") -> DiTDenoiser:
    """The denoiser of an export folder (`config.json` and safetensors), on the CPU."""
    path = Path(folder)
    description = _read_description(path / "config.json")
    file = path / weights
    if not file.is_file() or file.suffix != ".safetensors":
        raise InputError(
            f"no weights at {file}", "a safetensors file", "name a file of this folder that ends in .safetensors"
        )
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} cannot be read: {error}", "a whole safetensors file", "copy or export it again"
        ) from error
    denoiser = build_dit(description, folder=path)
    load_weights(denoiser, tensors, source=str(file))
    return denoiser


def _read_description(file: Path) -> dict[str, Any]:
    """`config.json`: a description, or a document that holds one under `model`."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"no {file.name} in {file.parent}",
            "an export folder with config.json and model.safetensors",
            "check the path",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{file} is not JSON: {error}", "the config.json of an export", "export the model again"
        ) from error
    inner = value.get("model", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict):
        raise InputError(f"{file} describes no model", "the config.json of an export", "export the model again")
    return inner
