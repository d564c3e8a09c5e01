"""Run the test suite: tests that start processes one after another, and beside them all others in parallel.

    python .ci/tests.py [--slow] [--cap_s SECONDS] [pytest arguments]

Tests marked `ranks`, `faults`, `browser` or `ray` start processes and wait for them with timeouts: one at a time, with
the priority of this process. They leave most of the processor idle. All others run meanwhile on two pytest-xdist
workers of the lowest priority; their output is printed when both groups have ended. `--cap_s` limits the time of the
slow tests: see slow_rotation.py. A failed test is not repeated, except those named in tests/racy.txt. Standard library
only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

SERIAL = "ranks or faults or browser or ray"
NO_TESTS_COLLECTED = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow instead of all others")
    parser.add_argument("--cap_s", type=float, default=0.0, help="stop starting tests after this time; 0: no limit")
    options, arguments = parser.parse_known_args()
    selected = f"{'slow' if options.slow else 'not slow'} and not gpu"
    deadline = time.time() + options.cap_s if options.cap_s else 0.0
    with tempfile.TemporaryFile() as output:
        parallel = start_pytest(
            f"{selected} and not ({SERIAL})", ["-n", "2", "--dist", "loadfile", *arguments], deadline, output
        )
        serial = start_pytest(f"{selected} and ({SERIAL})", arguments, deadline)
        statuses = {wait(serial), wait(parallel)} - {NO_TESTS_COLLECTED}
        output.seek(0)
        sys.stdout.buffer.write(b"\nTests that run in parallel:\n" + output.read())
        sys.stdout.flush()
    return max(statuses, default=NO_TESTS_COLLECTED)


def start_pytest(
    marks: str, arguments: list[str], deadline: float, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start pytest on the tests with these marks; with `output`, at the lowest priority."""
    command = [sys.executable, "-m", "pytest", "-m", marks, *arguments]
    environment = dict(os.environ)
    if deadline:
        command += ["-p", "slow_rotation"]
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["HALATION_SLOW_DEADLINE"] = str(deadline)
    if output is not None:
        command = ["nice", "-n", "19", *command]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT if output else None)


def wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code. Ctrl+C reaches pytest too, which then ends the processes of its tests."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main())
