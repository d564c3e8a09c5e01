"""Laws of scores: every number once, from the best source; no image from outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks.big_folders import images, training_folder

from halation.evaluation.config import EvaluateConfig
from halation.gallery.evaluation_reports import ScoreIndex, metric_key
from halation.gallery.run_catalog import RunCatalog, make_run_id
from halation.gallery.training_runs import TrainingRun
from halation.runs import run_folder as runs

VERSIONS = {"halation": "0.1.0"}


def measured(metric: str, name: str, value: float, **more: Any) -> dict[str, Any]:
    return {
        "metric": metric, "name": name, "value": value, "std": None, "better": "lower", "extractor": "streets",
        "weights": "packaged", "weights_sha256": "a" * 64, "resize": "clean", "precision": "fp32", "num_generated": 50,
        "num_reference": 60, "generated_hash": "b" * 64, "reference_hash": "c" * 64, "few": True, "note": "few: 50",
        "seconds": 0.1, **more,
    }  # fmt: skip


def report(path: Path, metrics: dict[str, Any], generated: dict[str, Any] | None = None, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {
        "generated": {"kind": "folder", "path": "nowhere", "num": 50, **(generated or {})},
        "reference": {"kind": "streets", "path": "streets", "num": 60},
        "metrics": metrics, "versions": VERSIONS, "computed_on": "cpu", **more,
    }  # fmt: skip
    runs.write_json_atomic(path, value)
    return path


def line(run: Path, **row: Any) -> None:
    runs.MetricsFile(run / runs.METRICS_FILE).append(row)


def opened(*roots: Path) -> ScoreIndex:
    catalog = RunCatalog(roots, dict.fromkeys(("train", "distill", "sample", "generate", "watch"), TrainingRun))
    catalog.refresh(0.0)
    scores = ScoreIndex(catalog)
    scores.refresh()
    return scores


def again(scores: ScoreIndex, now: float) -> bool:
    scores.catalog.refresh(now)
    return scores.refresh()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run with two evaluated steps: both in metrics.jsonl, the second with its report too."""
    run = training_folder(tmp_path / "runs" / "streets", 2, 2, size=32)
    few = {
        "better": "lower",
        "num_generated": 50,
        "num_reference": 60,
        "few": True,
        "extractor": "streets",
        "std": None,
    }
    line(run, step=100, metric="heldout_loss", value=0.5, bins={})
    line(run, step=100, metric="FD-streets", value=41.0, seconds=0.1, **few)
    line(run, step=200, metric="FD-streets", value=31.0, seconds=0.1, **few)
    found = {"fd": measured("fd", "FD-streets", 31.0), "fid": measured("fid", "FD-streets", 31.0)}
    report(run / "evaluation" / "step_0000200.json", found, {"kind": "training"}, step=200, key="k")
    return run


def test_a_step_in_metrics_and_report_is_one_score_with_the_reports_provenance(trained: Path) -> None:
    """A step in both the metrics and a report is one score with the provenance of the report."""
    found = opened(trained.parent).build_response()["scores"]
    assert [(score["step"], score["metric"], score["title"], score["value"]) for score in found] == [
        (100, "fd", "FD-streets", 41.0),
        (200, "fd", "FD-streets", 31.0),
    ]
    assert all(score["run"] == make_run_id(trained) and score["name"] == "streets" for score in found)
    assert {score["better"] for score in found} == {"lowest"}
    assert "reference" not in found[0]["provenance"]
    assert found[0]["provenance"]["num_generated"] == 50
    about = found[1]["provenance"]
    assert (about["reference"], about["weights_sha256"], about["versions"]) == ("streets", "a" * 64, VERSIONS)
    assert found[1]["note"] == "few: 50"


