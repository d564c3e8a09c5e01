"""Settings that are not given come from the model, or from the folder that was started before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from halation import cli
from halation.distillation import command as distill
from halation.distillation.config import DistillConfig
from halation.errors import InputError
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.model_images import open_model_images
from halation.images.png_codec import read_png
from halation.models.model_path_resolver import resolve_model
from halation.runs import run_folder as runs
from halation.training import command as train
from halation.training.config import TrainConfig
from support import run_readers, tiny_models
from support.commands import finish, generate_log, halation, run_generate

SIZE = ("--height", "16", "--width", "24", "--num_inference_steps", "2", "--guidance_scale", "3")


def cards(folder: Path, *flags: object) -> int:
    """`halation generate` with the test card and no other settings than these."""
    (folder / "prompts.txt").write_text("one\ntwo\nthree\n")
    words = (
        "generate",
        "--prompts",
        folder / "prompts.txt",
        "--model_path",
        "testcard",
        "--output_dir",
        folder / "out",
    )
    (folder / "log").unlink(missing_ok=True)
    return finish(halation([*map(str, (*words, "--nproc", 1, "--progress", "plain", *flags))]), folder / "log")


def drawn_settings(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "out/metadata.jsonl").read_text().splitlines()]
    return [(row["height"], row["width"], row["steps"], row["guidance_scale"]) for row in rows]


def test_settings_that_are_not_given_are_those_the_folder_was_started_with(tmp_path: Path) -> None:
    assert cards(tmp_path, *SIZE, "--num_samples", 1) == 0, generate_log(tmp_path)
    assert cards(tmp_path) == 0, generate_log(tmp_path)
    assert drawn_settings(tmp_path) == [(16, 24, 2, 3.0)] * 3
    assert "16 x 24, 2 steps, guidance 3 (height, width, num_inference_steps, guidance_scale: of this folder)" in (
        generate_log(tmp_path)
    )
    assert cards(tmp_path, "--guidance_scale", 7.5) == 2, "given and different"
    assert "guidance_scale: 3.0 -> 7.5" in generate_log(tmp_path)


def test_processes_that_share_a_folder_take_its_settings(tmp_path: Path) -> None:
    assert cards(tmp_path, *SIZE, "--num_samples", 1, "--cluster", "files") == 0, generate_log(tmp_path)
    assert cards(tmp_path, "--cluster", "files") == 0, generate_log(tmp_path)
    assert drawn_settings(tmp_path) == [(16, 24, 2, 3.0)] * 3


def test_a_first_call_that_drew_nothing_leaves_no_defaults(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "paint:1+:raise", prompts="one\n", height=8) == 1
    assert cards(tmp_path, "--num_samples", 1) == 0, generate_log(tmp_path)
    assert drawn_settings(tmp_path) == [(480, 832, 20, 7.5)], "those of the test card"


@pytest.mark.slow
def test_a_folder_of_the_old_defaults_goes_on_with_the_same_command(tmp_path: Path) -> None:
    """As begun by a version whose defaults were the same for every pipeline."""
    old = {"height": 48, "width": 64, "num_inference_steps": 3, "guidance_scale": 7.5}
    settings = {"model_path": tiny_models.built("pixart"), "nproc": 1, "micro_batch": 1, "prompts": "one\ntwo\n"}
    assert run_generate(tmp_path, num_samples=1, **settings, **old) == 0, generate_log(tmp_path)
    command = [
        "generate", "--prompts", tmp_path / "prompts.txt", "--model_path", settings["model_path"],
        "--output_dir", tmp_path / "out", "--nproc", 1, "--micro_batch", 1, "--batch_size", 4,
    ]  # fmt: skip
    assert finish(halation([*map(str, command)]), tmp_path / "log") == 0, generate_log(tmp_path)
    assert drawn_settings(tmp_path) == [(48, 64, 3, 7.5)] * 2


@pytest.mark.slow
def test_the_defaults_of_a_pipeline_are_drawn_recorded_and_printed(tmp_path: Path) -> None:
    """Those of PixArt's call, and of this model's config: 32 pixels, 20 steps, guidance 4.5."""
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    words = ["generate", "--prompts", tmp_path / "prompts.txt", "--model_path", tiny_models.built("pixart")]
    words += ["--output_dir", tmp_path / "out", "--nproc", 1, "--micro_batch", 1, "--progress", "plain"]
    assert finish(halation([*map(str, words)]), tmp_path / "log") == 0, generate_log(tmp_path)
    fixed = json.loads((tmp_path / "out/config.json").read_bytes())["fixed"]
    assert [fixed[name] for name in ("height", "width", "num_inference_steps", "guidance_scale")] == [32, 32, 20, 4.5]
    assert drawn_settings(tmp_path) == [(32, 32, 20, 4.5)]
    (row,) = run_readers.ledger_rows(tmp_path / "out")
    assert (row["height"], row["width"], row["steps"], row["guidance_scale"]) == (32, 32, 20, 4.5)
    pixels, texts = read_png(tmp_path / "out/000001_seed42.png")
    assert pixels.shape == (32, 32, 3)
    assert json.loads(texts["halation"])["guidance_scale"] == 4.5
    assert "32 x 32, 20 steps, guidance 4.5" in generate_log(tmp_path)
    assert "of PixArtAlphaPipeline" in generate_log(tmp_path)


@pytest.mark.slow
def test_a_guidance_scale_without_effect_is_recorded_as_none(tmp_path: Path) -> None:
    folder = tiny_models.flux(tmp_path / "schnell", guidance_embeds=False)
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    words = ["generate", "--prompts", tmp_path / "prompts.txt", "--model_path", folder, "--height", 32, "--width", 32]
    words += ["--num_inference_steps", 2, "--output_dir", tmp_path / "out", "--nproc", 1, "--micro_batch", 1]
    for _again in range(2):
        assert finish(halation([*map(str, words)]), tmp_path / "log") == 0, generate_log(tmp_path)
        assert drawn_settings(tmp_path) == [(32, 32, 2, None)]
    assert json.loads((tmp_path / "out/config.json").read_bytes())["fixed"]["guidance_scale"] is None
    texts = read_png(tmp_path / "out/000001_seed42.png")[1]
    assert json.loads(texts["halation"])["guidance_scale"] is None
    assert "CFG scale" not in texts["parameters"]
    (tmp_path / "out/000001_seed42.png").unlink()
    assert finish(halation([*map(str, (*words, "--verify"))]), tmp_path / "log") == 0, generate_log(tmp_path)


# -- refused before anything is loaded and before a folder is made


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: object, *flags: object) -> str:
    """What `generate` answers; it must not make its folder."""
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    words = ("generate", "--prompts", tmp_path / "prompts.txt", "--model_path", model, "--output_dir", tmp_path / "out")
    assert cli.main([*map(str, (*words, "--nproc", 1, *flags))]) == 2
    assert not (tmp_path / "out").exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "flags", "words"),
    [
        ("pixart", ("--height", 65), "multiples of 16"),
        ("pixart", ("--height", 65), "the nearest: --height 64, or --height 80"),
        ("pixart", ("--height", 65, "--width", 48), "--height 64 --width 48, or --height 80 --width 48"),
        ("wan", ("--width", 8), "the nearest: --width 16"),
        ("pixart", ("--guidance_scale", 1, "--negative_prompt", "blue"), "would ignore it"),
        ("flux", ("--negative_prompt", "blue"), "true_cfg_scale above 1"),
    ],
)
def test_what_a_pipeline_cannot_draw_or_ignores_is_refused_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, flags: tuple[object, ...], words: str
) -> None:
    assert words in refused(tmp_path, capsys, tiny_models.built(family), *flags)


def test_another_size_than_that_of_a_trained_model_is_refused_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(tmp_path, capsys, "streets-64", "--height", 65)
    assert "--height 65 --width 64 with streets-64" in said
    assert "64 x 64, the only size of this model" in said


def test_a_guidance_scale_that_a_model_ignores_is_refused_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.flux(tmp_path / "schnell", guidance_embeds=False)
    said = refused(tmp_path, capsys, folder, "--guidance_scale", 7.5)
    assert "--guidance_scale 7.5 with FluxPipeline, which would ignore it: guidance_embeds is false" in said
    assert "leave --guidance_scale out; --pipeline_args can set true_cfg_scale" in said


def test_a_pipeline_that_needs_an_image_is_refused_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_models.built("stable_diffusion"), tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionInpaintPipeline"}))
    assert "StableDiffusionInpaintPipeline needs image, mask_image" in refused(tmp_path, capsys, folder)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"patch_size": "x"}, "show no image size"),
        ("transformer/config.json", {"sample_size": [1, 2, 3]}, "show no image size"),
        ("vae/config.json", {"block_out_channels": 7}, "show no image size"),
        ("model_index.json", {"_class_name": "a|b"}, "requires the pipeline 'a|b'"),
        ("model_index.json", {"_class_name": None}, "requires the pipeline None"),
        ("model_index.json", {"_class_name": "NoSuchPipeline"}, "NoSuchPipeline, which diffusers"),
    ],
)
def test_configs_of_other_values_are_refused_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, change: dict[str, Any], words: str
) -> None:
    folder = shutil.copytree(tiny_models.built("pixart"), tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    assert words in refused(tmp_path, capsys, folder)


def test_a_pipeline_whose_configs_show_no_size_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    assert (resolve_model(str(tmp_path), raw=False).height, resolve_model(str(tmp_path), raw=False).steps) == (0, 28)
    with pytest.raises(InputError, match="do not show the size of its images"):
        open_model_images(EvaluateConfig(model_path=str(tmp_path), prompts=str(tmp_path / "prompts.txt")), "cpu")


def test_a_row_that_the_model_cannot_draw_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("prompt,height,guidance_scale\na cat,32,\na dog,33,\n")
    config = EvaluateConfig(model_path=str(tiny_models.built("pixart")), prompts=str(tmp_path / "prompts.csv"))
    with pytest.raises(InputError, match=r"prompts\.csv, line 3, column 1: --height 33 with PixArtAlphaPipeline"):
        open_model_images(config, "cpu")


def test_scoring_draws_with_the_defaults_of_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    config = EvaluateConfig(model_path=str(tiny_models.built("pixart")), prompts=str(tmp_path / "prompts.txt"))
    images = open_model_images(config, "cpu")
    (spec,) = images.specs
    assert (spec.height, spec.width, spec.steps, spec.guidance_scale) == (32, 32, 20, 4.5)
    assert images.facts["settings"]["guidance_scale"] == 4.5


@pytest.mark.parametrize(
    ("settings", "found", "action"),
    [
        ({}, "--image_size 33 33 with this model", "the nearest: --image_size 32 32, or --image_size 36 36"),
        ({"patch_size": 8}, "--image_size 33 33 with this model", "--image_size 32 32, or --image_size 40 40"),
        ({"model": "streets-64"}, "--image_size 33 33 with --model streets-64", "give --image_size 64 64"),
        ({"model_path": "pixart"}, "--image_size 33 33 with pixart", "--image_size 32 32, or --image_size 48 48"),
    ],
)
def test_a_training_size_that_does_not_fit_is_refused_before_a_folder_is_made(
    tmp_path: Path, settings: dict[str, Any], found: str, action: str
) -> None:
    if "model_path" in settings:
        settings = {"model_path": str(tiny_models.built(settings["model_path"]))}
    config = TrainConfig(image_size=(33,), output_dir=tmp_path / "run", report_to=("none",), **settings)
    with pytest.raises(InputError) as caught:
        train.run(config)
    assert found in caught.value.found
    assert action in caught.value.action
    assert not (tmp_path / "run").exists()


def test_a_distillation_size_that_does_not_fit_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    config = DistillConfig(
        teacher_path=str(tiny_models.built("pixart")), data_path=str(tmp_path / "prompts.txt"), image_size=(33, 48),
        output_dir=tmp_path / "run", report_to=("none",),
    )  # fmt: skip
    with pytest.raises(InputError, match="--image_size 33 48 with pixart") as caught:
        distill.run(config)
    assert caught.value.action == "the nearest: --image_size 32 48, or --image_size 48 48"
    assert not (tmp_path / "run").exists()


def test_the_record_of_a_run_decides_over_a_model_that_has_changed_its_defaults(tmp_path: Path) -> None:
    """A record that a first version wrote is the truth, whatever the model says today."""
    assert cards(tmp_path, "--num_samples", 1, *SIZE) == 0, generate_log(tmp_path)
    record = runs.read_record(runs.RunFolder(tmp_path / "out"))
    assert record["settings"]["guidance_scale"] == record["fixed"]["guidance_scale"] == 3.0
    assert cards(tmp_path, "--num_samples", 2) == 0
    after = runs.read_record(runs.RunFolder(tmp_path / "out"))
    assert after["fixed"]["guidance_scale"] == 3.0
    assert after["changes"] == []
