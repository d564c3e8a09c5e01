"""Features on a CUDA device do not depend on the batch or TF32 and match the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from halation.evaluation import feature_extraction
from halation.evaluation.extractors import open_extractor
from halation.evaluation.extractors.extractor import Extractor
from halation.evaluation.metrics.frechet import frechet_distance
from halation.evaluation.metrics.moments import moments
from support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
NAMES = ["clip", "dinov2", "streets", "inception"]
BATCH = 8


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("extractors")
    return {
        "clip": str(tiny_models.clip_model(folder / "clip")),
        "dinov2": str(tiny_models.dinov2_model(folder / "dinov2")),
        "streets": "",
        "inception": str(tiny_models.inception_safetensors(folder / "inception.safetensors")),
    }


def prepared(extractor: Extractor, num: int, first: int = 0) -> np.ndarray:
    """Smooth images with some noise, each decided by its number alone."""
    rows, columns = np.mgrid[0:48, 0:64][..., None] / 64
    inputs = []
    for number in range(first, first + num):
        generator = np.random.default_rng(number)
        wave = np.sin(generator.uniform(0, 20, 3) * rows + generator.uniform(0, 20, 3) * columns)
        image = 120 + 90 * wave + generator.normal(0, 12, (48, 64, 3))
        inputs.append(extractor.transform(image.clip(0, 255).astype(np.uint8)))
    return np.stack(inputs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_features_do_not_depend_on_neighbours_or_place_on_a_gpu(name: str, dtype: str, weights: dict[str, str]) -> None:
    extractor = open_extractor(name, device="cuda:0", dtype=dtype, weights=weights[name])
    inputs = torch.from_numpy(prepared(extractor, BATCH)).to(GPU)
    whole, turned = extractor(inputs), extractor(inputs.flip(0))
    alone = extractor(torch.cat([inputs[3:4], torch.zeros_like(inputs[1:])]))
    assert whole["features"].std(0).mean() > 1e-3 * whole["features"].abs().mean()
    for key, output in whole.items():
        assert torch.equal(turned[key].flip(0), output)
        assert torch.equal(alone[key][0], output[3])


@pytest.fixture
def tf32() -> Iterator[tuple[Any, ...]]:
    """A process that allows TF32 everywhere, as trainings do."""
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32"
    yield switches
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value


@pytest.mark.parametrize("name", ["clip", "inception"])
def test_a_process_that_allows_tf32_gets_the_features_of_one_that_does_not(
    name: str, weights: dict[str, str], tf32: Any
) -> None:
    extractor = open_extractor(name, device="cuda:0", weights=weights[name])
    inputs = torch.from_numpy(prepared(extractor, BATCH)).to(GPU)
    found = extractor(inputs)["features"]
    assert [switch.fp32_precision for switch in tf32] == ["tf32"] * 3, "the process keeps its own settings"
    with torch.inference_mode():
        rounded = extractor._outputs(inputs)["features"].float()
    for switch in tf32:
        switch.fp32_precision = "ieee"
    assert torch.equal(extractor(inputs)["features"], found)
    assert not torch.equal(rounded, found), "where TF32 changes nothing, nothing was shown"


@pytest.mark.parametrize(("name", "num"), [("clip", 76), ("dinov2", 76), ("streets", 76), ("inception", 12)])
def test_statistics_of_a_gpu_are_those_of_a_cpu_within_rounding(name: str, num: int, weights: dict[str, str]) -> None:
    """With a batch among them that is not full."""
    found = {}
    for device in (CPU, GPU):
        extractor = open_extractor(name, device=str(device), weights=weights[name])
        inputs = prepared(extractor, num)
        halves = (inputs[: num // 2], inputs[num // 2 :])
        found[device] = [
            moments(feature_extraction.run_extractor(extractor, half, BATCH, device)["features"]) for half in halves
        ]
    for ours, theirs in zip(found[GPU], found[CPU], strict=True):
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=0, atol=2e-4 * np.abs(theirs.mean).max())
        np.testing.assert_allclose(ours.scatter, theirs.scatter, rtol=0, atol=2e-3 * np.abs(theirs.scatter).max())
    if name in (
        "clip",
        "dinov2",
    ):  # fewer features than images: covariances of full rank, whose distance is well conditioned
        reference = frechet_distance(*found[CPU])
        assert reference > 0
        assert frechet_distance(*found[CPU], device=str(GPU)) == pytest.approx(reference, rel=1e-6)
        assert frechet_distance(*found[GPU], device=str(GPU)) == pytest.approx(reference, rel=1e-2)
