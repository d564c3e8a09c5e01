"""Stop signals: the first one stops all ranks at one step, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

DUPLICATE_SIGNAL_S = 2.0  # a service manager signals a whole group: a rank hears it twice, once from its launcher
STUCK_S = 6.0
SECOND_SIGNAL_WAIT_S = 1.0
CLOCK_SLACK_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """While entered, remembers the stop signal that this process received. SLURM usually sends SIGUSR1 before it kills.

    A second one ends the process at once or, for a parent that has children to end first, sets `is_urgent`. Outside
    the main thread no handler is installed: there signals belong to the caller.
    """

    def __init__(self, *, exit_on_second: bool = True) -> None:
        self.number = 0
        self.is_urgent = False
        self._exit_on_second = exit_on_second
        self._received_at = 0.0
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        self._previous_handlers = _handle_signals(self._on_signal)
        if self._previous_handlers and _early_signals.number:
            self.number, self._received_at = _early_signals.number, _early_signals._received_at
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        _last_handled_at[0] = time.monotonic()
        is_duplicate = (
            self.number == number
            and time.monotonic() - self._received_at < DUPLICATE_SIGNAL_S
            and number != signal.SIGINT
        )
        if self.number and number in (signal.SIGINT, signal.SIGTERM) and not is_duplicate:
            if self._exit_on_second:
                os._exit(128 + number)
            self.is_urgent = True
        if not self.number:
            self.number, self._received_at = number, time.monotonic()


_early_signals = StopSignals()
"""What came after `remember_signals` and before the first `StopSignals` that was entered."""
_last_handled_at = [0.0]
"""When a handler ran last, in this process."""


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, object]:
    """Install a handler for the signals that stop; the earlier handlers. Outside the main thread there are none."""
    previous: dict[int, object] = {}
    for number in STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ():
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: it is to outlive the terminal
        previous[number] = signal.signal(number, handler)
    return previous


def remember_signals() -> None:
    """From now on a signal is kept for the next `StopSignals`; a second one ends the process at once.

    For a rank that torchrun or srun started: it would die of a signal while it loads, be started again by torchrun,
    or leave the other ranks waiting for it.
    """
    if _handle_signals(_early_signals._on_signal):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a worker's signals are not this rank's
        threading.Thread(target=_exit_if_stuck, args=(reader,), name="halation-signals", daemon=True).start()


def _exit_if_stuck(reader: int) -> None:
    """End a process whose main thread does not return to Python, as in a rendezvous with ranks that never come.

    Handlers run between two instructions of Python; what arrives in the pipe is written by the signal itself.
    """
    first_at = 0.0
    while data := os.read(reader, 1):
        number, now = data[0], time.monotonic()
        if first_at and now - first_at > DUPLICATE_SIGNAL_S and number in (signal.SIGINT, signal.SIGTERM):
            time.sleep(SECOND_SIGNAL_WAIT_S)
            os._exit(128 + number)
        if number in STOP_SIGNALS and not first_at:
            first_at = now
            timer = threading.Timer(STUCK_S, _exit_unless_handled, [number, now])
            timer.daemon = True
            timer.start()


def _exit_unless_handled(number: int, received_at: float) -> None:
    if _last_handled_at[0] < received_at - CLOCK_SLACK_S:
        os._exit(exit_code(number))


def unblock_interrupts() -> None:
    """Let Ctrl+C end this process without a traceback, until a handler is installed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def leave_signals_to_parent(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers = signal.SIG_IGN,
) -> None:
    """In a child whose parent decides when it stops: a scheduler signals every process of a job."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def exit_code(number: int) -> int:
    """130 for Ctrl+C, 143 for every other wish to stop: a scheduler's warning counts as termination."""
    return 130 if number == signal.SIGINT else 143
