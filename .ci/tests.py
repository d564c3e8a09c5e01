"""Run the test suite: first the tests that run in parallel, then those that start processes, one after another.

    python .ci/tests.py [--slow] [--cap_s SECONDS] [pytest arguments]

Tests marked `ranks`, `faults`, `browser` or `ray` start processes and wait for them with timeouts, so they run alone.
All others run on two pytest-xdist workers. `--cap_s` limits the time of the slow tests: see slow_rotation.py. A failed
test is not repeated, except those named in tests/racy.txt. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

SERIAL = "ranks or faults or browser or ray"
NO_TESTS_COLLECTED = 5
INTERRUPTED = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow instead of all others")
    parser.add_argument("--cap_s", type=float, default=0.0, help="stop starting tests after this time; 0: no limit")
    options, arguments = parser.parse_known_args()
    selected = f"{'slow' if options.slow else 'not slow'} and not gpu"
    started = time.time()
    # The parallel tests get half of the capped time, the serial ones all that is left.
    status = run_pytest(
        f"{selected} and not ({SERIAL})", ["-n", "2", "--dist", "loadfile", *arguments], options.cap_s / 2
    )
    if status == INTERRUPTED:
        return status
    left_s = max(1.0, options.cap_s - (time.time() - started)) if options.cap_s else 0.0
    serial_status = run_pytest(f"{selected} and ({SERIAL})", arguments, left_s)
    statuses = {status, serial_status} - {NO_TESTS_COLLECTED}
    return max(statuses, default=NO_TESTS_COLLECTED)


def run_pytest(marks: str, arguments: list[str], cap_s: float) -> int:
    """Run pytest on the tests with these marks and return its exit code."""
    command = [sys.executable, "-m", "pytest", "-m", marks, *arguments]
    environment = dict(os.environ)
    if cap_s:
        command += ["-p", "slow_rotation"]
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["HALATION_SLOW_DEADLINE"] = str(time.time() + cap_s)
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # Ctrl+C reaches pytest too, which then ends the processes of its tests
            continue


if __name__ == "__main__":
    sys.exit(main())
