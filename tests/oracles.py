"""The tools that evaluation is compared with: each is imported where it is installed, and its test skipped with a reason where it is not.

They stand in a folder of their own: transformers and diffusers import any torchvision they can see, and this one, built for another
torch, would take them down.
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

import pytest
import torch
from transformers.utils.import_utils import is_torchvision_available

FOLDER = Path(sys.prefix) / "oracles"


def torch_fidelity(module: str = "") -> ModuleType:
    """torch-fidelity, or one of its modules."""
    return _oracle("torch_fidelity", module)


def pytorch_fid(module: str = "fid_score") -> ModuleType:
    return _oracle("pytorch_fid", module)


def clean_fid(module: str = "fid") -> ModuleType:
    return _oracle("cleanfid", module)


def torchmetrics(module: str = "") -> ModuleType:
    return _oracle("torchmetrics", module)


def torchvision(module: str = "") -> ModuleType:
    return _oracle("torchvision", module)


def _oracle(package: str, module: str) -> ModuleType:
    if not (FOLDER / package).is_dir():
        pytest.skip(f"{package} is not in {FOLDER}, where `make test` installs tests/oracles.txt")
    is_torchvision_available()  # asked once and remembered: transformers goes on without it
    with _visible(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an oracle says about itself while it is imported is no failure of ours
        _declare_operators()
        return importlib.import_module(f"{package}.{module}" if module else package)


@contextlib.contextmanager
def _visible() -> Iterator[None]:
    sys.path.append(str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


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
