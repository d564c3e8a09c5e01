"""Stop signals: the first stops all ranks at the same step, the second immediately."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from halation.progress import release_terminal

DUPLICATE_SIGNAL_S = 2.0  # a service manager signals a whole group: a rank gets it twice, once from its launcher
STUCK_S = 6.0
SECOND_SIGNAL_WAIT_S = 1.0
CLOCK_SLACK_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """While entered, records the first stop signal that this process receives.

    A second signal terminates the process or, for a parent that must stop its children first, sets `is_urgent`. SLURM
    usually sends SIGUSR1 before it kills. Outside the main thread no handler is installed: signals are the caller's.
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
                release_terminal()
                if "RANK" not in os.environ:  # the launcher of a rank prints it
                    os.write(2, b"halation: stopped immediately; the same command resumes from what it has saved\n")
                os._exit(128 + number)
            self.is_urgent = True
        if not self.number:
            self.number, self._received_at = number, time.monotonic()


_early_signals = StopSignals()
"""Signals received after `remember_signals` and before the first `StopSignals` is entered."""
_last_handled_at = [0.0]
"""When a handler last ran in this process."""


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, object]:
    """Install a handler for stop signals (main thread only); return the previous handlers."""
    previous: dict[int, object] = {}
    for number in STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ():
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: keep running without the terminal
        previous[number] = signal.signal(number, handler)
    return previous


def remember_signals() -> None:
    """Record signals for the next `StopSignals`; a second one terminates the process.

    For ranks started by torchrun or srun. Otherwise a signal during startup would kill the rank, which torchrun would
    restart, or for which the other ranks would wait.
    """
    if _handle_signals(_early_signals._on_signal):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # signals of workers are not this rank's
        threading.Thread(target=_exit_if_stuck, args=(reader,), name="halation-signals", daemon=True).start()


def _exit_if_stuck(reader: int) -> None:
    """Exit if the main thread does not return to Python, as in an incomplete rendezvous.

    Python handlers run only between bytecode instructions; the pipe is written by the C signal handler.
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
    """Let Ctrl+C terminate this process without a traceback until a handler is installed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def leave_signals_to_parent(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers = signal.SIG_IGN,
) -> None:
    """Ignore stop signals in a child: schedulers signal all processes, but the parent decides."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def exit_code(number: int) -> int:
    """Return 130 for Ctrl+C and 143 for all other stop signals, such as a scheduler's warning."""
    return 130 if number == signal.SIGINT else 143
