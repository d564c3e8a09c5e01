# ruff: noqa: T201
"""Run tests, the fast or the slow ones; the few that failed, if they start processes or a browser, run once more alone and may clear themselves.

A machine that pauses longer than a test was patient for must not refuse a change, and a broken law must: it fails twice.
So a second run is given only to tests marked `ranks`, `faults` or `browser` (the others depend on no clock: what they
pass alone and fail among others is a defect), and only where at most five failed (more is no noise). Whoever passes the
second time is named in a line that begins with RACY, with what it said when it failed: such a test wants mending.
All arguments go to pytest. Needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

TIMED = frozenset({"ranks", "faults", "browser"})
MOST = 5
TESTS_FAILED = 1


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory() as folder:
        status, reports = run_recorded(sys.argv[1:], Path(folder) / "first")
        failed = {report["test"]: report for report in reversed(reports) if report["outcome"] == "failed"}
        if status != TESTS_FAILED or not failed:
            return status
        untimed = [test for test, report in failed.items() if not TIMED & set(report["marks"])]
        if untimed or len(failed) > MOST:
            why = f"{len(failed)} failed" if len(failed) > MOST else f"{untimed[0]} depends on no clock"
            print(f"\nNo second run: {why}", flush=True)
            return status
        print(f"\nA second run, alone, of what failed: {len(failed)}", flush=True)
        status, again = run_recorded(list(failed), Path(folder) / "second")
    passed = {report["test"] for report in again if report["outcome"] == "passed"}
    for test, report in failed.items():
        if status == 0 and test in passed:
            print(f"\nRACY: {test} failed, then passed alone. It had said:\n{report['text']}", flush=True)
    # One that was skipped the second time has cleared itself of nothing.
    return 0 if status == 0 and failed.keys() <= passed else TESTS_FAILED


def run_recorded(arguments: list[str], record: Path) -> tuple[int, list[dict[str, Any]]]:
    """pytest's exit status, and what fast_record wrote down of each test."""
    record.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
        "HALATION_FAST_RECORD": str(record),
    }
    # An interrupt reaches pytest too, which then ends what its tests began: so this waits for it instead of killing it.
    before = signal.signal(signal.SIGINT, _wait)
    status = subprocess.call([sys.executable, "-m", "pytest", "-p", "fast_record", *arguments], env=environment)
    signal.signal(signal.SIGINT, before)
    return status, [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def _wait(_number: int, _frame: FrameType | None) -> None:
    pass


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
