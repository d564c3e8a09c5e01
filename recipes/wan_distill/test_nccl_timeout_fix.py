"""Test of the timeout of collectives: it can be set, slow sampling does not reach it, a rank that hangs does.

Real processes distil the tiny Wan, with gloo instead of NCCL on a machine without GPUs. The result of each check is
printed on a line. `python test_nccl_timeout_fix.py`, or pytest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import recipe_checks as runs

TIMEOUT_S = 15.0
STEP_S = 3.5
STEPS = 5
HANG_S = 10.0
SLOW_RANK = 1


def checks(folder: Path) -> Iterator[runs.Check]:
    """Yield the checks one by one, so that those before an error are still printed."""
    slow, hanging = folder / "slow", folder / "hanging"
    slow.mkdir()
    hanging.mkdir()
    yield from _slow_sampler(slow)
    yield from _hanging_rank(hanging)


def _slow_sampler(folder: Path) -> Iterator[runs.Check]:
    flags = ["--dist_timeout_s", TIMEOUT_S, "--num_epochs", 1, "--sample_steps", STEPS]
    done = runs.distil(folder, flags, fault=f"sample.forward:1+:sleep={STEP_S}:{SLOW_RANK}")
    yield done.returncode == 0, f"a rank that samples slowly is no failure: exit code {done.returncode}"
    if done.returncode:
        yield False, runs.last_lines(done.stderr)
        return
    recorded = json.loads((folder / "run" / "config.json").read_text())["settings"]["dist_timeout_s"]
    yield recorded == TIMEOUT_S, f"--dist_timeout_s is {recorded:g} s, as set"
    rows = json.loads((folder / "run" / "samples" / "epoch_0001_samples.json").read_text())["samples"]
    states = [row["state"] for row in rows]
    yield states == ["done"] * len(runs.PROMPTS), f"all samples are done: {states}"
    slept_s = STEP_S * len((folder / "faults").read_text().splitlines())
    yield slept_s > TIMEOUT_S, f"rank {SLOW_RANK} sampled for more than {slept_s:g} s, longer than the timeout"


def _hanging_rank(folder: Path) -> Iterator[runs.Check]:
    flags = ["--num_epochs", 1, "--sample_steps", STEPS, "--sample_timeout_s", HANG_S]
    began = time.monotonic()
    done = runs.distil(folder, flags, fault=f"sample.forward:2:sleep={2 * runs.PATIENCE_S}:{SLOW_RANK}")
    took_s = time.monotonic() - began
    yield done.returncode == 1, f"a rank that hangs fails the command after {took_s:.0f} s: exit code {done.returncode}"
    yield (folder / "faults").is_file(), f"rank {SLOW_RANK} did hang, in its second step"
    wanted = f"rank {SLOW_RANK} has made no progress for {HANG_S:g} s in sampling"
    yield wanted in done.stderr, f'the message says "{wanted}"'
    if wanted not in done.stderr:
        yield False, runs.last_lines(done.stderr)


def test_slow_sampling_is_no_timeout_and_a_hanging_rank_is(tmp_path: Path) -> None:
    assert runs.report(checks(tmp_path))


if __name__ == "__main__":
    sys.exit(runs.main(f"{runs.NUM_RANKS} processes distil a tiny Wan, rank {SLOW_RANK} is slow, then hangs", checks))
