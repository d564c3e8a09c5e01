"""What the page on scores says of results and of street scenes is what comes out."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFilter

from halation.data.streets import Streets
from halation.evaluation import command as evaluate
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractors import open_extractor
from halation.evaluation.metrics.frechet import frechet_distance
from halation.evaluation.metrics.kid import kernel_distance
from halation.evaluation.metrics.moments import moments
from halation.evaluation.metrics.nearest_neighbors import prdc
from halation.images.png_codec import encode_png
from support import tiny_models

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
NUM, SIZE = 8, 32
Pixels = npt.NDArray[np.uint8]


def rows(section: str) -> list[list[str]]:
    """The cells of all tables under a heading."""
    text = re.split(r"^#+ ", PAGE.split(f"# {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of every kind of source and of metric, but for those that take Inception."""
    place = tmp_path_factory.mktemp("reports")
    (place / "scenes").mkdir()
    prompts = ["image_id,prompt"]
    for number in range(NUM):
        scene = Streets(SIZE, SIZE).train(number)
        (place / "scenes" / f"{number}.png").write_bytes(encode_png(scene.pixels, {}))
        prompts.append(f'{number},"{scene.caption}"')
    (place / "prompts.csv").write_text("\n".join(prompts) + "\n")
    common: dict[str, Any] = {
        "allow_few": True,
        "num_reference": NUM,
        "nproc": 1,
        "decode_workers": 0,
        "progress": "none",
        "cache_dir": place / "cache",
        "output": place / "report.json",
        "bootstrap": 2,
        "prompts": str(place / "prompts.csv"),
        "clip_model": str(tiny_models.clip_model(place / "clip")),
    }
    files: dict[str, Any] = {"generated": str(place / "scenes")}
    live: dict[str, Any] = {"model_path": "testcard", "height": SIZE, "width": SIZE, "num_inference_steps": 1}
    found = []
    for settings in (
        files | {"reference": ("streets",), "metrics": ("fd", "kid", "prdc", "agreement", "clip")},
        files | {"metrics": (), "extractor": "streets", "save_statistics": place / "all.safetensors"},
        live | {"reference": (str(place / "all.safetensors"),), "metrics": ("fd",), "extractor": "streets"},
    ):
        assert evaluate.run(EvaluateConfig(**common, **settings)) == 0
        found.append(json.loads((place / "report.json").read_text()))
    return found


def test_the_page_lists_exactly_the_fields_of_a_result(reports: list[dict[str, Any]]) -> None:
    told: set[str] = set()
    for names, meaning in (row for row in rows("What comes out") if "`" in row[0]):
        told |= set(re.findall(r"`(\w+)`", names))
        if names == "`generated`, `reference`":
            told |= {"kind", "path", "num"} | set(re.findall(r"(?:digest|their|were|its) `(\w+)`", meaning))
    there: set[str] = set()
    for report in reports:
        there |= report.keys() | report["generated"].keys() | (report["reference"] or {}).keys()
        there |= {field for metric in report["metrics"].values() for field in metric}
    assert told - {"num_missing"} == there, "nothing is missing in these reports"


def test_the_page_knows_every_metric(reports: list[dict[str, Any]]) -> None:
    keys = next(row[1] for row in rows("What comes out") if row[0] == "`metrics`")
    assert set(re.findall(r"`(\w+)`", keys)) == {*reports[0]["metrics"], "fid", "is"}


def jpeg(quality: int) -> Callable[[Pixels], Pixels]:
    def coded(pixels: Pixels) -> Pixels:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return coded


def blurred(radius: float) -> Callable[[Pixels], Pixels]:
    return lambda pixels: np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


HARMS: dict[str, Callable[[Pixels], Pixels]] = {
    "as JPEG of quality 95": jpeg(95),
    "as JPEG of quality 75": jpeg(75),
    "blurred by 0.5 pixels": blurred(0.5),
    "blurred by 1 pixel": blurred(1.0),
}


@pytest.mark.slow
def test_the_page_says_what_the_streets_network_finds() -> None:
    extractor = open_extractor("streets", device="cpu")
    scenes = Streets(64, 64, num_validation=1000)

    def features(images: list[Pixels]) -> npt.NDArray[np.float32]:
        batches = [np.stack([extractor.transform(one) for one in images[at : at + 50]]) for at in range(0, 1000, 50)]
        return np.concatenate([extractor(torch.from_numpy(batch))["features"].numpy() for batch in batches])

    reference = features([scenes.validation(number).pixels for number in range(1000)])
    images = [scenes.train(number).pixels for number in range(1000)]
    whole = features(images)
    sets = {
        "as they are": whole,
        "the first 500": whole[:500],
        "the first 250": whole[:250],
        **{name: features([harm(one) for one in images]) for name, harm in HARMS.items()},
        "50 of them, 20 times each": np.tile(whole[:50], (20, 1)),
    }
    found = {name: numbers(rows_, reference) for name, rows_ in sets.items()}
    told = {row[0]: [float(cell) for cell in row[1:]] for row in rows("FD-streets and KID-streets")[1:]}
    assert told.keys() == found.keys()
    wrong = {name: found[name] for name in told if told[name] != pytest.approx(found[name], rel=0.1, abs=0.015)}
    assert not wrong


def numbers(one: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> list[float]:
    shares = prdc(reference, one)
    distance = frechet_distance(moments(one), moments(reference))
    kernel = kernel_distance(one, reference, num_subsets=20, subset_size=len(one) // 2)
    return [distance, kernel.mean, shares.precision, shares.recall, shares.coverage]
