"""Control requests act on all ranks at one step, and requested samples change no training."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from halation.errors import Interrupted
from halation.runs import control_requests
from halation.tools import ctl
from halation.tools.config import CtlConfig
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import rank_functions, run_readers
from support.rank_pool import RankPool

pytestmark = pytest.mark.ranks

Asked = Mapping[int, tuple[str, ...]]


class Asking(TrainingSession):
    """A training that is asked for something after each of the given steps, by its first rank's own hand."""

    asked: Asked = {}

    def _log(self, report: Any, *arguments: Any) -> None:
        super()._log(report, *arguments)
        for action in self.asked.get(report.step, ()) if self.world.is_rank_zero else ():
            control_requests.send_request(self.config.output_dir, action)


def train_asked(world: Any, config: TrainConfig, asked: Asked) -> tuple[int, str, int]:
    """Step, last words and exit code of a training that is asked."""
    with job.open_run_on_rank_zero(config, world), Asking(world, config) as session:
        session.prepare()
        session.asked = asked
        session.inbox.poll_interval_s = 0.0
        try:
            session.run()
        except Interrupted as interruption:
            return session.train_state.step, str(interruption), interruption.exit_code
        return session.train_state.step, "", 0


def answers(folder: Path) -> list[tuple[str, int, str]]:
    rows = [json.loads(line) for line in (folder / control_requests.RESPONSES_FILE).read_text().splitlines()]
    return [(row["action"], row["step"], row.get("refused", "")) for row in rows]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


