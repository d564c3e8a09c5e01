"""`halation ctl`: ask a running training to sample, save or stop; imports no torch."""

from __future__ import annotations

import time

from halation.config import check_settings
from halation.runs import control_requests
from halation.tools.config import CtlConfig

POLL_S = 0.1


def run(config: CtlConfig) -> int:
    """Send a request and wait for the run to accept it.

    Returns 0 if it is accepted (or --wait_s is 0), else 1. A request that is not accepted is withdrawn.
    """
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
        print("withdrawn" if is_cancelled else f"too late to withdraw: {config.run} has accepted it")
        return 130
    if response is None:
        is_cancelled = control_requests.cancel_request(request)
        is_running = control_requests.is_owner_running(request)
        response = None if is_running else control_requests.read_response(request)  # it may have arrived meanwhile
    if response is not None:
        print(
            f"not done at step {response.step}: {response.refused}"
            if response.refused
            else f"accepted at step {response.step}"
        )
        return 1 if response.refused else 0
    if not is_running:
        print(f"{config.run} ended before it accepted the request")
        return 1
    if is_cancelled:
        print(
            f"not accepted within {config.wait_s:g} s, withdrawn; "
            "a run that is starting, compiling or sampling accepts requests afterwards (--wait_s)"
        )
        return 1
    print(f"{config.run} has the request; its step is not finished yet")
    return 0
