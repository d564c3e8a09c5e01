"""`halation ctl`: ask a running training to sample, save or stop; imports no torch."""

from __future__ import annotations

import time

from halation.config import check_settings
from halation.runs import control_requests
from halation.tools.config import CtlConfig

POLL_S = 0.1


def run(config: CtlConfig) -> int:
    """Exit code 0 when the run has taken it (or --wait_s is 0), 1 when it has not; what was not taken is withdrawn."""
    check_settings(config)
    deadline = time.monotonic() + config.wait_s
    while control_requests.is_starting(config.run) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    request = control_requests.send_request(config.run, config.action)
    print(f"asked {config.run} to {config.action} at its next step", flush=True)
    if not config.wait_s:
        return 0
    response = None
    is_running = True
    try:
        while response is None and is_running and time.monotonic() <= deadline:
            time.sleep(POLL_S)
            is_running = control_requests.is_owner_running(request)
            response = control_requests.read_response(request)
    except KeyboardInterrupt:
        is_cancelled = control_requests.cancel_request(request)
        print("withdrawn" if is_cancelled else f"too late to withdraw: {config.run} has taken it")
        return 130
    if response is None:
        is_cancelled = control_requests.cancel_request(request)
        is_running = control_requests.is_owner_running(request)
        response = None if is_running else control_requests.read_response(request)  # it may have come since
    if response is not None:
        print(
            f"not done at step {response.step}: {response.refused}"
            if response.refused
            else f"taken at step {response.step}"
        )
        return 1 if response.refused else 0
    if not is_running:
        print(f"{config.run} ended before it took that")
        return 1
    if is_cancelled:
        print(
            f"not taken within {config.wait_s:g} s, withdrawn; "
            "a run that compiles, samples or starts takes requests after that (--wait_s)"
        )
        return 1
    print(f"{config.run} is taking it; the step is not over yet")
    return 0
