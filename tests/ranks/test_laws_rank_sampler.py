"""RankSampler in a user's loop: invisible to training, equal on any ranks, no hang."""

from __future__ import annotations

import gc
import json
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from halation import RankSampler
from support import training_loops
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("size", "autocast"), [(1, False), (2, False), (3, False), (2, True)])
def test_a_loop_that_samples_at_every_step_is_the_loop_that_never_does(
    ranks: RankPool, tmp_path: Path, size: int, autocast: bool
) -> None:
    often = ranks.run(size, training_loops.user_loop_losses, str(tmp_path / "often"), 1, "ddp", autocast)
    never = ranks.run(size, training_loops.user_loop_losses, str(tmp_path / "never"), 0, "ddp", autocast)
    assert often == never
    assert len(set(often[0][0])) == 4
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(("num", "sloppy"), [(0, False), (1, False), (5, False), (5, True)])
def test_each_prompt_is_drawn_once_and_its_bytes_do_not_depend_on_the_ranks(
    ranks: RankPool, tmp_path: Path, num: int, sloppy: bool
) -> None:
    folders = []
    for size in (1, 2, 3):
        told = ranks.run(size, drawn, str(tmp_path / str(size)), training_loops.PROMPTS[:num], sloppy)
        assert all(mine == told[0] for mine in told)
        assert [(row[0], row[2], row[3], row[6]) for row in told[0]] == [
            (k, 7 + k, "done", k % size) for k in range(num)
        ]
        folders.append(training_loops.files(tmp_path / str(size) / "samples" / "step_0000003"))
    assert folders[0] == folders[1] == folders[2]
    assert len(folders[0]) == (2 * num + 1 if num else 0)
    assert len(set(folders[0].values())) == len(folders[0])


def drawn(world: Any, out: str, prompts: tuple[str, ...], sloppy: bool) -> list[tuple[Any, ...]]:
    return training_loops.drawn(world, out, prompts, sloppy=sloppy)


def drawn_spoilt(world: Any, out: str) -> list[tuple[Any, ...]]:
    return training_loops.drawn(world, out, training_loops.PROMPTS, spoilt="a blue car")