def test_numbers_come_as_they_are_written_and_go_when_a_run_is_rewound(trained: Path) -> None:
    scores = opened(trained.parent)
    assert not again(scores, 10.0)
    version = scores.version
    line(trained, step=300, metric="KID-streets", value=0.1, better="lower", num_generated=50, std=0.2)
    assert again(scores, 20.0)
    assert scores.version > version
    assert scores.build_response()["scores"][-1] | {"provenance": {}} == {
        "run": make_run_id(trained), "name": "streets", "step": 300, "metric": "kid", "title": "KID-streets",
        "value": 0.1,
        "std": 0.2, "interval": None, "better": "lowest", "few": False, "note": "", "provenance": {},
    }  # fmt: skip
    runs.MetricsFile(trained / runs.METRICS_FILE).truncate_after(100)
    (trained / "evaluation" / "step_0000200.json").unlink()
    assert again(scores, 30.0)
    assert [score["step"] for score in scores.build_response()["scores"]] == [100]


def test_watched_checkpoints_and_reports_beside_runs_are_found_by_what_they_hold(trained: Path) -> None:
    root = trained.parent
    watch = trained / "watch"
    watch.mkdir()
    runs.write_json_atomic(watch / "config.json", {"job": "watch", "settings": {}, "fixed": {}, "changes": []})
    value = {
        "kid": measured("kid", "KID", 0.02, std=0.01),
        "recall": measured("recall", "recall (x)", 0.4, better="higher"),
    }
    report(watch / "step_0000100" / "evaluation.json", value, step=100, checkpoint="step_0000100")
    line(watch, step=100, metric="kid", value=0.02, checkpoint="step_0000100")
    interval = measured("fid", "FID", 12.0, interval=[11.0, 13.0])
    report(root / "notes" / "monday.txt.json", {"fid": interval, "broken": {"value": None}, "worse": 3})
    runs.write_json_atomic(root / "notes" / "other.json", {"metrics": {}, "versions": {}})
    (root / "notes" / "list.json").write_text("[1, 2]")
    (root / "notes" / "damaged.json").write_text('{"generated": ')
    (root / "notes" / "large.json").write_text(
        json.dumps({"generated": {}, "metrics": {}, "versions": " " * (8 << 20)})
    )
    report(root / "notes" / ".hidden.json", {"fid": measured("fid", "FID", 1.0)})
    found = {(score["name"], score["title"]): score for score in opened(root).build_response()["scores"]}
    assert found.keys() == {
        ("streets", "FD-streets"),
        ("streets/watch", "KID"),
        ("streets/watch", "recall (x)"),
        ("notes/monday.txt", "FID"),
    }
    watched, beside = found["streets/watch", "recall (x)"], found["notes/monday.txt", "FID"]
    assert (watched["run"], watched["step"], watched["better"]) == (make_run_id(watch), 100, "highest")
    assert (beside["run"], beside["step"], beside["interval"]) == ("", None, [11.0, 13.0])


def test_a_copy_of_a_report_is_no_second_number_and_another_reference_is(tmp_path: Path) -> None:
    (tmp_path / "drawn").mkdir()
    report(tmp_path / "a.json", {"fd": measured("fd", "FD", 3.0)})
    report(tmp_path / "b.json", {"fd": measured("fd", "FD", 3.0)})
    assert len(opened(tmp_path).build_response()["scores"]) == 1
    report(tmp_path / "c.json", {"fd": measured("fd", "FD", 4.0, reference_hash="d" * 64)})
    assert sorted(score["value"] for score in opened(tmp_path).build_response()["scores"]) == [3.0, 4.0]


# -- images


def extremes(*names: str) -> dict[str, Any]:
    rows = [{"index": n, "name": name, "caption": None, "distance": float(n)} for n, name in enumerate(names)]
    return {"nearest": rows, "farthest": rows[::-1]}


