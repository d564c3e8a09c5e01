"""A whole pipeline folder with the weights of a training in it, for `DiffusionPipeline.from_pretrained` and `halation generate`.

It appears under its name complete or not at all: a kill leaves a temporary folder that nothing opens, and the next export sweeps it.
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

from halation.errors import HalationError
from halation.faults import fault_point
from halation.models.pipelines.folder_check import PipelineFiles, inspect_folder, read_json
from halation.models.pipelines.load import pipeline_modules
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.lora import Lora, base_name, is_adapter_name, merged, published
from halation.models.students.pipeline_student import PipelineStudent
from halation.runs.folder import sync_folder, temporary_for

LORA_FILE = "pytorch_lora_weights.safetensors"
_INDEX = "model_index.json"
_WEIGHTS = "diffusion_pytorch_model"
_MAX_SHARD = 5 * 10**9
_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".safetensors")
"""What a component consists of where no pickle and no other framework's weights are wanted."""
_VARIANT = re.compile(r"\.(fp16|bf16|fp32)(?=[.-])")


def export_pipeline(
    denoiser: PipelineDenoiser, folder: Path, *, averaged: Mapping[str, Tensor], raw: Mapping[str, Tensor] | None
) -> None:
    """Write the pipeline of `denoiser` with the average of the trained weights in `transformer` and those as they are in
    `transformer_raw`; adapters are merged into the transformer, and lie beside it as LORA_FILE too.

    Both mappings are by the names of the module's trained parameters. All other components are copied from the base folder; a
    student brings a config and, where it is drawn in few steps, a scheduler of its own.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    building = temporary_for(folder)
    try:
        _write(denoiser, building, averaged, raw)
        fault_point("export.written")
        _take_place(building, folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _write(
    denoiser: PipelineDenoiser, building: Path, averaged: Mapping[str, Tensor], raw: Mapping[str, Tensor] | None
) -> None:
    files, lora, student = denoiser.files, denoiser.lora, denoiser.student
    own = {"transformer"} if student is None else student.replaces
    building.mkdir()
    for name in files.components:
        if name not in own:
            _copy_component(files.path / name, building / name, files.variant)
            fault_point("export.component")
    for name, trained in (("transformer", averaged), ("transformer_raw", raw)):
        if trained is not None:
            place = building / name
            place.mkdir()
            if student is None:
                _copy(files.path / "transformer" / "config.json", place / "config.json")
            else:
                _write_json(place / "config.json", dict(student.config))
            _write_weights(place, _tensors(denoiser, trained))
            fault_point("export.weights")
    if lora is not None:
        _write_adapters(building / LORA_FILE, averaged, lora)
    for licence in sorted(files.path.glob("LICENSE*")):
        if licence.is_file():
            _copy(licence, building / licence.name)
    if student is None:
        _copy(files.path / _INDEX, building / _INDEX)
    else:
        _write_student(denoiser, student, building)
    inspect_folder(building, pipeline_modules())
    for inner in (building, *(path for path in building.iterdir() if path.is_dir())):
        sync_folder(inner)


def _write_student(denoiser: PipelineDenoiser, student: PipelineStudent, building: Path) -> None:
    """The scheduler that the student was trained for, and an index that knows it and no second expert."""
    index = read_json(denoiser.files.path / _INDEX)
    if student.few_steps:
        scheduler = denoiser.scheduler
        place = building / "scheduler"
        scheduler.save_pretrained(str(place))
        for file in place.iterdir():
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        index["scheduler"] = ["diffusers", type(scheduler).__name__]
    if student.base == "transformer_2":
        index = {key: value for key, value in index.items() if key not in ("transformer_2", "boundary_ratio")}
    _write_json(building / _INDEX, index)


def _take_place(building: Path, folder: Path) -> None:
    """Put the new folder where an older one may be; between two renames there is neither, and never half of one."""
    if folder.exists():
        old = temporary_for(folder)
        os.replace(folder, old)
        fault_point("export.moved")
        os.replace(building, folder)
        shutil.rmtree(old)
    else:
        os.replace(building, folder)
    sync_folder(folder.parent)


# Components as they are


def _copy_component(source: Path, target: Path, variant: str | None) -> None:
    """Whole files, never links: a folder of a download cache is links into it. Weights of a variant get the plain name, which is
    looked for where nobody names a variant."""
    target.mkdir()
    weights = _weights(source, variant)
    for path in sorted(path for path in source.iterdir() if path.is_file() and path.suffix in _SUFFIXES):
        if ".safetensors" not in path.name:
            _copy(path, target / path.name)
        elif path in weights and path.suffix == ".json":
            _write_json(target / _VARIANT.sub("", path.name), _without_variant(read_json(path)))
        elif path in weights:
            _copy(path, target / _VARIANT.sub("", path.name))


def _weights(folder: Path, variant: str | None) -> list[Path]:
    """The weights and their index that a pipeline opened with this variant has read."""
    every = sorted(path for path in folder.iterdir() if path.is_file() and ".safetensors" in path.name)
    by_variant = {path: (found.group(1) if (found := _VARIANT.search(path.name)) else None) for path in every}
    wanted = [path for path in every if variant is not None and by_variant[path] == variant]
    return wanted or [path for path in every if by_variant[path] is None]


def _without_variant(index: Any) -> Any:
    return {**index, "weight_map": {name: _VARIANT.sub("", file) for name, file in index["weight_map"].items()}}


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 22)
        _to_disk(writing)


def _write_json(target: Path, value: Any) -> None:
    with target.open("wb") as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())
        _to_disk(file)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


# Weights


def _tensors(denoiser: PipelineDenoiser, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Each tensor of the transformer's files by name, made when it is asked for: trained, merged, or the base's own."""
    base = _kept_weights(denoiser)
    lora = denoiser.lora
    for name in denoiser.module.state_dict():
        if is_adapter_name(name):
            continue
        own = base_name(name)
        if name in trained:
            yield own, functools.partial(trained.__getitem__, name)
        elif own not in base:
            raise HalationError(f"{denoiser.files.path / 'transformer'} has no tensor {own}, and training gave none")
        elif lora is None:
            yield own, base[own]
        else:
            yield own, functools.partial(_merged, own, base[own], trained, lora.scale)


