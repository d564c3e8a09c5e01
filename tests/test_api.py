"""What the command line does can be done from Python, on ranks that it starts itself."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
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
    events: list[halation.ProgressEvent] = []
    run = halation.train(**settings, output_dir=tmp_path / "run", on_progress=events.append)
    assert (run.exit_code, [path.name for path in run.checkpoints]) == (0, ["step_0000002"])
    assert (run.export / "model.safetensors").is_file()
    assert [row.seed for row in run.samples] == list(range(42, 50))
    assert run.metrics[-1]["step"] == 2
    assert [event.done for event in events] == sorted(event.done for event in events)
    steps = [event for event in events if not event.is_message]
    assert (steps[-1].job, steps[-1].done, steps[-1].total) == ("training", 2, 2)
    assert steps[-1].values["loss"] > 0
    drawn = tmp_path / "drawn"
    result = halation.sample(checkpoint=str(run.output_dir), output_dir=str(drawn), prompts="a red car", nproc=2)
    assert [(row.prompt, row.path) for row in result.rows] == [("a red car", drawn / "sample_00.png")]
    assert result.rows[0].open().size == (32, 32)
    assert result.grid.is_file()


def test_a_config_object_is_accepted_in_place_of_keywords(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red car\n")
    config = halation.GenerateConfig(
        prompts_csv=str(prompts),
        model_path="testcard",
        output_dir=tmp_path / "out",
        height=32,
        width=32,
        progress="none",
    )
    assert [row.prompt for row in halation.generate(config)] == ["a red car"]
    with pytest.raises(TypeError, match="one GenerateConfig, or settings as keywords"):
        halation.generate(config, height=64)
    with pytest.raises(TypeError, match="one TrainConfig"):
        halation.train(config)  # type: ignore[call-overload]


def test_the_stub_of_the_api_has_every_setting() -> None:
    stub = Path("docs/api_stub.py")
    made = subprocess.run([sys.executable, "-c", _MAKE_STUB, str(stub)], capture_output=True, text=True, check=True)
    assert Path(halation.__file__).with_suffix(".pyi").read_text() == made.stdout, "run python docs/api_stub.py"


_MAKE_STUB = "import runpy, sys; sys.stdout.write(runpy.run_path(sys.argv[1])['make_stub']())"


def test_a_callback_that_raises_or_is_slow_does_not_stop_a_generation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def callback(event: halation.ProgressEvent) -> None:
        calls.append(event.done)
        raise RuntimeError("a bug in the notebook")

    prompts = [f"car {number}" for number in range(40)]
    settings = {"model_path": "testcard", "height": 32, "width": 32, "nproc": 1, "progress": "none"}
    result = halation.generate(prompts=prompts, output_dir=tmp_path / "out", on_progress=callback, **settings)
    assert result.exit_code == 0
    assert len(result.paths) == 40
    assert len(calls) == 1
    printed = capfd.readouterr().err
    assert printed.count("the progress callback failed") == printed.count("RuntimeError: a bug in the notebook") == 1


def test_prompts_are_a_list_of_texts_or_of_columns(tmp_path: Path) -> None:
    settings = {"model_path": "testcard", "height": 32, "width": 32, "nproc": 1, "progress": "none"}
    prompts = ["a\nred 'car', \"fast\"", {"prompt": "a blue car", "seed": 7, "image_id": "blue"}]
    result = halation.generate(prompts=prompts, output_dir=tmp_path / "out", **settings)
    assert [(row.prompt, row.seed) for row in result] == [(prompts[0], 42), ("a blue car", 7)]
    written = [path.stat().st_mtime_ns for path in result.paths]
    again = halation.generate(prompts=prompts, output_dir=tmp_path / "out", **settings)
    assert [path.stat().st_mtime_ns for path in again.paths] == written
    with pytest.raises(InputError, match="prompt 2 is a int"):
        halation.generate(prompts=["a car", 3], output_dir=tmp_path / "other", **settings)  # type: ignore[list-item]
    with pytest.raises(InputError, match="no prompts"):
        halation.generate(prompts=[], output_dir=tmp_path / "empty", **settings)


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
    result = halation.generate(**settings)
    assert result.exit_code == 1
    assert [(row.prompt, row.seed, row.path) for row in result.failures] == [("a blue car", 43, None)]
    assert "injected" in result.failures[0].reason.lower()
    with pytest.raises(FileNotFoundError, match="000002 failed"):
        result.failures[0].open()
    monkeypatch.delenv("HALATION_FAULT")
    assert halation.generate(**settings).exit_code == 0
    names = {path.name for path in (tmp_path / "pictures").glob("*.png")}
    assert names == {"000001_seed42.png", "000002_seed43.png", "000003_seed44.png"}


def test_prompts_may_be_texts_or_one_file(tmp_path: Path) -> None:
    settings = {"model_path": "testcard", "height": 32, "width": 32, "progress": "none"}
    texts = ["a red car", "two\nlines"]
    assert halation.generate(prompts=texts, output_dir=tmp_path / "texts", **settings).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "texts" / "metadata.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == texts
    (tmp_path / "prompts.txt").write_text("a red car\na blue car\n")
    assert (
        halation.generate(prompts=str(tmp_path / "prompts.txt"), output_dir=tmp_path / "file", **settings).exit_code
        == 0
    )
    first = "000001_seed42.png"
    assert (tmp_path / "texts" / first).read_bytes() == (tmp_path / "file" / first).read_bytes()
    with pytest.raises(InputError, match=r"no such file: .*missing\.txt"):
        halation.generate(prompts=str(tmp_path / "missing.txt"), output_dir=tmp_path / "never", **settings)
    with pytest.raises(InputError, match=r"--prompts - with --prompts_csv b\.csv"):
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
    assert report["metrics"]["fd"]["value"] == report.value("fd") > 1
    assert json.loads(json.dumps(report)) == report
    with pytest.raises(KeyError, match="they have fd"):
        report.value("fid")
    with pytest.raises(InputError, match=r"halation\.evaluate\(\)"):
        halation.evaluate(folder=str(tmp_path))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("halation", ["RankSampler", "Sample", "distill", "evaluate", "generate", "sample", "train", "watch"]),
        ("halation", ["TrainConfig", "GenerationResult", "Scores", "load_model", "LoadedModel", "ProgressEvent"]),
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
