"""Finds and checks the folder of a DINOv2 or CLIP model; reads CLIP's preprocessing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from PIL import Image

from halation.errors import InputError
from halation.evaluation.extractors.resize import ShortestEdgeCrop, describe_transform
from halation.evaluation.extractors.weights import is_offline
from halation.input_files import file_sha256, limit
from halation.models.hub_download import NETWORK_ERROR, hub_error
from halation.models.pipelines.folder_safety_check import PICKLE_SUFFIXES, check_model_sizes, read_json

_DOWNLOAD_PATTERNS = ("*.json", "*.txt", "*.safetensors")
TOKENIZER_FILES = (
    *("added_tokens.json", "merges.txt", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json"),
)
_MAX_SIDE = 4096
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A local model folder with safetensors weights."""

    path: Path
    name_or_path: str
    """The folder or Hub name as given."""
    config: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def weights_sha256(self) -> str:
        """Return the hash of all weight files, in the order of their names."""
        return file_sha256(*_weight_files(self.path))

    def model_sha256(self) -> str:
        """Return the hash of config and tokenizer files, by name and content."""
        digest = hashlib.sha256()
        for name in ("config.json", *(TOKENIZER_FILES if self.model_type == "clip" else ())):
            if (self.path / name).is_file():
                digest.update(f"{name} {file_sha256(self.path / name)}\n".encode())
        return digest.hexdigest()


def find_model_folder(name_or_path: str, flag: str = "--weights") -> ModelFolder:
    """Return the local folder of that name, or download the model to the Hub cache.

    `flag` is the flag that sets the model, for messages.
    """
    path = Path(name_or_path) if Path(name_or_path).is_dir() else _download_from_hub(name_or_path, flag)
    if not (path / "config.json").is_file():
        raise InputError(
            f"{path} has no config.json", "the complete folder of a DINOv2 or CLIP model", "copy the model again"
        )
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{path / 'config.json'} is not a JSON object", "a model config", "copy the model again")
    if not _weight_files(path):
        pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in PICKLE_SUFFIXES]
        found = (
            f"weights only as {pickles[0]}, a pickle, which can run any code when it is read"
            if pickles
            else "no weights"
        )
        raise InputError(
            f"{path} has {found}",
            "safetensors files beside config.json",
            "use a copy with safetensors, or convert it if you trust the file: "
            "AutoModel.from_pretrained(...).save_pretrained(...)",
        )
    check_model_sizes(path)
    return ModelFolder(path=path, name_or_path=name_or_path, config=config)


def _weight_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix == ".safetensors")


def _download_from_hub(name: str, flag: str) -> Path:
    why = "it is not in the Hub cache, and HF_HUB_OFFLINE is set"
    try:
        # Subfolders hold the same weights for other runtimes.
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(_DOWNLOAD_PATTERNS), ignore_patterns=["*/*"], local_files_only=is_offline()
        )
        return Path(folder)
    except HFValidationError as error:
        raise InputError(
            f"{name} is neither a folder nor a name on the Hub",
            "a local folder, or owner/name on the Hugging Face Hub",
            f"check {flag}",
        ) from error
    except RepositoryNotFoundError as error:  # gated models too
        raise hub_error(error, name, flag) from error
    except (HfHubHTTPError, NETWORK_ERROR) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
    except (LocalEntryNotFoundError, OSError) as error:
        if not is_offline():
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise InputError(
        f"the model {name!r} is not a folder and could not be downloaded from the Hub: {why}",
        "a local folder, or the name of a model that can be downloaded from the Hugging Face Hub",
        f"on a machine with network access, run `hf download {name} --local-dir FOLDER`, "
        f"copy the folder here and pass {flag} FOLDER",
    ) from None


@dataclass(frozen=True, kw_only=True)
class ClipPreprocessing:
    """Image preprocessing of CLIP: resize and crop, then (bytes * rescale - mean) / std."""

    transform: ShortestEdgeCrop
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def description(self) -> dict[str, Any]:
        """JSON that identifies the preprocessing: it differs if the model's input may differ."""
        shown = {"rescale": self.rescale, "mean": list(self.mean), "std": list(self.std)}
        return {**describe_transform(self.transform), **shown}


def read_clip_preprocessing(folder: ModelFolder) -> ClipPreprocessing:
    """Read CLIP's preprocessing from processor_config.json or preprocessor_config.json."""
    file, values = _read_processor_config(folder.path)
    try:
        transform = _parse_transform(values)
        do_normalize = values.get("do_normalize", True)
        return ClipPreprocessing(
            transform=transform,
            rescale=float(values.get("rescale_factor", 1 / 255)) if values.get("do_rescale", True) else 1.0,
            mean=_three_floats(values.get("image_mean") or _CLIP_MEAN) if do_normalize else (0.0,) * 3,
            std=_three_floats(values.get("image_std") or _CLIP_STD) if do_normalize else (1.0,) * 3,
        )
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise InputError(
            f"{file} has unsupported image preprocessing: {type(error).__name__}: {error}",
            "CLIP's preprocessing: resize to a shortest edge or to a height and width, center crop, "
            "mean and standard deviation",
            "copy the model again, or use another model",
        ) from error


def _read_processor_config(path: Path) -> tuple[Path, dict[str, Any]]:
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", "")):
        file = path / name
        values = read_json(file) if file.is_file() else None
        values = values.get(key) if key and isinstance(values, dict) else values
        if isinstance(values, dict):
            return file, values
    raise InputError(
        f"{path} has no preprocessor_config.json",
        "the file with the model's image preprocessing",
        "download the complete model",
    )


def _parse_transform(values: Mapping[str, Any]) -> ShortestEdgeCrop:
    size = values.get("size", 224)
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    crop = values.get("crop_size", 224)
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else dict(crop)
    do_center_crop = values.get("do_center_crop", True)
    exact = None if "shortest_edge" in size else (int(size["height"]), int(size["width"]))
    if not values.get("do_resize", True) or (exact is None and not do_center_crop) or size.get("longest_edge"):
        raise ValueError("images would keep different shapes")
    sides = [value for box in (size, crop) for value in box.values() if value is not None]
    if not all(1 <= int(side) <= limit(_MAX_SIDE) for side in sides):
        raise ValueError(f"a side that is not between 1 and {limit(_MAX_SIDE)}")
    return ShortestEdgeCrop(
        shortest_edge=int(size["shortest_edge"]) if exact is None else None,
        exact=exact,
        crop=(int(crop["height"]), int(crop["width"])) if do_center_crop else None,
        resample=int(Image.Resampling(values.get("resample", 3))),
    )


def _three_floats(values: Any) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if len(numbers) != 3:
        raise ValueError(f"{len(numbers)} numbers for three channels")
    return numbers
