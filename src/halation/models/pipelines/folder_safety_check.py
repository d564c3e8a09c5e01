"""Checks that a pipeline folder is safe to open, by its JSON and safetensors headers.

It knows names, files and headers; it never unpickles, imports or runs anything that lies in the folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation import input_files
from halation.errors import InputError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
TRUSTED_LIBRARIES = ("diffusers", "transformers")
_SIZED_CONFIGS = ("config.json", "scheduler_config.json")
_LAYER_PATTERN = re.compile(r"(layers|blocks|depth|layers_per_(\w+_)?block)$")
_REPEATED_KEYS = ("layers_per_block", "transformer_layers_per_block", "block_out_channels")
"""A model of blocks has the product of them: layers in a layer, layers, and the length of the last."""
_GRID_KEYS = ("sample_size", "pos_embed_max_size")
_MAX_GRID = 1024
"""Of the positions in an image on a side; they are computed when the model is built."""
_STORED_GRID_CLASS = "AuraFlowTransformer2DModel"
"""Its pos_embed_max_size counts all positions, which are weights."""
_UNBOUNDED_ENDINGS = ("theta", "seed", "pixels")
_MAX_SIZE = 2**22
_MAX_BYTES = {".json": input_files.MAX_JSON_BYTES} | dict.fromkeys(
    (".txt", ".model", ".tiktoken", ".jinja"), input_files.MAX_VOCABULARY_BYTES
)
_MAX_TIMESTEPS = 10**6
_MAX_TOKENS = 1e40
"""transformers says "no limit" with a number of thirty digits."""
_NUM_SHOWN = 5
_NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIANT_PATTERN = re.compile(r"\.(fp16|bf16|fp32)(-\d{5}-of-\d{5})?\.safetensors$")


@dataclass(frozen=True, kw_only=True)
class PipelineFiles:
    """What `model_index.json` asks for, checked: pipeline class, components, and the weights' only variant."""

    path: Path
    class_name: str
    components: Mapping[str, tuple[str, str]]
    variant: str | None
    omitted_components: tuple[str, ...] = ()
    """Components that it names and leaves out on purpose, such as one of several text encoders."""


def inspect_pipeline_folder(path: Path, pipeline_modules: frozenset[str]) -> PipelineFiles:
    """Read and check a pipeline folder. `pipeline_modules`: diffusers' own packages, where some components live."""
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
        if value == [None, None]:
            empty.append(name)
        else:
            components[name] = _parse_component(path, name, value, pipeline_modules)
    if not components:
        raise InputError(
            f"{path}: model_index.json names no components", "a whole pipeline folder", "copy the model again"
        )
    variants = {_check_component(path, name, class_name) for name, (_, class_name) in components.items()}
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


def _parse_component(path: Path, name: str, value: list[Any], pipeline_modules: frozenset[str]) -> tuple[str, str]:
    """Library and class name of a component, refused where its code would come with the folder."""
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
    library, component = value[:2]
    known = library in TRUSTED_LIBRARIES or library in pipeline_modules
    if not known or not _NAME_PATTERN.fullmatch(component) or (path / name / f"{library}.py").exists():
        raise InputError(
            f"{path}: the component {name!r} is {library}.{component}, "
            "which is code that does not come with diffusers or transformers",
            "components of diffusers and transformers only",
            "use a model that needs no remote code; Halation never runs code from a model folder",
        )
    return library, component


def _check_component(path: Path, name: str, class_name: str) -> str | None:
    """Refuse a component's folder where files are missing, damaged or unsafe; returns its weights' only variant."""
    folder = path / name
    if not folder.is_dir():
        raise InputError(
            f"{path} has no folder {name!r}, which model_index.json asks for",
            "a folder for each component",
            "download the whole model",
        )
    files = _list_regular_files(folder)
    for file in files:
        if file.suffix == ".json" and not file.name.startswith(("vocab", "added_tokens", "tokenizer.")):
            _check_config(file)
    weights = [file for file in files if file.suffix == ".safetensors"]
    pickles = [file for file in files if file.suffix in PICKLE_SUFFIXES]
    if pickles and not weights:
        raise _pickles_error(folder, [file.name for file in pickles])
    _check_sizes(folder, weights, class_name)
    matches = [_VARIANT_PATTERN.search(file.name) for file in weights]
    return matches[0].group(1) if matches and matches[0] and all(matches) else None


