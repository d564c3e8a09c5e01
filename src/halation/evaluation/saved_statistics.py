"""Saved statistics of images: Halation's .safetensors, and .npz of pytorch-fid and ADM."""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from halation import input_files
from halation.errors import InputError, format_names, shorten
from halation.evaluation.metrics.moments import Features, Gaussian, Moments, merge_moments
from halation.runs.run_folder import write_atomic

FORMAT = "halation statistics 1"
SUFFIXES = (".npz", ".safetensors")
_ZIP_ERRORS = (
    ValueError, TypeError, AttributeError, OSError, EOFError, KeyError, NotImplementedError, RuntimeError,
    MemoryError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_COMPARED_FACTS = ("extractor", "weights_sha256", "model_sha256", "preparation", "resize", "dtype")
"""Facts that must be equal for two sets of features to be comparable."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedStatistics:
    """The statistics in a file."""

    path: Path
    hash: str
    moments: Moments | Gaussian
    features: Features | None
    facts: dict[str, Any]
    """Provenance; empty if the file has none."""

    @property
    def num(self) -> int | None:
        """Number of images; None if the file does not have it."""
        return self.moments.num if isinstance(self.moments, Moments) else None


def read_statistics(paths: Sequence[Path], extractor_facts: Mapping[str, Any]) -> SavedStatistics:
    """Read one file, or merge several files of Halation; raise if the extractor differs."""
    found = [_read_file(path) for path in paths]
    for one in found:
        _check_compatible(one, extractor_facts)
    if len(found) == 1:
        return found[0]
    if len({one.hash for one in found}) < len(found):
        raise InputError(
            f"the same statistics twice in --reference {' '.join(map(str, paths))}",
            "statistics of different images, because they are merged",
            "remove one of them",
        )
    parts = [one.moments for one in found if isinstance(one.moments, Moments)]
    if len(parts) < len(found):
        path = next(one.path for one in found if isinstance(one.moments, Gaussian))
        raise InputError(
            f"{path} does not have its number of images",
            "files written by --save_statistics, if several are given",
            "give only that file",
        )
    features = [one.features for one in found if one.features is not None]
    return SavedStatistics(
        path=found[0].path,
        hash=hashlib.sha256("\n".join(one.hash for one in found).encode()).hexdigest(),
        moments=merge_moments(parts),
        features=np.concatenate(features) if len(features) == len(found) else None,
        facts=found[0].facts,
    )


def read_extractor_name(path: str) -> str:
    """Return the extractor of a statistics file; Inception for files of other tools."""
    if path.endswith(".safetensors") and Path(path).is_file():
        name = _read_file(Path(path)).facts.get("extractor")
        if name in ("dinov2", "clip", "streets"):  # other names are those of folders, whose paths are unknown
            return str(name)
    return "inception"


def write_statistics(path: Path, moments: Moments, features: Features | None, facts: Mapping[str, Any]) -> None:
    """Write moments, features if kept, and their provenance."""
    arrays = {"mean": moments.mean, "scatter": moments.scatter, "num": np.array([moments.num], np.int64)}
    if features is not None:
        arrays["features"] = features
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomic(path, save(contiguous, {"format": FORMAT, "facts": json.dumps(dict(facts))}))


def _read_file(path: Path) -> SavedStatistics:
    if not path.is_file():
        raise InputError(f"there is no file {path}", "saved statistics", "check --reference")
    try:
        digest = input_files.file_sha256(path)
    except OSError as error:
        raise _unreadable_error(path, error) from error
    return _read_npz(path, digest) if path.suffix == ".npz" else _read_safetensors(path, digest)


def _read_safetensors(path: Path, digest: str) -> SavedStatistics:
    try:
        input_files.read_safetensors_header(path)
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(
                    f"{path} does not hold statistics", "a file written by --save_statistics", "check --reference"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        moments = Moments(num=int(arrays["num"][0]), mean=arrays["mean"], scatter=arrays["scatter"])
        facts: dict[str, Any] = input_files.parse_json(metadata["facts"].encode())
        if not isinstance(facts, dict):
            raise ValueError("its facts are not a JSON object")
    except (SafetensorError, KeyError, IndexError, ValueError, TypeError, OverflowError, OSError) as error:
        raise _unreadable_error(path, error) from error
    _check_mean_covariance(path, moments.mean, moments.scatter)
    features = arrays.get("features")
    if features is not None and (features.ndim != 2 or features.shape[1] != len(moments.mean)):
        raise InputError(
            f"{path}: the features have shape {features.shape}",
            f"rows of {len(moments.mean)} numbers, like the mean",
            "create the statistics again",
        )
    return SavedStatistics(path=path, hash=digest, moments=moments, features=features, facts=facts)


def _read_npz(path: Path, digest: str) -> SavedStatistics:
    try:
        with input_files.open_regular_file(path) as stream:
            input_files.check_zip_directory(stream)
            file = zipfile.ZipFile(stream)
            names = [name.removesuffix(".npy") for name in file.namelist()]
            if not {"mu", "sigma"} <= set(names):
                raise InputError(
                    f"{path} holds {format_names(names) or 'nothing'}",
                    "the arrays mu and sigma, as pytorch-fid and ADM write them",
                    "create statistics of those images: "
                    "halation evaluate --generated FOLDER --save_statistics F.safetensors",
                )
            mean, covariance = _read_array(file, "mu"), _read_array(file, "sigma")
    except _ZIP_ERRORS as error:
        raise _unreadable_error(path, error) from error
    _check_mean_covariance(path, mean, covariance)
    mean, covariance = mean.astype(np.float64), covariance.astype(np.float64)
    return SavedStatistics(
        path=path, hash=digest, moments=Gaussian(mean=mean, covariance=covariance), features=None, facts={}
    )


def _read_array(file: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read one array; raise if its header exceeds the limit or the size of its member."""
    member = file.getinfo(name if name in file.namelist() else f"{name}.npy")
    with file.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    num_bytes = math.prod(shape) * dtype.itemsize
    max_bytes = input_files.limit(input_files.MAX_ARRAY_BYTES)
    if num_bytes > max_bytes or not 0 <= num_bytes <= member.file_size:
        raise ValueError(
            f"an array {name} of shape {shorten(shape)} in a member of {member.file_size} bytes; "
            f"the limit is {input_files.format_size(max_bytes)}, which --input_limits raises"
        )
    with file.open(member) as stream:
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _check_mean_covariance(path: Path, mean: np.ndarray, covariance: np.ndarray) -> None:
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise InputError(
            f"{path}: the mean has shape {mean.shape} and the covariance {covariance.shape}",
            "a vector and a square matrix of the same length",
            "check --reference",
        )
    if mean.dtype.kind != "f" or covariance.dtype.kind != "f":
        raise InputError(f"{path}: numbers of type {covariance.dtype}", "real numbers", "create the statistics again")
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise InputError(
            f"{path}: mean or covariance has NaN or infinity", "finite numbers", "create the statistics again"
        )
    if np.abs(covariance - covariance.T).max() > 1e-6 * np.abs(covariance).max():
        raise InputError(
            f"{path}: the covariance is not symmetric", "a symmetric matrix", "create the statistics again"
        )


def _unreadable_error(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} cannot be read: {error}", "saved statistics", "copy or create the file again")


def _check_compatible(statistics: SavedStatistics, expected: Mapping[str, Any]) -> None:
    num = len(statistics.moments.mean)
    if num != expected["num_features"]:
        raise InputError(
            f"{statistics.path} holds statistics of {num} features",
            f"{expected['num_features']} features of {expected['extractor']}",
            "check --reference and --extractor",
        )
    if statistics.facts:
        different = [name for name in _COMPARED_FACTS if statistics.facts.get(name) != expected.get(name)]
        if different:
            words = ", ".join(
                f"{name} {statistics.facts.get(name)} instead of {expected.get(name)}" for name in different
            )
            raise InputError(
                f"{statistics.path} was created with other settings: {words}",
                "statistics of the same extractor, weights, resize rule and precision",
                "use the settings it was created with, or create it again",
            )
