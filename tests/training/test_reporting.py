"""What a run logs when it begins, and the numbers that it writes with its steps."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from halation.distributed.world import World
from halation.errors import format_count
from halation.gallery.training_runs import TrainingRun
from halation.logging_setup import ON_CONSOLE, ConsoleWarningHandler, log_to_folder
from halation.progress import StepProgress
from halation.runs.run_folder import MetricsFile
from halation.training.config import TrainConfig
from halation.training.loop import StepReport
from halation.training.reporting import MAX_PEAK_MEASUREMENTS, StepLogger, count_adapter_layers, describe_parameters
from support.commands import HALATION, finish, halation, started, train, until


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


# -- steps


def write_step(logger: StepLogger, step: int, images_per_s: float, *, is_saved: bool = False) -> None:
    report = StepReport(
        step=step, loss=1.0, grad_norm=1.0, lr=1e-4, data_s=0.0, skipped=False, stop_signal=0, save_failed=False
    )
    logger.write(report, images_per_s, 1.0, step, is_saved)


def logger_of(folder: Path, peaks: list[float], log_every: int = 1) -> StepLogger:
    """A logger of a model of 1 FLOP an image; `peaks` are the matrix rates in the order of their measurement."""
    device = torch.device("cpu")
    return StepLogger(
        world=World(rank=0, size=1, local_rank=0, device=device, store=HashStore(), control=None, timeout_s=60.0),
        config=TrainConfig(n_steps=1000, log_every=log_every),
        progress=StepProgress("none", 1000, 0),
        metrics=MetricsFile(folder / "metrics.jsonl"),
        trackers=(),
        flops_per_image=1.0,
        peak_flops=peaks.pop(0),
        measure_peak_flops=lambda: peaks.pop(0),
        peak_memory_gib=lambda: 0.0,
        num_train=100,
        start_time=0.0,
    )


def test_a_rate_measured_on_a_busy_machine_is_measured_again(tmp_path: Path) -> None:
    """A training step is three forward passes; at 100 images/s it makes 300 FLOP/s."""
    logger = logger_of(tmp_path, [120.0, 150.0, 600.0, 0.0])
    for step in range(1, 5):
        write_step(logger, step, 100.0)
    assert [row["mfu"] for row in logger.metrics.read_rows()] == [None, 0.5, 0.5, 0.5]


def test_a_share_above_one_is_not_written_and_not_measured_for_ever(tmp_path: Path) -> None:
    logger = logger_of(tmp_path, [120.0] * MAX_PEAK_MEASUREMENTS)
    for step in range(1, 20):
        write_step(logger, step, 100.0)
    assert {row["mfu"] for row in logger.metrics.read_rows()} == {None}


def test_a_saved_step_has_a_row_between_the_regular_ones(tmp_path: Path) -> None:
    logger = logger_of(tmp_path, [1000.0], log_every=10)
    for step in range(1, 25):
        write_step(logger, step, 100.0, is_saved=step == 17)
    assert [row["step"] for row in logger.metrics.read_rows()] == [1, 10, 17, 20]


@pytest.mark.slow
def test_a_stopped_training_tells_one_step_one_time_and_shares_below_one(tmp_path: Path) -> None:
    """A real run with rare rows is stopped where no row is due."""
    folder = tmp_path / "run"
    words = train(folder, nproc=1, n_steps=100_000, ckpt_every=0, log_every=5, validation_images=0)
    with started([HALATION, *words], tmp_path / "log") as command:
        metrics = folder / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 4, command=command)
        command.process.send_signal(signal.SIGTERM)
        command.process.wait(60)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    run = TrainingRun(folder, "0")
    run.refresh()
    summary = run.summary()
    assert f"saved at step {rows[-1]['step']};" in summary["reason"]
    assert summary["done"] == rows[-1]["step"]
    shares = [row["mfu"] for row in rows if row["mfu"] is not None]
    assert shares, "a rate was measured"
    assert all(0 < share <= 1 for share in shares)
    ended = json.loads((folder / "ended.json").read_text())
    assert summary["seconds"] == ended["time_s"] == ended["seconds"] > rows[-1]["time_s"]
