"""The bundled models are small, complete, found by name and good at their task."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open

import halation
from halation import cli
from halation.config import validate_settings
from halation.data.streets import DRIVING_PROMPTS, caption, scene
from halation.distillation import command as distill
from halation.distillation.config import DistillConfig
from halation.errors import InputError
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.extractors import streets_classifier
from halation.evaluation.metrics.caption_agreement import caption_agreement
from halation.evaluation.model_images import open_model_images
from halation.gallery.generation_runs import shell_command
from halation.generation.config import GenerateConfig
from halation.generation.workers.image_runner import open_model, run_batch
from halation.models import model_folder
from halation.models.checkpoint_loading import find_checkpoint, load_denoiser, weights_digest
from halation.models.model_path_resolver import DEFAULT_STEPS, ModelRef, resolve_model, resolve_pipeline_folder
from halation.runs.run_folder import COMMIT_FILE
from halation.sample_specs import SampleBatch, SampleSpec
from halation.sampling import command as sample
from halation.sampling.config import SampleConfig
from halation.training import command as train
from halation.training.build_components import new_denoiser
from halation.training.config import TrainConfig
from halation.watcher import command as watch
from halation.watcher.config import WatchConfig

Pixels = npt.NDArray[np.uint8]
NAMES = model_folder.bundled_names()
LARGEST_BYTES = 16 * 2**20
FIRST_VALIDATION = 70_000


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def drawn(subject: ModelRef, prompts: Sequence[str]) -> list[Pixels]:
    order = {"model": subject.load_args, "device": "cpu", "threads": 1, "dtype": "fp32", "scheduler": "", "raw": False}
    model = open_model(order | {"cfg_truncation_step": None, "compile": False})
    specs = [
        SampleSpec(
            index=index,
            id=str(index),
            prompt=prompt,
            seed=42 + index,
            height=subject.height,
            width=subject.width,
            steps=subject.steps,
            guidance_scale=subject.guidance_scale,
        )
        for index, prompt in enumerate(prompts)
    ]
    batch = SampleBatch(specs=tuple(specs), num_real=len(specs))
    pieces = run_batch(model, batch, len(specs), range(len(specs)), lambda *_: None)
    images = [image for piece in pieces for image in piece.collect(lambda action: action())]
    return [image[0] for image in images if not isinstance(image, Exception)]


def agreeing(images: Sequence[Pixels], prompts: Sequence[str]) -> float:
    found = streets_classifier.load_network()(torch.from_numpy(np.stack(images)))
    return caption_agreement({name: value.numpy() for name, value in found.items()}, prompts).value


# -- what is there


def test_streets_64_is_there_and_nothing_heavy_is_imported_to_know_it() -> None:
    assert "streets-64" in NAMES
    words = "import sys; from halation.models.model_folder import bundled_names; bundled_names();"
    words += " print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_has_its_card_and_finite_weights_of_at_most_16_mib(name: str) -> None:
    folder = model_folder.bundled_folder(name)
    assert folder is not None
    assert name in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_size <= LARGEST_BYTES
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert all(torch.isfinite(file.get_tensor(key)).all() for key in file.keys())  # noqa: SIM118


def test_a_folder_that_is_put_beside_the_others_is_one_more_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "FOLDER", tmp_path / "all")
    shutil.copytree(Path(model_folder.__file__).with_name("bundled") / "streets-64", tmp_path / "all/another")
    assert model_folder.bundled_names() == ("another",)
    assert resolve_model("another", raw=False).steps == 12


# -- what a name means


@pytest.mark.parametrize("name", NAMES)
def test_a_name_brings_the_settings_the_model_is_made_for(name: str) -> None:
    subject = resolve_model(name, raw=False)
    folder = model_folder.FOLDER / name
    sampling = json.loads((folder / "config.json").read_text())["sampling"]
    assert (subject.name, subject.height, subject.width) == (name, 64, 64)
    assert (subject.steps, subject.guidance_scale) == (sampling["steps"], sampling["guidance_scale"])
    assert subject.load_args["sampler"] == sampling["sampler"]
    assert subject.digest == weights_digest(folder, raw=False)


def test_a_folder_of_that_name_wins(tmp_path: Path) -> None:
    shutil.copytree(model_folder.FOLDER / "streets-64", tmp_path / "streets-64")
    subject = resolve_model("streets-64", raw=False)
    assert (subject.load_args["path"], subject.load_args["embedded"]) == (str(tmp_path / "streets-64"), None)
    assert subject.steps == DEFAULT_STEPS, "the steps of previews say little about somebody's own model"
    assert find_checkpoint(Path("streets-64")).resolve() == tmp_path / "streets-64"


def test_a_file_of_that_name_is_no_model_and_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "streets-64").write_text("")
    assert resolve_model("streets-64", raw=False).load_args["embedded"] == "streets-64"


def test_the_images_it_drew_may_lie_in_a_folder_called_after_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("A rural road\n")
    drawing = {"prompts": "prompts.txt", "output_dir": "streets-64", "height": 8, "width": 8, "progress": "none"}
    assert halation.generate(model_path="testcard", **drawing).exit_code == 0  # the folder is the same whatever draws
    assert {"config.json", "metadata.jsonl"} <= {path.name for path in (tmp_path / "streets-64").iterdir()}
    (tmp_path / "streets-64/checkpoints").mkdir()  # a training leaves this before it has saved
    teacher = distill.resolve_config(DistillConfig(data_path="streets", report_to=("none",), teacher_path="streets-64"))
    scored = EvaluateConfig(model_path="streets-64", prompts="prompts.txt", reference=("streets",))
    for meant in (
        Path(resolve_model("streets-64", raw=False).load_args["path"]),
        Path(open_model_images(scored, "cpu").model_ref.load_args["path"]),
        sample.resolve_checkpoint("streets-64"),
        find_checkpoint(Path("streets-64")),
        find_checkpoint(Path(teacher.teacher_path)),
    ):
        assert meant == model_folder.FOLDER / "streets-64"


@pytest.mark.parametrize("made", ["model_index.json", "COMMIT.json", "checkpoints/step_0000001/COMMIT.json"])
def test_a_folder_that_holds_a_model_of_any_kind_is_meant(tmp_path: Path, made: str) -> None:
    file = tmp_path / "streets-64" / made
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert model_folder.resolve_model_path("streets-64") == Path("streets-64")
    assert model_folder.COMMIT_FILE == COMMIT_FILE


@pytest.mark.parametrize("path", ["./streets-64", "streets-64/"])
def test_with_a_separator_it_is_a_path_for_every_job(path: str) -> None:
    asked = [
        lambda: resolve_model(path, raw=False),
        lambda: sample.run(cli.parse("sample", ["--checkpoint", path])),
        lambda: halation.sample(model_path=path),
        lambda: distill.resolve_config(DistillConfig(teacher_path=path, data_path="streets", report_to=("none",))),
        lambda: new_denoiser(TrainConfig(model=path), None, None),  # type: ignore[arg-type]
    ]
    for ask in asked:
        with pytest.raises(InputError, match=r"(?s)streets-64.*did you mean streets-64, which comes with the package"):
            ask()
    Path("streets-64").mkdir()
    for ask in asked:
        with pytest.raises(InputError, match=r"no complete checkpoint in .*streets-64"):
            ask()


def test_on_a_machine_where_the_package_lies_elsewhere_the_name_finds_it() -> None:
    subject = resolve_model("streets-64", raw=False)
    moved = {**subject.load_args, "path": "/nowhere/streets-64"}
    order = {"model": moved, "device": "cpu", "threads": 1, "dtype": "fp32", "scheduler": "", "raw": False}
    assert open_model(order | {"cfg_truncation_step": None, "compile": False}).facts["scheduler"] == "multistep"


@pytest.mark.parametrize("wrong", ["streets64", "streets_64", "Streets-64", "street-64"])
def test_a_name_that_is_almost_right_gets_the_right_one(wrong: str) -> None:
    asked = [
        lambda: resolve_model(wrong, raw=False),
        lambda: sample.run(SampleConfig(checkpoint=Path(wrong))),
        lambda: distill.resolve_config(DistillConfig(teacher_path=wrong, data_path="streets")),
        lambda: find_checkpoint(Path(wrong)),
        lambda: new_denoiser(TrainConfig(model=wrong), None, None),  # type: ignore[arg-type]
    ]
    for ask in asked:
        with pytest.raises(InputError, match=rf"(?s){wrong}.*did you mean streets-64, which comes with the package\?"):
            ask()


def test_a_name_that_is_like_none_of_them_gets_the_flag_to_look_at() -> None:
    with pytest.raises(InputError, match=r"(?s)no folder nothing.*streets-64.*check --model_path"):
        resolve_model("nothing", raw=False)


def test_weights_that_are_not_there_are_asked_for_in_vain() -> None:
    with pytest.raises(InputError, match=r"(?s)no model_raw\.safetensors.*leave --raw out"):
        weights_digest(find_checkpoint(Path("streets-64")), raw=True)


# -- who takes it


def test_sample_knows_the_model_by_either_flag_and_from_python_and_files() -> None:
    for name in ("checkpoint", "model_path"):
        assert validate_settings(SampleConfig, {name: "streets-64"}, "here")["checkpoint"] == "streets-64"
    with pytest.raises(InputError, match=r"both 'checkpoint' and 'model_path'"):
        halation.sample(checkpoint="streets-64", model_path="streets-64")


def test_distill_takes_it_as_the_teacher_by_either_flag_and_records_the_name() -> None:
    for flag in ("teacher_path", "model_path"):
        config = distill.resolve_config(DistillConfig(data_path="streets", report_to=("none",), **{flag: "streets-64"}))
        assert (config.teacher_path, config.model_path) == ("streets-64", "")
        assert (config.image_size, config.teacher_guidance) == ((64, 64), 1.0)
    assert load_denoiser(Path(config.teacher_path), raw=False).sample_shape(64, 64) == (3, 64, 64)


def test_distill_with_two_teachers_is_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)--model_path a with --teacher_path b.*both name the teacher"):
        distill.resolve_config(DistillConfig(data_path="streets", model_path="a", teacher_path="b"))


def test_to_fine_tune_it_the_other_flag_is_named() -> None:
    with pytest.raises(InputError, match=r"(?s)streets-64 is not a diffusers pipeline.*--model streets-64"):
        resolve_pipeline_folder("streets-64")
    assert train.resolve_config(TrainConfig(model="streets-64")).model == "streets-64"


def test_watch_has_nothing_to_wait_for() -> None:
    with pytest.raises(InputError, match=r"(?s)bundled model.*halation evaluate --model_path streets-64"):
        watch.resolve_config(WatchConfig(run=Path("streets-64")))


def test_the_command_that_draws_a_image_again_names_the_model_and_no_path() -> None:
    settings = GenerateConfig(prompts_csv="x", model_path="streets-64")
    row = {"id": "a", "prompt": "A rural road", "negative_prompt": "", "seed": 1, "width": 64, "height": 64}
    words = shell_command({"settings": vars(settings)}, row | {"steps": 12, "guidance_scale": 1.0}, 0, 0)
    assert "--model_path streets-64 " in words
    assert str(model_folder.FOLDER) not in words


# -- what it draws


def test_the_eight_prompts_give_eight_images_that_show_what_they_say() -> None:
    images = drawn(
        replace(resolve_model("streets-64", raw=False), steps=6), DRIVING_PROMPTS
    )  # half of its own: half the time
    assert len(images) == 8
    for first, second in combinations(images, 2):
        assert np.abs(first.astype(int) - second).mean() > 10
    assert agreeing(images, DRIVING_PROMPTS) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_captions_it_has_never_seen_are_drawn_as_they_say(name: str) -> None:
    captions = [caption(scene("heldout", FIRST_VALIDATION + index)) for index in range(32)]
    assert agreeing(drawn(resolve_model(name, raw=False), captions), captions) >= 0.85


@pytest.mark.slow
def test_the_example_of_the_first_page_is_drawn_as_it_says() -> None:
    prompts = ["A rural road with two cars at night"] * 5
    assert agreeing(drawn(resolve_model("streets-64", raw=False), prompts), prompts) >= 0.9


@pytest.mark.slow
def test_every_job_takes_the_name_and_says_which_words_the_model_does_not_know(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("A rural road\nA highway with a unicorn at night\n")
    unknown = "streets-64 does not know: unicorn (in 1 of 2 prompts)"
    drawing = {"prompts": "prompts.txt", "model_path": "streets-64", "output_dir": "streets-64", "progress": "none"}
    assert halation.generate(**drawing).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "streets-64/metadata.jsonl").read_text().splitlines()]
    assert [(row["steps"], row["guidance_scale"], row["height"]) for row in rows] == [(12, 1.0, 64)] * 2
    record = json.loads((tmp_path / "streets-64/config.json").read_text())
    assert (record["settings"]["model_path"], record["fixed"]["model name"]) == ("streets-64", "streets-64")
    next((tmp_path / "streets-64").glob("*.png")).unlink()
    assert halation.generate(**drawing).exit_code == 0, "the same command goes on in a folder of the model's name"
    assert capfd.readouterr().err.count(unknown) == 2
    prompts = ["A unicorn", "A rural road"]
    halation.sample(model_path="streets-64", prompts=prompts, output_dir="samples", progress="none")
    assert capfd.readouterr().err.count(unknown) == 1
    assert json.loads((tmp_path / "samples/samples.json").read_text())["checkpoint"] == "streets-64"
    report = halation.evaluate(
        model_path="streets-64", prompts="prompts.txt", reference="streets", metrics="agreement", nproc=1
    )
    assert capfd.readouterr().err.count(unknown) == 1
    assert report["generated"]["path"] == "streets-64"
    assert report["generated"]["settings"]["num_inference_steps"] == 12
    short = {"n_steps": 1, "batch_size": 2, "sample": False, "report_to": "none", "progress": "none"}
    assert halation.train(model="streets-64", output_dir="trained", validation_images=2, **short).exit_code == 0
    few = {"data_path": "streets", "max_images": 2, "teacher_states": 2, "teacher_samples": False}
    assert halation.distill(model_path="streets-64", output_dir="distilled", **few, **short).exit_code == 0
    assert json.loads((tmp_path / "distilled/config.json").read_text())["settings"]["teacher_path"] == "streets-64"
