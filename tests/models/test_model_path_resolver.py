"""A folder given as a model: the settings of an export, and hints for a wrong folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import halation
from halation import cli
from halation.distributed.checkpoint.writer import commit_sha256
from halation.errors import InputError
from halation.images.png_codec import read_png
from halation.models.checkpoint_loading import load_denoiser
from halation.models.model_folder import fingerprint
from halation.models.model_path_resolver import (
    resolve_model,
    resolve_pipeline_folder,
)
from halation.runs.run_folder import RunFolder
from halation.sampling import command as sample
from halation.sampling.config import SampleConfig
from halation.training import command as train
from halation.training.config import TrainConfig
from support import tiny_models

WAN = {"_class_name": "WanPipeline"}
SAMPLING = {"sampler": "own", "height": 64, "width": 96, "guidance_scale": 2.5, "prompts": ["cat"], "steps": 2}


def written(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def fine_tuned(run: Path, base: Path) -> Path:
    """A run as far as nobody looks at its weights: its record, and a checkpoint that is whole."""
    written(run / "config.json", {"job": "train", "settings": {"model_path": str(base)}, "fixed": {}, "changes": []})
    step = run / "checkpoints/step_0000002"
    denoiser = {"family": "pipeline", "version": 1, "path": str(base)}
    state = written(step / "state.json", {"denoiser": denoiser, "sampling": SAMPLING})
    sums = {"state.json": hashlib.sha256(state.read_bytes()).hexdigest()}
    commit = {"format": 1, "step": 2, "kind": "full", "sha256": sums}
    written(step / "COMMIT.json", commit | {"seal": commit_sha256(commit)})
    return step


def test_an_export_brings_the_size_and_guidance_of_its_run(tmp_path: Path) -> None:
    written(tmp_path / "model_index.json", WAN)
    plain = resolve_model(str(tmp_path), raw=False)
    assert (plain.height, plain.width, plain.guidance_scale, plain.steps) == (480, 832, 5.0, 50), "of its call"
    before = fingerprint(tmp_path)
    written(tmp_path / "halation.json", {"step": 2, "sampling": SAMPLING})
    subject = resolve_model(str(tmp_path), raw=False)
    assert (subject.height, subject.width, subject.guidance_scale) == (64, 96, 2.5)
    assert fingerprint(tmp_path) == before, "it is no part of the model"


def test_the_guidance_of_a_run_is_no_default_where_the_model_ignores_it(tmp_path: Path) -> None:
    written(tmp_path / "model_index.json", {"_class_name": "FluxPipeline"})
    written(tmp_path / "halation.json", {"step": 2, "sampling": SAMPLING})
    for embeds, expected in ((True, 2.5), (False, None)):
        written(tmp_path / "transformer/config.json", {"guidance_embeds": embeds})
        assert resolve_model(str(tmp_path), raw=False).guidance_scale == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"sampling": {"height": 64}}', '{"sampling": {"height": "tall"}}'])
def test_a_damaged_note_in_an_export_is_refused(tmp_path: Path, content: str) -> None:
    written(tmp_path / "model_index.json", WAN)
    (tmp_path / "halation.json").write_text(content)
    with pytest.raises(InputError, match=r"halation\.json(:| cannot be read)"):
        resolve_model(str(tmp_path), raw=False)


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_0000002"])
def test_a_run_given_as_a_pipeline_is_answered_with_its_export(tmp_path: Path, inside: str) -> None:
    fine_tuned(tmp_path / "run", tmp_path / "base")
    for flag in ("model_path", "model"):
        with pytest.raises(InputError, match="fine-tuned a pipeline") as caught:
            train.resolve_config(TrainConfig(**{flag: str(tmp_path / "run" / inside)}))
        assert f"--model_path {tmp_path / 'run/export'}, which is written when" in caught.value.action
    written(tmp_path / "run/export/model_index.json", {})
    with pytest.raises(InputError) as caught:
        resolve_pipeline_folder(str(tmp_path / "run" / inside))
    assert caught.value.action == f"give --model_path {tmp_path / 'run/export'}"


def test_a_pipeline_given_as_a_dit_is_answered_with_the_right_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "tiny/model_index.json", {})
    with pytest.raises(InputError, match="is a diffusers pipeline") as caught:
        train.resolve_config(TrainConfig(model=str(tmp_path / "tiny")))
    assert f"--model_path {tmp_path / 'tiny'}" in caught.value.action
    monkeypatch.chdir(tmp_path)
    assert train.resolve_config(TrainConfig(model="tiny")).model == "tiny", "a size, whatever lies here"


def test_a_run_without_its_base_is_refused_early_and_names_its_export(tmp_path: Path) -> None:
    """A run whose base model is gone is refused before anything starts and names its export."""
    step = fine_tuned(tmp_path / "run", tmp_path / "base")
    for ask in (
        lambda: resolve_model(str(tmp_path / "run"), raw=False),
        lambda: sample.run(SampleConfig(checkpoint=step, output_dir=tmp_path / "out", nproc=1)),
    ):
        with pytest.raises(InputError, match="was fine-tuned from") as caught:
            ask()
        assert f"fine-tuned from {tmp_path / 'base'}, which no longer exists" in caught.value.found
        assert "export" not in caught.value.action
    written(tmp_path / "run/export/model_index.json", {})
    with pytest.raises(InputError) as caught:
        resolve_model(str(step), raw=False)
    assert f"`halation generate --model_path {tmp_path / 'run/export'}`" in caught.value.action


@pytest.mark.parametrize(
    ("recorded", "asked", "words"),
    [
        ("/models/a", "", "no --model_path, but"),
        ("/models/a", "/models/b", "/models/b is another model than /models/a"),
        ("/models/a", "/models/a", "the files in /models/a have changed"),
        ("", "/models/a", "trains a DiT of Halation"),
    ],
)
def test_going_on_with_another_base_is_told_by_names(tmp_path: Path, recorded: str, asked: str, words: str) -> None:
    fine_tuned(tmp_path, Path("base"))
    record = {"job": "train", "settings": {"model_path": recorded}, "fixed": {}, "changes": []}
    if recorded:
        record["fixed"] = {"model of --model_path": "aa"}
    written(tmp_path / "config.json", record)
    config = TrainConfig(output_dir=tmp_path, model_path=asked)
    with pytest.raises(InputError) as caught:
        train.check_same_base_model(config, RunFolder(tmp_path), "bb" if asked else "")
    assert words in caught.value.found
    if asked and recorded:
        train.check_same_base_model(config, RunFolder(tmp_path), "aa")  # moved, but the same


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hunyuan", "sd3"])
def test_training_run_and_export_draw_the_same_and_a_changed_base_is_named(
    tmp_path: Path, small_config: Callable[..., TrainConfig], family: str
) -> None:
    """Training, the run and its export draw the same images; a changed base is named."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(tiny_models.built(family), base)
    own = {"model": TrainConfig.model, "patch_size": 0, "max_images": 4, "n_steps": 1, "lr": 2e-3, "nproc": 1}
    config = small_config(run, model_path=str(base), guidance_scale=3.0, image_size=(64, 64), sample_seed=7, **own)
    assert train.run(config) == 0
    drawn = {}
    for name, model in (("from_run", run), ("from_export", run / "export")):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("\n".join(config.sample_prompts) + "\n")
        halation.generate(
            prompts_csv=prompts, model_path=model, output_dir=tmp_path / name, num_inference_steps=2, batch_size=1,
            seed_start=7, progress="none",
        )  # fmt: skip
        drawn[name] = [read_png(path)[0] for path in sorted((tmp_path / name).glob("*.png"))]
    samples = [read_png(path)[0] for path in sorted((run / "samples/step_0000001").glob("sample_*.png"))]
    assert len(samples) == 2
    for images in drawn.values():
        np.testing.assert_array_equal(np.stack(images), np.stack(samples))

    with pytest.raises(InputError, match="no --model_path, but"):
        train.run(dataclasses.replace(config, model_path="", n_steps=2, image_size=(32, 32)))
    shutil.copy(tiny_models.built(family) / "model_index.json", base / "transformer/more.json")
    with pytest.raises(InputError, match=r"was fine-tuned from .* is not the one this run was trained from") as caught:
        load_denoiser(run, raw=False)
    assert f"--model_path {run / 'export'}" in caught.value.action


