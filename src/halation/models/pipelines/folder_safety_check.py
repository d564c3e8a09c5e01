"""Which pipeline folders are safe to open: decided by reading JSON and safetensors headers, before any library sees the folder.

It knows names, files and headers; it never unpickles, imports or runs anything that lies in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation import input_files
from halation.errors import InputError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
TRUSTED_LIBRARIES = ("diffusers", "transformers")
_LAYER_KEYS = ("num_layers", "num_single_layers", "num_hidden_layers", "num_decoder_layers", "depth", "n_layers")
_GRID_KEYS = ("sample_size", "pos_embed_max_size")
_MAX_GRID = 1024
"""Of the positions in an image on a side; they are computed when the model is built."""
_SIZE_ENDINGS = ("_size", "_dim", "_channels", "_heads", "_embeddings", "_positions")
_MAX_SIZE = 2**22
_NUM_SHOWN = 5
_NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIANT_PATTERN = re.compile(r"\.(fp16|bf16|fp32)(-\d{5}-of-\d{5})?\.safetensors$")


@dataclass(frozen=True, kw_only=True)
class PipelineFiles:
    """What `model_index.json` asks for, checked: a pipeline class, its components, and the weights' variant if they have only one."""

    path: Path
    class_name: str
    components: Mapping[str, tuple[str, str]]
    variant: str | None
    omitted_components: tuple[str, ...] = ()
    """Components that it names and leaves out on purpose, such as one of several text encoders."""


def inspect_pipeline_folder(path: Path, pipeline_modules: frozenset[str]) -> PipelineFiles:
    """Read and check a pipeline folder. `pipeline_modules` are diffusers' own pipeline packages, where some components live."""
    index = _read_model_index(path)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or not _NAME_PATTERN.fullmatch(class_name):
        raise InputError(
            f"{path}: model_index.json asks for the pipeline {class_name!r}, which is code that comes with the folder",
            "the name of a pipeline class of diffusers",
            "use a model that needs no remote code; Halation never runs code from a model folder",
        )
    components: dict[str, tuple[str, str]] = {}
    empty: list[str] = []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            continue
        library, component = _parse_component(path, name, value)
        if library is None or component is None:
            empty.append(name)
            continue
        _check_no_remote_code(path, name, library, component, pipeline_modules)
        components[name] = (library, component)
    if not components:
        raise InputError(
            f"{path}: model_index.json names no components", "a whole pipeline folder", "copy the model again"
        )
    variants = {_check_component(path, name) for name in components}
    variants.discard(None)
    if len(variants) > 1:
        raise InputError(
            f"{path}: weights in the variants {', '.join(sorted(map(str, variants)))}",
            "plain weights, or one variant for all components",
            "save the pipeline again with save_pretrained",
        )
    return PipelineFiles(
        path=path,
        class_name=class_name,
        components=components,
        variant=next(iter(variants)) if variants else None,
        omitted_components=tuple(empty),
    )


def _read_model_index(path: Path) -> dict[str, Any]:
    file = path / "model_index.json"
    if not file.is_file():
        found = "is not a folder" if not path.is_dir() else "has no model_index.json"
        raise InputError(
            f"{path} {found}",
            "a local folder in diffusers layout: model_index.json and a folder for each component",
            "download the whole model, and give the folder that holds model_index.json",
        )
    value = read_json(file)
    if not isinstance(value, dict):
        raise InputError(f"{file} holds no JSON object", "a pipeline's index", "copy the model again")
    return value


def read_json(file: Path) -> Any:
    try:
        return input_files.read_json(file)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} cannot be read as JSON: {reason}", "a JSON file", "copy the model again") from error


def _parse_component(path: Path, name: str, value: list[Any]) -> tuple[str | None, str | None]:
    if value == [None, None]:
        return None, None
    if (
        len(value) < 2
        or not all(isinstance(part, str) and part for part in value[:2])
        or not _NAME_PATTERN.fullmatch(name)
    ):
        raise InputError(
            f"{path}: model_index.json describes the component {name!r} as {value!r}",
            "[library, class name]",
            "copy the model again",
        )
    return value[0], value[1]


def _check_no_remote_code(
    path: Path, name: str, library: str, component: str, pipeline_modules: frozenset[str]
) -> None:
    known = library in TRUSTED_LIBRARIES or library in pipeline_modules
    if known and _NAME_PATTERN.fullmatch(component) and not (path / name / f"{library}.py").exists():
        return
    raise InputError(
        f"{path}: the component {name!r} is {library}.{component}, which is code that does not come with diffusers or transformers",
        "components of diffusers and transformers only",
        "use a model that needs no remote code; Halation never runs code from a model folder",
    )


