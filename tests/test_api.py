"""What the command line does can be done from Python, on ranks that it starts itself."""

from __future__ import annotations

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
        "heldout_pictures": 4,
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


@pytest.mark.parametrize("settings", [{"lr": "fast"}, {"learning_rate": 1}, {"image_size": "wide"}])
def test_settings_that_mean_nothing_are_input_errors(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"halation\.train\(\)"):
        halation.train(**settings, output_dir=tmp_path / "run")
