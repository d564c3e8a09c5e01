"""`python -m benchmarks [--size small] [--only NAME ...]`: run the benchmarks.

Those that this machine supports are run one after the other, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure, shipped

NAMES = (
    "duel_01_training",
    "duel_02_loader",
    "duel_03_preview",
    "duel_04_all_ranks",
    "duel_05_uneven",
    "duel_06_png",
    "duel_07_generate",
    "duel_08_resume",
    "duel_09_frechet",
    "duel_10_scores",
    "duel_11_checkpoint",
    "gallery",
    "memory_estimate",
    "overhead",
    "sampling_scaling",
    "scaling",
)


def main() -> int:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    asked = parser.parse_args()
    reports: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in asked.only:
        began = time.monotonic()
        found = run(name, asked)
        measure.say(f"{name}: {'failed' if found is None else 'done'} after {time.monotonic() - began:.0f} s")
        if found is None:
            failed.append(name)
        else:
            reports.append(found)
    print("\nratios")
    for report in reports:
        for row in report["rows"]:
            print(f"  {report['name']:20} {row['case']:40} {row['ratio']:8.2f}x")
    if asked.output is not None:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(json.dumps(reports, indent=2) + "\n")
    for name in failed:
        print(f"  {name} FAILED")
    return 1 if failed else 0


def run(name: str, asked: argparse.Namespace) -> dict[str, Any] | None:
    """Run one benchmark in a separate process, with clean memory; None if it failed."""
    with tempfile.TemporaryDirectory(prefix="halation_benchmark_") as folder:
        output = Path(folder) / "report.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--size", asked.size, "--output", str(output)]
        if asked.work is not None:
            command += ["--work", str(asked.work / name)]
        code = subprocess.run(command, env=shipped.environment(), check=False).returncode
        if code or not output.exists():
            return None
        result: dict[str, Any] = json.loads(output.read_text())
        return result


if __name__ == "__main__":
    sys.exit(main())
