"""Fault points fire when and where requested, leave a record, and cost nothing otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from halation import fault_injection
from halation.fault_injection import InjectedFault, fault_point


@pytest.fixture(autouse=True)
def fresh_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    fault_injection._counts.clear()
    monkeypatch.setenv("HALATION_FAULT_LOG", str(tmp_path / "fired"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    yield
    fault_injection._counts.clear()


def ask(monkeypatch: pytest.MonkeyPatch, request: str) -> None:
    monkeypatch.setenv("HALATION_FAULT", request)


def fired(tmp_path: Path) -> list[str]:
    path = tmp_path / "fired"
    return path.read_text().splitlines() if path.exists() else []


def passages(name: str, number: int) -> list[bool]:
    """Whether each of these passages raised."""
    raised = []
    for _ in range(number):
        try:
            fault_point(name)
            raised.append(False)
        except (InjectedFault, OSError):
            raised.append(True)
    return raised


def test_the_nth_passage_alone_fires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask(monkeypatch, "a.write:3:raise")
    assert passages("a.write", 5) == [False, False, True, False, False]
    assert passages("a.fsync", 5) == [False] * 5
    assert fired(tmp_path) == ["a.write:3:raise:0"]


def test_a_plus_fires_from_then_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask(monkeypatch, "a.write:2+:ENOSPC")
    assert passages("a.write", 4) == [False, True, True, True]
    assert len(fired(tmp_path)) == 3


def test_a_star_counts_the_passages_of_all_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask(monkeypatch, "*:3:raise")
    assert passages("a.write", 2) + passages("b.write", 2) == [False, False, True, False]
    assert fired(tmp_path) == ["b.write:3:raise:0"]


def test_only_the_rank_that_is_meant_fires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask(monkeypatch, "a.write:1:raise:1;b.write:1:raise:0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert passages("a.write", 1) == [True]
    monkeypatch.setenv("RANK", "0")
    assert passages("a.write", 1) + passages("b.write", 1) == [False, True]
    assert fired(tmp_path) == ["a.write:1:raise:1", "b.write:1:raise:0"]


def test_once_means_once_for_all_processes_that_share_a_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask(monkeypatch, "a.write:1:raise:0:once")
    assert passages("a.write", 1) == [True]
    fault_injection._counts.clear()  # as in a rank that was started again
    assert passages("a.write", 2) == [False, False]
    assert fired(tmp_path) == ["a.write:1:raise:0"]


@pytest.mark.parametrize("name", ["ENOSPC", "EIO", "EROFS", "EMFILE"])
def test_system_errors_carry_their_number(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ask(monkeypatch, f"a.write:1:{name}")
    with pytest.raises(OSError, match=r"a\.write") as error:
        fault_point("a.write")
    assert error.value.errno == getattr(errno, name)


def test_a_sleep_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, "a.write:1:sleep=0.2")
    began = time.monotonic()
    fault_point("a.write")
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_can_be_killed_and_stopped(tmp_path: Path, action: str, number: int) -> None:
    environment = {**os.environ, "HALATION_FAULT": f"a.write:1:{action}"}
    code = "from halation.fault_injection import fault_point; fault_point('a.write'); print('went on', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    process.returncode = 0 if action == "stop" else -number
    if action == "stop":
        assert os.WSTOPSIG(status) == number
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, 0)
    else:
        assert os.WTERMSIG(status) == number
    said, _ = process.communicate()
    assert said == (b"went on\n" if action == "stop" else b"")
    assert fired(tmp_path) == [f"a.write:1:{action}:0"]


def test_unused_points_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALATION_FAULT", raising=False)
    began = time.process_time()
    for _ in range(10_000):
        fault_point("a.write")
    assert time.process_time() - began < 0.5, "50 microseconds a passage would show in a step"


def test_of_processes_that_reach_a_point_together_one_triggers_a_fault_of_once(tmp_path: Path) -> None:
    code = "from halation.fault_injection import fault_point; input(); fault_point('here')"
    environment = {**os.environ, "HALATION_FAULT": "here:1:kill:once", "HALATION_FAULT_LOG": str(tmp_path / "fired")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE) for _ in range(6)
    ]
    time.sleep(0.5)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert sorted(process.wait(60) for process in processes) == [-signal.SIGKILL] + [0] * 5
    assert (tmp_path / "fired").read_text() == "here:1:kill:0\n"