def drawn_steps(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step_")) for path in (folder / "samples").glob("step_*/grid.png"))


def visible(folder: Path, step: int, size: int) -> tuple[Any, ...]:
    """Weights, optimizer, EMA and position, losses, validation losses and every rank's random state, as files say."""
    place = folder / f"checkpoints/step_{step:07d}"
    random = [json.loads((place / f"rank_state_{rank}.json").read_text()) for rank in range(size)]
    return (
        run_readers.checkpoint_bytes(folder, step),
        run_readers.losses(folder),
        run_readers.validation_losses(folder),
        random,
    )


@pytest.mark.parametrize(("engine", "size"), [("ddp", 2), pytest.param("fsdp", 3, marks=pytest.mark.slow)])
def test_samples_and_saves_that_were_asked_for_are_invisible_to_training(
    ranks: RankPool, tmp_path: Path, engine: str, size: int
) -> None:
    settings = {"engine": engine, "n_steps": 5, "lr": 2e-2, "ema_decay": 0.5, "sample_raw": True}
    asked, never = tmp_path / "asked", tmp_path / "never"
    ends = ranks.run(
        size, train_asked, rank_functions.small_config(asked, **settings), {1: ("sample",), 2: ("save", "sample")}
    )
    assert ends == [(5, "", 0)] * size
    ranks.run(size, rank_functions.train, rank_functions.small_config(never, **settings))
    assert answers(asked) == [("sample", 2, ""), ("sample", 3, ""), ("save", 3, "")]
    assert drawn_steps(asked) == [2, 3, 5]
    assert drawn_steps(never) == [5]
    images = [run_readers.sample_files(asked / f"samples/step_{step:07d}") for step in (2, 3, 5)]
    assert len(images[0]) == len(images[2])
    assert images[0] != images[1] != images[2], "weights of that step"
    assert images[2] == run_readers.sample_files(never / "samples/step_0000005")
    assert visible(asked, 5, size) == visible(never, 5, size)
    assert saved_steps(asked) == [5], "the one that was asked for makes way, as others of its kind"
    assert not (asked / control_requests.CONTROL_FOLDER).exists()


def test_all_ranks_stop_at_the_step_at_which_one_of_them_was_asked(ranks: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = rank_functions.small_config(run, n_steps=5)
    words = "asked to stop by `halation ctl`: saved at step 3; run the same command to resume"
    assert ranks.run(3, train_asked, config, {2: ("stop", "sample")}) == [(3, words, 130)] * 3
    assert answers(run) == [("sample", 3, ""), ("stop", 3, "")]
    assert saved_steps(run) == drawn_steps(run) == [3], "the stop comes last"
    assert "stop, requested by `halation ctl`, is accepted at step 3" in run_readers.rank_log(run, 0)
    assert not (run / control_requests.CONTROL_FOLDER).exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_bits_of_one_that_never_was(ranks: RankPool, tmp_path: Path) -> None:
    run, never = tmp_path / "run", tmp_path / "never"
    config = rank_functions.small_config(run, n_steps=5)
    assert ranks.run(3, train_asked, config, {2: ("stop",)})[0][2] == 130
    ranks.run(3, rank_functions.train, config)
    ranks.run(3, rank_functions.train, rank_functions.small_config(never, n_steps=5))
    assert run_readers.checkpoint_bytes(run, 5) == run_readers.checkpoint_bytes(never, 5)
    assert run_readers.losses(run) == run_readers.losses(never)


@pytest.mark.slow
def test_a_stop_at_a_scheduled_step_saves_and_leaves_samples_to_the_next_start(ranks: RankPool, tmp_path: Path) -> None:
    """A stop at a scheduled step saves as scheduled and leaves the samples to the next start."""
    config = rank_functions.small_config(tmp_path, n_steps=5, ckpt_every=2)
    assert ranks.run(1, train_asked, config, {1: ("stop",)})[0][2] == 130
    assert saved_steps(tmp_path) == [2]
    assert json.loads((tmp_path / "checkpoints/step_0000002/COMMIT.json").read_text())["kind"] == "kept"
    assert drawn_steps(tmp_path) == []
    ranks.run(1, rank_functions.train, config)
    assert drawn_steps(tmp_path) == [2, 4, 5]


def test_requests_to_a_dead_run_or_at_the_last_step_are_dropped(ranks: RankPool, tmp_path: Path) -> None:
    """Requests to a dead run or at the last step are dropped; without samples none are drawn."""
    (tmp_path / control_requests.CONTROL_FOLDER).mkdir()
    dead = {"pid": 1, "host": socket.gethostname(), "command": "train", "since": "2020-01-01 00:00:00"}
    left = {"action": "stop", "id": "0", "by": "`halation ctl`", "owner": dead}
    (tmp_path / control_requests.CONTROL_FOLDER / "stop-0.json").write_text(json.dumps(left))
    (tmp_path / control_requests.CONTROL_FOLDER / "save-1.json").write_text("{")
    config = rank_functions.small_config(tmp_path, n_steps=4, sample=False)
    asked = {1: ("sample",), 3: ("save", "stop"), 4: ("sample",)}
    assert ranks.run(2, train_asked, config, asked) == [(4, "", 0)] * 2
    none, last, over = (
        "this run draws no samples (--sample False, or no prompts)",
        "the run ends with this step, which is saved anyway",
        "the run has ended",
    )
    assert answers(tmp_path) == [("sample", 2, none), ("save", 4, last), ("stop", 4, last), ("sample", 4, over)]
    log = run_readers.rank_log(tmp_path, 0)
    assert "dropped stop-0.json: it was not sent to this start of the run" in log
    assert "dropped save-1.json" in log
    assert f"sample, requested by `halation ctl`, is not done at step 2: {none}" in log
    assert not (tmp_path / control_requests.CONTROL_FOLDER).exists()
    assert not (tmp_path / "samples").exists()


@pytest.mark.slow
@pytest.mark.parametrize("names", ["rank", "gpu"])
def test_samples_that_were_asked_for_leave_those_of_the_epoch_alone(
    ranks: RankPool, tmp_path: Path, names: str
) -> None:
    shared = {"n_steps": 4, "ckpt_every": 2, "sample_names": names, "validation_images": 0}
    asked, never = tmp_path / "asked", tmp_path / "never"
    ranks.run(2, train_asked, rank_functions.small_config(asked, **shared), {2: ("sample",)})
    ranks.run(2, rank_functions.train, rank_functions.small_config(never, **shared))
    mine = asked / "samples/step_0000003"
    name = "gpu_1_sample.png" if names == "gpu" else "sample_01.png"
    assert (mine / name).exists()
    assert json.loads((mine / "samples.json").read_text())["step"] == 3

    def others(run: Path) -> dict[str, bytes]:
        paths = [path for path in (run / "samples").rglob("*") if path.suffix in (".png", ".txt")]
        return {str(path.relative_to(run)): path.read_bytes() for path in paths if path.parent.name != mine.name}

    assert others(asked) == others(never)


@pytest.mark.slow
def test_a_start_from_an_earlier_step_forgets_samples_that_were_asked_for_after_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = rank_functions.small_config(tmp_path, n_steps=6)
    ranks.run(1, train_asked, config, {1: ("save",), 2: ("sample",), 3: ("stop",)})
    assert drawn_steps(tmp_path) == [3]
    (tmp_path / "checkpoints/step_0000004").rename(tmp_path / "elsewhere")
    ranks.run(1, rank_functions.train, config)
    assert drawn_steps(tmp_path) == [6]


@pytest.fixture
def running(ranks: RankPool, tmp_path: Path) -> Callable[[int], tuple[Path, threading.Thread, list[Any]]]:
    """A real training on ranks of the pool that takes steps until it is told to stop."""

    def start(size: int) -> tuple[Path, threading.Thread, list[Any]]:
        config = rank_functions.small_config(tmp_path / "run", n_steps=100_000, validation_images=0, sample_steps=1)
        ends: list[Any] = []
        thread = threading.Thread(target=lambda: ends.extend(ranks.run(size, train_asked, config, {})))
        thread.start()
        while not (config.output_dir / "metrics.jsonl").exists() and thread.is_alive():
            threading.Event().wait(0.02)
        return config.output_dir, thread, ends

    return start


def test_a_person_samples_saves_and_stops_a_training_while_it_takes_its_steps(
    running: Callable[[int], tuple[Path, threading.Thread, list[Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, thread, ends = running(2)
    told = []
    for action in ("sample", "save", "stop"):
        assert ctl.run(CtlConfig(run=folder, action=action)) == 0  # type: ignore[arg-type]
        asked, taken = capsys.readouterr().out.splitlines()
        assert asked == f"asked {folder} to {action} at its next step"
        told.append(int(taken.removeprefix("accepted at step ")))
    thread.join()
    assert told == sorted(set(told))
    assert answers(folder) == [("sample", told[0], ""), ("save", told[1], ""), ("stop", told[2], "")]
    assert {(step, code) for step, _, code in ends} == {(told[2], 130)}
    assert drawn_steps(folder) == [told[0]]
    assert told[2] in saved_steps(folder)
    assert not (folder / control_requests.CONTROL_FOLDER).exists()
    assert not (folder / ".owner.json").exists()