def _merged(name: str, base: Callable[[], Tensor], adapters: Mapping[str, Tensor], scale: float) -> Tensor:
    return merged(name, base(), adapters, scale)


def _kept_weights(denoiser: PipelineDenoiser) -> dict[str, Callable[[], Tensor]]:
    """What training leaves as it is: the base's own, and of a student of another shape its buffers."""
    student = denoiser.student
    if student is None or student.is_copy:
        return _base_weights(denoiser.files, "transformer" if student is None else student.base)
    buffers = {name: buffer.detach() for name, buffer in denoiser.module.named_buffers()}
    return {name: functools.partial(buffers.__getitem__, name) for name in buffers}


def _base_weights(files: PipelineFiles, component: str) -> dict[str, Callable[[], Tensor]]:
    found: dict[str, Callable[[], Tensor]] = {}
    for file in _weights(files.path / component, files.variant):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as reader:
                found |= {name: functools.partial(_one_tensor, file, name) for name in reader.keys()}  # noqa: SIM118
    return found


def _one_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as reader:
        tensor: Tensor = reader.get_tensor(name)
    return tensor


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Callable[[], Tensor]]]) -> None:
    """One file, or shards and their index as diffusers names them; in memory there is one shard at a time."""
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
        os.replace(folder / _shard(0), folder / f"{_WEIGHTS}.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"{_WEIGHTS}-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / _shard(number), folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / f"{_WEIGHTS}.safetensors.index.json", index)


def _shard(number: int) -> str:
    return f"shard_{number}"


def _write_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    names = list(tensors)
    _save(folder / _shard(number), tensors, {"format": "pt"})
    tensors.clear()
    return names


def _write_adapters(path: Path, adapters: Mapping[str, Tensor], lora: Lora) -> None:
    tensors, settings = published(adapters, lora)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _save(path, whole, {"format": "pt", "lora_adapter_metadata": json.dumps(settings, sort_keys=True)})


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file(tensors, path, metadata=metadata)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
