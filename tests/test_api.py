"""What the command line does can be done from Python, on ranks that it starts itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import halation
from halation.errors import InputError


def test_a_training_and_a_drawing_from_python(tmp_path: Path) -> None:
    settings = {
        "data": "streets",
        "model": "tiny",
        "image_size": 32,
        "patch_size": 8,
        "batch_size": 2,
        "n_steps": 2,
        "sample_steps": 2,
        "validation_images": 4,
        "report_to": ("none",),
        "progress": "none",
        "nproc": 2,
    }
    assert halation.train(**settings, output_dir=tmp_path / "run") == 0
    drawn = tmp_path / "drawn"
    assert halation.sample(checkpoint=str(tmp_path / "run"), output_dir=str(drawn), prompts="a red car", nproc=2) == 0
    assert [row["state"] for row in json.loads((drawn / "samples.json").read_text())["samples"]] == ["done"]


def test_an_error_is_raised_and_not_an_exit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        halation.train(data=str(tmp_path / "nothing"), output_dir=tmp_path / "run")


@pytest.mark.parametrize(
    "settings", [{"lr": "fast"}, {"learning_rate": "fast"}, {"num_stpes": 1}, {"image_size": "wide"}]
)
def test_settings_that_mean_nothing_are_input_errors(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"halation\.train\(\)"):
        halation.train(**settings, output_dir=tmp_path / "run")


def test_a_generation_from_python_says_by_its_code_whether_every_image_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("a red car\na blue car\na green car\n")
    settings = {
        "prompts_csv": tmp_path / "prompts.txt",
        "model_path": "testcard",
        "output_dir": tmp_path / "pictures",
        "height": 32,
        "width": 32,
        "progress": "none",
    }
    monkeypatch.setenv("HALATION_FAULT", "paint.000002:1+:raise")
    assert halation.generate(**settings) == 1
    monkeypatch.delenv("HALATION_FAULT")
    assert halation.generate(**settings) == 0
    names = {path.name for path in (tmp_path / "pictures").glob("*.png")}
    assert names == {"000001_seed42.png", "000002_seed43.png", "000003_seed44.png"}


def test_prompts_may_be_texts_or_one_file(tmp_path: Path) -> None:
    settings = {"model_path": "testcard", "height": 32, "width": 32, "progress": "none"}
    texts = ["a red car", "two\nlines"]
    assert halation.generate(prompts=texts, output_dir=tmp_path / "texts", **settings) == 0
    rows = [json.loads(line) for line in (tmp_path / "texts" / "metadata.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == texts
    (tmp_path / "prompts.txt").write_text("a red car\na blue car\n")
    assert halation.generate(prompts=str(tmp_path / "prompts.txt"), output_dir=tmp_path / "file", **settings) == 0
    first = "000001_seed42.png"
    assert (tmp_path / "texts" / first).read_bytes() == (tmp_path / "file" / first).read_bytes()
    with pytest.raises(InputError, match=r"no such file: .*missing\.txt"):
        halation.generate(prompts=str(tmp_path / "missing.txt"), output_dir=tmp_path / "never", **settings)
    with pytest.raises(InputError, match=r"--prompts a with --prompts_csv b\.csv"):
        halation.generate(prompts=["a"], prompts_csv="b.csv", output_dir=tmp_path / "never", **settings)


def test_settings_of_a_generation_that_mean_nothing_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)halation\.generate\(\): unknown setting 'prompt_csv'.*'prompts_csv'"):
        halation.generate(prompt_csv="prompts.csv", model_path="testcard", output_dir=tmp_path / "pictures")


def test_an_evaluation_from_python_returns_its_report(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "drawn").mkdir()
    for number in range(6):
        Image.new("RGB", (32, 32), (40 * number, 90, 30)).save(tmp_path / "drawn" / f"{number}.png")
    report = halation.evaluate(
        generated=str(tmp_path / "drawn"),
        reference="streets",
        num_reference=8,
        metrics="fd",
        allow_few=True,
        cache_dir=str(tmp_path / "cache"),
        progress="none",
    )
    assert report["metrics"]["fd"]["name"] == "FD-streets"
    assert report["metrics"]["fd"]["value"] > 1
    with pytest.raises(InputError, match=r"halation\.evaluate\(\)"):
        halation.evaluate(folder=str(tmp_path))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("halation", ["RankSampler", "Sample", "distill", "evaluate", "generate", "sample", "train", "watch"]),
        ("halation.errors", ["HalationError", "InputError", "RankFailure"]),
        ("halation.adapters.accelerate", ["rank_sampler"]),
        ("halation.adapters.lightning", ["SamplerCallback"]),
        ("halation.adapters.transformers", ["SamplerCallback"]),
        ("halation.data.streets", ["DRIVING_PROMPTS", "PLACES", "TIMES", "WEATHERS", "CAR_COLOURS", "Attributes"]),
        ("halation.data.streets", ["Streets", "Mentioned", "caption", "draw", "mentioned", "scene"]),
    ],
)
def test_import_paths_that_pages_show_stay(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert [name for name in names if not hasattr(found, name)] == []
