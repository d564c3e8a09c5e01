"""`halation ctl`: ask a running training to sample, save or stop, and wait until it has taken that; imports no torch."""

from __future__ import annotations

import math
import time

from halation.errors import InputError
from halation.runs import control
from halation.tools.config import CtlConfig

POLL_S = 0.1


def run(config: CtlConfig) -> int:
    """Exit code 0 when the run has taken it (or nobody waits for that), 1 when it has not; what was not taken is withdrawn."""
    if not 0 <= config.wait_s < math.inf:
        raise InputError(f"--wait_s {config.wait_s}", "seconds, or 0 not to wait", "give a number that is not negative")
    deadline = time.monotonic() + config.wait_s
    while control.is_starting(config.run) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    request = control.ask(config.run, config.action)
    print(f"asked {config.run} to {config.action} at its next step", flush=True)
    if not config.wait_s:
        return 0
    try:
        answer = _wait(request, deadline)
    except KeyboardInterrupt:
        withdrawn = control.withdraw(request)
        print("withdrawn" if withdrawn else f"too late to withdraw: {config.run} has taken it")
        return 130
    if answer is not None:
        return _tell(answer)
    withdrawn = control.withdraw(request)
    if not control.is_awaited(request):
        answer = control.answer_to(request)  # its last words may have come since
        if answer is not None:
            return _tell(answer)
        print(f"{config.run} ended before it took that")
        return 1
    if withdrawn:
        print(
            f"not taken within {config.wait_s:g} s, withdrawn; a run that compiles, samples or starts takes requests after that (--wait_s)"
        )
        return 1
    print(f"{config.run} is taking it; the step is not over yet")
    return 0


def _wait(request: control.Request, deadline: float) -> control.Answer | None:
    """The run's answer, as soon as it is there; None when time is up or the run is gone."""
    while True:
        gone = not control.is_awaited(request)
        answer = control.answer_to(request)
        if answer is not None or gone or time.monotonic() > deadline:
            return answer
        time.sleep(POLL_S)


def _tell(answer: control.Answer) -> int:
    if answer.refused:
        print(f"not done at step {answer.step}: {answer.refused}")
        return 1
    print(f"taken at step {answer.step}")
    return 0
