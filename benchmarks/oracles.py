"""The tools that evaluation is compared with, imported from a folder of their own.

transformers and diffusers import any torchvision they can see, and the one that these tools need, built for another torch, would take
them down. So it is seen only while a tool is imported, after transformers has looked for it once.
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
"""Where `make test` puts them; the second is for an interpreter that is not this repository's own."""


def place() -> Path | None:
    """The folder they stand in, or None where nobody installed them."""
    return next((folder for folder in PLACES if folder.is_dir()), None)


def imported(name: str) -> ModuleType | None:
    """A module of a tool, or None where they are not installed."""
    folder = place()
    if folder is None:
        return None
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # asked once and remembered
    with _visible(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a tool says about itself while it is imported is no failure of ours
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
    """torchvision built for another torch has no binaries that load, and looks for two of their operators when it is imported."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None