def test_a_pipeline_whose_configs_name_no_size_is_drawn_as_large_as_its_call_draws(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    assert train.native_size(tmp_path) == (480, 832)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(InputError, match="cannot find the native image size"):
        train.native_size(tmp_path)


def test_a_model_with_links_that_lead_back_has_a_digest(tmp_path: Path) -> None:
    written(tmp_path / "model_index.json", WAN)
    before = fingerprint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(".")
    assert resolve_model(str(tmp_path), raw=False).digest == before


@pytest.mark.parametrize("steps", ["x", [1], 1e308, float("inf"), float("nan"), -3, 10**9])
def test_a_student_of_absurd_steps_is_refused(tmp_path: Path, steps: object) -> None:
    written(tmp_path / "model_index.json", WAN)
    written(tmp_path / "halation.json", {"sampling": SAMPLING | {"distilled": {"steps": steps}}})
    with pytest.raises(InputError, match=r"halation\.json: distilled: steps is "):
        resolve_model(str(tmp_path), raw=False)


@pytest.mark.parametrize(
    ("content", "found"), [(b"\xff\xfe", "is not text"), (b"step_0000002\n" * 1000, "the limit is 4096 bytes")]
)
def test_a_name_of_the_latest_checkpoint_that_is_none_is_refused(
    tmp_path: Path, content: bytes, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latest").write_bytes(content)
    assert cli.main(["sample", "--checkpoint", str(tmp_path / "latest"), "--prompts", "a car"]) == 2
    assert found in capsys.readouterr().err
