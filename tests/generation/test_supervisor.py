"""Who draws what next: turns, shares taken over, and places without a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import run_readers
from support.commands import assert_generated, fired, generate_log, run_generate

pytestmark = pytest.mark.ranks


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_every_worker_starts_with_its_turn(tmp_path: Path, nproc: int) -> None:
    """Workers of one speed take nothing over until the last round: worker r has r, r + W, r + 2W ..."""
    assert run_generate(tmp_path, nproc=nproc, batch_size=1, model_path="testcard:0.15", micro_batch=1) == 0
    drawn_by = [int(row["worker"]) for row in run_readers.ledger_rows(tmp_path / "out")]
    for worker in range(nproc):
        assert drawn_by[worker] == worker, "its first one"
    expected = [index % nproc for index in range(24)]
    strays = [index for index in range(24) if drawn_by[index] != expected[index]]
    assert all(index >= 24 - 3 * nproc for index in strays), drawn_by
    assert_generated(tmp_path, batch_size=1)


def test_a_slow_worker_gives_its_share_away(tmp_path: Path) -> None:
    """The fast worker draws most of the slow one's turns, and every image is still drawn and counted once."""
    # Worker 0 waits at its first image, or it might have drawn all of them before worker 1 has started.
    faults = "paint:1+:sleep=2:1;paint:1:sleep=5:0"
    assert run_generate(tmp_path, faults, nproc=2, batch_size=1, model_path="testcard:0.02", micro_batch=1) == 0, (
        generate_log(tmp_path)
    )
    assert any(line.endswith(":1") for line in fired(tmp_path / "log")), "worker 1 drew something"
    drawn_by = [row["worker"] for row in run_readers.ledger_rows(tmp_path / "out")]
    assert drawn_by.count("0") > 16
    assert_generated(tmp_path, batch_size=1)
    summary = run_readers.summary(tmp_path / "out")
    assert sum(worker["done"] for worker in summary["workers"].values()) == summary["drawn_now"] == 24


def test_one_image_and_more_workers_than_images_are_drawn_once(tmp_path: Path) -> None:
    assert run_generate(tmp_path, prompts="alone\n", nproc=3, batch_size=1) == 0, generate_log(tmp_path)
    assert_generated(tmp_path, "alone\n", batch_size=1)


@pytest.mark.slow
def test_a_place_whose_worker_keeps_dying_is_given_up_and_the_others_draw_its_share(tmp_path: Path) -> None:
    """Worker 1 dies with every batch it begins; worker 0 is slow enough that it gets the chance to."""
    assert run_generate(tmp_path, "paint:1+:kill:1;paint:1+:sleep=0.7:0") == 0, generate_log(tmp_path)
    killed = [line for line in fired(tmp_path / "log") if ":kill:" in line]
    assert len(killed) == 3
    assert "worker 1: " in generate_log(tmp_path)
    assert "not restarted after 3 deaths in a row" in generate_log(tmp_path)
    assert_generated(tmp_path)
    summary = run_readers.summary(tmp_path / "out")
    assert summary["workers"]["1"] == {
        "done": 0,
        "failed": 0,
        "seconds_painting": 0.0,
        "busy_share": 0.0,
        "restarts": 2,
    }


@pytest.mark.slow
def test_what_a_slow_worker_holds_but_has_not_begun_is_drawn_by_those_who_are_done(tmp_path: Path) -> None:
    """Six batches of 0.2 s. Worker 1 holds three and needs 6 s for each: no other worker waits for them."""
    prompts = "".join(f"prompt number {number}\n" for number in range(6))
    settings = {"prompts": prompts, "batch_size": 1, "micro_batch": 1, "num_inference_steps": 20}
    assert run_generate(tmp_path, model_path="testcard:0.2,1=30", nproc=2, **settings) == 0, generate_log(tmp_path)
    assert [row["worker"] for row in run_readers.ledger_rows(tmp_path / "out")].count("0") == 6
    summary = run_readers.summary(tmp_path / "out")
    assert summary["seconds"] < 5, "nobody waited for the slow one's first batch"
    assert summary["redone_sheets"] == 1, "what it had not begun was taken from it"
    assert run_readers.generation_problems(tmp_path / "out", 6) == []


@pytest.mark.slow
def test_a_stolen_batch_returns_to_its_worker_if_the_new_one_dies(tmp_path: Path) -> None:
    """Worker 0 draws its first batch slowly and loses its other batches to worker 1, which dies for good."""
    prompts = "one\ntwo\nthree\nfour\n"
    fault = "paint:1:sleep=2:0;paint:2+:kill:1"
    assert (
        run_generate(tmp_path, fault, prompts=prompts, batch_size=1, micro_batch=1, model_path="testcard:0.05") == 0
    ), generate_log(tmp_path)
    assert any(":kill:1" in line for line in fired(tmp_path / "log"))
    assert_generated(tmp_path, prompts, batch_size=1)
