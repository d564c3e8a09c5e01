"""Short distillations of the tiny Wan in real processes, for the test scripts of this recipe."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from halation.errors import HalationError

SCRIPT = Path(__file__).with_name("train_distillation.py")
NUM_RANKS = 3
PROMPTS = ("A cat", "A dog", "A bird", "A fish")
SMALL = "--num_epochs 2 --batch_size 5 --max_images 14 --teacher_steps 4 --teacher_states 2 --no_teacher_samples"
QUIET = "--report_to none --progress none --max_restarts 0"
PATIENCE_S = 600.0
Check = tuple[bool, str]


def distil(folder: Path, flags: Sequence[object], fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run `train_distillation.py` on NUM_RANKS processes on the CPU, in `folder`.

    `fault` is a value of HALATION_FAULT; each time it is triggered, a line is added to `folder/faults`.
    """
    words = [sys.executable, SCRIPT, "--teacher_path", "tiny", "--output_dir", "run", "--nproc", NUM_RANKS]
    words += ["--save_samples", "--sample_prompts", *PROMPTS, *SMALL.split(), *QUIET.split(), *flags]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HALATION_FAULT": fault}
    return subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env={**clean, **own, "HALATION_FAULT_LOG": str(folder / "faults")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def last_lines(text: str, num: int = 15) -> str:
    return "\n".join(text.splitlines()[-num:])


def report(found: Iterator[Check]) -> bool:
    """Print a line for each check; return True if all passed."""
    good = True
    try:
        for passed, sentence in found:
            print(f"{'ok  ' if passed else 'FAIL'} {sentence}", flush=True)
            good &= passed
    except (OSError, KeyError, ValueError, IndexError, subprocess.TimeoutExpired, HalationError) as error:
        print(f"FAIL {type(error).__name__}: {error}", flush=True)
        good = False
    return good


def main(title: str, checks: Callable[[Path], Iterator[Check]]) -> int:
    print(title, flush=True)
    with tempfile.TemporaryDirectory(prefix="halation_checks_") as scratch:
        good = report(checks(Path(scratch)))
    print("ALL CHECKS PASSED" if good else "SOME CHECKS FAILED")
    return 0 if good else 1
