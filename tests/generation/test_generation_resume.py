"""The same command resumes; a different one is refused with a diff unless it adds work."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from halation.runs import run_folder as runs
from support import run_readers
from support.commands import PROMPTS, assert_resumed, generate_log, run_generate


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first twelve of 24 images are drawn."""
    folder = tmp_path_factory.mktemp("begun")
    assert run_generate(folder, num_samples=12) == 0, generate_log(folder)
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


OTHER = {
    "num_inference_steps": (5, "num_inference_steps: 2 -> 5"),
    "batch_size": (2, "batch_size: 4 -> 2"),
    "guidance_scale": (3.0, "guidance_scale: 7.5 -> 3.0"),
    "height": (32, "height: 16 -> 32"),
    "seed_start": (7, "seed_start: 42 -> 7"),
    "micro_batch": (2, "micro_batch: 0 -> 2"),
    "negative_prompt": ("rain", 'negative_prompt: "" -> "rain"'),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_setting_is_refused_with_what_is_different(folder: Path, name: str) -> None:
    value, words = OTHER[name]
    before = run_readers.images_and_metadata(folder / "out"), (folder / "out" / "config.json").read_bytes()
    began = time.monotonic()
    assert run_generate(folder, **{name: value}) == 2
    assert time.monotonic() - began < 20
    assert words in generate_log(folder)
    assert "--accept_changes" in generate_log(folder)
    assert (run_readers.images_and_metadata(folder / "out"), (folder / "out" / "config.json").read_bytes()) == before


def changed_record(folder: Path, key: str) -> None:
    """As if a part of the run's fingerprint had been another one when it was begun."""
    path = folder / "out" / "config.json"
    record = json.loads(path.read_bytes())
    assert key in record["fixed"]
    record["fixed"][key] = "of yesterday"
    runs.write_json_with_digest(path, record)


def test_another_model_is_refused_with_what_is_different(folder: Path) -> None:
    changed_record(folder, "model")
    assert run_generate(folder) == 2
    assert 'model: "of yesterday" -> "testcard 1"' in generate_log(folder)


@pytest.mark.slow
def test_another_torch_is_refused_with_what_is_different(tmp_path: Path) -> None:
    from support import tiny_models

    settings = {"model_path": tiny_models.built("pixart"), "height": 32, "width": 32, "nproc": 1, "micro_batch": 1}
    assert run_generate(tmp_path, prompts="a cat\n", **settings) == 0, generate_log(tmp_path)
    changed_record(tmp_path, "torch version")
    assert run_generate(tmp_path, prompts="a cat\n", **settings) == 2
    assert 'torch version: "of yesterday" -> ' in generate_log(tmp_path)


def test_other_prompts_in_drawn_rows_are_refused_with_the_rows(folder: Path) -> None:
    before = run_readers.images_and_metadata(folder / "out"), (folder / "out" / "config.json").read_bytes()
    for accept in ({}, {"accept_changes": True}):
        assert run_generate(folder, prompts=PROMPTS.replace("number 3\n", "number three\n"), **accept) == 2
        assert 'row 4: prompt: "prompt number 3" -> "prompt number three"' in generate_log(folder)
        assert (
            run_readers.images_and_metadata(folder / "out"),
            (folder / "out" / "config.json").read_bytes(),
        ) == before
    assert_resumed(folder)


def test_fewer_prompts_are_refused_and_more_are_drawn(folder: Path) -> None:
    assert run_generate(folder, prompts="".join(PROMPTS.splitlines(keepends=True)[:5])) == 2
    assert "fewer prompts than before" in generate_log(folder)
    assert_resumed(folder)


def test_an_accepted_change_holds_for_open_images_and_is_recorded(folder: Path) -> None:
    """An accepted change holds for images that are not drawn yet and is recorded as an epoch."""
    before = run_readers.image_digests(folder / "out")
    (folder / "out" / next(iter(before))).unlink()
    assert run_generate(folder, num_inference_steps=5, guidance_scale=3.0, accept_changes=True) == 0, generate_log(
        folder
    )
    assert run_readers.generation_problems(folder / "out", 24) == []
    rows = run_readers.ledger_rows(folder / "out")
    assert [row["steps"] for row in rows] == [2] * 12 + [5] * 12
    assert [row["epoch"] for row in rows] == [1] + [0] * 11 + [1] * 12, "the deleted one was drawn again"
    assert run_readers.image_digests(folder / "out").items() >= before.items(), "and is what it was"
    record = json.loads((folder / "out" / "config.json").read_bytes())
    assert [change["changed"] for change in record["changes"]] == [
        ["num_inference_steps: 2 -> 5", "guidance_scale: 7.5 -> 3.0"]
    ]
    assert run_generate(folder, num_inference_steps=5, guidance_scale=3.0) == 0, "from now on these are the settings"
    assert run_generate(folder) == 2


def test_an_accepted_change_reaches_planned_rows_that_failed_or_were_not_begun(tmp_path: Path) -> None:
    fault = ";".join(f"paint.{number:06d}:1+:raise" for number in range(5, 9))
    assert run_generate(tmp_path, fault) == 1
    assert run_generate(tmp_path, num_inference_steps=3, accept_changes=True) == 0, generate_log(tmp_path)
    assert run_readers.generation_problems(tmp_path / "out", 24) == []
    assert [row["steps"] for row in run_readers.ledger_rows(tmp_path / "out")] == [2] * 4 + [3] * 4 + [2] * 16


def test_a_change_that_would_give_two_images_one_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twins.csv").write_text("image_id,prompt\na,one\na,two\n")
    assert run_generate(tmp_path, "paint:1+:sleep=0", prompts=tmp_path / "twins.csv", batch_size=1) == 0, generate_log(
        tmp_path
    )
    (tmp_path / "out" / "a_seed42.png").unlink()
    settings = {"prompts": tmp_path / "twins.csv", "batch_size": 1}
    assert run_generate(tmp_path, "paint.a:1+:raise", **settings) == 1
    before = (tmp_path / "out" / "config.json").read_bytes()
    assert run_generate(tmp_path, seed_start=43, accept_changes=True, **settings) == 2
    assert "row 1 would now be named a_seed43" in generate_log(tmp_path)
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert run_generate(tmp_path, seed_start=44, accept_changes=True, **settings) == 0, generate_log(tmp_path)
    assert list(run_readers.image_digests(tmp_path / "out")) == ["a_seed43.png", "a_seed44.png"]


def test_settings_may_change_freely_before_the_first_image(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "rehearse:1+:raise", num_inference_steps=9, batch_size=3) == 1
    assert_resumed(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"gpu_ids": 77}, "no such GPU: 77"),
        ({"gpu_ids": "-1"}, "gpu_ids"),
        ({"gpu_ids": "0,0"}, "GPU"),
        ({"nproc": -1}, "nproc"),
    ],
)
def test_devices_that_are_not_there_are_refused_at_once_with_what_is(
    tmp_path: Path, flags: dict[str, object], words: str
) -> None:
    began = os.times()
    assert run_generate(tmp_path, **{"nproc": 0} | flags) == 2
    ended = os.times()  # of the command's own time, since a busy machine's is longer: torch is not even imported
    assert ended.children_user + ended.children_system - began.children_user - began.children_system < 2
    assert words in generate_log(tmp_path)
    assert "gpu_ids" not in flags or "this machine has " in generate_log(tmp_path) or flags["gpu_ids"] == "-1"
    assert not (tmp_path / "out").exists()