def _list_regular_files(folder: Path) -> list[Path]:
    """The files of a folder; refused where one is a pipe or a device, or too large for what a library reads whole."""
    found = []
    for file in sorted(folder.iterdir()):
        try:
            input_files.open_regular_file(file, max_bytes=_MAX_BYTES.get(file.suffix)).close()
        except input_files.RefusedFileError as error:
            raise error.as_input_error() from error
        except (FileNotFoundError, IsADirectoryError):  # a link to nothing, as an unfinished download leaves it
            continue
        except OSError as error:
            raise InputError(
                f"{file} cannot be read: {error.strerror}", "files that can be read", "check it"
            ) from error
        found.append(file)
    return found


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
    for name, value in _read_model_index(path).items():
        if isinstance(value, list) and _NAME_PATTERN.fullmatch(name) and (path / name).is_dir():
            check_model_sizes(path / name, str(value[-1]) if value else "")


def check_model_sizes(folder: Path, class_name: str = "") -> None:
    """Refuse the folder of a component whose configs ask for absurd sizes, or that holds too many files."""
    weights = [file for file in _list_regular_files(folder) if file.suffix == ".safetensors"]
    _check_sizes(folder, weights, class_name)


def _check_sizes(folder: Path, weights: Sequence[Path], class_name: str) -> None:
    """A model has a tensor for each layer at least, and numbers that one can build tensors of."""
    tensors = {name: entry for file in weights for name, entry in check_safetensors(file).items()}
    for name in _SIZED_CONFIGS:
        if (folder / name).is_file():
            config = read_json(folder / name)
            max_grid = _max_grid(config, tensors) if class_name == _STORED_GRID_CLASS else _MAX_GRID
            for key, value in _walk_integers(config):
                high = _max_value(
                    key, len(tensors), max_grid, has_patches=isinstance(config, dict) and "patch_size" in config
                )
                low = -1 if high < _MAX_SIZE else -high  # counts; other numbers may mark something, as -100 does
                input_files.check_numbers(str(folder / name), {key: value}, {key: (low, high)})
            if tensors:
                _check_num_layers(folder / name, config, len(tensors))
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else None
    if isinstance(config, dict) and config.get("model_max_length") is not None:
        input_files.check_numbers(str(file), config, {"model_max_length": (1.0, _MAX_TOKENS)})


def _max_grid(config: Any, tensors: Mapping[str, Any]) -> int:
    """Positions that are weights: as many as are stored, of the width that the config says."""
    try:
        width = config["num_attention_heads"] * config["attention_head_dim"]
        start, end = tensors["pos_embed.pos_embed"]["data_offsets"]
        _, num_positions, stored_width = tensors["pos_embed.pos_embed"]["shape"]
        is_stored = width == stored_width and 0 < num_positions * width <= end - start
        return max(_MAX_GRID, num_positions) if is_stored else _MAX_GRID
    except (KeyError, TypeError, ValueError):
        return _MAX_GRID


def _max_value(key: str, num_tensors: int, max_grid: int, *, has_patches: bool) -> int:
    if key.endswith(_UNBOUNDED_ENDINGS):
        return sys.maxsize
    if key == "num_train_timesteps":
        return _MAX_TIMESTEPS
    if key in _GRID_KEYS and has_patches:
        return max_grid
    return num_tensors if num_tensors and _LAYER_PATTERN.search(key) else _MAX_SIZE


def _check_num_layers(file: Path, config: Any, num_tensors: int) -> None:
    """Refuse long lists of blocks, and layers in layers in blocks: together they may be millions."""
    num_layers = 1
    for key, value in _walk_entries(config):
        if isinstance(value, list) and len(value) > input_files.limit(max(num_tensors, _MAX_GRID)):
            raise input_files.over_limit_error(
                f"{file}: {key} has {len(value)} entries", f"{num_tensors}, as its tensors"
            )
    for key in _REPEATED_KEYS:
        value = config.get(key) if isinstance(config, dict) else None
        numbers = [number for _, number in _walk_integers(value)]
        num_layers *= max(1, len(numbers) if key == "block_out_channels" else max(numbers, default=1))
    input_files.check_numbers(str(file), {"number of layers": num_layers}, {"number of layers": (0, num_tensors)})


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


def _walk_integers(value: Any) -> Iterator[tuple[str, int]]:
    """All integers with the key that they, or the lists around them, stand under."""
    stack = [("", value)]
    while stack:
        key, current = stack.pop()
        if isinstance(current, dict):
            stack.extend((str(name), inner) for name, inner in current.items())
        elif isinstance(current, list):
            stack.extend((key, inner) for inner in current)
        elif isinstance(current, int) and not isinstance(current, bool):
            yield key, current


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
    """Refuse a file whose length is not what its header says: a copy that was cut off. Returns the header."""
    try:
        return input_files.read_safetensors_header(file)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} has {reason}", "a whole safetensors file", "copy the model again") from error
