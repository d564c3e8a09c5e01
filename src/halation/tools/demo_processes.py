"""Commands of the demo as processes of their own, seen on the same terminal, that end with it; and one that is killed on purpose."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from halation.distributed.signals import StopSignals, exit_code
from halation.distributed.subcommand import started, wait
from halation.errors import Interrupted
from halation.gallery.generation_rows import LEDGER_FILE, LedgerTables

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
    process = started(words)
    killed = wait(process, signals, kill_when, POLL_S)
    heed(signals)
    return process.returncode, killed


def num_drawn(folder: Path) -> int:
    """Pictures that the ledger of a generation calls done, read while it is being written."""
    try:
        with LedgerTables(folder / LEDGER_FILE).reading() as connection:
            return int(connection.execute("SELECT COUNT(*) FROM pictures WHERE state = 1").fetchone()[0])
    except sqlite3.Error:  # not there yet
        return 0
