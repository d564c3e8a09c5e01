"""Named points where a test can make the program fail, hang or die; no-ops otherwise.

`HALATION_FAULT="name:N:action[:rank][:once]"` triggers `action` at the Nth call of `fault_point(name)`; `N+` triggers
it at the Nth and every later call. The name `*` counts the calls of all points. Separate several faults with `;`.
Actions: raise, kill, stop, sleep=SECONDS, OOM for a MemoryError, and ENOSPC, EIO, EROFS, EMFILE for OSErrors.

Each triggered fault is appended to the file named by `HALATION_FAULT_LOG`, so that a test can prove that it happened.
Calls are counted per process. `once` is for ranks that are restarted: the fault is skipped if the log already has it.
"""

from __future__ import annotations

import errno
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
