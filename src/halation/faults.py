"""Named points where a test may make the program fail, hang or die; free when no test asks for it.

`HALATION_FAULT="name:N:action[:rank]"` fires `action` the Nth time `fault_point(name)` is passed (N+ fires from then on);
several faults are separated by `;`. Actions: raise, kill, stop, sleep=SECONDS, and ENOSPC, EIO, EROFS, EMFILE for OSErrors.
Each firing is appended to the file named by `HALATION_FAULT_LOG`, so that a test can prove that its fault fired.
"""

from __future__ import annotations

import errno
import os
import signal
import time

_counts: dict[str, int] = {}


class InjectedFault(RuntimeError):
    """Raised by a fault point on a test's request."""


def fault_point(name: str) -> None:
    """Do nothing, unless the environment asks this point to fail."""
    request = os.environ.get("HALATION_FAULT")
    if not request:
        return
    count = _counts[name] = _counts.get(name, 0) + 1
    for entry in request.split(";"):
        wanted, number, action, *rank = entry.split(":")
        if wanted != name or (rank and rank[0] != os.environ.get("RANK", "0")):
            continue
        due = count >= int(number[:-1]) if number.endswith("+") else count == int(number)
        if due:
            _fire(name, count, action)


def _fire(name: str, count: int, action: str) -> None:
    log = os.environ.get("HALATION_FAULT_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{name}:{count}:{action}:{os.environ.get('RANK', '0')}\n")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("sleep="):
        time.sleep(float(action.removeprefix("sleep=")))
    elif action == "raise":
        raise InjectedFault(f"fault injected at {name}, passage {count}")
    else:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code), name)