def _check_component(path: Path, name: str) -> str | None:
    """Refuse what is missing, damaged or unsafe in one component's folder; the variant if its weights have only that."""
    folder = path / name
    if not folder.is_dir():
        raise InputError(
            f"{path} has no folder {name!r}, which model_index.json asks for",
            "a folder for each component",
            "download the whole model",
        )
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for file in files:
        if file.suffix == ".json" and not file.name.startswith(("vocab", "added_tokens", "tokenizer.")):
            _check_config(file)
    weights = [file for file in files if file.suffix == ".safetensors"]
    pickles = [file for file in files if file.suffix in PICKLE_SUFFIXES]
    if pickles and not weights:
        raise _pickles_error(folder, [file.name for file in pickles])
    _check_sizes(folder, weights)
    return _weights_variant(weights)


def check_not_only_pickles(folder: Path) -> None:
    """Refuse a folder whose weights are pickles alone, by the names of these files."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles and not any(folder.rglob("*.safetensors")):
        raise _pickles_error(folder, pickles)


def _pickles_error(folder: Path, names: Sequence[str]) -> InputError:
    shown = ", ".join(names[:_NUM_SHOWN]) + (f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else "")
    return InputError(
        f"{folder} has weights only as {shown} (a pickle can run any code when it is read)",
        "safetensors",
        "convert them to safetensors on a machine where you trust the file: "
        "DiffusionPipeline.from_pretrained(folder).save_pretrained(new, safe_serialization=True)",
    )


def check_component_sizes(path: Path) -> None:
    """Refuse a pipeline whose configs ask for absurd sizes, before a process is started that loads it."""
    for folder in sorted(folder for folder in path.iterdir() if folder.is_dir()):
        weights = [file for file in sorted(folder.iterdir()) if file.suffix == ".safetensors" and file.is_file()]
        if weights:
            _check_sizes(folder, weights)


def _check_sizes(folder: Path, weights: Sequence[Path]) -> None:
    """A model has a tensor for each layer at least, and numbers that one can build tensors of."""
    num_tensors = sum(len(check_safetensors(file)) for file in weights)
    file = folder / "config.json"
    config = read_json(file) if weights and file.exists() else {}
    for key, value in _walk_entries(config):
        if value is None or isinstance(value, bool):
            continue
        if key in _LAYER_KEYS and isinstance(value, int):
            input_files.check_numbers(str(file), {key: value}, {key: (0, num_tensors)})
        elif key in _GRID_KEYS and isinstance(value, int) and isinstance(config, dict) and "patch_size" in config:
            input_files.check_numbers(str(file), {key: value}, {key: (0, _MAX_GRID)})
        elif key.endswith(_SIZE_ENDINGS) and isinstance(value, int):
            input_files.check_numbers(str(file), {key: value}, {key: (-1, _MAX_SIZE)})


def _check_config(file: Path) -> None:
    value = read_json(file)
    for key, inner in _walk_entries(value):
        if key == "auto_map" and inner:
            raise InputError(
                f"{file} asks for code that comes with the model (auto_map)",
                "a component of diffusers or transformers",
                "use a model that needs no remote code; Halation never runs code from a model folder",
            )
        if key.endswith("attn_implementation") and isinstance(inner, str) and "/" in inner:
            raise InputError(
                f"{file} asks for attention code from elsewhere ({inner})",
                "an attention implementation that comes with the libraries",
                f"remove {key!r} from that file",
            )
    if file.name.endswith(".safetensors.index.json"):
        _check_shards(file, value)


def _walk_entries(value: Any) -> Iterator[tuple[str, Any]]:
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            yield from current.items()
            stack.extend(current.values())
        elif isinstance(current, list):
            stack.extend(current)


def _check_shards(file: Path, value: Any) -> None:
    names = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(names, dict):
        raise InputError(f"{file} lists no shards", "a safetensors index", "copy the model again")
    for name in sorted({str(shard) for shard in names.values()}):
        if "/" in name or "\\" in name or not name.endswith(".safetensors") or not (file.parent / name).is_file():
            raise InputError(
                f"{file} names the shard {name!r}, which is not a safetensors file beside it",
                "safetensors files in the same folder",
                "download the whole model",
            )


def check_safetensors(file: Path) -> dict[str, Any]:
    """Refuse a file that is shorter or longer than its header says: a copy or a download that was cut off. Returns the header."""
    try:
        return input_files.read_safetensors_header(file)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} has {reason}", "a whole safetensors file", "copy the model again") from error


def _weights_variant(weights: list[Path]) -> str | None:
    matches = [_VARIANT_PATTERN.search(file.name) for file in weights]
    if not weights or not all(matches):
        return None
    return next(match.group(1) for match in matches if match)
