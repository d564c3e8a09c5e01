"""Named points where a test can make the program fail, hang or die; no-ops otherwise.

`HALATION_FAULT="name:N:action[:rank][:once]"` triggers `action` at the Nth call of `fault_point(name)`; `N+` triggers
it at the Nth and every later call. The name `*` counts the calls of all points. Separate several faults with `;`.
Actions: raise, kill, stop, sleep=SECONDS, OOM for a MemoryError, and ENOSPC, EIO, EROFS, EMFILE for OSErrors.

Each triggered fault is appended to the file named by `HALATION_FAULT_LOG`, so that a test can prove that it happened.
Calls are counted per process. `once` is for ranks that are restarted: the fault is skipped if the log already has it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time

_counts: dict[str, int] = {}


class InjectedFault(RuntimeError):
    """Raised by a fault point with the action `raise`."""


def fault_point(name: str) -> None:
    """Trigger the faults that HALATION_FAULT requests for this point."""
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
        if is_due and _record(name, wanted, count, action, once="once" in rest):
            _fire(name, count, action)


def _rank() -> str:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def _record(name: str, wanted: str, count: int, action: str, *, once: bool) -> bool:
    """Append the fault to the log; return False if it is to be triggered `once` and the log has it.

    The lock makes one of several processes trigger a fault that all of them reach at the same time.
    """
    log = os.environ.get("HALATION_FAULT_LOG")
    if not log:
        return True
    with open(log, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        start, end = "" if wanted == "*" else f"{wanted}:", f":{action}:{_rank()}\n"
        if once and any(line.startswith(start) and end in line for line in file):
            return False
        file.write(f"{name}:{count}:{action}:{_rank()}\n")
    return True


def _fire(name: str, count: int, action: str) -> None:
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
