"""What a run logs when it begins."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from halation.errors import format_count
from halation.logging_setup import ON_CONSOLE, ConsoleWarningHandler, log_to_folder
from halation.training.config import TrainConfig
from halation.training.reporting import count_adapter_layers, describe_parameters
from support.commands import finish, halation, train


def test_a_run_of_adapters_says_what_is_trained_beside_what_there_is() -> None:
    assert describe_parameters(TrainConfig(), 2_800_000, 2_800_000) == "2.8 M parameters"
    words = describe_parameters(TrainConfig(lora_rank=4), 12_300, 2_800_000)
    assert words == "adapters of rank 4 with 0.0123 M of 2.8 M parameters"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (2, "rank", "2 ranks"),
        (1, "micro-batch", "1 micro-batch"),
        (3, "micro-batch", "3 micro-batches"),
        (2, "trajectory", "2 trajectories"),
        (2, "day", "2 days"),
        (2, "class", "2 classes"),
        (1, "class", "1 class"),
    ],
)
def test_a_count_and_its_noun_agree(number: int, noun: str, text: str) -> None:
    assert format_count(number, noun) == text


def test_ordinary_lines_reach_the_console_as_information(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The console shows warnings and chosen lines; the file has all, each at its level."""
    log = logging.getLogger("halation.test")
    with log_to_folder(tmp_path) as console:
        assert isinstance(console, ConsoleWarningHandler)
        log.info("for the file alone")
        log.info("begun", extra=ON_CONSOLE)
        log.warning("look out")
    assert capsys.readouterr().err == "halation: begun\nhalation: look out\n"
    levels = [line.split()[2:4] for line in (tmp_path / "generate.log").read_text().splitlines()]
    assert levels == [["INFO", "for"], ["INFO", "begun"], ["WARNING", "look"]]


@pytest.mark.slow
def test_an_undisturbed_training_logs_no_warning(tmp_path: Path) -> None:
    flags = {"sample": True, "sample_prompts": "A city street at night", "progress": "plain"}
    words = halation(train(tmp_path / "run", nproc=1, **flags))
    assert finish(words, tmp_path / "said") == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert "training tiny on streets: " in said
    assert "1 rank (single, cpu, fp32)" in said
    log = (tmp_path / "run" / "logs" / "train.log").read_text()
    assert re.search(r" INFO \[rank 0\] training tiny on streets: ", log)
    assert " WARNING " not in log
    assert not re.search(r"\b1 (ranks|images|steps|rows|micro-batches)\b", log + said)


def test_layers_with_adapters_are_counted_by_their_names_in_a_block() -> None:
    layers = [f"blocks.{k}.attn1.{layer}" for k in (0, 1) for layer in ("to_q", "to_out.0")]
    names = [f"{layer}.lora_{side}.default.weight" for layer in layers for side in "AB"]
    assert count_adapter_layers([*names, "proj_out.weight"]) == {"to_q": 2, "to_out.0": 2}
