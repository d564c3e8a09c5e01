"""The recipe from prompts to scores: one call, resumable, with all checks first."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from halation.data.streets import Streets
from halation.images.png_codec import encode_png
from support import tiny_models

RECIPE = Path(__file__).parents[2] / "recipes" / "coco_eval"
SIZE = 32
ANNOTATIONS = [
    {"id": 7, "image_id": 139, "caption": "A red bus\n on a road. "},
    {"id": 3, "image_id": 139, "caption": "A bus, red."},
    {"id": 9, "image_id": 42, "caption": "Two dogs  and a cat"},
    {"id": 4, "image_id": 285, "caption": 'A sign that says "stop"'},
]
PROMPTS = {
    "000000000042": "Two dogs and a cat",
    "000000000139": "A bus, red.",
    "000000000285": 'A sign that says "stop"',
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a call that works, but for where it writes; the folder's name has a space."""
    folder = tmp_path_factory.mktemp("parts") / "all of them"
    (folder / "real").mkdir(parents=True)
    for number in range(4):
        pixels = Streets(SIZE, SIZE).train(number).pixels
        (folder / "real" / f"{number}.png").write_bytes(encode_png(pixels, {}))
    (folder / "captions.json").write_text(json.dumps({"images": [], "annotations": ANNOTATIONS}))
    return {
        "MODEL_PATH": str(tiny_models.built("sd3")),
        "COCO_CAPTIONS": str(folder / "captions.json"),
        "REFERENCE": str(folder / "real"),
        "INCEPTION_WEIGHTS": str(tiny_models.inception_pth(folder / "inception.pth")),
        "CLIP_MODEL": str(tiny_models.clip_model(folder / "clip")),
        "ALLOW_FEW": "true",
        "USE_MULTIGPU": "false",
        "NUM_STEPS": "2",
        "HEIGHT": str(SIZE),
        "WIDTH": str(SIZE),
    }


