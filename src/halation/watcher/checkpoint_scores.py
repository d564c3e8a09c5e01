"""What is known of the checkpoints that were scored: their numbers, which is best, and the files that show it.

The evaluation.json of each step is the only truth; metrics.jsonl and metrics.png are made from them anew every time.
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

from halation.errors import InputError
from halation.images import grid
from halation.images.axes import short_number
from halation.images.plot import direction, metric_panels, plot
from halation.images.png import encode_png, read_png
from halation.runs.folder import METRICS_FILE, publish, read_json, step_name

EVALUATION_FILE = "evaluation.json"
NUM_IN_GRID, NUM_COLUMNS = 16, 4
NUMBERS = ("name", "value", "std", "better", "few")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The numbers of one checkpoint, by metric."""

    step: int
    checkpoint: str
    metrics: Mapping[str, Mapping[str, Any]]

    def value(self, metric: str) -> float:
        return float(self.metrics[metric]["value"])

    def name(self, metric: str) -> str:
        return str(self.metrics[metric].get("name") or metric)


def read_verdicts(folder: Path) -> list[Verdict]:
    """All steps that have their evaluation, by step."""
    found = []
    for path in sorted(folder.glob(f"step_*/{EVALUATION_FILE}")):
        if re.fullmatch(r"step_\d+", path.parent.name):
            value = read_json(path)
            found.append(Verdict(step=value["step"], checkpoint=value["checkpoint"], metrics=value["metrics"]))
    return sorted(found, key=lambda verdict: verdict.step)


def problem_of(evaluation: Any) -> str:
    """Why an evaluation cannot be a verdict; empty where it can."""
    metrics = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    if not isinstance(metrics, dict) or not metrics:
        return "the evaluation holds no numbers"
    for name, entry in metrics.items():
        value = entry.get("value") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"the evaluation says {name} is {value}"
    return ""


def best_of(verdicts: Sequence[Verdict], metric: str) -> Verdict:
    """The earliest of those whose number nothing beats."""
    sign = -1 if direction(metric, verdicts[-1].metrics[metric].get("better")) == "highest" else 1
    return min(verdicts, key=lambda verdict: (sign * verdict.value(metric), verdict.step))


def deciding(verdict: Verdict, best_by: str) -> str:
    """The metric that decides: the one that was asked for, or the first."""
    if best_by and best_by not in verdict.metrics:
        raise InputError(
            f"--best_by {best_by}, and the evaluation has {', '.join(verdict.metrics)}",
            "one of these numbers",
            "choose one of them, or ask for it by --metrics in another --output_dir",
        )
    return best_by or next(iter(verdict.metrics))


def reference_of(verdict: Verdict) -> set[str]:
    """The hashes of what the numbers were compared with."""
    found = {str(entry.get("reference_hash") or "") for entry in verdict.metrics.values()}
    return found - {""}


def sentence(verdict: Verdict, verdicts: Sequence[Verdict], metric: str) -> str:
    """step 500: FD-streets 31.2 (best 29.8 at 400), KID-streets 0.0123"""
    best = best_of(verdicts, metric)
    if best.step == verdict.step:
        standing = "the best so far" if len(verdicts) > 1 else "the first"
    else:
        standing = f"best {short_number(best.value(metric))} at {best.step}"
    words = [f"{verdict.name(metric)} {short_number(verdict.value(metric))} ({standing})"]
    words += [
        f"{verdict.name(other)} {short_number(verdict.value(other))}" for other in verdict.metrics if other != metric
    ]
    few = ", of few pictures" if any(entry.get("few") for entry in verdict.metrics.values()) else ""
    return f"step {verdict.step}: {', '.join(words)}{few}"


def write_metrics(folder: Path, verdicts: Sequence[Verdict], title: str) -> None:
    """metrics.jsonl and metrics.png."""
    rows = [
        {"step": verdict.step, "checkpoint": verdict.checkpoint, "metric": metric}
        | {key: entry[key] for key in NUMBERS if key in entry}
        for verdict in verdicts
        for metric, entry in verdict.metrics.items()
    ]
    publish(folder / METRICS_FILE, b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    panels = metric_panels(rows)
    if panels:
        publish(folder / "metrics.png", encode_png(plot(panels, title), {}))


def write_grid(drawn: Path, path: Path) -> None:
    """The first pictures of a `halation generate` with their prompts."""
    with open(drawn / "metadata.jsonl", "rb") as file:
        rows = [json.loads(line) for line in itertools.islice(file, NUM_IN_GRID)]
    shown = [read_png(drawn / row["file_name"])[0] for row in rows]
    publish(path, encode_png(grid.grid(shown, NUM_COLUMNS, [row["prompt"] for row in rows]), {}))


def folder_of(folder: Path, step: int) -> Path:
    return folder / step_name(step)
