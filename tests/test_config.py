"""Every setting says what it means and what a resumed run may do with it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halation.config import as_json, fixed_settings, setting, to_current_names
from halation.sampling.config import SampleConfig
from halation.training.config import TrainConfig


@pytest.mark.parametrize(("command", "kind"), [("train", TrainConfig), ("sample", SampleConfig)])
def test_every_setting_has_a_sentence_in_the_help(command: str, kind: type) -> None:
    halation = Path(sys.executable).with_name("halation")
    done = subprocess.run(
        [halation, command, "--help"], env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=30
    )
    text = " ".join(done.stdout.replace("│", " ").split())
    for field in dataclasses.fields(kind):
        told = re.search(rf" --{field.name}\W.*?\((default|required)", text)
        assert told, field.name
        assert re.search(r"[a-z]{3}.*\.", told.group()), field.name


def test_settings_of_two_calls_compare_as_json_and_leave_out_what_is_free() -> None:
    first = TrainConfig()
    more = dataclasses.replace(first, n_steps=30_000, nproc=4, ckpt_every=7, sample_prompts=("a",), progress="none")
    other = dataclasses.replace(first, lr=1.0)
    assert fixed_settings(first) == fixed_settings(more)
    assert {name for name in fixed_settings(first) if fixed_settings(first)[name] != fixed_settings(other)[name]} == {
        "lr"
    }
    assert as_json(more)["sample_prompts"] == ["a"]
    assert list(to_current_names(as_json(first))) == [field.name for field in dataclasses.fields(TrainConfig)]


def test_what_decides_weights_or_data_is_never_free() -> None:
    decisive = {
        "data",
        "image_size",
        "model",
        "seed",
        "lr",
        "dtype",
        "batch_size",
        "caption_dropout",
        "num_register_tokens",
        "engine",
    }
    assert decisive <= fixed_settings(TrainConfig()).keys()


def test_a_default_that_could_be_shared_between_configs_is_refused() -> None:
    with pytest.raises(TypeError, match="shared"):
        setting([])
