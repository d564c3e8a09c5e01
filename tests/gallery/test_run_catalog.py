"""Runs below folders are found, updated and dropped, and polling costs next to nothing."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from benchmarks import big_folders
from halation.gallery.run_catalog import RunCatalog, make_run_id, read_run_kind
from halation.gallery.training_runs import TrainingRun
from halation.gallery.watcher_runs import WatchRun
from halation.runs import lock
from halation.runs import run_folder as runs

MAKERS = dict.fromkeys(("train", "distill", "sample", "generate"), TrainingRun) | {"watch": WatchRun}


def begin(folder: Path, job: str) -> Path:
    folder.mkdir(parents=True)
    runs.create_or_resume_run(runs.RunFolder(folder), job, {"n_steps": 5}, {}, False)
    return folder


def catalog_of(*roots: Path) -> RunCatalog:
    catalog = RunCatalog(roots, MAKERS)
    catalog.refresh(now=0.0)
    return catalog


def names(catalog: RunCatalog) -> dict[str, str]:
    return {entry.name: entry.kind for entry in catalog.entries()}


def test_runs_are_found_wherever_they_lie_but_not_in_hidden_deep_or_crowded_folders(tmp_path: Path) -> None:
    begin(tmp_path / "a", "train")
    begin(tmp_path / "b/c/d/e/f/g", "distill")
    begin(tmp_path / "b/c/d/e/f/too/deep", "train")
    begin(tmp_path / ".hidden/run", "train")
    begin(tmp_path / "a/checkpoints/step_0000001", "train")
    begin(tmp_path / "a/mine", "sample")
    (tmp_path / "a/export").mkdir()
    (tmp_path / "a/export/config.json").write_text('{"model": "tiny"}')
    begin(tmp_path / "crowd/run", "train")
    for number in range(2_001):
        os.close(os.open(tmp_path / "crowd" / f"{number}.txt", os.O_CREAT))
    assert names(catalog_of(tmp_path)) == {"a": "train", "a/mine": "sample", "b/c/d/e/f/g": "distill"}


def test_a_folder_that_was_named_may_be_crowded(tmp_path: Path) -> None:
    for number in range(2_100):
        (tmp_path / f"empty_{number}").mkdir()
    begin(tmp_path / "run", "train")
    assert names(catalog_of(tmp_path)) == {"run": "train"}


def test_images_of_a_watch_are_its_children(tmp_path: Path) -> None:
    begin(tmp_path / "run", "train")
    watch = begin(tmp_path / "run/watch", "watch")
    begin(watch / "step_0000010/pictures", "generate")
    catalog = catalog_of(tmp_path)
    parents = {entry.name: entry.summary()["parent"] for entry in catalog.entries()}
    assert parents == {
        "run": None,
        "run/watch": make_run_id(tmp_path / "run"),
        "run/watch/step_0000010/pictures": make_run_id(watch),
    }


def test_a_run_that_comes_or_goes_changes_the_list(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path)
    assert catalog.refresh(now=10.0) == []
    folder = begin(tmp_path / "x/new", "train")
    assert catalog.refresh(now=11.0) == [], "it has just looked"
    assert catalog.refresh(now=13.0) == ["", make_run_id(folder)]
    assert names(catalog) == {"x/new": "train"}
    shutil.rmtree(folder)
    assert catalog.refresh(now=16.0)[0] == ""
    assert catalog.entries() == []
    assert catalog.get(make_run_id(folder)) is None


def test_a_record_that_comes_after_its_folder_was_read_is_found(tmp_path: Path) -> None:
    begin(tmp_path / "run", "train")
    (tmp_path / "run/later").mkdir()
    catalog = catalog_of(tmp_path)
    runs.create_or_resume_run(runs.RunFolder(tmp_path / "run/later"), "sample", {}, {}, False)
    catalog.refresh(now=3.0)
    assert names(catalog) == {"run": "train", "run/later": "sample"}


def test_the_same_run_below_two_roots_is_listed_once_and_a_root_may_be_a_run(tmp_path: Path) -> None:
    folder = begin(tmp_path / "top/run", "train")
    assert names(catalog_of(folder)) == {"run": "train"}
    assert names(catalog_of(tmp_path / "top", folder)) == {"top/run": "train"}
    (tmp_path / "link").symlink_to(folder)
    assert names(catalog_of(tmp_path / "link")) == {"run": "train"}
    assert names(catalog_of(tmp_path)) == {"top/run": "train"}, "links are not followed from inside"


def test_the_newest_change_comes_first(tmp_path: Path) -> None:
    for number, name in enumerate("bca"):
        folder = begin(tmp_path / name, "train")
        os.utime(folder / "config.json", (1_000_000 + number,) * 2)
    assert [entry.name for entry in catalog_of(tmp_path).entries()] == ["a", "c", "b"]


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"job": ["train"]}', '{"job": "fly"}'])
def test_a_damaged_record_breaks_nothing(tmp_path: Path, text: str) -> None:
    folder = begin(tmp_path / "run", "train")
    runs.MetricsFile(folder / "metrics.jsonl").append({"step": 3, "loss": 0.5, "time_s": 1.0})
    (folder / "config.json").write_text(text)
    listed = [entry.detail()["summary"] for entry in catalog_of(tmp_path).entries()]
    if text in ("{", ""):
        assert [(each["kind"], each["done"], each["loss"]) for each in listed] == [("train", 3, 0.5)]
    else:
        assert listed == [], "a record of something else is not ours to show"


def test_a_folder_is_a_run_by_its_record_alone_where_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert read_run_kind(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"job": "distill"}))
    assert read_run_kind(tmp_path) == "distill"


def test_a_run_at_rest_is_looked_at_every_five_seconds_and_a_running_one_always(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run", "train")
    catalog = catalog_of(tmp_path)
    metrics = runs.MetricsFile(folder / "metrics.jsonl")
    metrics.append({"step": 1})
    assert catalog.refresh(now=1.0) == []
    assert catalog.refresh(now=5.0) == [make_run_id(folder)]
    with lock.lock_folder(folder, "train"):
        assert catalog.refresh(now=10.0) == [make_run_id(folder)]
        metrics.append({"step": 2})
        assert catalog.refresh(now=10.5) == [make_run_id(folder)]
        assert catalog.refresh(now=11.5) == []


def test_a_run_at_rest_that_a_command_takes_is_seen_at_once(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run", "train")
    catalog = catalog_of(tmp_path)
    with lock.lock_folder(folder, "train"):
        assert catalog.refresh(now=0.5) == [make_run_id(folder)]
        assert [entry.summary()["state"] for entry in catalog.entries()] == ["running"]
    assert catalog.refresh(now=1.0) == [make_run_id(folder)]
    assert [entry.summary()["state"] for entry in catalog.entries()] == ["finished"]


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a/runs", "b/runs"):
        begin(tmp_path / name / "one", "train")
    assert sorted(names(catalog_of(tmp_path / "a/runs", tmp_path / "b/runs"))) == ["a/runs/one", "b/runs/one"]


def test_polling_fifty_idle_runs_takes_under_one_percent_of_a_core(tmp_path: Path) -> None:
    """Polling fifty runs in which nothing happens takes under one percent of a core."""
    for number in range(50):
        folder = begin(tmp_path / f"run_{number}", "train")
        big_folders.write_metrics(folder, 100, 10)
        (folder / "samples/step_0000100").mkdir(parents=True)
        (folder / "samples/step_0000100/samples.json").write_text('{"step": 100, "samples": []}')
    catalog = catalog_of(tmp_path)
    for path in (tmp_path, *tmp_path.iterdir()):
        os.utime(path, (time.time() - 60,) * 2)
    catalog.refresh(now=3.0)
    began = time.process_time()
    for second in range(4, 34):
        assert catalog.refresh(now=float(second)) == []
    assert time.process_time() - began < 0.3
