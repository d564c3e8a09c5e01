"""Ranks exchange objects, compare tensors and name the rank that makes no progress."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halation import input_files
from halation.distributed import launcher
from halation.distributed.world import HeartbeatMonitor, World, check_ranks_agree, run_on_rank_zero
from halation.errors import HalationError, InputError, RankFailure
from halation.input_files import RefusedFileError
from halation.training.build_components import build_engine
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks


WORDS: list[Any] = ["", "ä" * 1000, {"日本": [1, None, True]}, "🙂\u0000\n"]


def exchange_all(world: World) -> list[list[Any]]:
    return [world.all_gather_object(WORDS[(world.rank + turn) % len(WORDS)]) for turn in range(len(WORDS))]


def from_first(world: World) -> Any:
    return world.broadcast_from_rank_zero({"rank": world.rank})


def on_first_value(world: World) -> Any:
    return run_on_rank_zero(world, "a value", lambda _beat: [world.rank, "Straße"], 5.0)


def on_first_error(world: World) -> tuple[str, int]:
    def refuse(_beat: Any) -> None:
        raise InputError("found", "expected", "action")

    try:
        run_on_rank_zero(world, "an error", refuse, 5.0)
    except HalationError as error:
        return str(error), error.exit_code
    return "no error", 0


def on_first_refused_file(world: World) -> tuple[str, int]:
    def read(_beat: Any) -> None:
        input_files.read_bytes("/dev/null", 10)

    try:
        run_on_rank_zero(world, "a file", read, 5.0)
    except HalationError as error:
        return str(error).splitlines()[0], error.exit_code
    return "no error", 0


def on_first_slowly(world: World, beats: int, pause_s: float) -> tuple[Any, float]:
    """Rank 0 works longer than the timeout, but says so all the time."""

    def work(beat: Any) -> str:
        for _ in range(beats):
            time.sleep(pause_s)
            beat()
        return "done"

    began = time.monotonic()
    return run_on_rank_zero(world, "slow work", work, 2.0), time.monotonic() - began


def meet(world: World, timeout_s: float, idle: dict[int, str]) -> tuple[str, float]:
    """All ranks work and meet, but the idle ones sleep, stop or die on the way; what this rank was told, and when."""
    began = time.monotonic()
    try:
        with HeartbeatMonitor(world, "a test", timeout_s) as monitor:
            for _ in range(3):
                monitor.heartbeat()
                time.sleep(0.1)
            what = idle.get(world.rank)
            if what == "sleep":
                doze_off()
            elif what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            words = monitor.gather_results(world.rank)
    except RankFailure as failure:
        return str(failure), time.monotonic() - began
    return str(words), time.monotonic() - began


def doze_off() -> None:
    time.sleep(5.0)


def blame(world: World) -> str:
    """Rank 1 has come one beat less far than the others when rank 0 asks who is behind."""
    with HeartbeatMonitor(world, "a forward", 5.0) as monitor:
        for _ in range(3 if world.rank == 1 else 4):
            monitor.heartbeat()
        time.sleep(1.2)
        found = monitor.explain_failure()
        monitor.gather_results("")
    return found


def agree(world: World, broken: int | None) -> str:
    tensors = {"a": torch.ones(3), "b": torch.arange(5.0), "flags": torch.tensor([True, False])}
    if world.rank == broken:
        tensors["b"][3] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    try:
        check_ranks_agree(world, tensors.items(), "at step 7")
    except RankFailure as failure:
        return str(failure)
    return "agreed"


class Memory:
    """The pieces of one rank in a checkpoint's place."""

    def __init__(self, pieces: dict[str, dict[str, Any]]) -> None:
        self.tensors = {part: {name: p.local.clone() for name, p in named.items()} for part, named in pieces.items()}

    def has_part(self, part: str) -> bool:
        return bool(self.tensors[part])

    def read(self, part: str, name: str) -> torch.Tensor:
        return self.tensors[part][name]

    def read_shard(self, part: str, name: str, _like: Any) -> torch.Tensor:
        return self.tensors[part][name]


def trained_engine(world: World, engine_name: str, num_steps: int) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    module[0].weight.requires_grad = False
    engine = build_engine(engine_name, world, module, [module[0]])
    engine.prepare_optimizer(0.1, (0.9, 0.99), 0.01)
    for _ in range(num_steps):
        engine.backward(engine.wrapped_module(torch.ones(2, 5) * (world.rank + 1)).sum())
        engine.clip_grad_norm(1.0)
        engine.step()
        engine.zero_grad()
    return engine