def test_a_draw_that_raises_costs_its_image_alone_and_every_rank_knows(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(3, drawn_spoilt, str(tmp_path / "run"))
    assert told[0] == told[1] == told[2]
    assert [row[3] for row in told[0]] == ["done", "failed", "done", "done", "done"]
    assert told[0][1][5] == "ValueError: no image for a blue car"
    folder = tmp_path / "run" / "samples" / "step_0000003"
    said = json.loads((folder / "samples.json").read_text())
    assert [row["state"] for row in said["samples"]] == [row[3] for row in told[0]]
    assert not (folder / "sample_01.png").exists()
    again = ranks.run(2, drawn, str(tmp_path / "run"), training_loops.PROMPTS, False)  # resumed: only what is missing
    assert [row[6] for row in again[0]] == [-1, 0, -1, -1, -1]
    assert {row[3] for row in again[0]} == {"done"}


@pytest.mark.parametrize("size", [2, 3])
def test_shards_are_drawn_with_by_all_ranks_equally_often(ranks: RankPool, tmp_path: Path, size: int) -> None:
    whole = ranks.run(1, training_loops.drawn_sharded, str(tmp_path / "whole"), training_loops.PROMPTS)
    told = ranks.run(size, training_loops.drawn_sharded, str(tmp_path / "run"), training_loops.PROMPTS)
    assert [row[:2] for row in told[0][0]] == [(k, "done") for k in range(5)]
    assert [row[2] for row in told[0][0]] == [k % size for k in range(5)]
    step = Path("samples") / "step_0000001"
    assert training_loops.files(tmp_path / "run" / step) == training_loops.files(tmp_path / "whole" / step)
    assert [losses for _, losses in told] == ranks.run(size, training_loops.unsampled_losses)
    assert whole[0][1][0] != whole[0][1][1]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")
def test_zero_3_is_drawn_with_by_all_ranks_equally_often_and_keeps_its_bits(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(3, training_loops.drawn_zero_3, str(tmp_path / "run"), training_loops.PROMPTS)
    assert [row for row, _ in told] == [[(k, "done", k % 3) for k in range(5)]] * 3
    assert [bits for _, bits in told] == [
        bits for _, bits in ranks.run(3, training_loops.drawn_zero_3, str(tmp_path / "none"), ())
    ]
    whole = ranks.run(1, training_loops.drawn_zero_3, str(tmp_path / "whole"), training_loops.PROMPTS)
    step = Path("samples") / "step_0000001"
    assert training_loops.files(tmp_path / "run" / step) == training_loops.files(tmp_path / "whole" / step)
    assert whole[0][0] == [(k, "done", 0) for k in range(5)]


@pytest.mark.parametrize("spoilt", ["a red car", "night"])
def test_a_prompt_that_fails_before_a_sharded_forward_is_survived(ranks: RankPool, tmp_path: Path, spoilt: str) -> None:
    told = ranks.run(3, training_loops.drawn_sharded, str(tmp_path / "run"), training_loops.PROMPTS, spoilt)
    states = {prompt: row[1] for prompt, row in zip(training_loops.PROMPTS, told[0][0], strict=True)}
    assert states == {prompt: "failed" if prompt == spoilt else "done" for prompt in training_loops.PROMPTS}


def test_an_error_inside_a_sharded_forward_ends_all_ranks_and_names_the_culprit(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, training_loops.failing_inside, str(tmp_path / "run"), timeout_s=60.0)
    assert {trouble.kind for trouble in caught.value.troubles.values()} == {"RankFailure"}
    assert "rank 1 failed inside a sharded forward" in caught.value.troubles[1].message
    assert "rank 1 failed: ValueError: a layer broke" in caught.value.troubles[0].message


@pytest.mark.parametrize("nested", [True, False])
def test_a_prompt_that_fails_between_two_sharded_forwards_ends_all_ranks_at_once(
    ranks: RankPool, tmp_path: Path, nested: bool
) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, training_loops.failing_between, str(tmp_path / "run"), 2, nested, timeout_s=60.0)
    assert {trouble.kind for trouble in caught.value.troubles.values()} == {"RankFailure"}
    assert "rank 1 failed after 1 of an image's sharded forwards" in caught.value.troubles[1].message
    assert "rank 1 failed: ValueError: not finite after forward 1" in caught.value.troubles[0].message


def test_a_prompt_that_fails_after_the_last_sharded_forward_is_survived(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(2, training_loops.failing_between, str(tmp_path / "run"), 3)
    assert told == [[("done", ""), ("failed", "ValueError: not finite after forward 2")]] * 2


def test_shards_that_a_validation_left_whole_are_still_shards(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, training_loops.drawn_after_validation, str(tmp_path / "run")) == [[(0, "done", 0)]] * 2


def test_a_rank_that_hangs_in_draw_is_named_with_where_it_stands(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, training_loops.hanging, str(tmp_path / "run"))
    assert caught.value.troubles[0].kind == "RankFailure"
    said = caught.value.troubles[0].message
    assert "rank 1 has made no progress for 2 s in sampling step 1" in said
    assert "time.sleep(" in said


SLOW = pytest.mark.slow
GONE = "is gone: its process ended or was killed"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("who", "how", "where", "words"),
    [
        (0, "SIGKILL", "draw", f"{GONE} (the process that hosts the rendezvous store)"),
        (1, "SIGKILL", "draw", GONE),
        pytest.param(2, "SIGKILL", "draw", GONE, marks=SLOW),
        pytest.param(0, "_exit", "draw", GONE, marks=SLOW),
        pytest.param(1, "_exit", "draw", GONE, marks=SLOW),
        pytest.param(1, "SIGTERM", "draw", GONE, marks=SLOW),
        (1, "exit", "on", "left: SystemExit: 3"),
        pytest.param(0, "exit", "on", "left: SystemExit: 3", marks=SLOW),
        pytest.param(0, "exit", "draw", "left: SystemExit: 3", marks=SLOW),
        pytest.param(2, "SIGINT", "on", "left: KeyboardInterrupt", marks=SLOW),
        pytest.param(0, "SIGINT", "draw", "left: KeyboardInterrupt", marks=SLOW),
        pytest.param(1, "BaseException", "on", "left: BaseException: no such kind", marks=SLOW),
        pytest.param(0, "SIGKILL", "between", GONE, marks=SLOW),
        pytest.param(1, "SIGKILL", "between", GONE, marks=SLOW),
        pytest.param(1, "SIGKILL", "worker", GONE, marks=SLOW),
        pytest.param(0, "SIGKILL", "forward", "is gone", marks=SLOW),
        (1, "SIGKILL", "forward", GONE),
        pytest.param(1, "exit", "forward", "left: SystemExit: 3", marks=SLOW),
    ],
)
def test_a_rank_that_leaves_for_any_reason_is_named_to_all_others_within_ten_seconds(
    ranks: RankPool, tmp_path: Path, who: int, how: str, where: str, words: str
) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(3, training_loops.leaving, str(tmp_path), who, how, where, timeout_s=90.0)
    for rank in {0, 1, 2} - {who}:
        kind, said, after_s = json.loads((tmp_path / f"told_{rank}").read_text())
        assert kind == "RankFailure", said
        assert f"rank {who} {words}" in said
        assert after_s < 10.0


@pytest.mark.faults
def test_a_rank_in_a_long_draw_logs_at_once_that_another_has_left(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(2, training_loops.told_in_long_draw, str(tmp_path), timeout_s=90.0)
    messages, after_s = json.loads((tmp_path / "told").read_text())
    assert messages == ["rank 1 is gone: its process ended or was killed"]
    assert after_s < 10.0


def test_the_default_device_of_the_trainer_is_none_of_the_ranks_words(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, training_loops.drawn_with_default_device, str(tmp_path)) == [["done"] * 3] * 2


def test_a_rank_that_is_busy_or_stopped_has_not_left(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, training_loops.drawn_while_stopped, str(tmp_path)) == [["done"] * 3] * 3


@pytest.mark.slow
def test_a_rank_that_never_calls_is_missed_after_the_timeout(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, training_loops.called_by_first_alone, str(tmp_path / "run"))
    assert caught.value.troubles[0].kind == "RankFailure"
    assert "not every rank called sampler(step) within 2 s" in caught.value.troubles[0].message


def test_a_second_training_in_one_folder_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """A second training in one folder is refused on all its ranks and changes nothing."""
    model = training_loops.network()
    first = RankSampler(training_loops.drawer(model), training_loops.PROMPTS, tmp_path / "run", 1, model=model)
    first(3), first(12)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RanksFailed) as caught:
        ranks.run(3, drawn, str(tmp_path / "run"), training_loops.PROMPTS, False)
    troubles = caught.value.troubles.values()
    assert {(trouble.kind, trouble.exit_code) for trouble in troubles} == {("InputError", 2)}
    (said,) = {trouble.message for trouble in troubles}
    assert f"in use by a training, process {os.getpid()} on {socket.gethostname()}" in said
    assert "choose another out=" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    del first
    gc.collect()
    assert {row[3] for row in ranks.run(3, drawn, str(tmp_path / "run"), training_loops.PROMPTS, False)[0]} == {"done"}


def test_what_the_first_rank_alone_meets_costs_no_other_rank_its_time(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": "x"}\n')
    assert ranks.run(2, training_loops.drawn_over_damage, str(tmp_path)) == [["done"] * 10] * 2


def test_a_wrapper_whose_forward_waits_for_others_is_refused_and_nobody_waits(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(2, training_loops.drawn_by_wrapper, str(tmp_path / "run"))
    assert all(state == "failed" and "call model.module inside draw" in reason for state, reason in told[0])
    assert len(told[0]) == 5


@pytest.mark.slow
def test_a_slow_draw_does_not_meet_the_patience_of_the_trainers_group(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(2, training_loops.drawn_slowly, str(tmp_path / "run"), world_timeout_s=1.0, timeout_s=30.0)
    assert told == [["done", "done"]] * 2


def test_calls_leave_no_keys_in_the_trainers_store_and_make_one_group(ranks: RankPool, tmp_path: Path) -> None:
    for keys, groups in ranks.run(2, training_loops.left_behind, str(tmp_path / "run")):
        assert len(set(keys)) == 1
        assert len(set(groups)) == 1


def test_ranks_that_are_at_different_steps_are_told(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 samples step 1, but rank 0 samples step 0"):
        ranks.run(2, training_loops.disagreeing, str(tmp_path / "run"))
