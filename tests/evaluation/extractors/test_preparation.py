"""Preparation of images is fully described by its settings and needs bounded memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halation.evaluation.extractors import open_extractor, resize
from halation.evaluation.extractors.resize import ShortestEdgeCrop
from support import tiny_models


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.clip_model(tmp_path_factory.mktemp("models") / "small-clip")


@pytest.fixture(scope="module")
def dinov2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.dinov2_model(tmp_path_factory.mktemp("models") / "small-dinov2")


def facts(name: str, folder: Path | str = "", **settings: Any) -> dict[str, Any]:
    return open_extractor(name, device="cpu", weights=str(folder), **settings).facts


def preparation_of(name: str, folder: Path | str = "", **settings: Any) -> Any:
    return json.loads(json.dumps(facts(name, folder, **settings)["preparation"]))


def test_facts_describe_the_whole_preparation(clip_folder: Path, dinov2_folder: Path) -> None:
    assert preparation_of("streets") == {
        "kind": "SquareResize",
        "version": resize.RESIZE_VERSION,
        "size": 64,
        "rule": "clean",
    }
    dinov2 = preparation_of("dinov2", dinov2_folder, resize="tf")
    assert dinov2 == {
        **{"kind": "SquareResize", "version": resize.RESIZE_VERSION, "size": 224, "rule": "tf"},
        **{"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    }
    clip = preparation_of("clip", clip_folder)
    assert {name: clip[name] for name in ("shortest_edge", "crop", "resample")} == {
        **{"shortest_edge": 32, "crop": [32, 32], "resample": 3},
    }
    assert clip.keys() >= {"kind", "version", "exact", "rescale", "mean", "std"}


@pytest.mark.parametrize(
    "changed",
    [
        *({"image_mean": [0.1, 0.2, 0.3]}, {"image_std": [1, 1, 1]}, {"resample": 2}, {"rescale_factor": 0.01}),
        *({"crop_size": {"height": 32, "width": 31}}, {"do_normalize": False}, {"size": {"shortest_edge": 40}}),
    ],
)
def test_any_change_of_clips_preprocessor_changes_its_facts(
    changed: dict[str, Any], clip_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(clip_folder, tmp_path / "copy")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert preparation_of("clip", folder) != preparation_of("clip", clip_folder)


@pytest.mark.parametrize("name", ["clip", "dinov2"])
def test_facts_know_the_network_and_the_tokenizer_and_no_path(
    name: str, clip_folder: Path, dinov2_folder: Path, tmp_path: Path
) -> None:
    original = clip_folder if name == "clip" else dinov2_folder
    folder = shutil.copytree(original, tmp_path / "copy")
    before = facts(name, original)["model_sha256"]
    assert facts(name, folder)["model_sha256"] == before
    seen = {before}
    texts = ["tokenizer.json", "tokenizer_config.json"] if name == "clip" else []
    for file in (folder / file for file in ("config.json", *texts)):
        file.write_text(file.read_text() + "\n")
        seen.add(facts(name, folder)["model_sha256"])
    assert len(seen) == 2 + len(texts)


@pytest.mark.parametrize("resample", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(70, 9), (9, 70), (600, 50), (61, 400), (3, 1000), (1, 1000), (40, 41)])
@pytest.mark.parametrize("crop", [(32, 32), (40, 24)])
def test_only_the_middle_of_a_long_image_is_resized_and_gives_the_same(
    shape: tuple[int, int], crop: tuple[int, int], resample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = ShortestEdgeCrop(shortest_edge=32, exact=None, crop=crop, resample=resample)
    image = np.random.default_rng(5).integers(0, 256, (*shape, 3), dtype=np.uint8)
    whole = prepare(image).astype(int)
    monkeypatch.setattr("halation.evaluation.extractors.resize.LARGEST_INTERMEDIATE", 0)
    middle = prepare(image).astype(int)
    assert middle.shape == (*crop, 3)
    assert np.abs(middle - whole).max() <= (1 if resample else 255)  # nearest may take the other of two equally near
    assert (middle != whole).mean() < 0.05


@pytest.mark.parametrize("shape", [(1, 60_000), (60_000, 1), (3, 10_000_000)])
def test_a_long_thin_image_needs_little_memory(shape: tuple[int, int]) -> None:
    program = (
        "import resource, sys, numpy\n"
        "from halation.evaluation.extractors.resize import ShortestEdgeCrop\n"
        "prepare = ShortestEdgeCrop(shortest_edge=224, exact=None, crop=(224, 224), resample=3)\n"
        f"image = numpy.tile(numpy.arange({max(shape)}, dtype=numpy.uint8)[:, None], (1, {min(shape)}))\n"
        f"image = numpy.stack([image.reshape({max(shape)}, {min(shape)})] * 3, -1)\n"
        f"image = image if {shape[0] > shape[1]} else image.transpose(1, 0, 2).copy()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)\n"
        "result = prepare(image)\n"
        "assert result.shape == (224, 224, 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
