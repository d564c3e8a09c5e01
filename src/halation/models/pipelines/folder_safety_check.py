"""Checks that a pipeline folder is safe to open, from JSON and safetensors headers.

It reads file names, JSON and headers only; it never unpickles, imports or runs anything from the folder.
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
"""The number of layers of a block model is the product of the first two and the length of the last."""
_GRID_KEYS = ("sample_size", "pos_embed_max_size")
_MAX_GRID = 1024
"""Maximum of positions per side of an image; they are computed when the model is built."""
_STORED_GRID_CLASS = "AuraFlowTransformer2DModel"
"""The pos_embed_max_size of this class counts all positions, which are weights."""
_UNBOUNDED_ENDINGS = ("theta", "seed", "pixels")
_MAX_SIZE = 2**22
_MAX_BYTES = {".json": input_files.MAX_JSON_BYTES} | dict.fromkeys(
    (".txt", ".model", ".tiktoken", ".jinja"), input_files.MAX_VOCABULARY_BYTES
)
_MAX_TIMESTEPS = 10**6
_MAX_TOKENS = 1e40
"""transformers uses a number of thirty digits for "no limit"."""
_NUM_SHOWN = 5
_NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIANT_PATTERN = re.compile(
    r"^(?:diffusion_pytorch_model|model)(?:-\d{5}-of-\d{5})?\.([\w-]+?)(-\d{5}-of-\d{5})?\.safetensors$"
)


@dataclass(frozen=True, kw_only=True)
class PipelineFiles:
    """The checked content of `model_index.json`: pipeline class, components, weights variant."""

    path: Path
    class_name: str
    components: Mapping[str, tuple[str, str]]
    variant: str | None
    omitted_components: tuple[str, ...] = ()
    """Components that the index lists but leaves out on purpose, such as one of several text encoders."""


def inspect_pipeline_folder(path: Path, pipeline_modules: frozenset[str]) -> PipelineFiles:
    """Read and check a pipeline folder.

    `pipeline_modules` are the packages of diffusers that contain some of the components.
    """
    index = _read_model_index(path)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or not _NAME_PATTERN.fullmatch(class_name):
        raise InputError(
            f"{path}: model_index.json requires the pipeline {class_name!r}, whose code comes with the folder",
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
            f"{path}: model_index.json lists no components", "a complete pipeline folder", "copy the model again"
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
            "download the whole model, and give the folder that contains model_index.json",
        )
    value = read_json(file)
    if not isinstance(value, dict):
        raise InputError(f"{file} is not a JSON object", "a pipeline's index", "copy the model again")
    return value


def read_json(file: Path) -> Any:
    try:
        return input_files.read_json(file)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} cannot be read as JSON: {reason}", "a JSON file", "copy the model again") from error


def _parse_component(path: Path, name: str, value: list[Any], pipeline_modules: frozenset[str]) -> tuple[str, str]:
    """Return library and class name of a component; reject code that comes with the folder."""
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
            "whose code does not come from diffusers or transformers",
            "components of diffusers and transformers only",
            "use a model that needs no remote code; Halation never runs code from a model folder",
        )
    return library, component


def _check_component(path: Path, name: str, class_name: str) -> str | None:
    """Reject a component with missing, damaged or unsafe files; return its weights variant."""
    folder = path / name
    if not folder.is_dir():
        raise InputError(
            f"{path} has no folder {name!r}, which model_index.json requires",
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
    """List the files of a folder; reject pipes, devices and files too large to read whole."""
    found = []
    for file in sorted(folder.iterdir()):
        try:
            input_files.open_regular_file(file, max_bytes=_MAX_BYTES.get(file.suffix)).close()
        except input_files.RefusedFileError as error:
            raise error.as_input_error() from error
        except (FileNotFoundError, IsADirectoryError):  # for example a broken link of an unfinished download
            continue
        except OSError as error:
            raise InputError(
                f"{file} cannot be read: {error.strerror}", "readable files", "check its permissions and the disk"
            ) from error
        found.append(file)
    return found


def check_not_only_pickles(folder: Path) -> None:
    """Reject a folder whose only weights are pickles, judged by file names."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles and not any(folder.rglob("*.safetensors")):
        raise _pickles_error(folder, pickles)


