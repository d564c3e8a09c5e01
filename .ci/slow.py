# ruff: noqa: T201
"""Run the slow tests under a cap on time: green if none failed until then, and nothing of theirs is left running.

The command is expected to hand `$PYTEST_ARGS` to pytest, or to fast.py, whose second run then lies within the cap: where something
failed, the rest ends a while before it. A failure that the cap left without one counts. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import FrameType

GRACE_S = 30.0
RESERVE_S = 240.0
"""What is left for the second run of what failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cap_s", type=float, required=True)
    parser.add_argument("--grace_s", type=float, default=GRACE_S)
    parser.add_argument("--reserve_s", type=float, default=RESERVE_S)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "failures"
        record.touch()
        status = run_capped(options.command, options.cap_s, options.grace_s, options.reserve_s, record)
        failures = record.read_text(encoding="utf-8").splitlines()
    if status is not None:
        return 0 if status == 0 else 1
    print(f"\nThe cap of {options.cap_s:g} s is reached; failures until then: {len(failures)}", flush=True)
    for failure in failures:
        print(f"  {failure}", flush=True)
    return 1 if failures else 0


def run_capped(command: list[str], cap_s: float, grace_s: float, reserve_s: float, record: Path) -> int | None:
    """The command's exit code, or None where the cap ended it."""
    mark = f"HALATION_SLOW_MARK={uuid.uuid4().hex}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_ARGS": "-p slow_record -vv",
        "HALATION_SLOW_RECORD": str(record),
        "HALATION_SLOW_DEADLINE": str(time.time() + cap_s),
        "HALATION_SLOW_RESERVE_S": str(reserve_s),
        **dict([mark.split("=")]),
    }
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(cap_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            print(f"\nStill running {grace_s:g} s after the interrupt: killed", flush=True)
        return None
    finally:
        _sweep(process, mark)


def _sweep(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the command's group, and its children that went into groups of their own: all carry the mark."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (folder / "environ").read_bytes().split(b"\0")
            if marked and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it ended meanwhile, or is somebody else's
            continue


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
