"""Exports a whole pipeline folder with trained weights, for diffusers and `generate`.

The export is atomic: if the process is killed, a temporary folder remains, which is never read and which the next
export removes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from halation.distributed.checkpoint.writer import write_safetensors
from halation.errors import HalationError
from halation.fault_injection import fault_point
from halation.models.pipelines.folder_safety_check import inspect_pipeline_folder, read_json
from halation.models.pipelines.load import pipeline_modules
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.lora import is_adapter_name
from halation.models.students.pipeline_student import PipelineStudent
from halation.runs.run_folder import publish_folder, remove_path, temporary_path

LORA_FILE = "pytorch_lora_weights.safetensors"
_INDEX_FILE = "model_index.json"
_WEIGHTS_STEM = "diffusion_pytorch_model"
_MAX_SHARD = 5 * 10**9
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".safetensors")
"""The files of a component without pickles and without weights of other frameworks."""
_VARIANT_PATTERN = re.compile(r"\.(fp16|bf16|fp32)(?=[.-])")


def export_pipeline(
    denoiser: PipelineDenoiser, folder: Path, *, averaged: Mapping[str, Tensor], raw: Mapping[str, Tensor] | None
) -> None:
    """Write the pipeline of `denoiser`: EMA weights in `transformer`, raw ones beside it.

    Raw weights go to `transformer_raw`. Adapters are merged into the transformer and also written as LORA_FILE. Both
    mappings use the names of the module's trained parameters. All other components are copied from the base folder. A
    student has its own config and, if it is sampled in few steps, its own scheduler.
    """
    for stale in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = temporary_path(folder)
    try:
        _write_pipeline(denoiser, staging, averaged, raw)
        fault_point("export.written")
        publish_folder(staging, folder, "export")
    finally:
        remove_path(staging)


def _write_pipeline(
    denoiser: PipelineDenoiser, staging: Path, averaged: Mapping[str, Tensor], raw: Mapping[str, Tensor] | None
) -> None:
    files, lora, student = denoiser.files, denoiser.lora, denoiser.student
    own = {"transformer"} if student is None else student.replaced_components
    staging.mkdir()
    for name in files.components:
        if name not in own:
            _copy_component(files.path / name, staging / name, files.variant)
            fault_point("export.component")
    for name, trained in (("transformer", averaged), ("transformer_raw", raw)):
        if trained is not None:
            place = staging / name
            place.mkdir()
            if student is None:
                shutil.copyfile(files.path / "transformer" / "config.json", place / "config.json")
            else:
                _write_json(place / "config.json", dict(student.config))
            _write_weights(place, _export_tensors(denoiser, trained))
            fault_point("export.weights")
    if lora is not None:
        tensors, settings = lora.to_diffusers(averaged)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
        metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(settings, sort_keys=True)}
        # save_file of safetensors writes several metadata keys in a random order.
        write_safetensors(staging / LORA_FILE, whole, metadata)
    for licence in sorted(files.path.glob("LICENSE*")):
        if licence.is_file():
            shutil.copyfile(licence, staging / licence.name)
    if student is None:
        shutil.copyfile(files.path / _INDEX_FILE, staging / _INDEX_FILE)
    else:
        _write_student(denoiser, student, staging)
    inspect_pipeline_folder(staging, pipeline_modules())


def _write_student(denoiser: PipelineDenoiser, student: PipelineStudent, staging: Path) -> None:
    """Write the student's scheduler and an index with it and without the second expert."""
    index = read_json(denoiser.files.path / _INDEX_FILE)
    if student.few_steps:
        scheduler = denoiser.scheduler
        scheduler.save_pretrained(str(staging / "scheduler"))
        index["scheduler"] = ["diffusers", type(scheduler).__name__]
    if student.base == "transformer_2":
        index = {key: value for key, value in index.items() if key not in ("transformer_2", "boundary_ratio")}
    _write_json(staging / _INDEX_FILE, index)


# Unchanged components


