"""A few-step student is sampled with its own steps by default; other steps give a warning."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halation
from halation.distillation import command as distill
from halation.distillation.config import DistillConfig
from halation.distributed.checkpoint.writer import commit_sha256
from halation.errors import InputError
from halation.evaluation.config import EvaluateConfig
from halation.evaluation.model_images import open_model_images
from halation.generation.config import GenerateConfig
from halation.generation.session import resolve_config
from halation.generation.workers.local_pool import WorkerSlot
from halation.images.png_codec import read_png
from halation.models.model_path_resolver import resolve_model
from halation.sampling import command as sample
from halation.sampling.config import SampleConfig
from support import tiny_models

SAMPLING: dict[str, Any] = {
    **{"sampler": "own", "height": 32, "width": 32, "guidance_scale": 1.0, "prompts": ["cat"], "steps": 4, "seed": 0},
    **{"same_seed": False, "sheet_size": 1, "dtype": "fp32", "distilled": {"objective": "trajectory", "steps": 4}},
}
PROMPTS = ("a red cat", "two dogs")


def written(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def student(tmp_path: Path, kind: str, sampling: dict[str, Any] = SAMPLING) -> Path:
    """An export or a checkpoint as far as nobody looks at its weights."""
    written(tmp_path / "base/model_index.json", {"_class_name": "WanPipeline"})
    if kind == "export":
        written(tmp_path / "base/halation.json", {"step": 2, "sampling": sampling})
        return tmp_path / "base"
    denoiser = {"family": "pipeline", "version": 1, "path": str(tmp_path / "base")}
    state = written(tmp_path / "step_0000002/state.json", {"denoiser": denoiser, "sampling": sampling})
    sums = {"state.json": hashlib.sha256(state.read_bytes()).hexdigest()}
    commit = {"format": 1, "step": 2, "kind": "full", "sha256": sums}
    written(tmp_path / "step_0000002/COMMIT.json", commit | {"seal": commit_sha256(commit)})
    return tmp_path / "step_0000002"


def steps_of(folder: Path, asked: int | None) -> int | None:
    config = GenerateConfig(model_path=str(folder), num_inference_steps=asked)
    places = [WorkerSlot(label="0", device="cpu")]
    return resolve_config(config, resolve_model(str(folder), raw=False), places, {}).num_inference_steps


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_the_steps_of_a_student_are_the_default_of_generating_scoring_and_sampling(tmp_path: Path, kind: str) -> None:
    folder = student(tmp_path, kind)
    assert (steps_of(folder, None), steps_of(folder, 9)) == (4, 9)
    subject = resolve_model(str(folder), raw=False)
    assert subject.guidance_scale == 1.0
    assert list(subject.warnings(4, 1.0, ())) == list(subject.warnings(None, None, ())) == []
    steps, guidance = subject.warnings(9, 3.0, ())
    assert "--num_inference_steps: 9 steps, but the model was distilled (trajectory) for 4" in steps
    assert "--guidance_scale 3, but the model was distilled for 1" in guidance
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    for asked, steps in ((None, 4), (9, 9)):
        scored = EvaluateConfig(
            model_path=str(folder), prompts=str(tmp_path / "prompts.txt"), num_inference_steps=asked
        )
        assert {spec.steps for spec in open_model_images(scored, "cpu").specs} == {steps}
    assert sample._merge_settings(SampleConfig(checkpoint=folder), SAMPLING)["steps"] == 4
    assert sample._merge_settings(SampleConfig(checkpoint=folder, sample_steps=9), SAMPLING)["steps"] == 9


@pytest.mark.parametrize("distilled", [None, {"objective": "velocity"}])
def test_models_that_learned_no_number_of_steps_are_drawn_in_the_usual_ones(
    tmp_path: Path, distilled: dict[str, Any] | None
) -> None:
    folder = student(tmp_path, "export", {**SAMPLING, "distilled": distilled})
    assert (steps_of(folder, None), steps_of(folder, 9)) == (50, 9)
    assert list(resolve_model(str(folder), raw=False).warnings(9, None, ())) == []


@pytest.mark.parametrize("distilled", [3, {"steps": "few"}])
def test_a_note_of_steps_that_is_none_is_refused(tmp_path: Path, distilled: Any) -> None:
    with pytest.raises(InputError, match=r"halation\.json(:| cannot be read)"):
        resolve_model(str(student(tmp_path, "export", {**SAMPLING, "distilled": distilled})), raw=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["wan", "hunyuan", "flux"])
def test_a_distilled_run_its_samples_and_its_export_draw_the_same_by_default(
    tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A distilled run, its samples and its export draw the same images with default settings."""
    run, prompts = tmp_path / "run", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    shape = written(tmp_path / "student.json", {"depth": 2, "width": None})
    config = DistillConfig(
        **{"output_dir": run, "teacher_path": str(tiny_models.built(family)), "student_config": str(shape)},
        **{"data_path": str(prompts), "objective": "trajectory", "student_steps": 2, "teacher_steps": 4},
        **{"teacher_states": 2, "image_size": (32, 32), "n_steps": 1, "batch_size": 1, "sample_prompts": PROMPTS},
        **{"sample_batch_size": 1, "sample_seed": 7, "nproc": 1, "progress": "none", "report_to": ()},
    )  # fmt: skip
    assert distill.run(config) == 0
    samples = [read_png(path)[0] for path in sorted((run / "samples/step_0000001").glob("sample_*.png"))]
    assert len(samples) == 2
    given = {"seed_start": 7, "batch_size": 1, "progress": "none"}
    for name, model in (("from_run", run), ("from_export", run / "export")):
        assert (
            halation.generate(prompts_csv=prompts, model_path=model, output_dir=tmp_path / name, **given).exit_code == 0
        )
        rows = [json.loads(line) for line in (tmp_path / name / "metadata.jsonl").read_text().splitlines()]
        assert {row["steps"] for row in rows} == {2}
        drawn = [read_png(path)[0] for path in sorted((tmp_path / name).glob("*.png"))]
        np.testing.assert_array_equal(np.stack(drawn), np.stack(samples))
    halation.sample(checkpoint=run, output_dir=tmp_path / "again", progress="none")
    again = [read_png(path)[0] for path in sorted((tmp_path / "again").glob("sample_*.png"))]
    np.testing.assert_array_equal(np.stack(again), np.stack(samples))
    capfd.readouterr()
    halation.sample(checkpoint=run, output_dir=tmp_path / "more", sample_steps=3, progress="none")
    assert "3 steps, but the model was distilled (trajectory) for 2" in capfd.readouterr().err
    other = {**given, "num_inference_steps": 3}
    assert (
        halation.generate(
            prompts_csv=prompts, model_path=run / "export", output_dir=tmp_path / "other", **other
        ).exit_code
        == 0
    )
    assert "distilled (trajectory) for 2" in (tmp_path / "other/logs/generate.log").read_text()
