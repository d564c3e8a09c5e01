"""Other commands of Halation as processes of their own: their memory, their GPUs and their crashes end with them, and they end with us."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from halation.distributed.launcher import LAUNCHER_ENV_VARS, PARENT_PID_ENV, describe_exit
from halation.distributed.stop_signals import StopSignals, block_interrupts, exit_code
from halation.errors import Interrupted
from halation.runs.lock import FolderMonitor

POLL_S = 0.1
REPORT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 60.0
NUM_TAIL_BYTES = 64 * 1024
NUM_TAIL_LINES = 12
# Tied to us by the kernel before anything else is imported; the folder the user stands in must shadow no module (-P).
# Until the command line is there to put Ctrl+C into words, it ends the process without any: Python's own are a traceback. Whoever
# starts it may block that signal until here.
BOOTSTRAP_CODE = (
    "import signal; from halation.distributed.stop_signals import unblock_interrupts; unblock_interrupts(); "
    "from halation.distributed.launcher import set_parent_death_signal; set_parent_death_signal(); "
    "import sys; from halation.cli import main; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
)


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a command ended; `output_tail` are its last ones."""

    returncode: int
    output_tail: str


def run_command(
    arguments: Sequence[str],
    log: Path,
    signals: StopSignals,
    on_report: Callable[[dict[str, Any]], None],
    monitor: FolderMonitor,
) -> CommandResult:
    """Run `halation WORDS...` to its end; a signal to us is handed on, and raised as Interrupted when the command has ended.

    What it writes goes to `log`; of its JSON lines the newest is handed to `on_report` now and then. A command whose folder is lost,
    as `monitor` knows, is ended.
    """
    with open(log, "wb") as file:
        process = start_command(arguments, file)
    reported_at = 0.0

    def report_progress() -> bool:
        nonlocal reported_at
        monitor.check()
        if time.monotonic() - reported_at >= REPORT_INTERVAL_S:
            reported_at = time.monotonic()
            report = _read_newest_report(log)
            if report:
                on_report(report)
        return False

    wait_for_command(process, signals, report_progress, POLL_S)
    if signals.number:
        raise Interrupted("stopped; the same command goes on from here", exit_code(signals.number))
    return CommandResult(returncode=process.returncode, output_tail=_read_output_tail(log, process.returncode))


def start_command(arguments: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """`halation WORDS...` in a process group of its own, which ends with us; it writes to `output`, or to where we do."""
    environment = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_ENV_VARS, "RANK")}
    # A Ctrl+C that we hand on while its Python starts would come out as a traceback: it hears no such thing before it is ready.
    with block_interrupts():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", BOOTSTRAP_CODE, *arguments],
            env=environment | {PARENT_PID_ENV: str(os.getpid())},
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for_command(
    process: subprocess.Popen[bytes], signals: StopSignals, should_kill: Callable[[], bool], poll_s: float
) -> bool:
    """Wait until a command has ended, and hand on to it what stops us; SIGKILL it as soon as `should_kill` says so, and return whether that
    was its end."""
    signalled_at, killed = 0.0, False
    try:
        while process.poll() is None:
            if signals.number and not signalled_at:
                signalled_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT if signals.number == signal.SIGINT else signal.SIGTERM)
            killed = should_kill()
            if killed or (signalled_at and (signals.is_urgent or time.monotonic() - signalled_at > STOP_TIMEOUT_S)):
                break
            time.sleep(poll_s)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return killed and process.returncode == -signal.SIGKILL


def _read_tail(log: Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - NUM_TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _read_newest_report(log: Path) -> dict[str, Any]:
    for line in reversed(_read_tail(log)):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value
    return {}


def _read_output_tail(log: Path, code: int) -> str:
    """The end of what a command said to people, or how it ended where it said nothing."""
    lines = [line for line in _read_tail(log) if line.strip() and not line.startswith("{")]
    return "\n".join(lines[-NUM_TAIL_LINES:]) or f"it {describe_exit(code)}"
