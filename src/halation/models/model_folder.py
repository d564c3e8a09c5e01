"""Inspects model folders without loading them: bundled models, hashes, saved settings.

This module does not import torch.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation import input_files
from halation.errors import InputError
from halation.runs.run_folder import COMMIT_FILE

FOLDER = Path(__file__).with_name("bundled")
EXPORT_FILE = "halation.json"
"""File in an exported pipeline with the step and the sampling settings of its run. No model reads it."""
HUB_FILE = ".hub.json"
"""File in the folder of a model of the Hub with its name, commit and files."""
HUB_FACT = "hub model"
"""Key of a model's name and commit on the Hub, as owner/name@commit, among the fixed settings of a run."""
SAMPLING_RANGES = {
    "height": (1, 16_384), "width": (1, 16_384), "steps": (1, 10_000), "seed": (0, 2**63 - 1),
    "sheet_size": (1, 65_536), "threads": (0, 4096), "guidance_scale": (0.0, 1e6), "time_shift": (0.0, 1e6),
}  # fmt: skip


# -- bundled models


def bundled_names() -> tuple[str, ...]:
    """Return the names that are accepted as a model path: the folders in `bundled/`."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/config.json")))


def bundled_folder(name: str | Path) -> Path | None:
    """Return the folder of the bundled model of this name, or None."""
    return FOLDER / str(name) if str(name) in bundled_names() else None


def bundled_name(folder: Path) -> str | None:
    """Return the name of the bundled model in this folder, or None."""
    folder = folder.expanduser().resolve()
    return folder.name if folder.parent == FOLDER.resolve() and folder.name in bundled_names() else None


def resolve_model_path(model: str | Path) -> Path:
    """Return the folder of a path or a name: a local model first, then a bundled one.

    A local folder that has the name of a bundled model but contains no model is ignored: it may be an output folder
    named after the model. Text with a separator is always a path; it is made absolute if `Path` would drop the
    separator (a leading "./").
    """
    path = Path(model).expanduser()
    bundled = bundled_folder(path)
    if bundled is None:
        return path
    if str(model) != str(path):
        return path.absolute()
    has_model = (  # a pipeline, a checkpoint, a run that has one, or an export
        any((path / name).exists() for name in ("model_index.json", COMMIT_FILE))
        or any(path.glob(f"checkpoints/*/{COMMIT_FILE}"))
        or ((path / "config.json").exists() and any(path.glob("*.safetensors")))
    )
    return path if has_model else bundled


def portable_name(folder: Path) -> str:
    """Return the name of a bundled model, which is equal on every machine, else the path."""
    return bundled_name(folder) or str(folder)


def suggest_model(model: str | Path, otherwise: str) -> str:
    """Suggest the bundled model with a similar name for a missing model, or `otherwise`."""
    plain = {_normalize_name(name): name for name in bundled_names()}
    near = difflib.get_close_matches(_normalize_name(str(model)), plain, n=1, cutoff=0.8)
    return f"did you mean {plain[near[0]]}, which comes with the package?" if near else otherwise


def _normalize_name(name: str) -> str:
    """Lower-case a name and drop its punctuation, which is often mistyped."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


