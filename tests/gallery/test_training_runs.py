"""A training is shown as it is on disk, step by step, while it writes and after damage."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import big_folders
from halation.gallery.training_runs import MAX_OLDER_ROWS, MAX_ROWS, MetricRows, TrainingRun
from halation.gallery.watcher_runs import WatchRun
from halation.runs import lock
from halation.runs import run_folder as runs

SETTINGS = {"prompts": ["a", "b"], "seed": 42, "same_seed": False, "height": 8, "width": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return big_folders.training_folder(tmp_path / "run", 3, 2, every=10, size=8, prompts=("a", "b"))


def opened(folder: Path) -> TrainingRun:
    run = TrainingRun(folder, "0123456789")
    run.refresh()
    return run


def row(index: int, prompt: str, file: str = "", **more: Any) -> dict[str, Any]:
    return {"index": index, "prompt": prompt, "seed": 42 + index, "state": "done", "reason": "", "file": file} | more


def put(place: Path, rows: list[dict[str, Any]], name: str = "samples.json", **facts: Any) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for each in rows:
        if each["file"] and each["state"] == "done":
            (place / each["file"]).write_bytes(b"picture")
    runs.write_json_atomic(place / name, {"settings": SETTINGS, **facts, "samples": rows})


def test_steps_are_rows_and_prompts_columns_and_a_key_is_a_image(folder: Path) -> None:
    run = opened(folder)
    detail = run.detail()
    assert [step["step"] for step in detail["steps"]] == [10, 20, 30]
    assert [(each["prompt"], each["seed"], each["size"]) for each in detail["prompts"]] == [
        ("a", 42, [8, 8]),
        ("b", 43, [8, 8]),
    ]
    assert detail["steps"][1]["loss"] == big_folders.loss_at(20)
    cell = detail["steps"][1]["cells"]["ema"][1]
    assert cell["key"] == "s20.1"
    assert run.image("s20.1") == (folder / "samples/step_0000020/sample_01.png").resolve()
    assert detail["variants"] == ["ema"]
    assert detail["metrics"][:2] == ["loss", "lr"]


def test_the_summary_of_a_run_says_where_it_is(folder: Path) -> None:
    with lock.lock_folder(folder, "train"):
        summary = opened(folder).summary()
    assert (summary["state"], summary["done"], summary["planned"], summary["unit"]) == ("running", 30, 30, "steps")
    assert summary["rate"] == pytest.approx(10.0)
    assert summary["left_s"] == 0
    assert summary["title"] == "tiny DiT, streets, 8x8"
    assert summary["last"]["key"] == "s30.0"
    assert summary["spark"][-1] == [30, pytest.approx(big_folders.loss_at(30), rel=1e-3)]
    assert summary["started"] == time.mktime(time.strptime("2026-01-02 03:04:05", "%Y-%m-%d %H:%M:%S"))


def test_a_step_appears_while_it_is_drawn_image_by_image(folder: Path) -> None:
    run = opened(folder)
    run.detail()
    place = folder / "samples/step_0000040"
    put(place, [], step=40)
    assert run.refresh()
    assert run.detail()["steps"][-1]["cells"] == {"ema": [None, None]}
    (place / "sample_01.png").write_bytes(b"picture")
    assert run.refresh()
    coming = run.detail()["steps"][-1]["cells"]["ema"]
    assert (coming[0], coming[1]["key"]) == (None, "s40.1")
    put(place, [row(0, "a", "sample_00.png"), row(1, "b", "sample_01.png")], step=40, loss=0.5)
    before = run.version
    assert run.refresh()
    assert run.version > before
    last = run.detail()["steps"][-1]
    assert (last["loss"], [cell["key"] for cell in last["cells"]["ema"]]) == (0.5, ["s40.0", "s40.1"])
    assert not run.refresh()


def test_raw_failed_and_missing_images_have_their_cells(folder: Path) -> None:
    rows = [
        row(0, "a", "sample_00.png"),
        row(1, "b", "sample_01.png", state="failed", reason="CUDA out of memory"),
        row(0, "a", "sample_00_raw.png", raw=True),
        row(1, "b", "sample_01_raw.png", raw=True, state="open"),
    ]
    put(folder / "samples/step_0000040", rows, step=40)
    run = opened(folder)
    detail = run.detail()
    assert detail["variants"] == ["ema", "raw"]
    cells = detail["steps"][-1]["cells"]
    assert cells["ema"][1] == {"failed": "CUDA out of memory"}
    assert (cells["raw"][0]["key"], cells["raw"][1]) == ("s40.0.raw", None)
    assert run.image("s40.0.raw") == (folder / "samples/step_0000040/sample_00_raw.png").resolve()
    assert run.image("s40.1") is None
    assert run.summary()["failed"] == 1


def test_prompts_that_changed_have_columns_of_their_own(folder: Path) -> None:
    put(folder / "samples/step_0000040", [row(0, "new", "sample_00.png"), row(1, "b", "sample_01.png")], step=40)
    detail = opened(folder).detail()
    assert [each["prompt"] for each in detail["prompts"]] == ["a", "b", "new"]
    keys = [[cell and cell["key"] for cell in step["cells"]["ema"]] for step in detail["steps"]]
    assert keys == [
        ["s10.0", "s10.1", None],
        ["s20.0", "s20.1", None],
        ["s30.0", "s30.1", None],
        [None, "s40.1", "s40.2"],
    ]


def test_names_by_epoch_and_rank_in_one_folder_and_a_teacher_beside_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    runs.create_or_resume_run(
        runs.RunFolder(folder), "distill", {"teacher_path": "models/big", "image_size": [8, 16]}, {}, False
    )
    (folder / "samples/teacher").mkdir(parents=True)
    for number in range(2):
        (folder / f"samples/teacher/sample_{number:02d}.png").write_bytes(b"picture")
    for epoch in (1, 2):
        rows = [
            row(
                index,
                prompt,
                f"epoch_{epoch:04d}_rank_0_sample_{index:02d}.png",
                teacher=f"teacher/sample_{index:02d}.png",
            )
            for index, prompt in enumerate("ab")
        ]
        put(folder / "samples", rows, f"epoch_{epoch:04d}_samples.json", step=50 * epoch, epoch=epoch)
    run = opened(folder)
    detail = run.detail()
    assert [(step["step"], step["epoch"]) for step in detail["steps"]] == [(50, 1), (100, 2)]
    assert detail["variants"] == ["ema", "teacher"]
    assert [cell["key"] for cell in detail["steps"][0]["cells"]["teacher"]] == ["t.0", "t.1"]
    assert detail["prompts"][0]["size"] == [16, 8]
    assert run.image("t.1") == (folder / "samples/teacher/sample_01.png").resolve()
    assert run.image("s100.1") == (folder / "samples/epoch_0002_rank_0_sample_01.png").resolve()
    assert run.summary()["title"] == "student of big, 16x8"


def test_the_list_shows_the_newest_sample_where_epochs_and_asked_for_steps_mix(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    runs.create_or_resume_run(runs.RunFolder(folder), "train", {}, {}, False)
    for step in (3, 7):
        put(folder / f"samples/step_{step:07d}", [row(0, "a", "sample_00.png")], step=step)
    for epoch in range(1, 6):
        put(folder / "samples", [row(0, "a", f"{epoch}.png")], f"epoch_{epoch}_samples.json", step=100 * epoch)
    run = opened(folder)
    assert run.summary()["last"]["key"] == "s500.0"
    put(folder / "samples/step_0000600", [row(0, "a", "sample_00.png")], step=600)
    run.refresh()
    assert run.summary()["last"]["key"] == "s600.0"


def test_no_image_is_given_from_outside_of_the_run_and_no_other_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    place = folder / "samples/step_0000040"
    place.mkdir()
    (place / "link.png").symlink_to(tmp_path / "secret.png")
    rows = [row(0, "a"), row(1, "b"), row(2, "c"), row(3, "d"), row(4, "e")]
    files = ["../../../secret.png", str(tmp_path / "secret.png"), "link.png", "../../config.json", "sample_00.png"]
    for each, file in zip(rows, files, strict=True):
        each["file"] = file
    (place / "sample_00.png").write_bytes(b"picture")
    runs.write_json_atomic(place / "samples.json", {"step": 40, "samples": rows})
    run = opened(folder)
    assert [run.image(f"s40.{number}") is not None for number in range(5)] == [False] * 4 + [True]
    for key in ("s40", "s40.0/../x", "../secret.png", "s40.99", "s99999.0", "t.0", "s40.4\n", ""):
        assert run.image(key) is None


def test_a_image_drawn_again_has_another_version_and_the_others_keep_theirs(folder: Path) -> None:
    run = opened(folder)
    before = [step["cells"]["ema"][0]["v"] for step in run.detail()["steps"]]
    put(folder / "samples/step_0000030", [row(0, "a", "sample_00.png")], step=30, loss=1.0)
    run.refresh()
    after = [step["cells"]["ema"][0]["v"] for step in run.detail()["steps"]]
    assert after[:2] == before[:2]
    assert after[2] != before[2]


def test_a_training_that_goes_back_to_a_checkpoint_takes_its_page_along(folder: Path) -> None:
    run = opened(folder)
    run.detail()
    place = run.metrics(0)["next"]
    assert run.metrics(place) == {"reset": False, "next": place, "rows": []}
    runs.MetricsFile(folder / "metrics.jsonl").truncate_after(9)
    for step in range(10, 45):
        runs.MetricsFile(folder / "metrics.jsonl").append(big_folders.metrics_row(step) | {"again": step})
    for step in (20, 30):
        shutil.rmtree(folder / "samples" / runs.step_name(step))
    put(folder / "samples/step_0000010", [row(0, "other", "sample_00.png")], step=10)
    assert run.refresh()
    answer = run.metrics(place)
    assert answer["reset"]
    assert [each["step"] for each in answer["rows"]] == list(range(1, 45))
    detail = run.detail()
    assert [step["step"] for step in detail["steps"]] == [10]
    assert [each["prompt"] for each in detail["prompts"]] == ["other"]
    runs.MetricsFile(folder / "metrics.jsonl").append({"step": 45})
    run.refresh()
    assert run.metrics(answer["next"])["rows"] == [{"step": 45}]


def test_many_rows_are_thinned_evenly_with_the_first_and_the_last_kept(folder: Path) -> None:
    big_folders.write_metrics(folder, 9_000, 10)
    rows = opened(folder).metrics(0)["rows"]
    assert len(rows) == 4_000
    assert (rows[0]["step"], rows[-1]["step"]) == (1, 9_000)
    assert max(after["step"] - before["step"] for before, after in itertools.pairwise(rows)) <= 3


def test_a_long_run_is_kept_thinned_and_a_new_row_of_it_costs_next_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.5, "time_s": {step}}}\n' for step in range(60_000)))
    metrics = MetricRows(path)
    metrics.refresh()
    assert len(metrics.older_rows.items) + len(metrics.recent_rows) <= MAX_OLDER_ROWS + MAX_ROWS
    for points in ([row["step"] for row in metrics.rows_after(0)["rows"]], [step for step, _ in metrics.sparkline()]):
        gaps = [after - before for before, after in itertools.pairwise(points)]
        assert (points[0], points[-1]) == (0, 59_999)
        assert max(gaps) <= 3 * (sum(gaps) / len(gaps)), "as far apart everywhere"
    place = metrics.rows_after(0)["next"]
    began = time.process_time()
    for step in range(60_000, 60_020):
        with path.open("a") as file:
            file.write(f'{{"step": {step}, "loss": 1.5}}\n')
        assert metrics.refresh()
        assert metrics.sparkline()[-1] == [step, 1.5]
    assert time.process_time() - began < 20 * 0.005
    assert [row["step"] for row in metrics.rows_after(place)["rows"]] == list(range(60_000, 60_020))
    away = metrics.rows_after(1_000)
    assert away["reset"], "more than is told at once"
    assert len(away["rows"]) <= MAX_ROWS


def test_evaluations_are_scores_and_checkpoints_are_named_by_what_they_are(folder: Path) -> None:
    metrics = runs.MetricsFile(folder / "metrics.jsonl")
    metrics.append({"step": 10, "metric": "fd", "value": 3.5, "std": 0.1, "better": "lowest", "num_generated": 64})
    metrics.append({"step": 10, "metric": "heldout_loss", "value": 0.4, "bins": {}})
    metrics.append({"step": 20, "metric": "fd", "value": float("nan")})
    place = folder / "checkpoints/step_0000010"
    place.mkdir(parents=True)
    runs.write_json_atomic(place / "COMMIT.json", {"step": 10, "kind": "kept"})
    (folder / "checkpoints/damaged_step_0000005").mkdir()
    detail = opened(folder).detail()
    assert detail["checkpoints"] == [{"step": 10, "kind": "kept"}]
    assert [(score["metric"], score["value"], score["better"]) for score in detail["scores"]] == [
        ("fd", 3.5, "lowest"),
        ("heldout_loss", 0.4, "lowest"),
    ]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"samples": 5}', '{"samples": [1, {"prompt": 3}]}', '{"step": "x", "samples": {}}']
)
def test_a_damaged_index_costs_its_own_step_only(folder: Path, text: str) -> None:
    (folder / "samples/step_0000020/samples.json").write_text(text)
    detail = opened(folder).detail()
    assert json.loads(json.dumps(detail))
    drawn = [step["step"] for step in detail["steps"] if any(step["cells"].get("ema", []))]
    assert drawn == [10, 30]


def test_what_is_not_the_default_is_named_where_the_defaults_are_known(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())["settings"]
    run = TrainingRun(folder, "0", {"train": settings | {"lr": 5.0}})
    run.refresh()
    assert run.config()["differs"] == ["lr"]
    assert "differs" not in opened(folder).config()
    assert run.log(300) == ["2026-01-02 03:04:05,678 INFO [rank 0] trained"]


def test_the_base_model_is_the_first_row_and_a_sample_has_its_own_size_and_seed(folder: Path) -> None:
    """Samples of step 0 have no loss; rows of a prompt file show their own size and seed."""
    rows = [row(0, "a", "sample_00.png"), row(1, "b", "sample_01.png")]
    put(folder / "samples/step_0000000", rows, step=0, loss=None)
    detail = opened(folder).detail()
    assert [(step["step"], step["loss"] is None) for step in detail["steps"]][:2] == [(0, True), (10, False)]
    assert all(detail["steps"][0]["cells"]["ema"])
    place = folder / "samples/step_0000040"
    put(place, [], step=40, settings=SETTINGS | {"rows": [{}, {"seed": 7}]})
    (place / "sample_01.png").write_bytes(b"picture")
    asked = [(prompt["prompt"], prompt["seed"], prompt["size"]) for prompt in opened(folder).detail()["prompts"]]
    assert ("b", 7, [16, 8]) in asked
    own = row(1, "b", "sample_01.png") | {"seed": 7, "height": 64, "width": 48}
    put(place, [rows[0], own], step=40)
    asked = [(prompt["prompt"], prompt["seed"], prompt["size"]) for prompt in opened(folder).detail()["prompts"]]
    assert asked == [("a", 42, [16, 8]), ("b", 43, [8, 8]), ("b", 7, [48, 64])]


def test_a_folder_of_samples_by_hand_is_one_step_and_shows_its_images_as_they_come(tmp_path: Path) -> None:
    folder = tmp_path / "drawn"
    folder.mkdir()
    runs.write_json_atomic(folder / "config.json", {"job": "sample", "fixed": {"model": "x", **SETTINGS}})
    (folder / "sample_00.png").write_bytes(b"picture")
    run = opened(folder)
    assert run.kind == "sample"
    assert (run.summary()["done"], run.summary()["planned"], run.summary()["unit"]) == (1, 2, "images")
    rows = [row(0, "a", "sample_00.png"), row(1, "b", "sample_01.png")]
    put(folder, rows, checkpoint="runs/x/checkpoints/step_0000070")
    assert run.refresh()
    detail = run.detail()
    assert [step["step"] for step in detail["steps"]] == [70]
    assert run.summary()["done"] == 2
    assert run.image("s70.1") == (folder / "sample_01.png").resolve()


def test_a_watch_says_what_it_scored_and_which_is_best(tmp_path: Path) -> None:
    folder = tmp_path / "watch"
    (folder / "step_0000010").mkdir(parents=True)
    runs.create_or_resume_run(runs.RunFolder(folder), "watch", {}, {}, False)
    run = WatchRun(folder, "0")
    run.refresh()
    assert run.summary()["title"] == "nothing scored yet"
    rows = [{"step": 10, "checkpoint": "step_0000010", "metric": "fd", "name": "FD", "value": 2.5, "better": "lowest"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "best").write_text("step_0000010\n")
    (folder / "step_0000010/grid.png").write_bytes(b"picture")
    assert run.refresh()
    assert not run.refresh()
    summary = run.detail()["summary"]
    assert (summary["done"], summary["title"], summary["last"]["key"]) == (1, "best: step_0000010, by fd", "s10.0")
    assert run.image("s10.0") == (folder / "step_0000010/grid.png").resolve()
    assert run.image("s11.0") is None


def test_a_watch_counts_the_checkpoints_that_wait_and_tells_when_each_was_scored(tmp_path: Path) -> None:
    folder = tmp_path / "run/watch"
    for name in ("step_0000010", "step_0000020"):
        (folder / name).mkdir(parents=True)
        (folder / name / "evaluation.json").write_text("{}")
    os.utime(folder / "step_0000010/evaluation.json", (1_700_000_000,) * 2)
    os.utime(folder / "step_0000020/evaluation.json", (1_700_000_060,) * 2)
    for name in (
        "step_0000010",
        "step_0000015",
        "step_0000020",
        "step_0000030",
        "step_0000040",
        "latest",
        ".step_9.tmp",
    ):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    runs.create_or_resume_run(runs.RunFolder(folder), "watch", {"every": 10, "min_step": 10}, {"watched": ".."}, False)
    rows = [{"step": step, "metric": "fd", "value": 2.5} for step in (10, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "failed.json").write_bytes(runs.json_with_digest({"step_0000030": {"step": 30}}))
    run = WatchRun(folder, "0")

    def told() -> tuple[int, int, str]:
        summary = run.summary()
        return summary["done"], summary["planned"], summary["unit"]

    run.refresh()
    assert told() == (2, 4, "checkpoints")
    assert [step["time"] for step in run.detail()["steps"]] == [1_700_000_000, 1_700_000_060]
    (tmp_path / "run/checkpoints/step_0000050").mkdir()
    assert run.refresh()
    assert told() == (2, 5, "checkpoints")
    runs.write_json_atomic(folder / "ended.json", {"state": "finished"})
    assert run.refresh()
    assert told() == (2, 3, "checkpoints"), "what came after its end does not wait for it"


def test_a_list_of_runs_reads_the_newest_samples_only(folder: Path) -> None:
    first = folder / "samples/step_0000010/samples.json"
    os.utime(first, (1, 1))
    os.utime(first.with_name("sample_00.png"), (1, 1))
    hidden = first.with_name("hidden")
    first.rename(hidden)
    run = opened(folder)
    run.summary()
    hidden.rename(first)
    assert [step["step"] for step in run.detail()["steps"]] == [10, 20, 30]


@pytest.mark.slow
def test_a_thousand_steps_of_eight_prompts_open_in_a_second(tmp_path: Path) -> None:
    folder = big_folders.training_folder(tmp_path / "run", 1_000, 8, size=8)
    began = time.process_time()
    assert len(opened(folder).detail()["steps"]) == 1_000
    assert time.process_time() - began < 1.0


# -- numbers that do not depend on the times of files


def test_a_copied_run_shows_the_numbers_of_the_original(folder: Path, tmp_path: Path) -> None:
    with lock.lock_folder(folder, "train"):
        time.sleep(0.05)
    long_ago = time.time() - 5_000
    for path in folder.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    first, second = opened(folder).summary(), opened(copy).summary()
    names = ("state", "done", "planned", "started", "changed", "seconds", "loss")
    assert {name: first[name] for name in names} == {name: second[name] for name in names}
    assert abs(second["changed"] - time.time()) < 60, "the recorded end"


def test_the_time_of_a_run_is_recorded_or_that_of_its_training(folder: Path) -> None:
    last = big_folders.metrics_row(30)["time_s"]
    assert opened(folder).summary()["seconds"] == pytest.approx(last, abs=0.2), "an old run has its metrics alone"
    runs.write_json_atomic(folder / "ended.json", {"state": "finished", "seconds": 2.0, "time_s": 75.5})
    assert opened(folder).summary()["seconds"] == 75.5


def test_samples_that_recorded_when_they_were_drawn_say_so_in_a_copy(folder: Path) -> None:
    index = folder / "samples/step_0000030/samples.json"
    runs.write_json_atomic(index, json.loads(index.read_text()) | {"time": "2026-01-02T03:04:05+0000"})
    assert [step["time"] for step in opened(folder).detail()["steps"]][-1] == 1_767_323_045


def test_a_stopped_run_is_at_the_step_it_saved(folder: Path) -> None:
    place = folder / "checkpoints" / runs.step_name(37)
    place.mkdir(parents=True)
    runs.write_json_atomic(place / "COMMIT.json", {"step": 37, "kind": "latest"})
    assert opened(folder).summary()["done"] == 37


@pytest.mark.parametrize(
    ("n_steps", "state", "planned"),
    [
        (None, "stopped", 160),
        (20_000, "stopped", 160),  # as written by earlier versions
        (160, "stopped", 160),
        (20_000, "finished", 121),
        (None, "finished", 121),
    ],
)
def test_the_total_of_a_run_by_epochs_is_recorded_or_derived(
    folder: Path, n_steps: int | None, state: str, planned: int
) -> None:
    """Each of its five epochs has 32 steps; a finished run has reached its total."""
    record = json.loads((folder / "config.json").read_text())
    record["settings"] |= {"num_epochs": 5, "n_steps": n_steps}
    runs.write_json_with_digest(folder / "config.json", record)
    rows = [{"step": step, "epoch": round(step / 32, 4), "loss": 1.0, "time_s": 0.1 * step} for step in (1, 60, 121)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    runs.write_json_atomic(folder / "ended.json", {"state": state, "reason": ""})
    summary = opened(folder).summary()
    assert (summary["done"], summary["planned"]) == (121, planned)