def started(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The script in `folder`, told nothing but these."""
    told = re.compile(
        r"HALATION|(MODEL_PATH|PROMPTS_CSV|REFERENCE|OUTPUT_DIR|RESULTS|METRICS|EXTRACTOR|GPU_IDS|NUM_SAMPLES)$"
    )
    clean = {name: value for name, value in os.environ.items() if not told.match(name)}
    own = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HALATION_CACHE": str(folder / "cache")}
    return subprocess.run(
        ["bash", str(RECIPE / "run_full_evaluation.sh")],
        cwd=folder,
        env=clean | own | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def report_of(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_captions_become_prompts_images_and_scores_and_again_nothing_is_drawn(
    tmp_path: Path, parts: dict[str, str]
) -> None:
    variables = parts | {"OUTPUT_DIR": "my images/"}
    done = started(tmp_path, variables)
    assert done.returncode == 0, done.stderr
    images = sorted((tmp_path / "my images").glob("*.png"))
    assert [path.name for path in images] == [f"{name}_seed{42 + k}.png" for k, name in enumerate(PROMPTS)]
    rows = [json.loads(line) for line in (tmp_path / "my images" / "metadata.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == list(PROMPTS.values())
    with Image.open(images[0]) as image:
        assert image.size == (SIZE, SIZE)

    report = report_of(tmp_path / "my images_results.json")
    assert set(report["metrics"]) == {"fid", "clip"}
    assert report["metrics"]["fid"]["name"] == "FD-inception", "random weights are not FID's"
    assert report["metrics"]["fid"]["few"] is True
    assert (report["generated"]["num"], report["reference"]["num"]) == (3, 4)
    assert report["metrics"]["fid"]["value"] > 0
    assert 0 <= report["metrics"]["clip"]["value"] <= 100
    assert "my images_results.json" in done.stdout

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix in (".png", ".safetensors")}
    assert len(before) > len(images), "features are kept beside the images"
    again = started(tmp_path, variables)
    assert again.returncode == 0, again.stderr
    assert "all already done" in again.stderr
    there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix in (".png", ".safetensors")}
    assert there == before
    values = {name: found["value"] for name, found in report["metrics"].items()}
    repeated = report_of(tmp_path / "my images_results.json")["metrics"]
    assert {name: found["value"] for name, found in repeated.items()} == values


QUICK = {
    "no model": ({"MODEL_PATH": ""}, "MODEL_PATH is not set"),
    "no prompts": ({"COCO_CAPTIONS": ""}, "there is no ./mscoco_data/prompts.csv"),
    "no real images": ({"REFERENCE": "nothing here", "PROMPTS_CSV": "given.txt"}, "no real images at nothing here"),
    "captions that are none": ({"COCO_CAPTIONS": "given.txt"}, "COCO's captions as JSON"),
    "too few prompts": ({"REFERENCE": "streets", "ALLOW_FEW": "", "PROMPTS_CSV": "given.txt"}, "1 generated image"),
}
SLOW = {
    "missing weights": ({"INCEPTION_WEIGHTS": "gone.pth", "PROMPTS_CSV": "given.txt"}, "gone.pth is not a file"),
    "no folder of CLIP": (
        {"CLIP_MODEL": "gone", "PROMPTS_CSV": "given.txt"},
        "is not a folder and could not be downloaded",
    ),
    "an empty reference": ({"REFERENCE": "cache", "PROMPTS_CSV": "given.txt"}, "has no images"),
    "FID of streets": ({"REFERENCE": "streets", "METRICS": "fid", "PROMPTS_CSV": "given.txt"}, "FD-streets"),
    "too few images": (
        {"REFERENCE": "streets", "ALLOW_FEW": "", "NUM_SAMPLES": "5", "PROMPTS_CSV": "many.txt"},
        "5 generated images",
    ),
    "FID without real images": ({"REFERENCE": "", "METRICS": "fid clip", "PROMPTS_CSV": "given.txt"}, "no real images"),
}


@pytest.mark.parametrize(
    ("variables", "message"),
    [pytest.param(*case, id=name) for name, case in QUICK.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_what_is_missing_is_said_before_the_first_image(
    tmp_path: Path, parts: dict[str, str], variables: dict[str, str], message: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "given.txt").write_text("a red bus\n")
    (tmp_path / "many.txt").write_text("a red bus\n" * 3000)
    done = started(tmp_path, parts | variables)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert "to do:" in done.stderr
    assert not list(tmp_path.rglob("*.png"))
    assert not (tmp_path / "eval_output_results.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_documents_four_variables_generate_and_name_the_scores_that_are_missing(
    tmp_path: Path, parts: dict[str, str]
) -> None:
    """With the document's four variables, it generates, names what it cannot compute, and exits with 1."""
    (tmp_path / "mscoco_data").mkdir()
    (tmp_path / "mscoco_data" / "prompts.csv").write_text("image_id,prompt\n7,a red bus\n9,two dogs\n11,a sign\n")
    small = {name: parts[name] for name in ("MODEL_PATH", "NUM_STEPS", "HEIGHT", "WIDTH")}
    four = small | {"USE_MULTIGPU": "true", "GPU_IDS": "0 1 2 3", "NUM_SAMPLES": "2"}
    done = started(tmp_path, four)
    assert done.returncode == 1, done.stderr
    assert "no GPU found: GPU_IDS is ignored" in done.stderr
    assert sorted(path.name for path in (tmp_path / "eval_output").glob("*.png")) == ["7_seed42.png", "9_seed43.png"]
    before, _, after = done.stderr.partition("will be left out")
    assert "images" not in before
    last = after.partition("could not be computed")[2]
    for words in ("fid: there are no real images at ./mscoco_data/val2017", "clip: ", "is: ", "run the script again"):
        assert words in last, words
    assert not (tmp_path / "eval_output_results.json").exists()

    more = {name: parts[name] for name in ("INCEPTION_WEIGHTS", "CLIP_MODEL", "ALLOW_FEW")}
    done = started(tmp_path, four | more)
    assert done.returncode == 1, done.stderr
    assert set(report_of(tmp_path / "eval_output_results.json")["metrics"]) == {"clip", "is"}
    assert "fid: there are no real images" in done.stderr
    assert "clip:" not in done.stderr
    shutil.copytree(parts["REFERENCE"], tmp_path / "mscoco_data" / "val2017")
    done = started(tmp_path, four | more)
    assert done.returncode == 0, done.stderr
    assert set(report_of(tmp_path / "eval_output_results.json")["metrics"]) == {"fid", "clip"}
    assert "all already done" in done.stderr


@pytest.mark.slow
def test_every_variable_reaches_its_command(tmp_path: Path, parts: dict[str, str]) -> None:
    (tmp_path / "given.txt").write_text("a red bus\ntwo dogs\na sign\n")
    chosen = {
        "PROMPTS_CSV": "given.txt",
        "NUM_SAMPLES": "2",
        "SEED_START": "7",
        "GUIDANCE_SCALE": "3.5",
        "DTYPE": "fp32",
        "METRICS": "clip",
        "RESULTS": "scores/all.json",
        "USE_MULTIGPU": "true",
    }
    done = started(tmp_path, parts | chosen)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "eval_output"
    assert sorted(path.name for path in folder.glob("*.png")) == ["000001_seed7.png", "000002_seed8.png"]
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert [(row["guidance_scale"], row["steps"], row["height"]) for row in rows] == [(3.5, 2, SIZE)] * 2
    assert set(report_of(tmp_path / "scores" / "all.json")["metrics"]) == {"clip"}


@pytest.mark.slow
def test_another_extractor_has_metrics_of_its_own(tmp_path: Path, parts: dict[str, str]) -> None:
    (tmp_path / "given.txt").write_text("a red car in a city\na rainy street at night\nthree trees\n")
    used = {name: value for name, value in parts.items() if name not in ("INCEPTION_WEIGHTS", "CLIP_MODEL")}
    done = started(tmp_path, used | {"PROMPTS_CSV": "given.txt", "EXTRACTOR": "streets"})
    assert done.returncode == 0, done.stderr
    found = report_of(tmp_path / "eval_output_results.json")["metrics"]
    assert {key: one["name"] for key, one in found.items()} == {
        "fd": "FD-streets",
        "kid": "KID-streets",
        "agreement": "prompt agreement",
    }
