"""`halation evaluate` agrees with other tools on the same files and weights."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halation.data.streets import Streets
from halation.evaluation import command as evaluate
from halation.evaluation.config import EvaluateConfig
from support import oracles, tiny_models

# The oracles', about scipy's next release and about covariances of fewer images than features.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Matrix is singular")
NUM = 24
"""Images on each side: enough for every number to be one, and as many as a core bears."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharp and blurred scenes, as PNG, and random weights of Inception's shape."""
    folder = tmp_path_factory.mktemp("oracles")
    source = Streets(96, 96)
    for name, first in (("generated", 0), ("real", 100)):
        (folder / name).mkdir()
        for number in range(NUM):
            image = Image.fromarray(source.train(first + number).pixels)
            if name == "generated":
                image = image.resize((48, 48)).resize((96, 96))
            image.save(folder / name / f"{number:03d}.png")
    tiny_models.inception_pth(folder / "inception.pth")
    return folder


@pytest.fixture(scope="module")
def ours(place: Path) -> Callable[[str], dict[str, Any]]:
    """The metrics by a resize rule, computed when first asked for."""

    @functools.cache
    def metrics(rule: Any) -> dict[str, Any]:
        config = EvaluateConfig(
            generated=str(place / "generated"),
            reference=(str(place / "real"),),
            weights=str(place / "inception.pth"),
            metrics=("fid", "kid", "is", "prdc"),
            resize=rule,
            kid_subset_size=12,
            kid_subsets=20,
            allow_few=True,
            batch_size=8,
            nproc=1,
            decode_workers=0,
            cache_dir=place / "cache",
            output=place / f"{rule}.json",
            progress="none",
        )
        assert evaluate.run(config) == 0
        found: dict[str, Any] = json.loads((place / f"{rule}.json").read_text())["metrics"]
        return found

    return metrics


@pytest.mark.slow
def test_torch_fidelity(place: Path, ours: Callable[[str], dict[str, Any]]) -> None:
    found = oracles.torch_fidelity().calculate_metrics(
        input1=str(place / "generated"),
        input2=str(place / "real"),
        cuda=False,
        fid=True,
        kid=True,
        isc=True,
        prc=True,
        kid_subset_size=12,
        kid_subsets=20,
        isc_splits=10,
        feature_extractor="inception-v3-compat",  # precision and recall would take VGG otherwise
        feature_extractor_weights_path=str(place / "inception.pth"),
        batch_size=8,
        save_cpu_ram=True,
        cache=False,
        verbose=False,
    )
    mine = {name: one["value"] for name, one in ours("tf").items()}
    assert mine["fid"] == pytest.approx(found["frechet_inception_distance"], rel=1e-3)
    assert mine["kid"] == pytest.approx(found["kernel_inception_distance_mean"], rel=1e-3)
    assert ours("tf")["kid"]["std"] == pytest.approx(found["kernel_inception_distance_std"], rel=1e-3)
    assert mine["is"] == pytest.approx(found["inception_score_mean"], rel=1e-3)
    assert mine["precision"] == pytest.approx(found["precision"])
    assert mine["recall"] == pytest.approx(found["recall"])


@pytest.mark.slow
def test_pytorch_fid(place: Path, ours: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    module = oracles.pytorch_fid("inception")
    weights = torch.load(place / "inception.pth", weights_only=True)
    monkeypatch.setattr(module, "load_state_dict_from_url", lambda *_args, **_kwargs: weights)
    score = oracles.pytorch_fid("fid_score")
    folders = [str(place / "generated"), str(place / "real")]
    assert ours("torch")["fid"]["value"] == pytest.approx(
        score.calculate_fid_given_paths(folders, 8, torch.device("cpu"), 2048, num_workers=0), rel=1e-3
    )


@pytest.mark.slow
def test_clean_fid(place: Path, ours: Callable[[str], dict[str, Any]]) -> None:
    from halation.evaluation.extractors import open_extractor

    fid = oracles.clean_fid("fid")
    extractor = open_extractor("inception", device="cpu", weights=str(place / "inception.pth"))

    def model(batch: torch.Tensor) -> torch.Tensor:
        """Ours instead of clean-fid's network, which is a download; files, resizing and distance are clean-fid's."""
        return extractor(batch.permute(0, 2, 3, 1).contiguous())["features"]

    features = [
        fid.get_folder_features(
            str(place / name),
            model,
            num_workers=0,
            batch_size=8,
            device=torch.device("cpu"),
            mode="clean",
            verbose=False,
        )
        for name in ("generated", "real")
    ]
    assert ours("clean")["fid"]["value"] == pytest.approx(fid.fid_from_feats(*features), rel=1e-3)


@pytest.mark.slow
def test_torchmetrics(place: Path, ours: Callable[[str], dict[str, Any]]) -> None:
    """torchmetrics' moments and distances of our features; its own Inception is torch-fidelity's."""
    from halation.evaluation.extractors import open_extractor
    from halation.evaluation.extractors.resize import resize_to_square

    extractor = open_extractor("inception", device="cpu", resize="tf", weights=str(place / "inception.pth"))

    class Network(torch.nn.Module):
        num_features = 2048

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            rows = [resize_to_square(image.permute(1, 2, 0).numpy().astype(np.uint8), 299, "tf") for image in images]
            return extractor(torch.from_numpy(np.stack(rows)))["features"]

    metric = oracles.torchmetrics("image.fid").FrechetInceptionDistance(feature=Network()).set_dtype(torch.float64)
    for name in ("generated", "real"):
        rows = [np.asarray(Image.open(place / name / f"{number:03d}.png")) for number in range(NUM)]
        metric.update(torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2), real=name == "real")
    assert ours("tf")["fid"]["value"] == pytest.approx(float(metric.compute()), rel=1e-3)
