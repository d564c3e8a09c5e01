"""The tools that evaluation is compared with: each is imported where it is installed, and its test skipped with a reason where it is not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from types import ModuleType

import pytest
import torch


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
    for needed in (package, "torchvision"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(
                f"{needed} is not installed; `pip install --no-deps -r tests/oracles.txt` installs what we compare with"
            )
    _declare_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an oracle says about itself while it is imported is no failure of ours
        return importlib.import_module(f"{package}.{module}" if module else package)


@functools.cache
def _declare_operators() -> torch.library.Library | None:
    """torchvision built for another torch has no binaries that load, and looks for two of their operators when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            return library
    return None
