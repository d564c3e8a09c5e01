"""Starts `halation` commands as processes, and finds every process that they started."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from support import run_readers

HALATION = str(Path(sys.executable).with_name("halation"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HALATION_DEVICE", "HALATION_RENDEZVOUS")
PROMPTS = "".join(f"prompt number {number}\n" for number in range(24))


def train(folder: Path, nproc: int | None = 2, **settings: object) -> list[str]:
    """The arguments of `halation` for a training of a few seconds."""
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
    """A running command with all processes that it started, found by a mark in their environment."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.mark = f"HALATION_TEST_MARK={uuid.uuid4().hex}"
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        variables = inherited | dict([self.mark.split("=")]) | dict(environment)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                words, env=variables, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def alive(self) -> dict[int, str]:
        """Process ids and command lines of all running processes with the mark."""
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
        """Wait until no process with the mark runs; return the seconds."""
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
    """Run a command inside the context and kill what is left of it at the end.

    Injected faults are logged in `fired` beside the log.
    """
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
    """Run a command to its end and return its exit code."""
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
    """The last step in metrics.jsonl; 0 before the first."""
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
    """The text of metrics.jsonl, which a restarted run changes with its first line."""
    try:
        return (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return ""


def fired(log: Path) -> list[str]:
    path = log.with_name("fired")
    return path.read_text().split() if path.exists() else []


@functools.cache
def undisturbed_training() -> dict[str, str]:
    """Digests of the last checkpoint of an undisturbed run on two ranks, made once a session."""
    with tempfile.TemporaryDirectory(prefix="halation_unbroken_") as name:
        folder = Path(name)
        assert finish(halation(train(folder / "run")), folder / "log") == 0, (folder / "log").read_text()
        return last_bits(folder / "run")


def last_bits(run: Path) -> dict[str, str]:
    """Digests of the last checkpoint of a run of six steps whose folder is otherwise in order."""
    assert max(run_readers.checkpoints(run / "checkpoints")) == 6
    assert run_readers.checkpoint_problem(run / "checkpoints" / "step_0000006") is None
    assert run_readers.leftovers(run) == []
    return run_readers.checkpoint_digests(run / "checkpoints" / "step_0000006")


# `halation generate` with the test card


def generate(folder: Path, prompts: Path | str = PROMPTS, **settings: object) -> list[str]:
    """The command that generates into `folder`/out; prompts given as text are written to a file first."""
    if isinstance(prompts, str):
        path = folder / "prompts.txt"
        if not path.exists() or path.read_text() != prompts:
            path.write_text(prompts)
        prompts = path
    flags: dict[str, object] = {
        "prompts": prompts,
        "model_path": "testcard",
        "output_dir": folder / "out",
        "height": 16,
        "width": 24,
        "num_inference_steps": 2,
        "batch_size": 4,
        "nproc": 2,
        "progress": "plain",
    } | settings
    words = [word for name, value in flags.items() if value is not True for word in (f"--{name}", str(value))]
    return halation(["generate", *words, *(f"--{name}" for name, value in flags.items() if value is True)])


def run_generate(folder: Path, fault: str = "", timeout_s: float = 60, **settings: object) -> int:
    """Run `generate` once to its end, with its output in `folder`/log; return the exit code."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    return finish(generate(folder, **settings), log, fault, timeout_s=timeout_s)  # type: ignore[arg-type]


def generate_log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


@functools.cache
def undisturbed_generation(prompts: str = PROMPTS, batch_size: int = 4) -> tuple[dict[str, str], bytes]:
    """Images and metadata of an undisturbed call with one worker, made once a session."""
    with tempfile.TemporaryDirectory(prefix="halation_unbroken_") as name:
        folder = Path(name)
        assert run_generate(folder, prompts=prompts, nproc=1, batch_size=batch_size) == 0, generate_log(folder)
        assert run_readers.generation_problems(folder / "out", prompts.count("\n")) == []
        return run_readers.images_and_metadata(folder / "out")


def assert_generated(folder: Path, prompts: str = PROMPTS, batch_size: int = 4) -> None:
    """The folder has exactly the files of an undisturbed call."""
    problems = run_readers.generation_problems(folder / "out", prompts.count("\n"))
    assert not problems, "\n".join(problems)
    assert run_readers.images_and_metadata(folder / "out") == undisturbed_generation(prompts, batch_size), (
        "other bytes than without a disturbance"
    )


def assert_resumed(folder: Path, prompts: str = PROMPTS, **settings: object) -> None:
    assert run_generate(folder, prompts=prompts, **settings) == 0, generate_log(folder)
    assert_generated(folder, prompts)


def worker_pids(command: Started) -> list[int]:
    """Process ids of the workers in the order of their numbers."""
    return [pid for _, pid in sorted(command.rank_pids().items())]


# -- a command on a real pseudo-terminal, and the screen that its output leaves

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[78=>]|[\r\n\x08\x07]|[^\x1b\r\n\x08\x07]")


class Screen:
    """What a terminal of this size shows: text, line ends, wrapping, cursor up, erasing, and whether the cursor shows."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0
        self.is_cursor_visible = True

    def feed(self, text: str) -> None:
        for found in TOKEN.finditer(text):
            token = found[0]
            if found[2]:
                self._control(found[1], found[2])
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self._line_feed()
            elif token == "\x08":
                self.column = max(self.column - 1, 0)
            elif token[0] not in "\x1b\x07":
                self._put(token)

    def _put(self, letter: str) -> None:
        if self.column == self.width:  # a full line wraps with the next letter, as terminals do
            self.column = 0
            self._line_feed()
        line = self.rows[self.row]
        line += [" "] * (self.column + 1 - len(line))
        line[self.column] = letter
        self.column += 1

    def _line_feed(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    def _control(self, numbers: str, kind: str) -> None:
        if kind == "A":  # rows above the screen cannot be reached
            self.row = max(self.row - int(numbers or 1), len(self.rows) - self.height, 0)
        elif kind == "K":
            assert numbers == "2", f"erasing {numbers} is not known here"
            self.rows[self.row] = []
        elif numbers == "?25":
            self.is_cursor_visible = kind == "h"
        else:
            assert kind == "m", f"the control sequence {numbers}{kind} is not known here"

    def lines(self) -> list[str]:
        """Everything written so far, with what has scrolled away; without empty lines."""
        return [text for text in ("".join(row).rstrip() for row in self.rows) if text]


class Terminal:
    """A command on a pseudo-terminal of its own, where Ctrl+C is echoed as `^C` and interrupts the foreground."""

    def __init__(self, command: Sequence[str], width: int, height: int = 24, **environment: str) -> None:
        self.screen = Screen(width, height)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        left_out = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "RANK")
        usual: Mapping[str, str] = {name: value for name, value in os.environ.items() if name not in left_out}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**usual, "TERM": "xterm-256color", **environment},
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read_until(self, condition: Callable[[str], object], timeout_s: float = 300.0) -> None:
        """Read until the screen's text satisfies the condition."""
        deadline = time.monotonic() + timeout_s
        while not condition("\n".join(self.screen.lines())):
            assert self._read(0.1), "the command ended first:\n" + "\n".join(self.screen.lines())
            assert time.monotonic() < deadline, "\n".join(self.screen.lines())

    def finish(self, timeout_s: float = 300.0) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(0.1):
            assert time.monotonic() < deadline, "\n".join(self.screen.lines())
        return self.process.wait(timeout_s)

    def _read(self, timeout_s: float) -> bool:
        """Feed what there is to the screen; return False when all processes have closed the terminal."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return True
        part = b""
        with contextlib.suppress(OSError):  # EIO: Linux says so that the other side has hung up
            part = os.read(self._ours, 65536)
        self.screen.feed(part.decode(errors="replace"))
        return bool(part)
