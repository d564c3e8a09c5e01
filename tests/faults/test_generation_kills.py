"""After any kill, stop or interrupt the same command ends in the same folder."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from support import run_readers
from support.commands import (
    Started,
    assert_generated,
    assert_resumed,
    fired,
    generate,
    generate_log,
    run_generate,
    started,
    until,
    worker_pids,
)

pytestmark = pytest.mark.faults

MANY = "".join(f"prompt number {number}\n" for number in range(240))
SUPERVISOR = {"RANK": "9"}
"""Workers get numbers of their own, so that a fault can be meant for the supervisor alone."""


def num_painted(folder: Path) -> int:
    """Number of batches begun in all calls: each passes this point once, and a short sleep logs it."""
    return sum(line.startswith("paint:") for line in fired(folder / "log"))


def kill_at_random(folder: Path, seed: int, num_kills: int) -> tuple[int, int, int]:
    """Kill one worker, all, or the parent; return the killed workers and parents and the starts.

    The number of workers is drawn anew at each start. A killed parent ends its workers, which count as killed.
    """
    generator = random.Random(seed)
    killed_workers = killed_parents = starts = 0
    while killed_workers + killed_parents < num_kills:
        nproc = generator.randint(1, 4)
        words = generate(folder, MANY, nproc=nproc, model_path="testcard:0.05")
        with started(words, folder / "log", "paint:1+:sleep=0.001") as command:
            starts += 1
            done = run_readers.num_done(folder / "out")
            until(lambda done=done: run_readers.num_done(folder / "out") > done or command.process.poll() is not None)
            for _ in range(generator.randint(1, 4)):
                time.sleep(generator.uniform(0.0, 0.25))
                if command.process.poll() is not None:
                    break
                victims = worker_pids(command)
                whom = generator.choice(("one", "one", "one", "all", "parent"))
                if whom == "parent":
                    command.process.kill()
                    killed_parents += 1
                    killed_workers += len(victims)
                    command.until_gone(10)
                    break
                for pid in victims if whom == "all" else generator.sample(victims, min(1, len(victims))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed_workers += 1
            else:
                command.kill_all()
                killed_parents += 1
                killed_workers += nproc
        assert list(run_readers.damaged_images(folder / "out")) == [], "a final name never stands for half an image"
        if run_readers.num_done(folder / "out") == MANY.count("\n"):
            break
    return killed_workers, killed_parents, starts


def assert_kills_change_nothing(folder: Path, seed: int, num_kills: int) -> str:
    """At most two batches are begun again for each killed worker.

    These are the one it drew, and the one whose files or results were on their way. Idle workers at the end of a call
    may begin a few batches of others once more.
    """
    killed_workers, killed_parents, starts = kill_at_random(folder, seed, num_kills)
    words = generate(folder, MANY, nproc=2)
    with started(words, folder / "log", "paint:1+:sleep=0.001") as command:
        assert command.process.wait(60) == 0, generate_log(folder)
    assert_generated(folder, MANY)
    num_batches = MANY.count("\n") // 4
    again = num_painted(folder) - num_batches
    told = (
        f"seed {seed}: {starts} starts, {killed_parents} kills of the parent, {killed_workers} of workers; "
        f"{again} of {num_batches} batches begun again, {again / max(1, killed_workers):.2f} a killed worker"
    )
    assert again <= 2 * killed_workers + 4, told
    return told


def test_random_kills_of_workers_and_parents_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = assert_kills_change_nothing(tmp_path, 20261115, 8)
    with capsys.disabled():
        print(f"\n{told}")  # noqa: T201


@pytest.mark.slow
def test_forty_random_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(time.time())
    kills = 0
    while kills < 40:
        folder = tmp_path / str(seed)
        folder.mkdir()
        told = assert_kills_change_nothing(folder, seed, 40)
        kills += sum(map(int, re.findall(r"(\d+) kills of the parent, (\d+)", told)[0]))
        with capsys.disabled():
            print(f"\n{told}")  # noqa: T201
        seed += 1


@pytest.mark.parametrize("point", ["open", "write", "fsync", "rename", "renamed"])
def test_a_worker_killed_at_each_step_of_publishing_costs_nothing(tmp_path: Path, point: str) -> None:
    """One worker, so that the batch with the fault is its own however late others would have started."""
    assert run_generate(tmp_path, f"picture.{point}:2:kill:0:once", nproc=1) == 0
    assert fired(tmp_path / "log") == [f"picture.{point}:2:kill:0"]
    assert_generated(tmp_path)


# Every point that it passes is one of a slow law, below.
PARENT_POINTS = (
    *("publish.write:1", "publish.renamed:2", "ledger.plan.commit", "ledger.record.commit:2"),
    *("ledger.record.committed:2", "metadata.rename", "failures.renamed", "publish.fsync:4"),
)


def test_a_supervisor_killed_at_each_step_of_its_writing_loses_nothing(tmp_path: Path) -> None:
    """One folder, killed again and again, each time further on; too late a point means a normal call."""
    num_fired = 0
    for point in PARENT_POINTS:
        name, _, number = point.partition(":")
        (tmp_path / "fired").unlink(missing_ok=True)
        words = generate(tmp_path, nproc=1)
        with started(words, tmp_path / "log", f"{name}:{number or 1}:kill:9", SUPERVISOR) as command:
            code = command.process.wait(30)
            command.until_gone(10)
        assert (code == -signal.SIGKILL) == bool(fired(tmp_path / "log"))
        num_fired += len(fired(tmp_path / "log"))
        assert list(run_readers.damaged_images(tmp_path / "out")) == []
        if run_readers.num_done(tmp_path / "out") == 24:  # so that there is something to record and to list once more
            next((tmp_path / "out").glob("*.png")).unlink()
    assert num_fired == len(PARENT_POINTS)
    assert_resumed(tmp_path)


def wait_until_drawing(command: Started, folder: Path, at_least: int = 1) -> None:
    until(lambda: run_readers.num_done(folder / "out") >= at_least, command=command)


def test_workers_go_with_their_parent_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with started(generate(tmp_path, model_path="testcard:0.3", nproc=3), tmp_path / "log") as command:
        wait_until_drawing(command, tmp_path)
        assert len(worker_pids(command)) == 3
        command.process.kill()
        command.until_gone(10)
    assert run_readers.num_done(tmp_path / "out") < 24
    assert_resumed(tmp_path)


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stopped_workers_batches_are_drawn_by_others_and_waking_up_changes_nothing(
    tmp_path: Path, nproc: int
) -> None:
    settings = {"model_path": "testcard:0.1", "stall_timeout_s": 3.0 if nproc == 1 else 60.0, "nproc": nproc}
    with started(generate(tmp_path, **settings), tmp_path / "log") as command:
        wait_until_drawing(command, tmp_path)
        stopped = worker_pids(command)[0]
        os.kill(stopped, signal.SIGSTOP)
        if nproc == 2:
            others = time.monotonic()
            until(lambda: run_readers.num_done(tmp_path / "out") == 24 or time.monotonic() - others > 20)
            assert run_readers.num_done(tmp_path / "out") == 24, "the other one has drawn its share too"
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        assert command.process.wait(30) == 0, command.said()
    assert_generated(tmp_path)


def test_a_second_command_on_the_folder_is_refused_at_once_and_told_who_holds_it(tmp_path: Path) -> None:
    with started(generate(tmp_path, nproc=1), tmp_path / "first", "paint.000013:1:stop") as command:
        until(lambda: bool(fired(tmp_path / "first")), command=command)
        began = time.monotonic()
        assert run_generate(tmp_path) == 2
        assert time.monotonic() - began < 10, "it does not wait for the one that stands still"
        assert f"is in use by `halation generate`, process {command.process.pid} on " in generate_log(tmp_path)
        os.kill(worker_pids(command)[0], signal.SIGCONT)
        assert command.process.wait(30) == 0, "and the first one does not notice"
    assert_generated(tmp_path)


def interrupted(folder: Path, number: signal.Signals, code: int, within_s: float) -> str:
    """A signal while drawing ends it in time with that code, nothing left running, finished images kept."""
    folder.mkdir(exist_ok=True)
    # Batches of one image: three seconds of them are left when the first is there, so that no pause makes the signal
    # late.
    words = generate(folder, model_path="testcard:0.25", batch_size=1, nproc=2)
    with started(words, folder / "log") as command:
        wait_until_drawing(command, folder)
        before = run_readers.num_done(folder / "out")
        os.kill(command.process.pid, number)
        assert command.process.wait(within_s) == code, command.said()
        command.until_gone(5)
    assert run_readers.num_done(folder / "out") > before, "batches that were begun are finished"
    assert run_readers.leftovers(folder / "out") == []
    assert "run the same command to generate them" in generate_log(folder)
    assert run_readers.summary(folder / "out")["interrupted"] is True
    assert len(run_readers.metadata_rows(folder / "out")) == run_readers.num_done(folder / "out")
    return generate_log(folder)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow),
    ],
)
def test_one_signal_finishes_the_batches_that_are_begun_and_ends(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    interrupted(tmp_path, number, code, within_s=20)
    assert_resumed(tmp_path, batch_size=1)


def test_two_signals_end_it_at_once_and_leave_nothing_behind(tmp_path: Path) -> None:
    with started(generate(tmp_path, micro_batch=4), tmp_path / "log", "paint.000013:1+:sleep=100") as command:
        until(lambda: bool(fired(tmp_path / "log")), command=command)
        os.kill(command.process.pid, signal.SIGINT)
        until(lambda: "signal again to stop immediately" in command.said(), command=command)
        os.kill(command.process.pid, signal.SIGINT)
        assert command.process.wait(20) == 130, "sooner than its batch would have been finished"
        command.until_gone(5)
    assert run_readers.leftovers(tmp_path / "out") == []
    assert_resumed(tmp_path, micro_batch=4)


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_keep_a_signal_waiting_for_good(tmp_path: Path) -> None:
    with started(generate(tmp_path, nproc=1), tmp_path / "log", "paint.000006:1+:sleep=1000") as command:
        until(lambda: bool(fired(tmp_path / "log")), command=command)
        os.kill(command.process.pid, signal.SIGTERM)
        time.sleep(2.2)
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.process.wait(20) == 143
    assert run_readers.leftovers(tmp_path / "out") == []
    assert_resumed(tmp_path)


@pytest.mark.parametrize(
    ("phase", "number", "code"),
    [
        ("ledger.plan.commit", signal.SIGINT, 130),
        ("ledger.plan.commit", signal.SIGTERM, 143),
        ("ledger.plan.commit", signal.SIGHUP, 143),
        pytest.param("rehearse", signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_signals_while_planning_and_while_loading_end_it_cleanly(
    tmp_path: Path, phase: str, number: signal.Signals, code: int
) -> None:
    with started(generate(tmp_path, nproc=1), tmp_path / "log", f"{phase}:1:sleep=30") as command:
        until(lambda: bool(fired(tmp_path / "log")), command=command)
        os.kill(command.process.pid, number)
        assert command.process.wait(10) == code, command.said()
        command.until_gone(5)
    assert "Traceback" not in generate_log(tmp_path)
    assert run_readers.leftovers(tmp_path / "out") == []
    assert_resumed(tmp_path)


def test_a_command_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    words = ["nohup", *generate(tmp_path, model_path="testcard:0.2")]
    with started(words, tmp_path / "log") as command:
        wait_until_drawing(command, tmp_path)
        os.kill(command.process.pid, signal.SIGHUP)
        assert command.process.wait(30) == 0, command.said()
    assert_generated(tmp_path)


def test_a_signal_while_workers_start_ends_it_cleanly(tmp_path: Path) -> None:
    with started(generate(tmp_path), tmp_path / "log") as command:
        until(lambda: bool(worker_pids(command)), command=command)
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.process.wait(10) == 143, command.said()
    assert run_readers.leftovers(tmp_path / "out") == []
    assert_resumed(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_supervisor_killed_at_every_point_it_passes_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "".join(f"prompt number {number}\n" for number in range(4))
    number = 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        with started(generate(folder, few, nproc=1), folder / "log", f"*:{number + 1}:kill:9", SUPERVISOR) as command:
            command.process.wait(30)
            command.until_gone(10)
        if not fired(folder / "log"):
            break
        number += 1
        assert not (folder / "out").exists() or list(run_readers.damaged_images(folder / "out")) == []
        assert_resumed(folder, few)
    with capsys.disabled():
        print(f"\nthe supervisor was killed at each of {number} points")  # noqa: T201
    assert number > 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_killed_at_every_point_it_passes_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "".join(f"prompt number {number}\n" for number in range(4))
    number = 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        words = generate(folder, few, nproc=1)
        with started(words, folder / "log", f"*:{number + 1}:kill:0:once", SUPERVISOR) as command:
            code = command.process.wait(30)
        assert list(run_readers.damaged_images(folder / "out")) == []
        if not fired(folder / "log"):
            break
        number += 1
        assert code == 0, generate_log(folder)
        assert_generated(folder, few)
    with capsys.disabled():
        print(f"\nthe worker was killed at each of {number} points")  # noqa: T201
    assert number > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_rows_are_resumed_in_seconds_and_a_gibibyte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "million.csv"
    with open(prompts, "w") as file:
        file.write("image_id,prompt\n")
        file.writelines(f"{number:07d},a photo of street number {number} by day\n" for number in range(1_000_000))
    times, peaks = [], []
    generator = random.Random(11)
    words = generate(tmp_path, prompts, nproc=2, model_path="testcard:0.02")
    for _call in range(11):
        done = run_readers.num_done(tmp_path / "out")
        began = time.monotonic()
        with started(words, tmp_path / "log") as command:
            until(lambda done=done: run_readers.num_done(tmp_path / "out") > done, 120, command)
            times.append(time.monotonic() - began)
            time.sleep(generator.uniform(0.0, 0.3))
            status = Path(f"/proc/{command.process.pid}/status").read_text()
            peaks.append(int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024)
            command.process.kill()
            command.until_gone(10)
    with capsys.disabled():
        print(  # noqa: T201
            f"\na million rows: the first image after {times[0]:.1f} s (plan, {peaks[0]:.0f} MiB), "
            f"on resume after {max(times[1:]):.1f} s at most ({max(peaks[1:]):.0f} MiB)"
        )
    assert max(times[1:]) < 40  # 3 s on a quiet machine; reading every row takes minutes
    assert max(peaks) < 1024
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["changes"] == []
    assert run_readers.image_digests(tmp_path / "out").keys() >= {
        f"{index:07d}_seed{index + 42}.png" for index in range(4)
    }
