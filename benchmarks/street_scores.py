"""Scores models of the street scenes with `halation evaluate`, with intervals over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measure, shipped
from halation.data.streets import caption, scene
from halation.data.streets.scene_attributes import Split

# Two-sided 95 % of Student's t by degrees of freedom.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, kw_only=True)
class Score:
    """Scores of one model with one setting and one set of seeds."""

    name: str
    seed: int
    steps: int
    guidance: float
    fd: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class Jury:
    """Scores models on captions of validation scenes; features are cached in `work`."""

    work: Path
    num_images: int
    num_reference: int
    dtype: str = "fp32"

    def score(self, name: str, model: Path, seed: int, *, steps: int, guidance: float) -> Score:
        label = f"{name}_steps{steps}_guidance{guidance:g}_seed{seed}"
        output = self.work / "scores" / f"{label}.json"
        prompts = captions(self.work, "heldout", self.num_images)
        words = [
            "evaluate", "--model_path", model, "--prompts", prompts, "--reference", "streets", "--metrics", "fd", "agreement",
            "--num_reference", self.num_reference, "--num_inference_steps", steps, "--guidance_scale", guidance,
            "--seed_start", 1_000_000 * (seed + 1), "--model_batch_size", 50, "--nproc", 1, "--cache_dir", self.work / "features",
            "--allow_few", "--model_dtype", self.dtype, "--progress", "none", "--output", output,
        ]  # fmt: skip
        run(self.work, f"score_{label}", words)
        found = json.loads(output.read_text())["metrics"]
        distance, share = found["fd"]["value"], found["agreement"]["value"]
        measure.say(f"{label}: FD-streets {distance:.2f}, agreement {share:.3f}")
        return Score(name=name, seed=seed, steps=steps, guidance=guidance, fd=distance, agreement=share)


def run(work: Path, name: str, words: Sequence[object]) -> None:
    """Run the shipped command, with its output in a log of that name."""
    log = work / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    measure.say(f"{name}: halation {' '.join(str(word) for word in words)}")
    shipped.halation([str(word) for word in words], log)


def captions(work: Path, part: Split, num: int) -> Path:
    """Write one caption per scene, so that captions are as frequent as in the data."""
    file = work / f"{part}_{num}.txt"
    if not file.exists():
        file.write_text("".join(f"{caption(scene(part, index))}\n" for index in range(num)))
    return file


def with_interval(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean and, for two or more values, half the width of its 95 % t interval."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    half = STUDENT_T.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {half:.{digits}f}"


def table(scores: Sequence[Score]) -> str:
    """Format a table with one row per setting, over its seeds."""
    groups: dict[tuple[str, int, float], list[Score]] = {}
    for each in dict.fromkeys(scores):
        groups.setdefault((each.name, each.steps, each.guidance), []).append(each)
    rows = [("model", "steps", "guidance", "FD-streets", "agreement", "seeds")]
    for (name, steps, guidance), found in groups.items():
        distance = with_interval([each.fd for each in found])
        share = with_interval([each.agreement for each in found], 3)
        rows.append((name, str(steps), f"{guidance:g}", distance, share, str(len(found))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"  {line.rstrip()}" for line in lines)
