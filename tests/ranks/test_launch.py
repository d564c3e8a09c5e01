"""`halation train` on several ranks, stopped and killed, ends cleanly and resumes exactly."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from halation.distributed import launcher
from halation.errors import InputError
from support import commands, run_readers
from support.commands import finish, fired, halation, last_step, started, train, until

pytestmark = pytest.mark.ranks

SLOWLY = "train.step:1+:sleep=0.15"
"""Long enough for a signal to come in the middle of a run."""


# -- what is refused before anything starts


@pytest.mark.parametrize("gpu_ids", [(99,), (-1,), (0, 0, 99), (98, 99)])
def test_gpus_that_are_not_there_are_refused_with_the_list_of_those_that_are(gpu_ids: tuple[int, ...]) -> None:
    present = launcher.num_gpus()
    with pytest.raises(InputError) as error:
        launcher.select_devices(0, gpu_ids, False)
    assert error.value.found.startswith("no such GPU: ")
    assert ("no GPU (ranks run on the CPU)" if not present else "GPU") in error.value.expected


def test_a_negative_number_of_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="--nproc -2"):
        launcher.select_devices(-2, (), False)


@pytest.mark.gpu
def test_a_gpu_given_twice_or_shared_is_refused() -> None:
    with pytest.raises(InputError, match="duplicate GPU in --gpu_ids 0 0"):
        launcher.select_devices(0, (0, 0), False)
    with pytest.raises(InputError, match="at most one rank per GPU"):
        launcher.select_devices(2, (0,), False)
    assert launcher.select_devices(2, (0,), True) == ("cuda:0", "cuda:0")


def test_ranks_without_gpus_run_on_the_cpu() -> None:
    if launcher.num_gpus() == 0:
        assert launcher.select_devices(3, (), False) == ("cpu",) * 3
        assert launcher.select_devices(0, (), False) == ("cpu",)


def test_the_command_refuses_bad_ids_within_a_second_and_leaves_nothing(tmp_path: Path) -> None:
    began = os.times()
    code = finish(halation([*train(tmp_path / "run", nproc=None), "--gpu_ids", "98,99"]), tmp_path / "log")
    assert code == 2
    ended = os.times()  # the command's own seconds: those of a busy machine are longer
    spent_s = ended.children_user + ended.children_system - began.children_user - began.children_system
    assert spent_s < 1.5, "a second, and the start of the interpreter"
    assert "no such GPU: 98, 99" in (tmp_path / "log").read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_error_of_all_ranks_is_told_once_without_a_traceback(tmp_path: Path) -> None:
    words = halation(train(tmp_path / "run", engine="single", max_restarts=3))
    assert finish(words, tmp_path / "log") == 2
    said = (tmp_path / "log").read_text()
    assert said.count("--engine single with 2 ranks") == 1
    assert "Traceback" not in said
    assert "restarting" not in said
    assert run_readers.leftovers(tmp_path / "run") == []


@pytest.mark.slow
def test_a_start_that_ranks_refuse_leaves_the_run_what_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finish(halation(train(run)), tmp_path / "log") == 0
    before = [(run / name).read_bytes() for name in ("ended.json", "config.json")]
    assert finish(halation(train(run, n_steps=2)), tmp_path / "log") == 2
    assert "but the run is at step 6" in (tmp_path / "log").read_text()
    assert [(run / name).read_bytes() for name in ("ended.json", "config.json")] == before


# -- being asked to stop


@pytest.mark.slow
@pytest.mark.faults
def test_one_ctrl_c_saves_and_the_same_command_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """The other rank has nothing to write and is ready at once: nobody may leave before the first one has committed."""
    run = tmp_path / "run"
    words = halation(train(run, ckpt_every=0))
    with started(words, tmp_path / "log", "train.step:3+:sleep=1;checkpoint.part:1:sleep=6:0") as command:
        until(lambda: last_step(run) >= 2, command=command)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 130
        command.until_gone(5.0)
        assert "asked to stop (signal 2): saved at step" in command.said()
        assert "Traceback" not in command.said()
    assert "checkpoint.part:1:sleep=6:0" in fired(tmp_path / "log")
    [step] = run_readers.valid_checkpoints(run / "checkpoints")
    assert 2 <= step < 6
    assert run_readers.leftovers(run) == []
    assert finish(words, tmp_path / "log") == 0
    assert commands.last_bits(run) == commands.undisturbed_training()


@pytest.mark.faults
@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(halation(train(run)), tmp_path / "log", f"{SLOWLY};checkpoint.part:4+:sleep=60") as command:
        until(lambda: last_step(run) >= 3, command=command)
        command.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert command.process.poll() is None, "it saves"
        began = time.monotonic()
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(10) == 130
        assert time.monotonic() - began < 8.0, "the save would take a minute"
        command.until_gone(5.0)
    assert len(fired(tmp_path / "log")) > 3
    assert list(run_readers.valid_checkpoints(run / "checkpoints")) == [2]


@pytest.mark.slow
def test_a_warning_to_one_rank_alone_stops_all_at_one_step(tmp_path: Path) -> None:
    """SLURM's warning (SIGUSR1) may reach a single process; the launcher must not start it again."""
    run = tmp_path / "run"
    with started(halation(train(run, ckpt_every=0, max_restarts=2)), tmp_path / "log", SLOWLY) as command:
        until(lambda: last_step(run) >= 1, command=command)
        os.kill(command.rank_pids()[1], signal.SIGUSR1)
        assert command.process.wait(30) == 143
        command.until_gone(5.0)
        assert "restarting" not in command.said()
    [folder] = run_readers.valid_checkpoints(run / "checkpoints").values()
    assert json.loads((folder / "state.json").read_text())["position"]["step"] < 6


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGUSR1, 143, marks=pytest.mark.slow),
     pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow),
      pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)  # fmt: skip
