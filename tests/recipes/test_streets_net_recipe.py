"""The recipe trains a network, writes it with its record, and repeats the same bytes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halation.evaluation.extractors import streets_classifier
from halation.input_files import file_sha256

RECIPE = Path(__file__).parents[2] / "recipes" / "streets_net"
FEW = ["--num_pictures", "24", "--num_steps", "3", "--batch_size", "8", "--num_heldout", "12"]


def command() -> list[str]:
    """The words of the one command on the recipe's page."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (RECIPE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    words = shlex.split(blocks[0], comments=True)
    assert words[:2] == ["python", "train.py"]
    return words[2:]


def trained(folder: Path) -> tuple[str, Path]:
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, str(RECIPE / "train.py"), *command(), *FEW],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout, folder / "streets_net.safetensors"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return trained(tmp_path_factory.mktemp("first") / "run")


def test_the_command_on_the_page_writes_a_network_with_its_record(first: tuple[str, Path]) -> None:
    printed, path = first
    record = streets_classifier.read_record(path)
    assert (record.seed, record.num_trained_on, record.num_steps, record.num_validated_on) == (0, 24, 3, 12)
    assert set(record.accuracy) == {"32", "48", "64", "96", "128"}
    assert 0.0 <= record.agreement <= 1.0
    outputs = streets_classifier.load_network(path)(torch.zeros(1, 64, 64, 3))
    assert all(torch.isfinite(output).all() for output in outputs.values())
    assert path.stat().st_size <= 2 * 2**20
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert f"SHA-256 {file_sha256(path)}" in printed


def test_it_prints_what_the_network_reaches_and_tells_apart(first: tuple[str, Path]) -> None:
    printed, path = first
    share = streets_classifier.read_record(path).accuracy["64"]["cars"]
    assert re.search(rf"^  64 pixels  .*cars {100 * share:.1f} %$", printed, re.MULTILINE)
    distances = re.findall(r"^(.+?) +FD-streets +(\d+\.\d+)$", printed, re.MULTILINE)
    assert len(distances) > 10
    assert distances[0][0] == "as they are"


@pytest.mark.slow
def test_the_same_command_writes_the_same_bytes(first: tuple[str, Path], tmp_path: Path) -> None:
    _, again = trained(tmp_path / "again")
    assert again.read_bytes() == first[1].read_bytes()