# -- what a folder holds must not be lost or passed off as something else


def test_rows_that_are_not_drawn_yet_may_change_and_drawn_ones_may_not(tmp_path: Path) -> None:
    lines = [f"prompt {number}" for number in range(8)]
    assert run_generate(tmp_path, "paint.000006:1+:raise", prompts="\n".join(lines) + "\n", batch_size=1) == 1
    lines[5] = "another prompt"
    assert run_generate(tmp_path, prompts="\n".join(lines) + "\n", batch_size=1) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == lines
    lines[2] = "a drawn one"
    assert run_generate(tmp_path, prompts="\n".join(lines) + "\n", batch_size=1) == 2
    assert 'prompt: "prompt 2" -> "a drawn one"' in generate_log(tmp_path)


def test_accepted_changes_never_write_over_a_drawn_image(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,image_id\nfirst,a\nsecond,a\n")
    assert run_generate(tmp_path, prompts=path, num_samples=1, seed_start=42) == 0
    before = run_readers.image_digests(tmp_path / "out")
    assert run_generate(tmp_path, prompts=path, num_samples=2, seed_start=41, accept_changes=True) == 2
    assert "the name of another row's image" in generate_log(tmp_path)
    assert run_readers.image_digests(tmp_path / "out") == before


def test_a_first_call_in_which_everything_failed_binds_nobody(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "paint:1+:raise", prompts="a\nb\n") == 1
    assert run_generate(tmp_path, prompts="a\nb\n", num_inference_steps=3) == 0


def test_a_smaller_batch_needs_a_smaller_micro_batch(tmp_path: Path) -> None:
    assert run_generate(tmp_path, prompts="a\nb\nc\nd\n", num_samples=2) == 0
    assert run_generate(tmp_path, prompts="a\nb\nc\nd\n", batch_size=2, accept_changes=True) == 0
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert record["fixed"]["micro batch"] == 2


def test_the_summary_counts_what_is_there_after_a_call_that_ended_by_an_error(tmp_path: Path) -> None:
    assert run_generate(tmp_path, prompts="".join(f"{number}\n" for number in range(9))) == 0
    assert run_generate(tmp_path, "paint:1+:raise", prompts="".join(f"{number}\n" for number in range(40))) == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["planned"], summary["done"]) == (40, 9)
    assert summary["failed"] > 0


@pytest.mark.parametrize("name", ["metadata.jsonl", "summary.json", "config.json", "000001_seed42.png", "x_seed7"])
def test_files_that_are_not_ours_are_not_written_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    assert run_generate(tmp_path) == 2
    assert "but no ledger of `halation generate`" in generate_log(tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_workers_that_would_have_nothing_to_do_are_not_started(tmp_path: Path) -> None:
    assert run_generate(tmp_path, prompts="a\nb\nc\n", nproc=30) == 0
    assert [path.name for path in (tmp_path / "out" / "logs").glob("worker_*.log")] == ["worker_0.log"]


@pytest.mark.faults
def test_a_spare_worker_takes_over_where_the_one_that_was_needed_cannot_go_on(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "rehearse:1+:kill:0", prompts="a\nb\nc\n", nproc=2) == 0
    assert "not restarted after" in (tmp_path / "out" / "logs" / "generate.log").read_text()
