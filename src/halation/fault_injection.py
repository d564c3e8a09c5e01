"""Named points where a test may make the program fail, hang or die; free otherwise.

`HALATION_FAULT="name:N:action[:rank][:once]"` fires `action` the Nth time `fault_point(name)` is passed (N+ fires
from then on); the name `*` counts every passage of every point. Several faults are separated by `;`. Actions: raise,
kill, stop, sleep=SECONDS, OOM for a MemoryError, and ENOSPC, EIO, EROFS, EMFILE for OSErrors.

Each firing is appended to the file named by `HALATION_FAULT_LOG`, so that a test can prove that its fault fired.
Passages are counted by process; `once` is for ranks that are started again: it fires only while the log has no word
of it.
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
    for counted in (name, "*"):
        _counts[counted] = _counts.get(counted, 0) + 1
    for entry in request.split(";"):
        wanted, number, action, *rest = entry.split(":")
        if wanted not in (name, "*") or any(word.isdigit() and word != _rank() for word in rest):
            continue
        count = _counts[wanted]
        is_due = count >= int(number[:-1]) if number.endswith("+") else count == int(number)
        if is_due and not ("once" in rest and _has_fired(wanted, action)):
            _fire(name, count, action)


def _rank() -> str:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def _has_fired(wanted: str, action: str) -> bool:
    start = "" if wanted == "*" else f"{wanted}:"
    try:
        with open(os.environ["HALATION_FAULT_LOG"]) as file:
            return any(line.startswith(start) and f":{action}:{_rank()}\n" in line for line in file)
    except (KeyError, FileNotFoundError):
        return False


def _fire(name: str, count: int, action: str) -> None:
    log = os.environ.get("HALATION_FAULT_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{name}:{count}:{action}:{_rank()}\n")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("sleep="):
        time.sleep(float(action.removeprefix("sleep=")))
    elif action == "raise":
        raise InjectedFault(f"fault injected at {name}, passage {count}")
    elif action == "OOM":
        raise MemoryError(f"fault injected at {name}, passage {count}")
    else:
        code = getattr(errno, action)
        raise OSError(code, os.strerror(code), name)