def _pickles_error(folder: Path, names: Sequence[str]) -> InputError:
    shown = ", ".join(names[:_NUM_SHOWN]) + (f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else "")
    return InputError(
        f"{folder} has weights only as {shown} (loading a pickle can run any code)",
        "safetensors",
        "if you trust the file, convert it to safetensors: "
        "DiffusionPipeline.from_pretrained(folder).save_pretrained(new, safe_serialization=True)",
    )


def check_component_sizes(path: Path) -> None:
    """Reject a pipeline whose configs have absurd sizes, before a process loads it."""
    for name, value in _read_model_index(path).items():
        if isinstance(value, list) and _NAME_PATTERN.fullmatch(name) and (path / name).is_dir():
            check_model_sizes(path / name, str(value[-1]) if value else "")


def check_model_sizes(folder: Path, class_name: str = "") -> None:
    """Reject a component whose configs have absurd sizes, or whose files are not regular."""
    weights = [file for file in _list_regular_files(folder) if file.suffix == ".safetensors"]
    _check_sizes(folder, weights, class_name)


def _check_sizes(folder: Path, weights: Sequence[Path], class_name: str) -> None:
    """Check the sizes in the configs; a model has at least one tensor per layer."""
    tensors = {name: entry for file in weights for name, entry in check_safetensors(file).items()}
    for name in _SIZED_CONFIGS:
        if (folder / name).is_file():
            config = read_json(folder / name)
            max_grid = _max_grid(config, tensors) if class_name == _STORED_GRID_CLASS else _MAX_GRID
            for key, value in _walk_integers(config):
                high = _max_value(
                    key, len(tensors), max_grid, has_patches=isinstance(config, dict) and "patch_size" in config
                )
                low = -1 if high < _MAX_SIZE else -high  # counts; other numbers may be markers, such as -100
                input_files.check_numbers(str(folder / name), {key: value}, {key: (low, high)})
            if tensors:
                _check_num_layers(folder / name, config, len(tensors))
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else None
    if isinstance(config, dict) and config.get("model_max_length") is not None:
        input_files.check_numbers(str(file), config, {"model_max_length": (1.0, _MAX_TOKENS)})


def _max_grid(config: Any, tensors: Mapping[str, Any]) -> int:
    """Return the limit for positions that are weights: the stored number if widths match."""
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
    """Reject long lists of blocks, and nested layers that multiply to millions."""
    num_layers = 1
    for key, value in _walk_entries(config):
        if isinstance(value, list) and len(value) > input_files.limit(max(num_tensors, _MAX_GRID)):
            raise input_files.over_limit_error(
                f"{file}: {key} has {len(value)} entries", f"{num_tensors}, the number of its tensors"
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
                f"{file} requires code that comes with the model (auto_map)",
                "a component of diffusers or transformers",
                "use a model that needs no remote code; Halation never runs code from a model folder",
            )
        if key.endswith("attn_implementation") and isinstance(inner, str) and "/" in inner:
            raise InputError(
                f"{file} requires external attention code ({inner})",
                "an attention implementation of the libraries",
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
    """Yield all integers with their key; integers in a list have the key of the list."""
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
                f"{file} lists the shard {name!r}, which is not a safetensors file beside it",
                "safetensors files in the same folder",
                "download the whole model",
            )


def check_safetensors(file: Path) -> dict[str, Any]:
    """Return the header of a file; reject a truncated file, whose length does not match it."""
    try:
        return input_files.read_safetensors_header(file)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file} has {reason}", "a complete safetensors file", "copy the model again") from error
