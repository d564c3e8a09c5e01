"""Ranks tell each other words, agree or say who does not, and miss the one that makes no progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halation.distributed import launcher
from halation.input_files import RefusedFileError
from support import rank_words as jobs
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_words_of_any_length_reach_every_rank_in_rank_order(ranks: RankPool, size: int) -> None:
    wanted = [[jobs.WORDS[(rank + turn) % len(jobs.WORDS)] for rank in range(size)] for turn in range(len(jobs.WORDS))]
    assert ranks.run(size, jobs.exchange_all) == [wanted] * size


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_ranks_word_and_work_are_everybodys(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, jobs.from_first) == [{"rank": 0}] * size
    assert ranks.run(size, jobs.on_first_value) == [[0, "Straße"]] * size


@pytest.mark.parametrize("size", [1, 3])
def test_an_error_of_the_first_rank_is_raised_by_all(ranks: RankPool, size: int) -> None:
    message = "found\n  expected: expected\n  to do:    action"
    assert ranks.run(size, jobs.on_first_error) == [(message, 2)] * size


def test_a_file_that_the_first_rank_refuses_is_told_in_a_sentence_by_all(ranks: RankPool) -> None:
    said = ("/dev/null is not read: it is a device, not a regular file", 2)
    assert ranks.run(2, jobs.on_first_refused_file) == [said] * 2


def test_a_rank_reports_a_refused_file_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALATION_RENDEZVOUS", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    launcher.report_error(RefusedFileError("file", "it is a device", "give another"), "Traceback")
    row = json.loads((tmp_path / "error_3.json").read_text())
    assert (row["kind"], row["exit_code"]) == ("InputError", 2)
    assert row["message"].startswith("file is not read: it is a device\n")


@pytest.mark.slow
def test_work_may_take_longer_than_the_timeout_while_it_makes_progress(ranks: RankPool) -> None:
    for value, seconds in ranks.run(3, jobs.on_first_slowly, 10, 0.4):
        assert value == "done"
        assert seconds > 4.0, "longer than the timeout of 2 s"


@pytest.mark.faults
def test_a_rank_that_sleeps_is_named_by_all_others_with_the_place_it_sleeps_at(ranks: RankPool) -> None:
    told = ranks.run(3, jobs.meet, 2.0, {1: "sleep"})
    for rank in (0, 2):
        sentence, seconds = told[rank]
        assert sentence.startswith("rank 1 has made no progress for 2 s in a test (heartbeat 3)")
        assert "in doze_off" in sentence
        assert seconds < 20.0
    assert told[1][1] > 5.0, "it slept"


@pytest.mark.slow
@pytest.mark.faults
def test_a_rank_that_is_stopped_is_named_as_not_answering(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failure:
        ranks.run(3, jobs.meet_or_raise, 1.5, {2: "stop"}, timeout_s=5.0)
    troubles = failure.value.troubles
    assert troubles[2].kind == "Hung", "it was stopped"
    for rank in (0, 1):
        assert troubles[rank].kind == "RankFailure"
        assert troubles[rank].message.startswith("rank 2 has made no progress for 2 s in a test")
        assert "its process does not respond" in troubles[rank].message


def test_who_is_furthest_behind_is_blamed(ranks: RankPool) -> None:
    for sentence in ranks.run(3, jobs.blame):
        assert sentence.startswith("rank 1 has made no progress")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_hold_equal_tensors_agree(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, jobs.agree, None) == ["agreed"] * size


@pytest.mark.faults
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_bit_on_one_rank_is_told_by_all_ranks_with_the_tensor(ranks: RankPool, broken: int) -> None:
    for sentence in ranks.run(3, jobs.agree, broken):
        assert (
            f"ranks disagree at step 7: rank {broken or 1} differs from rank 0 in 1 of 3 tensors, first in b"
            in sentence
        )


@pytest.mark.parametrize(("size", "engine"), [(1, "single"), (2, "ddp"), (1, "fsdp"), (2, "fsdp"), (3, "fsdp")])
def test_an_optimizer_taken_apart_comes_back_whole(ranks: RankPool, size: int, engine: str) -> None:
    assert ranks.run(size, jobs.pieces_come_back, engine) == [True] * size


def test_several_ranks_that_would_never_meet_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, jobs.single_engine):
        assert message.startswith("--engine single with 2 ranks")
    assert ranks.run(1, jobs.single_engine) == ["single"]
