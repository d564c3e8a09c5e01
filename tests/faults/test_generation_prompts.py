"""A prompt that fails, hangs, runs out of memory or kills its worker costs only itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from support import run_readers
from support.commands import (
    assert_generated,
    assert_resumed,
    finish,
    fired,
    generate,
    generate_log,
    run_generate,
    undisturbed_generation,
)

pytestmark = pytest.mark.faults


def assert_set_aside(folder: Path, guilty: Mapping[int, str], tries: int) -> None:
    """Exactly these are missing, each listed with its reason, and all others are as they would be without them."""
    out = folder / "out"
    rows = run_readers.ledger_rows(out)
    assert {row["picture"] for row in rows if row["state"] != "done"} == set(guilty), generate_log(folder)
    listed = run_readers.listed_failures(out)
    assert listed.keys() == guilty.keys()
    for index, reason in guilty.items():
        assert rows[index]["state"] == "failed"
        assert reason in rows[index]["reason"]
        assert rows[index]["attempts"] == tries
        assert listed[index] == rows[index]["reason"]
        assert reason in generate_log(folder)
    assert [line["index"] for line in run_readers.metadata_rows(out)] == [
        row["picture"] for row in rows if row["state"] == "done"
    ]
    wanted = dict(undisturbed_generation()[0])
    for index in guilty:
        del wanted[f"{rows[index]['name']}.png"]
    assert run_readers.image_digests(out) == wanted
    summary = run_readers.summary(out)
    assert (summary["done"], summary["failed"], summary["open"]) == (len(rows) - len(guilty), len(guilty), 0)
    assert sum(summary["failures_by_reason"].values()) == len(guilty)
    assert run_readers.leftovers(out) == []


@pytest.mark.parametrize(("nproc", "guilty"), [pytest.param(1, 0, marks=pytest.mark.slow), (2, 5)])
def test_a_prompt_that_always_raises_is_tried_twice_and_set_aside(tmp_path: Path, nproc: int, guilty: int) -> None:
    assert run_generate(tmp_path, f"paint.{guilty + 1:06d}:1+:raise", nproc=nproc) == 1
    assert len(fired(tmp_path / "log")) == 2
    assert_set_aside(tmp_path, {guilty: "fault injected"}, tries=2)
    assert_resumed(tmp_path)


def test_a_prompt_that_raises_once_is_drawn_the_second_time(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "paint.000006:1:raise", nproc=1) == 0
    assert len(fired(tmp_path / "log")) == 1
    assert_generated(tmp_path)
    assert [row["attempts"] for row in run_readers.ledger_rows(tmp_path / "out")] == [
        2 if 4 <= i < 8 else 1 for i in range(24)
    ]


def test_a_prompt_that_hangs_is_noticed_tried_twice_and_set_aside(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run_generate(tmp_path, "paint.000006:1+:sleep=1000", stall_timeout_s=1.5) == 1
    assert time.monotonic() - began < 50
    assert 2 <= len(fired(tmp_path / "log")) <= 3  # an idle worker may try what the other one is overdue with
    assert_set_aside(tmp_path, {5: "no sign of life"}, tries=2)
    assert_resumed(tmp_path)


@pytest.mark.parametrize(("nproc", "guilty"), [pytest.param(1, 0, marks=pytest.mark.slow), (1, 5), (2, 7)])
def test_a_prompt_that_kills_its_worker_is_tried_three_times_and_set_aside_alone(
    tmp_path: Path, nproc: int, guilty: int
) -> None:
    assert run_generate(tmp_path, f"paint.{guilty + 1:06d}:1+:kill", nproc=nproc) == 1
    assert len(fired(tmp_path / "log")) == 3
    assert_set_aside(tmp_path, {guilty: "SIGKILL"}, tries=3)
    assert_resumed(tmp_path)


@pytest.mark.slow
def test_two_prompts_of_one_batch_that_kill_are_both_found(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "paint.000005:1+:kill;paint.000007:1+:kill", nproc=1) == 1
    assert_set_aside(tmp_path, {4: "SIGKILL", 6: "SIGKILL"}, tries=3)
    assert_resumed(tmp_path)


def test_a_prompt_that_never_fits_into_memory_is_set_aside_with_that_reason(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "draw.000006:1+:OOM", nproc=1) == 1
    # the whole batch, its half, alone in the half; then four of it, two and one
    assert len(fired(tmp_path / "log")) == 6
    assert_set_aside(tmp_path, {5: "out of memory with one image at a time"}, tries=2)
    assert_resumed(tmp_path)


def test_out_of_memory_halves_the_micro_batch_and_marks_the_images(tmp_path: Path) -> None:
    """Out of memory halves the micro-batch for that batch only and marks its images."""
    assert run_generate(tmp_path, "draw.000006:1:OOM", nproc=1) == 0
    assert len(fired(tmp_path / "log")) == 1
    assert_generated(tmp_path)
    rows = run_readers.ledger_rows(tmp_path / "out")
    assert [row["micro_batch"] for row in rows] == [2 if 4 <= index < 8 else 0 for index in range(24)]
    assert run_readers.summary(tmp_path / "out")["smaller_micro_batches"] == 4
    assert "out of memory with a micro-batch of 4" in (tmp_path / "out" / "logs" / "worker_0.log").read_text()


def test_half_a_batch_at_once_runs_out_of_memory_down_to_one(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "draw.000006:1:OOM", nproc=1, micro_batch=2) == 0
    assert len(fired(tmp_path / "log")) == 1
    assert_generated(tmp_path)
    rows = run_readers.ledger_rows(tmp_path / "out")
    assert [row["micro_batch"] for row in rows] == [1 if index in (4, 5) else 0 for index in range(24)]


def test_a_model_that_fails_for_every_prompt_ends_early_with_its_reason(tmp_path: Path) -> None:
    many = "".join(f"prompt {number}\n" for number in range(400))
    began = time.monotonic()
    assert run_generate(tmp_path, "paint:1+:raise", prompts=many) == 1
    assert time.monotonic() - began < 10
    assert "images all failed" in generate_log(tmp_path)
    assert "fault injected at paint" in generate_log(tmp_path)
    assert "no image was generated" in generate_log(tmp_path)
    assert "Traceback" not in generate_log(tmp_path)
    assert len(fired(tmp_path / "log")) < 40
    assert run_readers.image_digests(tmp_path / "out") == {}
    assert run_readers.leftovers(tmp_path / "out") == []
    rows = run_readers.ledger_rows(tmp_path / "out")
    assert run_readers.listed_failures(tmp_path / "out").keys() == {
        row["picture"] for row in rows if row["state"] == "failed"
    }
    assert_resumed(tmp_path, prompts=many)


@pytest.mark.slow
def test_prompts_that_failed_before_and_fail_again_are_no_sign_of_a_bad_model(tmp_path: Path) -> None:
    """A second call tries nothing but the failures: that none of them succeeds says nothing about the model."""
    fault = ";".join(f"paint.{number:06d}:1+:raise" for number in range(13, 25))
    # One worker first: of two, the one with the failures could be ahead by as many as end a run early.
    for nproc in (1, 2):
        assert run_generate(tmp_path, fault, nproc=nproc) == 1
        assert "images all failed" not in generate_log(tmp_path)
        assert_set_aside(tmp_path, dict.fromkeys(range(12, 24), "fault injected"), tries=2)
    assert_resumed(tmp_path)


@pytest.mark.parametrize(("action", "words"), [("raise", "cannot generate images"), ("kill", "no worker is left")])
def test_a_model_that_cannot_even_rehearse_ends_with_its_reason(tmp_path: Path, action: str, words: str) -> None:
    assert run_generate(tmp_path, f"rehearse:1+:{action}") == 1
    assert fired(tmp_path / "log")
    assert words in generate_log(tmp_path)
    assert_resumed(tmp_path)


def test_a_rehearsal_whose_worker_dies_is_taken_over_by_another(tmp_path: Path) -> None:
    assert run_generate(tmp_path, "rehearse:1:kill:0:once;rehearse:1:kill:1:once") == 0
    assert sorted(fired(tmp_path / "log")) == ["rehearse:1:kill:0", "rehearse:1:kill:1"]
    assert_generated(tmp_path)


@pytest.mark.slow
def test_a_tiny_pipeline_sets_a_prompt_aside_that_gives_not_a_number(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import shutil

    from safetensors.torch import load_file, save_file

    from support import tiny_models

    model = tmp_path / "model"
    shutil.copytree(tiny_models.built("pixart"), model)
    [weights] = (model / "text_encoder").glob("*.safetensors")
    tensors = load_file(weights)
    tokenizer = tiny_models.t5_tokenizer()
    name = next(key for key in tensors if "shared" in key or "embed_tokens" in key)
    tensors[name][tokenizer("#")["input_ids"][1]] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    prompts = "a red cat\na dog # street\ntwo cars\na tree\n"
    words = generate(
        tmp_path, prompts, model_path=model, nproc=1, height=32, width=32, guidance_scale=4.0, micro_batch=4
    )
    assert finish(words, tmp_path / "log") == 1, generate_log(tmp_path)
    assert {
        index: "not finite" in reason or "NaN" in reason
        for index, reason in run_readers.listed_failures(tmp_path / "out").items()
    } == {1: True}, generate_log(tmp_path)
    assert len(run_readers.image_digests(tmp_path / "out")) == 3
    assert list(run_readers.damaged_images(tmp_path / "out")) == []
    assert run_readers.leftovers(tmp_path / "out") == []
