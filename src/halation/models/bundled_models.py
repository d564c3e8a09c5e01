"""The models that come with the package, by their names: export folders like any other, found without importing torch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from halation.runs.run_folder import COMMIT_FILE

FOLDER = Path(__file__).with_name("bundled")


def bundled_names() -> tuple[str, ...]:
    """The names that may stand where a model is asked for; a folder put beside the others is one more."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/config.json")))


def bundled_folder(name: str | Path) -> Path | None:
    """The folder of the model of this name, if it comes with the package."""
    return FOLDER / str(name) if str(name) in bundled_names() else None


def bundled_name(folder: Path) -> str | None:
    """The name of the model that lies in this folder, if it comes with the package."""
    folder = folder.expanduser().resolve()
    return folder.name if folder.parent == FOLDER.resolve() and folder.name in bundled_names() else None


def resolve_model_path(model: str | Path) -> Path:
    """What a person means by a path or a name: the model in the folder of that name, or else the one that comes with the package.

    A folder of that name that holds no model hides none: it is where a run puts its images, called after what draws them. Text with
    a separator in it is a path; where it would be forgotten (a Path has no leading "./"), the path is made whole.
    """
    path = Path(model).expanduser()
    bundled = bundled_folder(path)
    if bundled is None:
        return path
    if str(model) != str(path):
        return path.absolute()
    return path if _has_model(path) else bundled


def _has_model(folder: Path) -> bool:
    """A pipeline, a checkpoint, a run that has one, or an export; told by names alone, because nothing heavy is imported for it."""
    if any((folder / name).exists() for name in ("model_index.json", COMMIT_FILE)) or any(
        folder.glob(f"checkpoints/*/{COMMIT_FILE}")
    ):
        return True
    return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def portable_name(folder: Path) -> str:
    """How a record names a model: one of the package by its name, which holds on every machine; others by their path."""
    return bundled_name(folder) or str(folder)


def suggest_model(model: str | Path, otherwise: str) -> str:
    """What to do about a model that is not there: take the one of the package whose name is almost that, or `otherwise`."""
    plain = {_normalize_name(name): name for name in bundled_names()}
    near = difflib.get_close_matches(_normalize_name(str(model)), plain, n=1, cutoff=0.8)
    return f"did you mean {plain[near[0]]}, which comes with the package?" if near else otherwise


def _normalize_name(name: str) -> str:
    """Without what people leave out or mistake for something else when they type a name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
