"""Scores of checkpoints: read them, find the best, write metrics.jsonl and metrics.png.

The evaluation.json of each step is the source; the other files are rebuilt from it every time.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halation.errors import InputError, format_count
from halation.generation.metadata_and_summary import METADATA_FILE
from halation.images import grid
from halation.images.plot import best_direction, draw_panels, format_number, metric_panels
from halation.images.png_codec import encode_png, read_png
from halation.runs.run_folder import METRICS_FILE, read_json_with_digest, step_name, write_atomic

EVALUATION_FILE = "evaluation.json"
NUM_GRID_IMAGES, NUM_COLUMNS = 16, 4
METRIC_KEYS = ("name", "value", "std", "better", "few", "num_missing")


@dataclass(frozen=True, kw_only=True)
class CheckpointScore:
    """The scores of one checkpoint, by metric."""

    step: int
    checkpoint: str
    metrics: Mapping[str, Mapping[str, Any]]

    @property
    def num_missing(self) -> int:
        """The number of images that failed and are not scored."""
        return max((int(entry.get("num_missing") or 0) for entry in self.metrics.values()), default=0)

    def value(self, metric: str) -> float:
        return float(self.metrics[metric]["value"])

    def metric_name(self, metric: str) -> str:
        return str(self.metrics[metric].get("name") or metric)


def read_scores(folder: Path) -> list[CheckpointScore]:
    """Read the scores of all evaluated steps, ordered by step."""
    found = []
    for path in sorted(folder.glob(f"step_*/{EVALUATION_FILE}")):
        if re.fullmatch(r"step_\d+", path.parent.name):
            try:
                value = read_json_with_digest(path)
            except InputError as error:
                action = "delete it; the step is scored again if its checkpoint still exists"
                raise InputError(error.found, error.expected, action) from error
            found.append(CheckpointScore(step=value["step"], checkpoint=value["checkpoint"], metrics=value["metrics"]))
    return sorted(found, key=lambda score: score.step)


def find_evaluation_problem(evaluation: Any) -> str:
    """Return why an evaluation has no usable scores; empty if it has."""
    metrics = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    if not isinstance(metrics, dict) or not metrics:
        return "the evaluation has no metrics"
    for name, entry in metrics.items():
        value = entry.get("value") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"the evaluation has no finite value for {name}: {value}"
    return ""


def best_score(scores: Sequence[CheckpointScore], metric: str) -> CheckpointScore:
    """Return the best checkpoint by this metric, the earliest of equal ones."""
    sign = -1 if best_direction(metric, scores[-1].metrics[metric].get("better")) == "highest" else 1
    return min(scores, key=lambda score: (sign * score.value(metric), score.step))


def deciding_metric(score: CheckpointScore, best_by: str) -> str:
    """The metric that decides which checkpoint is best: `best_by`, or the first."""
    if best_by and best_by not in score.metrics:
        raise InputError(
            f"--best_by {best_by}, and the evaluation has {', '.join(score.metrics)}",
            "one of these scores",
            "choose one of them, or add it to --metrics in another --output_dir",
        )
    return best_by or next(iter(score.metrics))


def reference_hashes(score: CheckpointScore) -> set[str]:
    """The hashes of the references of the scores."""
    found = {str(entry.get("reference_hash") or "") for entry in score.metrics.values()}
    return found - {""}


def format_score(score: CheckpointScore, scores: Sequence[CheckpointScore], metric: str) -> str:
    """Format as `step 500: FD-streets 31.2 (best 29.8 at 400), KID-streets 0.0123`."""
    best = best_score(scores, metric)
    if best.step == score.step:
        comparison = "the best so far" if len(scores) > 1 else "the first"
    else:
        comparison = f"best {format_number(best.value(metric))} at {best.step}"
    words = [f"{score.metric_name(metric)} {format_number(score.value(metric))} ({comparison})"]
    words += [
        f"{score.metric_name(other)} {format_number(score.value(other))}" for other in score.metrics if other != metric
    ]
    few = ", of few images" if any(entry.get("few") for entry in score.metrics.values()) else ""
    missing = f", without {format_count(score.num_missing, 'missing image')}" if score.num_missing else ""
    return f"step {score.step}: {', '.join(words)}{few}{missing}"


def write_metrics(folder: Path, scores: Sequence[CheckpointScore], title: str) -> None:
    """Write metrics.jsonl and metrics.png."""
    rows = [
        {"step": score.step, "checkpoint": score.checkpoint, "metric": metric}
        | {key: entry[key] for key in METRIC_KEYS if key in entry}
        for score in scores
        for metric, entry in score.metrics.items()
    ]
    write_atomic(folder / METRICS_FILE, b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    panels = metric_panels(rows)
    if panels:
        write_atomic(folder / "metrics.png", encode_png(draw_panels(panels, title), {}))


def write_grid(images_folder: Path, path: Path) -> None:
    """Write a grid of the first generated images with their prompts."""
    with open(images_folder / METADATA_FILE, "rb") as file:
        rows = [json.loads(line) for line in itertools.islice(file, NUM_GRID_IMAGES)]
    shown = [read_png(images_folder / row["file_name"])[0] for row in rows]
    write_atomic(path, encode_png(grid.make_grid(shown, NUM_COLUMNS, [row["prompt"] for row in rows]), {}))


def step_folder(folder: Path, step: int) -> Path:
    return folder / step_name(step)
