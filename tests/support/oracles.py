"""Other tools that evaluation is compared with; without them these tests are skipped."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmarks import oracles


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
    found = oracles.imported(f"{package}.{module}" if module else package)
    if found is None:  # a folder that lacks one of them is a failure: `make test` installs all or none
        pytest.skip(
            f"no oracles in {oracles.PLACES[0]}: `make test` installs tests/oracles.txt there, plain pytest does not"
        )
    return found