def _copy_component(source: Path, target: Path, variant: str | None) -> None:
    """Copy a component as files, never as links, which a download cache consists of.

    Weights of a variant get the plain name, so that they load without a variant argument.
    """
    target.mkdir()
    weights = _weight_files(source, variant)
    for path in sorted(path for path in source.iterdir() if path.is_file() and path.suffix in _SUFFIXES):
        if ".safetensors" not in path.name:
            shutil.copyfile(path, target / path.name)
        elif path in weights and path.suffix == ".json":
            index = read_json(path)
            places = {name: _VARIANT_PATTERN.sub("", file) for name, file in index["weight_map"].items()}
            _write_json(target / _VARIANT_PATTERN.sub("", path.name), {**index, "weight_map": places})
        elif path in weights:
            shutil.copyfile(path, target / _VARIANT_PATTERN.sub("", path.name))


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Return the weights and their index that a pipeline with this variant loads."""
    every = sorted(path for path in folder.iterdir() if path.is_file() and ".safetensors" in path.name)
    by_variant = {path: (found.group(1) if (found := _VARIANT_PATTERN.search(path.name)) else None) for path in every}
    wanted = [path for path in every if variant is not None and by_variant[path] == variant]
    return wanted or [path for path in every if by_variant[path] is None]


def _write_json(target: Path, value: Any) -> None:
    target.write_bytes((json.dumps(value, indent=2) + "\n").encode())


# Weights


def _export_tensors(
    denoiser: PipelineDenoiser, trained: Mapping[str, Tensor]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield each tensor of the transformer by name, with a function that makes it.

    A tensor is trained, merged, or taken from the base.
    """
    base = _untrained_weights(denoiser)
    lora = denoiser.lora
    for name in denoiser.module.state_dict():
        if is_adapter_name(name):
            continue
        own = name.replace(".base_layer.", ".")  # its name in the transformer's files
        if name in trained:
            yield own, functools.partial(trained.__getitem__, name)
        elif own not in base:
            raise HalationError(f"the tensor {own} is neither in {denoiser.files.path / 'transformer'} nor trained")
        elif lora is None:
            yield own, base[own]
        else:
            yield own, functools.partial(lora.merge, own, base[own], trained)


def _untrained_weights(denoiser: PipelineDenoiser) -> dict[str, Callable[[], Tensor]]:
    """Return the untrained tensors: those of the base, or the buffers of a resized student."""
    files, student = denoiser.files, denoiser.student
    if student is not None and not student.is_copy:
        buffers = {name: buffer.detach() for name, buffer in denoiser.module.named_buffers()}
        return {name: functools.partial(buffers.__getitem__, name) for name in buffers}
    found: dict[str, Callable[[], Tensor]] = {}
    for file in _weight_files(files.path / ("transformer" if student is None else student.base), files.variant):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as reader:
                found |= {name: functools.partial(_read_tensor, file, name) for name in reader.keys()}  # noqa: SIM118
    return found


def _read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as reader:
        tensor: Tensor = reader.get_tensor(name)
    return tensor


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Callable[[], Tensor]]]) -> None:
    """Write one file, or shards with an index, named as in diffusers.

    Only one shard is in memory at a time.
    """
    shards: list[list[str]] = []
    total = size = 0
    waiting: dict[str, Tensor] = {}
    for name, make in tensors:
        tensor = make().detach().cpu().contiguous()
        if waiting and size + tensor.nbytes > _MAX_SHARD:
            shards.append(_write_shard(folder, len(shards), waiting))
            size = 0
        waiting[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    shards.append(_write_shard(folder, len(shards), waiting))
    if len(shards) == 1:
        os.replace(folder / _shard_name(0), folder / f"{_WEIGHTS_STEM}.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"{_WEIGHTS_STEM}-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / _shard_name(number), folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / f"{_WEIGHTS_STEM}.safetensors.index.json", index)


def _shard_name(number: int) -> str:
    return f"shard_{number}"


def _write_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    names = list(tensors)
    path = folder / _shard_name(number)
    save_file(tensors, path, metadata={"format": "pt"})
    tensors.clear()
    return names