def test_one_rank_alone_saves_and_ends_with_the_code_of_its_signal(tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    with started(halation(train(run, nproc=1, ckpt_every=0)), tmp_path / "log", "train.step:2+:sleep=1") as command:
        until(lambda: last_step(run) >= 1, command=command)
        command.process.send_signal(number)
        assert command.process.wait(30) == code
        assert f"asked to stop (signal {number})" in command.said()
    assert len(run_readers.valid_checkpoints(run / "checkpoints")) == 1
    assert run_readers.leftovers(run) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_ranks_are_starting_is_no_failure(tmp_path: Path, number: int, code: int) -> None:
    with started(halation(train(tmp_path / "run", max_restarts=3)), tmp_path / "log") as command:
        until(lambda: len(command.rank_pids()) == 2, command=command)
        time.sleep(0.3)
        command.process.send_signal(number)
        assert command.process.wait(20) == code
        command.until_gone(5.0)
        assert "before all ranks had started" in command.said()
        assert "Traceback" not in command.said()
    assert run_readers.leftovers(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_a_signal_to_a_starting_rank_is_no_failure_and_causes_no_restart(
    tmp_path: Path, number: int, code: int
) -> None:
    """A signal to one rank while it starts is no failure and causes no restart."""
    with started(halation(train(tmp_path / "run", max_restarts=3)), tmp_path / "log") as command:
        until(lambda: len(command.rank_pids()) == 2, command=command)
        os.kill(command.rank_pids()[1], number)
        assert command.process.wait(60) == code, command.said()
        command.until_gone(5.0)
        assert f"rank 1 was asked to stop (signal {number})" in command.said()
        assert "restarting" not in command.said()
        assert "Traceback" not in command.said()
    assert run_readers.leftovers(tmp_path / "run") == []
    assert finish(halation(train(tmp_path / "run")), tmp_path / "log") == 0
    assert commands.last_bits(tmp_path / "run") == commands.undisturbed_training()


# -- being killed


@pytest.mark.slow
@pytest.mark.faults
def test_ranks_die_with_a_killed_parent_and_a_killed_rank_is_started_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = halation(train(run, max_restarts=1, num_workers=1))
    with started(words, tmp_path / "log", "train.step:4+:sleep=20") as command:
        until(lambda: last_step(run) >= 3, command=command)
        assert_refused(tmp_path, words, command)
        assert len(command.alive()) >= 5, "parent, two ranks, a worker each"
        command.process.kill()
        command.until_gone(10.0)
    assert run_readers.valid_checkpoints(run / "checkpoints")
    words = halation(train(run, max_restarts=1))
    fault = "train.step:2:kill:1:once"
    (tmp_path / "fired").unlink(missing_ok=True)
    assert finish(words, tmp_path / "log", fault) == 0
    assert fired(tmp_path / "log") == ["train.step:2:kill:1"]
    said = (tmp_path / "log").read_text()
    assert "rank 1 was killed by signal 9 (SIGKILL)" in said
    assert "restarting from the last checkpoint (1 of 1)" in said
    assert commands.last_bits(run) == commands.undisturbed_training()


def assert_refused(tmp_path: Path, words: list[str], owner: commands.Started) -> None:
    """A second command on the folder does no harm and says who is there."""
    began = time.monotonic()
    assert finish(words, tmp_path / "second") == 2
    assert time.monotonic() - began < 25.0, "it does not wait for the other one"
    assert f"in use by `halation train`, process {owner.process.pid}" in (tmp_path / "second").read_text()
    assert owner.process.poll() is None


@pytest.mark.faults
@pytest.mark.slow
def test_a_rank_that_always_dies_is_started_again_as_often_as_allowed(tmp_path: Path) -> None:
    words = halation(train(tmp_path / "run", max_restarts=1, ckpt_every=0))
    assert finish(words, tmp_path / "log", "train.step:2:kill:1") == 1
    assert fired(tmp_path / "log") == ["train.step:2:kill:1"] * 2
    said = (tmp_path / "log").read_text()
    assert said.count("restarting from") == 1
    assert said.rstrip().splitlines()[-1].startswith("halation: rank 1 was killed by signal 9")
    assert run_readers.leftovers(tmp_path / "run") == []


@pytest.mark.faults
@pytest.mark.slow
def test_an_error_nobody_expected_names_its_rank(tmp_path: Path) -> None:
    assert finish(halation(train(tmp_path / "run")), tmp_path / "log", "train.step:1:raise:1") == 1
    assert fired(tmp_path / "log") == ["train.step:1:raise:1"]
    said = (tmp_path / "log").read_text()
    assert "rank 1 failed:" in said
    assert "InjectedFault: fault injected at train.step" in said
    assert run_readers.leftovers(tmp_path / "run") == []
