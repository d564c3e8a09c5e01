"""Runs the shipped command in a separate process, measured by the files it writes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.1


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment with an absolute PYTHONPATH and without launcher variables."""
    result = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = [str(Path(entry).resolve()) for entry in result.get("PYTHONPATH", "").split(os.pathsep) if entry]
    source = Path(__file__).resolve().parents[1] / "src"
    result["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*path, str(source)]))
    return result | dict(extra or {})


def halation(words: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> float:
    """Run `halation WORDS`; return the seconds, or raise with the end of its output."""
    began = time.perf_counter()
    with log.open("wb") as file:
        command = [sys.executable, "-m", "halation.cli", *words]
        code = subprocess.run(command, stdout=file, stderr=file, env=environment(extra), check=False).returncode
    if code:
        raise SystemExit(f"halation {' '.join(words)} exited with {code}:\n{_tail(log)}")
    return time.perf_counter() - began


def train(
    words: Sequence[str],
    run: Path,
    log: Path,
    *,
    until_step: int,
    limit_s: float,
    extra: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `halation train WORDS` until metrics.jsonl has `until_step`, then kill it.

    It is killed instead of stopped, because a last checkpoint of ten gigabytes is not part of the throughput.
    """
    command = [sys.executable, "-m", "halation.cli", "train", "--output_dir", str(run), *words]
    with log.open("wb") as file:
        # Files that a killed launcher leaves are removed with the benchmark's folder.
        place = environment({"TMPDIR": str(run.parent), **(extra or {})})
        process = subprocess.Popen(command, stdout=file, stderr=file, env=place)
    deadline = time.monotonic() + limit_s
    try:
        while True:
            ended = process.poll()
            lines = training_lines(run)
            if lines and lines[-1]["step"] >= until_step:
                return lines
            if ended is not None:
                raise SystemExit(f"halation train exited with {ended} before step {until_step}:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"halation train did not reach step {until_step} within {limit_s:.0f} s:\n{_tail(log)}"
                )
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def training_lines(run: Path) -> list[dict[str, Any]]:
    """Return the training lines of metrics.jsonl, without an incomplete last line."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    text = path.read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
    return [line for line in lines if "loss" in line]


def rates(lines: Sequence[Mapping[str, Any]], batch: int, after_step: int) -> list[float]:
    """Return images per second between logged steps after the warm-up, by the run's clock."""
    kept = [line for line in lines if line["step"] >= after_step]
    return [
        (later["step"] - sooner["step"]) * batch / max(later["time_s"] - sooner["time_s"], 1e-9)
        for sooner, later in itertools.pairwise(kept)
    ]


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