def pieces_come_back(world: World, engine_name: str) -> bool:
    """Train two steps, take weights and optimizer apart, and put them into a fresh engine; shapes of one row included.

    Between taking apart and comparing, the optimizer's state was in host memory once.
    """
    engine = trained_engine(world, engine_name, 2)
    pieces = engine.state_shards()
    assert "0.weight" not in pieces["model"]
    rows = world.all_gather_object({name: [p.start, *p.local.shape] for name, p in pieces["model"].items()})
    for name, parameter in engine.named_parameters():
        if engine.sharded and sum(row[name][1] for row in rows) != parameter.shape[0]:
            return False
    memory = Memory(pieces)
    with engine.offload_optimizer_state():
        pass
    fresh = trained_engine(world, engine_name, 0)
    fresh.load_checkpoint(memory)
    return all(equal(Memory(one.state_shards()), memory) for one in (engine, fresh))


def equal(one: Memory, other: Memory) -> bool:
    return all(
        one.tensors[part].keys() == other.tensors[part].keys()
        and all(torch.equal(one.tensors[part][name], values) for name, values in other.tensors[part].items())
        for part in other.tensors
    )


def single_engine(world: World) -> str:
    try:
        return build_engine("single", world, nn.Linear(2, 2), []).name
    except InputError as error:
        return str(error)


def meet_or_raise(world: World, timeout_s: float, idle: dict[int, str]) -> None:
    message, _ = meet(world, timeout_s, idle)
    if message.startswith("rank "):
        raise RankFailure(message)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_words_of_any_length_reach_every_rank_in_rank_order(ranks: RankPool, size: int) -> None:
    wanted = [[WORDS[(rank + turn) % len(WORDS)] for rank in range(size)] for turn in range(len(WORDS))]
    assert ranks.run(size, exchange_all) == [wanted] * size


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_ranks_word_and_work_are_everybodys(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, from_first) == [{"rank": 0}] * size
    assert ranks.run(size, on_first_value) == [[0, "Straße"]] * size


@pytest.mark.parametrize("size", [1, 3])
def test_an_error_of_the_first_rank_is_raised_by_all(ranks: RankPool, size: int) -> None:
    message = "found\n  expected: expected\n  to do:    action"
    assert ranks.run(size, on_first_error) == [(message, 2)] * size


def test_a_file_that_the_first_rank_refuses_is_told_in_a_sentence_by_all(ranks: RankPool) -> None:
    said = ("/dev/null is not read: it is a device, not a regular file", 2)
    assert ranks.run(2, on_first_refused_file) == [said] * 2


def test_a_rank_reports_a_refused_file_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALATION_RENDEZVOUS", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    launcher.report_error(RefusedFileError("file", "it is a device", "give another"), "Traceback")
    row = json.loads((tmp_path / "error_3.json").read_text())
    assert (row["kind"], row["exit_code"]) == ("InputError", 2)
    assert row["message"].startswith("file is not read: it is a device\n")


@pytest.mark.slow
def test_work_may_take_longer_than_the_timeout_while_it_makes_progress(ranks: RankPool) -> None:
    for value, seconds in ranks.run(3, on_first_slowly, 10, 0.4):
        assert value == "done"
        assert seconds > 4.0, "longer than the timeout of 2 s"


@pytest.mark.faults
def test_a_rank_that_sleeps_is_named_by_all_others_with_the_place_it_sleeps_at(ranks: RankPool) -> None:
    told = ranks.run(3, meet, 2.0, {1: "sleep"})
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
        ranks.run(3, meet_or_raise, 1.5, {2: "stop"}, timeout_s=5.0)
    troubles = failure.value.troubles
    assert troubles[2].kind == "Hung", "it was stopped"
    for rank in (0, 1):
        assert troubles[rank].kind == "RankFailure"
        assert troubles[rank].message.startswith("rank 2 has made no progress for 2 s in a test")
        assert "its process does not respond" in troubles[rank].message


def test_who_is_furthest_behind_is_blamed(ranks: RankPool) -> None:
    for sentence in ranks.run(3, blame):
        assert sentence.startswith("rank 1 has made no progress")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_hold_equal_tensors_agree(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, agree, None) == ["agreed"] * size


@pytest.mark.faults
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_bit_on_one_rank_is_told_by_all_ranks_with_the_tensor(ranks: RankPool, broken: int) -> None:
    for sentence in ranks.run(3, agree, broken):
        assert (
            f"ranks disagree at step 7: rank {broken or 1} differs from rank 0 in 1 of 3 tensors, first in b"
            in sentence
        )


@pytest.mark.parametrize(("size", "engine"), [(1, "single"), (2, "ddp"), (1, "fsdp"), (2, "fsdp"), (3, "fsdp")])
def test_an_optimizer_taken_apart_comes_back_whole(ranks: RankPool, size: int, engine: str) -> None:
    assert ranks.run(size, pieces_come_back, engine) == [True] * size


def test_several_ranks_that_would_never_meet_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, single_engine):
        assert message.startswith("--engine single with 2 ranks")
    assert ranks.run(1, single_engine) == ["single"]
