"""`halation generate` from a run draws what training draws, at its size and guidance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import halation
from halation.errors import HalationError, InputError
from halation.images.png_codec import read_png
from halation.models.denoiser import FamilyDefaults
from halation.training import command as train
from halation.training.config import TrainConfig

PROMPTS = ("a red car in a city", "a rainy street at night", "three trees")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_config: Callable[..., TrainConfig]) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "run"
    assert train.run(small_config(folder, n_steps=30, lr=1e-3)) == 0
    return folder


def generate(tmp_path: Path, run: Path, name: str = "out", **settings: object) -> Path:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    folder = tmp_path / name
    given = {"num_inference_steps": 3, "progress": "none", "batch_size": 2, **settings}
    assert halation.generate(prompts_csv=prompts, model_path=run, output_dir=folder, **given).exit_code == 0
    return folder


def images(folder: Path) -> list[np.ndarray]:
    return [read_png(path)[0] for path in sorted(folder.glob("*.png")) if path.name != "grid.png"]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    return generate(tmp_path_factory.mktemp("before"), run)


def test_the_images_are_those_that_sample_draws(tmp_path: Path, run: Path, before: Path) -> None:
    drawn = tmp_path / "drawn"
    halation.sample(
        checkpoint=run, output_dir=drawn, prompts=PROMPTS, sample_steps=3, sample_seed=42, batch_size=2, progress="none"
    )
    ours, theirs = images(before), images(drawn)
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(ours[0], ours[1])


def test_size_and_guidance_are_the_runs_own_unless_said(before: Path) -> None:
    row = json.loads((before / "metadata.jsonl").read_text().splitlines()[0])
    assert (row["height"], row["width"]) == (32, 32)
    assert row["guidance_scale"] == FamilyDefaults().guidance_scale


@pytest.mark.parametrize(
    "change",
    [
        {"guidance_scale": 2.5},
        pytest.param({"seed_start": 7}, marks=pytest.mark.slow),
        pytest.param({"num_inference_steps": 4}, marks=pytest.mark.slow),
        pytest.param({"scheduler": "euler"}, marks=pytest.mark.slow),
        pytest.param({"raw": True}, marks=pytest.mark.slow),
        pytest.param({"cfg_truncation_step": 1}, marks=pytest.mark.slow),
        pytest.param({"negative_prompt": "three trees"}, marks=pytest.mark.slow),
    ],
)
def test_each_setting_changes_the_images(tmp_path: Path, run: Path, before: Path, change: dict[str, object]) -> None:
    after = generate(tmp_path, run, "changed", **change)
    assert not np.array_equal(images(before)[0], images(after)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"height": 64}, "the only size of this model"),
        pytest.param({"num_frames": 5}, "this model generates images", marks=pytest.mark.slow),
        ({"scheduler": "unipc"}, "one of euler, heun, multistep"),
        pytest.param({"guidance_scale": 1.0, "cfg_truncation_step": 1}, "no null branch", marks=pytest.mark.slow),
    ],
)
def test_what_the_model_cannot_draw_is_refused_with_what_it_can(
    tmp_path: Path, run: Path, change: dict[str, object], words: str
) -> None:
    with pytest.raises(HalationError, match=words) as caught:
        generate(tmp_path, run, **change)
    assert caught.value.exit_code == InputError.exit_code
