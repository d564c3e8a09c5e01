"""Scores of checkpoints become lines, a plot, a sentence and a best one, whatever order they came in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halation.errors import InputError
from halation.images.png_codec import read_png
from halation.runs import run_folder as runs
from halation.watcher import checkpoint_scores
from halation.watcher.checkpoint_scores import CheckpointScore


def entry(name: str, value: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "std": None, "few": False} | more


def score(step: int, fd: float, agreement: float = 0.5, **more: Any) -> CheckpointScore:
    metrics = {
        "fd": entry("FD-streets", fd, **more),
        "agreement": entry("prompt agreement", agreement, better="higher"),
    }
    return CheckpointScore(step=step, checkpoint=f"step_{step:07d}", metrics=metrics)


def written(folder: Path, *found: CheckpointScore) -> None:
    for each in found:
        place = checkpoint_scores.step_folder(folder, each.step)
        place.mkdir(parents=True)
        value = {"step": each.step, "checkpoint": each.checkpoint, "metrics": each.metrics}
        (place / "evaluation.json").write_text(json.dumps(value))


def test_every_evaluation_is_a_line_for_each_number_and_a_point_in_the_plot(tmp_path: Path) -> None:
    written(tmp_path, score(500, 31.2), score(40, 40.0, std=1.5))
    (tmp_path / "step_0000600").mkdir()
    found = checkpoint_scores.read_scores(tmp_path)
    assert [each.step for each in found] == [40, 500]
    checkpoint_scores.write_metrics(tmp_path, found, "runs/a")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["metric"], row["value"]) for row in rows] == [
        *((40, "fd", 40.0), (40, "agreement", 0.5), (500, "fd", 31.2), (500, "agreement", 0.5)),
    ]
    assert rows[0] == {
        "step": 40,
        "checkpoint": "step_0000040",
        "metric": "fd",
        "name": "FD-streets",
        "value": 40.0,
        "std": 1.5,
        "few": False,
    }
    pixels, _ = read_png(tmp_path / "metrics.png")
    assert pixels.shape[1] > 1000


def test_the_best_is_the_lowest_or_the_highest_by_what_the_number_means() -> None:
    found = [score(1, 3.0, 0.9), score(2, 1.0, 0.2), score(3, 1.0, 0.9)]
    assert checkpoint_scores.best_score(found, "fd").step == 2
    assert checkpoint_scores.best_score(found, "agreement").step == 1
    opposite = [
        CheckpointScore(step=step, checkpoint="", metrics={"clip": entry("CLIP", value, better="lower")})
        for step, value in ((1, 2.0), (2, 1.0))
    ]
    assert checkpoint_scores.best_score(opposite, "clip").step == 2, "what the evaluation says counts more than a name"


def test_the_first_number_decides_unless_another_is_asked_for() -> None:
    one = score(1, 3.0)
    assert checkpoint_scores.deciding_metric(one, "") == "fd"
    assert checkpoint_scores.deciding_metric(one, "agreement") == "agreement"
    with pytest.raises(InputError, match="--best_by kid, and the evaluation has fd, agreement"):
        checkpoint_scores.deciding_metric(one, "kid")


def test_the_sentence_says_where_a_checkpoint_stands() -> None:
    first, second, third = score(300, 35.0), score(400, 29.83), score(500, 31.24, few=True)
    assert (
        checkpoint_scores.format_score(first, [first], "fd")
        == "step 300: FD-streets 35 (the first), prompt agreement 0.5"
    )
    said = checkpoint_scores.format_score(second, [first, second], "fd")
    assert said == "step 400: FD-streets 29.8 (the best so far), prompt agreement 0.5"
    said = checkpoint_scores.format_score(third, [first, second, third], "fd")
    assert said == "step 500: FD-streets 31.2 (best 29.8 at 400), prompt agreement 0.5, of few images"


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ({}, "no metrics"),
        ([], "no metrics"),
        ({"metrics": {}}, "no metrics"),
        ({"metrics": {"fd": {"value": None}}}, "fd: None"),
        ({"metrics": {"fd": {"value": math.nan}}}, "fd: nan"),
        ({"metrics": {"fd": 3.0}}, "fd: None"),
        ({"metrics": {"fd": {"value": 3.0}}}, ""),
    ],
)
def test_an_evaluation_without_its_numbers_is_none(evaluation: Any, words: str) -> None:
    problem = checkpoint_scores.find_evaluation_problem(evaluation)
    assert words in problem
    assert bool(problem) == bool(words)


def test_the_grid_shows_the_first_sixteen_images(tmp_path: Path) -> None:
    with open(tmp_path / "metadata.jsonl", "w") as file:
        for number in range(20):
            Image.fromarray(np.full((64, 64, 3), 10 * number, np.uint8)).save(tmp_path / f"{number}.png")
            file.write(json.dumps({"file_name": f"{number}.png", "prompt": f"number {number}"}) + "\n")
    checkpoint_scores.write_grid(tmp_path, tmp_path / "grid.png")
    pixels, _ = read_png(tmp_path / "grid.png")
    shown = {int(value) for value in np.unique(pixels[..., 0])}
    assert {10 * number for number in range(16)} <= shown
    assert pixels.shape[1] == 12 + 4 * 140


def test_an_evaluation_that_was_changed_on_disk_is_refused_by_name(tmp_path: Path) -> None:
    place = checkpoint_scores.step_folder(tmp_path, 40)
    place.mkdir(parents=True)
    path = place / checkpoint_scores.EVALUATION_FILE
    runs.write_json_with_digest(path, {"step": 40, "checkpoint": "a", "metrics": {"fd": entry("FD", 31.25)}})
    assert checkpoint_scores.read_scores(tmp_path)[0].value("fd") == 31.25
    path.write_bytes(path.read_bytes().replace(b"31.25", b"11.25"))
    with pytest.raises(InputError, match=r"(?s)evaluation\.json is damaged: .*delete it"):
        checkpoint_scores.read_scores(tmp_path)
