"""Test of two fixes: no rank waits at a barrier for samples, and samples take few steps of the right sampler.

Three processes distil the tiny Wan for two epochs while one of them samples slowly. The result of each check is printed
on a line. `python test_fixes.py`, or pytest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import recipe_checks as runs

from halation.images.png_codec import read_png

STEPS = 5
SLOW_RANK = 1
EPOCHS = (1, 2)


def checks(folder: Path) -> Iterator[runs.Check]:
    """Yield the checks one by one, so that those before an error are still printed."""
    done = runs.distil(folder, ["--sample_steps", STEPS], fault=f"sample.forward:1+:sleep=0.5:{SLOW_RANK}")
    yield done.returncode == 0, f"{runs.NUM_RANKS} processes exited with code {done.returncode}"
    if done.returncode:
        yield False, runs.last_lines(done.stderr)
        return
    run = folder / "run"
    samples = run / "samples"
    indexes = [json.loads((samples / f"epoch_{epoch:04d}_samples.json").read_text()) for epoch in EPOCHS]
    rows = [row for index in indexes for row in index["samples"]]
    states = [row["state"] for row in rows]
    yield states == ["done"] * len(EPOCHS) * len(runs.PROMPTS), f"all samples of both epochs are done: {states}"
    drew = {row["rank"] for row in rows}
    yield len(drew) > 1, f"more than one rank sampled: {sorted(drew)}"
    steps = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    yield steps[-1] == "step_0000002", f"training went on after the samples of epoch 1: {steps}"

    slow = len((folder / "faults").read_text().splitlines())
    num_slow = sum(row["rank"] == SLOW_RANK for row in rows)
    yield slow == STEPS * num_slow > 0, f"rank {SLOW_RANK} made {slow} steps for {num_slow} samples, {STEPS} for each"
    kinds = [_scheduler(path) for path in (folder / "tiny_wan", run / "export")]
    yield kinds[0] == kinds[1] != "DDIMScheduler", f"the export samples with the teacher's scheduler, {kinds[1]}"
    last = rows[len(runs.PROMPTS) :]
    images = [read_png(samples / row["file"])[0] for row in last]
    plain = _drawn_by_diffusers(run / "export", last)
    same = [bool(np.array_equal(*pair)) for pair in zip(images, plain, strict=True)]
    yield all(same), f"diffusers alone draws the same {len(same)} images from the export in {STEPS} steps: {same}"


def _scheduler(pipeline: Path) -> str:
    return str(json.loads((pipeline / "model_index.json").read_text())["scheduler"][1])


def _drawn_by_diffusers(export: Path, rows: list[dict[str, Any]]) -> list[Any]:
    from halation.models.pipelines import load

    load.filter_library_warnings()
    import diffusers
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(str(export), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    settings = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": STEPS, "guidance_scale": 1.0}
    found = []
    for row in rows:
        generator = torch.Generator().manual_seed(row["seed"])
        frames = pipe(row["prompt"], generator=generator, output_type="np", **settings).frames
        found.append((frames[0][0] * 255).round().astype(np.uint8))
    return found


def test_sampling_needs_no_barrier_and_takes_few_steps(tmp_path: Path) -> None:
    assert runs.report(checks(tmp_path))


if __name__ == "__main__":
    sys.exit(runs.main(f"{runs.NUM_RANKS} processes distil a tiny Wan, rank {SLOW_RANK} samples slowly", checks))