# -- models of the Hub


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """How to download a model of the Hub."""

    revision: str | None = None
    variant: str | None = None
    output_dir: Path | None = None
    """The run folder; a resumed run uses the commit that it was started with."""
    progress: str = "auto"

    @classmethod
    def of(cls, config: Any) -> HubOptions:
        """Return the options among the settings of a command."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__ if hasattr(config, name)})


def read_hub_fact(folder: str | Path) -> dict[str, str]:
    """Return the name and the commit of a model of the Hub for the record of a run, or {}."""
    file = Path(folder) / HUB_FILE
    if not file.is_file():
        return {}
    facts = input_files.read_json(file)
    return {HUB_FACT: f"{facts['name']}@{facts['commit']}"}


# -- settings and hashes


def check_sampling_settings(source: str, sampling: Mapping[str, Any]) -> None:
    """Reject saved sampling settings of an export or a checkpoint that cannot be used."""
    input_files.check_numbers(source, sampling, SAMPLING_RANGES)
    kinds = {"sampler": str, "dtype": str, "prompts": list, "distilled": dict | None}
    for name, kind in kinds.items():
        if name in sampling and not isinstance(sampling[name], kind):
            raise InputError(
                f"{source}: {name} is a {type(sampling[name]).__name__}",
                "the settings that Halation wrote with the weights",
                "export the model again, or give another one",
            )
    distilled = sampling.get("distilled") or {}
    if distilled.get("steps"):
        input_files.check_numbers(f"{source}: distilled", distilled, {"steps": SAMPLING_RANGES["steps"]})


def read_export_size(folder: Path) -> tuple[int, int] | None:
    """Return height and width of an export of a DiT, or None for other folders."""
    try:
        sampling = input_files.read_json(folder / "config.json")["sampling"]
        return int(sampling["height"]), int(sampling["width"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def default_patch_size(height: int, downsampling_factor: int) -> int:
    """Return the patch size of a new DiT.

    It is 2 in latents as in the DiT paper; in pixels it keeps the sequence near 256 tokens.
    """
    if downsampling_factor > 1:
        return 2
    return 4 if height <= 64 else 8


def find_fine_tuned_run(folder: Path) -> Path | None:
    """Return the fine-tuning run that a folder is, or is part of, or None."""
    folder = folder.resolve()
    for run in (folder, *folder.parents[:2]):
        try:
            record = input_files.read_json(run / "config.json")
            if record["job"] in ("train", "distill") and record["settings"]["model_path"]:
                return run
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def fine_tuned_error(flag: str, folder: Path, run: Path) -> InputError:
    """Error for a fine-tuning run, or a folder in it, that names the export to use instead."""
    export = run / "export"
    later = "" if (export / "model_index.json").exists() else ", which is written when training ends"
    return InputError(
        f"--{flag} {folder} belongs to a run that fine-tuned a pipeline",
        "a DiT of Halation" if flag == "model" else "a whole pipeline, such as its export",
        f"give --{'model_path' if flag == 'model' else flag} {export}{later}",
    )


def distillation_settings(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps and the objective of a few-step student, else an empty dict."""
    distilled = sampling.get("distilled") or {}
    if not distilled.get("steps"):
        return {}
    return {"steps": int(distilled["steps"]), "distillation_objective": str(distilled.get("objective", ""))}


def fingerprint(folder: Path) -> str:
    """Hash every file of a model: name, size, and content as `_update_with_content` reads it.

    Files that no model reads (images, READMEs, hidden files, EXPORT_FILE) are left out.
    """
    endings = {".json", ".safetensors", ".txt", ".model", ".jinja", ".bin"}
    digest, found = hashlib.sha256(), set()
    try:
        for root, folders, names in input_files.walk_folder(folder, max_entries=input_files.MAX_MODEL_ENTRIES):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found |= {Path(root) / name for name in names if not name.startswith(".") and Path(name).suffix in endings}
        for path in sorted(found - {folder / EXPORT_FILE}, key=lambda path: path.relative_to(folder).as_posix()):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
            content = hashlib.sha256()
            _update_with_content(content, path, size, num_windows=16, window_bytes=1 << 16, max_whole_bytes=1 << 20)
            digest.update(content.digest())
    except input_files.RefusedFileError as error:
        raise error.as_input_error() from error
    return digest.hexdigest()


def components_fingerprint(folder: Path, names: Collection[str]) -> str:
    """Hash the files of some components of a pipeline folder, with more and smaller windows.

    Runs and caches store this value, so it stays separate from `fingerprint`.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        for file in sorted(path for path in (folder / name).iterdir() if path.is_file()):
            if file.suffix in (".safetensors", ".json", ".txt", ".model", ".tiktoken"):
                size = file.stat().st_size
                digest.update(f"{name}/{file.name} {size}\n".encode())
                _update_with_content(digest, file, size, num_windows=64, window_bytes=1 << 14, max_whole_bytes=1 << 22)
    return digest.hexdigest()


def _update_with_content(
    digest: hashlib._Hash, path: Path, size: int, *, num_windows: int, window_bytes: int, max_whole_bytes: int
) -> None:
    """Hash a small file whole, and evenly spaced windows of a large one.

    The first window covers the header. Different weights differ nearly everywhere, so windows are enough to detect
    them, and reading a 30 GB model at every resume would take minutes. A single damaged byte may be missed.
    """
    with input_files.open_regular_file(path) as file:
        if size <= max_whole_bytes:
            digest.update(file.read(max_whole_bytes))
            return
        for number in range(num_windows):
            file.seek((size - window_bytes) * number // (num_windows - 1))
            digest.update(file.read(window_bytes))
