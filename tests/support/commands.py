"""Starts `halation` as a person or a scheduler does, and finds every process that came of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from support import checker

HALATION = str(Path(sys.executable).with_name("halation"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HALATION_DEVICE", "HALATION_RENDEZVOUS")


def train(folder: Path, nproc: int | None = 2, **settings: object) -> list[str]:
    """The words after `halation` for a training of a few seconds."""
    flags: dict[str, object] = {
        "data": "streets",
        "model": "tiny",
        "image_size": 32,
        "patch_size": 8,
        "batch_size": 2,
        "n_steps": 6,
        "ckpt_every": 2,
        "keep_last": 0,
        "log_every": 1,
        "sample_steps": 2,
        "sample": False,
        "validation_images": 4,
        "report_to": "none",
        "progress": "none",
        "max_restarts": 0,
        "dist_timeout_s": 60,
        "output_dir": folder,
    }
    flags |= settings | ({} if nproc is None else {"nproc": nproc})
    return ["train", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


class Started:
    """A command that runs, with everything it started in turn."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.mark = f"HALATION_TEST_MARK={uuid.uuid4().hex}"
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        variables = inherited | dict([self.mark.split("=")]) | dict(environment)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                words, env=variables, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def alive(self) -> dict[int, str]:
        """Process ids and command lines of all that carry the mark and still run."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def rank_pids(self) -> dict[int, int]:
        """The process of each rank, by rank."""
        found = {}
        for pid in self.alive():
            with contextlib.suppress(OSError):
                words = dict(
                    word.split("=", 1)
                    for word in Path(f"/proc/{pid}/environ").read_text().split("\0")
                    if word.startswith(("RANK=", "HALATION_RENDEZVOUS="))
                )
                if "RANK" in words:
                    found[int(words["RANK"])] = pid
        return found

    def kill_all(self) -> None:
        while alive := self.alive():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()

    def until_gone(self, timeout_s: float) -> float:
        """Seconds until nothing that carries the mark runs any more."""
        began = time.monotonic()
        while alive := self.alive():
            self.process.poll()
            assert time.monotonic() - began < timeout_s, f"still there after {timeout_s} s: {alive}"
            time.sleep(0.05)
        return time.monotonic() - began


@contextlib.contextmanager
def started(
    words: Sequence[str], log: Path, fault: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """Run a command while entered; nothing of it is alive afterwards. Faults are logged in `fired` beside the log."""
    variables = dict(environment or {})
    if fault:
        variables |= {"HALATION_FAULT": fault, "HALATION_FAULT_LOG": str(log.with_name("fired"))}
    command = Started(words, variables, log)
    try:
        yield command
    finally:
        command.kill_all()


def halation(words: Sequence[str]) -> list[str]:
    return [HALATION, *words]


def finish(
    words: Sequence[str],
    log: Path,
    fault: str = "",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> int:
    """Run a command to its end; its exit code."""
    with started(words, log, fault, environment) as command:
        return command.process.wait(timeout_s)


def until(condition: Callable[[], object], timeout_s: float = 60.0, command: Started | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        said = command.said() if command else ""
        assert time.monotonic() < deadline, f"not within {timeout_s} s; it said: {said}"
        assert command is None or command.process.poll() is None or condition(), f"ended early: {said}"
        time.sleep(0.02)


def last_step(folder: Path) -> int:
    """The last step that metrics.jsonl tells of; 0 before the first."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    steps = [0]
    for line in lines:
        with contextlib.suppress(ValueError):
            steps.append(json.loads(line)["step"])
    return max(steps)


def last_line(folder: Path) -> str:
    """The last step and its time: a restarted run's first line differs from the line it was killed after."""
    try:
        return (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return ""


def fired(log: Path) -> list[str]:
    path = log.with_name("fired")
    return path.read_text().split() if path.exists() else []


@functools.cache
def unbroken() -> dict[str, str]:
    """The bits of the last checkpoint of a run on two ranks that nobody disturbed; made once for all tests of a session."""
    with tempfile.TemporaryDirectory(prefix="halation_unbroken_") as name:
        folder = Path(name)
        assert finish(halation(train(folder / "run")), folder / "log") == 0, (folder / "log").read_text()
        return last_bits(folder / "run")


def last_bits(run: Path) -> dict[str, str]:
    """The bits a run of six steps ended with, once nothing else is wrong with its folder."""
    assert max(checker.checkpoints(run / "checkpoints")) == 6
    assert checker.problem(run / "checkpoints" / "step_0000006") is None
    assert checker.leftovers(run) == []
    return checker.bits(run / "checkpoints" / "step_0000006")
