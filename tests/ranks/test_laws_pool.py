"""The rank pool of these tests: ordered results, errors with their rank, no hung process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from halation import fault_injection
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks


def who(world: Any, word: str) -> tuple[int, int, str, list[str]]:
    return world.rank, world.size, os.environ["RANK"], world.all_gather_object(f"{word}{world.rank}")


def fail(world: Any, culprit: int) -> None:
    if world.rank == culprit:
        raise ValueError("this one")
    world.all_gather_object("the others wait")


def hang(world: Any, culprit: int) -> None:
    if world.rank == culprit:
        time.sleep(600)
    world.all_gather_object("the others wait")


def die(world: Any, culprit: int) -> None:
    if world.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    world.all_gather_object("the others wait")


def meddle(world: Any) -> tuple[str, dict[str, int]]:
    """Leave traces that the next call must not see."""
    seen = os.environ.get("HALATION_FAULT", ""), dict(fault_injection._counts)
    os.environ["HALATION_FAULT"] = "left.over:1:raise"
    fault_injection.fault_point("some.point")
    return seen


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_come_in_rank_order(ranks: RankPool, size: int) -> None:
    words = [f"w{rank}" for rank in range(size)]
    assert ranks.run(size, who, "w") == [(rank, size, str(rank), words) for rank in range(size)]


def test_an_error_names_its_rank_and_shows_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1: ValueError: this one") as caught:
        ranks.run(3, fail, 1)
    assert caught.value.troubles[1].kind == "ValueError"
    assert "in fail" in caught.value.troubles[1].trace


def test_a_hung_rank_is_killed_shows_its_stack_and_the_next_call_works(ranks: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, hang, 1, timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert caught.value.troubles[1].kind == "Hung"
    assert "in hang" in caught.value.troubles[1].trace
    assert [result[0] for result in ranks.run(3, who, "w")] == [0, 1, 2]


def test_a_killed_rank_is_told_apart_from_the_ones_that_missed_it(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(3, die, 2)
    assert caught.value.troubles[2].exit_code == -signal.SIGKILL
    assert caught.value.troubles[0].kind == caught.value.troubles[1].kind == "RuntimeError"
    assert [result[0] for result in ranks.run(3, who, "w")] == [0, 1, 2]


def test_a_call_leaves_no_environment_and_no_counts_behind(ranks: RankPool) -> None:
    assert ranks.run(1, meddle, environment={"HALATION_FAULT": "a:1:raise"}) == [("a:1:raise", {})]
    assert ranks.run(1, meddle) == [("", {})]