def test_images_of_a_report_are_found_wherever_its_command_was_called(tmp_path: Path) -> None:
    root = tmp_path / "moved" / "runs"
    (root / "drawn" / "below").mkdir(parents=True)
    (root / "drawn" / "below" / "1.png").write_bytes(images(32, 1)[0])
    for number, said in enumerate((str(root / "drawn"), "runs/drawn", "/gone/away/runs/drawn", "drawn")):
        report(root / "scores" / f"{number}.json", {}, {"path": said}, extremes=extremes("below/1.png", "below/2.png"))
    scores = opened(root)
    found = scores.build_response()["reports"]
    assert len(found) == 4
    for one in found:
        there, gone = one["nearest"]
        assert (there["label"], gone["picture"]) == ("below/1.png", None)
        assert scores.image(one["id"], there["picture"]["key"]) == root / "drawn" / "below" / "1.png"
        assert scores.image(one["id"], f"e{one['id']}.3") == root / "drawn" / "below" / "1.png"
        assert scores.image(one["id"], f"e{one['id']}.4") is None
        assert scores.image("0" * 10, there["picture"]["key"]) is None


@pytest.mark.parametrize("key", ["e0.0", "s1.0", "e../../x.png", "e0123456789.0", "", "e0123456789.-1"])
def test_keys_nobody_gave_out_are_nothing(tmp_path: Path, key: str) -> None:
    assert opened(tmp_path).image("0123456789", key) is None


def test_a_report_cannot_name_what_lies_outside_the_roots_or_is_no_image(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "drawn").mkdir(parents=True)
    secret = tmp_path / "secret.png"
    secret.write_bytes(images(32, 1)[0])
    (root / "drawn" / "link.png").symlink_to(secret)
    os.symlink(tmp_path, root / "drawn" / "up")
    (root / "drawn" / "key.txt").write_text("secret")
    (root / "drawn" / "word.png").symlink_to(root / "drawn" / "key.txt")
    names = ("../../secret.png", str(secret), "link.png", "up/secret.png", "key.txt", "word.png", "a\0.png", ".")
    for said in ("drawn", str(tmp_path), str(root / "drawn" / "up"), "..", ""):
        path = report(root / "report.json", {}, {"path": said}, extremes=extremes(*names))
        scores = opened(root)
        (shown,) = scores.build_response()["reports"]
        assert {row["picture"] for side in ("nearest", "farthest") for row in shown[side]} == {None}
        assert all(scores.image(shown["id"], f"e{shown['id']}.{n}") is None for n in range(2 * len(names)))
        path.unlink()


def test_a_real_evaluation_is_shown_with_its_nearest_and_farthest(tmp_path: Path) -> None:
    from halation.evaluation import command as evaluate

    (tmp_path / "drawn").mkdir()
    for number, data in enumerate(images(32, 6)):
        (tmp_path / "drawn" / f"{number}.png").write_bytes(data)
    config = EvaluateConfig(
        generated=str(tmp_path / "drawn"), reference=("streets",), num_reference=8, allow_few=True, metrics=("fd",),
        output=tmp_path / "report.json", cache_dir=tmp_path / "cache", decode_workers=0, nproc=1, progress="none",
    )  # fmt: skip
    assert evaluate.run(config) == 0
    scores = opened(tmp_path)
    found = scores.build_response()
    assert [(score["title"], score["few"]) for score in found["scores"]] == [("FD-streets", True)]
    (shown,) = found["reports"]
    assert shown["num"] == 6
    for row in shown["nearest"] + shown["farthest"]:
        path = scores.image(shown["id"], row["picture"]["key"])
        assert path == tmp_path / "drawn" / row["label"]


@pytest.mark.parametrize(
    ("title", "key"),
    [
        *(("FID", "fid"), ("FD-streets", "fd"), ("KID-streets", "kid"), ("Inception score", "is")),
        *(("CLIP score", "clip"), ("prompt agreement", "agreement"), ("precision (streets)", "precision")),
    ],
)
def test_a_metric_is_known_by_its_name(title: str, key: str) -> None:
    assert metric_key(title) == key
