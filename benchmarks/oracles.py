"""Imports the tools that evaluation is compared with, from a separate folder.

transformers and diffusers import any torchvision on the path, and the one that these tools need, built for another
torch, would break them. Therefore the folder is on the path only while a tool is imported, after transformers has
checked for torchvision.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

PLACES = (Path(sys.prefix) / "oracles", Path(__file__).resolve().parents[1] / ".venv" / "oracles")
"""Folders in which `make test` installs them; the second is for an interpreter outside this repository."""


def place() -> Path | None:
    """Return the folder of the tools, or None if they are not installed."""
    return next((folder for folder in PLACES if folder.is_dir()), None)


def imported(name: str) -> ModuleType | None:
    """Import a module of a tool; None if they are not installed."""
    folder = place()
    if folder is None:
        return None
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # the result is cached
    with _visible(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of a tool during its import must not fail tests
        _declare_operators()
        return importlib.import_module(name)


@contextlib.contextmanager
def _visible(folder: Path) -> Iterator[None]:
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@functools.cache
def _declare_operators() -> torch.library.Library | None:
    """Declare two operators that torchvision needs at import.

    The binaries of a torchvision built for another torch do not load.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None
