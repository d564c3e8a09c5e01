"""Child processes: start, tie to the parent, stop, describe how they ended.

A child is killed when its parent ends (PR_SET_PDEATHSIG) and has its own process group, so that only the parent signals
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from halation.distributed.stop_signals import StopSignals, exit_code
from halation.errors import Interrupted
from halation.progress import observer_fds
from halation.runs.lock import FolderMonitor

_PARENT_PID_ENV = "HALATION_PARENT"
LAUNCHER_ENV_VARS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""Set by the launcher of this process; a child that is not a rank of the same world must not see them."""
_PR_SET_PDEATHSIG = 1
POLL_S = 0.1
REPORT_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 60.0
NUM_TAIL_BYTES = 64 * 1024
NUM_TAIL_LINES = 12
# Until the command line handles Ctrl+C, it terminates the process without a traceback.
BOOTSTRAP_CODE = (
    "import signal; from halation.distributed.stop_signals import unblock_interrupts; unblock_interrupts(); "
    "from halation.distributed.child_process import tie_to_parent; tie_to_parent(); "
    "import sys; from halation.cli import main; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
)


def tie_to_parent(parent_pid: int | None = None) -> None:
    """In a child on Linux: have the kernel kill this process when its parent ends.

    The kernel watches the thread that started the child: start children from a thread that outlives them.
    `parent_pid` defaults to the value that `start_child` sets in the environment.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    inherited = os.environ.pop(_PARENT_PID_ENV, None)  # a child of this process has another parent
    if parent_pid is None and inherited is not None:
        parent_pid = int(inherited)
    if parent_pid not in (None, os.getppid()):  # the parent ended before the line above took effect
        os._exit(1)


def start_child(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `python ARGUMENTS...` in its own process group; it should call `tie_to_parent`.

    SIGINT is blocked until the child calls `unblock_interrupts`: while Python starts, Ctrl+C would print a traceback.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            # -P: modules in the current folder must not shadow what the child imports.
            [sys.executable, "-P", *arguments],
            env={**environment, _PARENT_PID_ENV: str(os.getpid())},
            process_group=0,
            pass_fds=[*pass_fds, *observer_fds()],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def environment_without_launcher() -> dict[str, str]:
    """Return the environment for a child that is not a rank of this world."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV_VARS}


def wait_or_kill(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float = 0.0) -> None:
    """Wait for processes to end, and kill those that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def describe_exit(code: int | None) -> str:
    """Describe how a process ended; `code` as in subprocess and multiprocessing."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    words = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"{words}; if no user sent it, the machine ran out of memory" if code == -signal.SIGKILL else words


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a command ended; `output_tail` is the end of its log."""

    returncode: int
    output_tail: str


def run_command(
    arguments: Sequence[str],
    log: Path,
    signals: StopSignals,
    on_report: Callable[[dict[str, Any]], None],
    monitor: FolderMonitor,
) -> CommandResult:
    """Run `halation ARGUMENTS...` to its end; forward a stop signal, then raise Interrupted.

    Its output goes to `log`; the newest JSON line there is passed to `on_report` every REPORT_INTERVAL_S. The command
    is killed when `monitor` finds that its folder is lost.
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
        raise Interrupted("stopped; run the same command to resume", exit_code(signals.number))
    # The last lines that are not JSON.
    lines = [line for line in _read_tail(log) if line.strip() and not line.startswith("{")]
    tail = "\n".join(lines[-NUM_TAIL_LINES:]) or f"it {describe_exit(process.returncode)}"
    return CommandResult(returncode=process.returncode, output_tail=tail)


def start_command(arguments: Sequence[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start `halation ARGUMENTS...` as a child that writes to `output` or standard output."""
    return start_child(
        ["-c", BOOTSTRAP_CODE, *arguments], environment_without_launcher(), stdout=output, stderr=subprocess.STDOUT
    )


def wait_for_command(
    process: subprocess.Popen[bytes], signals: StopSignals, should_kill: Callable[[], bool], poll_s: float
) -> bool:
    """Wait for a command to end, and forward the first stop signal to it.

    It is killed as soon as `should_kill` returns True. Return True if that kill ended it.
    """
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
        wait_or_kill([process])
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
