"""Commands of the demo as processes of their own, seen on the same terminal, that end with it; and one that is killed on purpose."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from halation.errors import Interrupted
from halation.gallery.ledgers import LEDGER_FILE, LedgerTables
from halation.generation.crew import FOREIGN
from halation.jobs.children import PATIENCE_S, START
from halation.world.launch import PARENT
from halation.world.signals import StopSignals, exit_code

POLL_S = 0.02


def heed(signals: StopSignals) -> None:
    """Go no further where somebody asked to stop."""
    if signals.number:
        raise Interrupted("stopped, and nothing is left running; the same command goes on", exit_code(signals.number))


def run_command(words: Sequence[str], signals: StopSignals, kill_when: Callable[[], bool]) -> tuple[int, bool]:
    """Run `halation WORDS...` to its end, or SIGKILL it as soon as `kill_when` says so; its exit code, and whether that happened.

    A signal to us is handed on, and raised as Interrupted when the command has ended: it saves what it can before that. Its own
    ranks and workers are tied to it by the kernel as it is tied to us, so a kill of one is the end of all below it.
    """
    heed(signals)
    process = _started(words)
    asked_at, killed = 0.0, False
    try:
        while process.poll() is None:
            if signals.number and not asked_at:
                asked_at = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT if signals.number == signal.SIGINT else signal.SIGTERM)
            late = asked_at and (signals.urgent or time.monotonic() - asked_at > PATIENCE_S)
            killed = kill_when()
            if late or killed:
                process.kill()
                process.wait()
                break
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    heed(signals)
    return process.returncode, killed and process.returncode == -signal.SIGKILL


def _started(words: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in (*FOREIGN, "RANK")}
    # A Ctrl+C that we hand on while its Python starts would come out as a traceback: it hears no such thing before it is ready.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", START, *words],
            env=environment | {PARENT: str(os.getpid())},
            process_group=0,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def num_drawn(folder: Path) -> int:
    """Pictures that the ledger of a generation calls done, read while it is being written."""
    try:
        with LedgerTables(folder / LEDGER_FILE).reading() as connection:
            return int(connection.execute("SELECT COUNT(*) FROM pictures WHERE state = 1").fetchone()[0])
    except sqlite3.Error:  # not there yet
        return 0
