"""A rank that fails or hangs while sampling is named by all, and training keeps its bits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from halation.training.config import TrainConfig
from support import rank_functions, run_readers
from support.rank_pool import RankPool, RanksFailed

pytestmark = [pytest.mark.ranks, pytest.mark.faults]

POINTS = ("sample.prepare", "sample.forward", "sample.decode", "sample.write")
OUTSIDE_A_FORWARD = ("sample.prepare", "sample.decode", "sample.write")


def config(folder: Path, engine: str, **changes: Any) -> TrainConfig:
    """Three prompts, so that each of up to three ranks draws one; samples after the first step and after the last."""
    settings = {"n_steps": 2, "lr": 1e-2, "ckpt_every": 1, "sample_prompts": rank_functions.PROMPTS[:3]}
    return rank_functions.small_config(folder, engine=engine, **settings | changes)


@pytest.fixture(scope="module")
def unharmed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    known: dict[tuple[str, int], Path] = {}

    def folder(engine: str, size: int) -> Path:
        if (engine, size) not in known:
            known[engine, size] = tmp_path_factory.mktemp(f"unharmed_{engine}_{size}")
            ranks.run(size, rank_functions.train, config(known[engine, size], engine))
        return known[engine, size]

    return folder


FAST = [
    ("fsdp", 2, "sample.decode", 1),
]
GRID = [
    (engine, size, point, rank)
    for engine, points in (("ddp", POINTS), ("fsdp", OUTSIDE_A_FORWARD))
    for size in (2, 3)
    for point in points
    for rank in (0, size - 1)
]


@pytest.mark.parametrize(
    ("engine", "size", "point", "culprit"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in GRID],
)
def test_a_rank_that_raises_while_sampling_is_reported_and_training_unchanged(
    ranks: RankPool,
    tmp_path: Path,
    unharmed: Callable[[str, int], Path],
    engine: str,
    size: int,
    point: str,
    culprit: int,
) -> None:
    """A rank that raises while sampling is reported by all ranks, and training keeps its bits."""
    fired = tmp_path / "fired"
    environment = {"HALATION_FAULT": f"{point}:1:raise:{culprit}", "HALATION_FAULT_LOG": str(fired)}
    ranks.run(size, rank_functions.train, config(tmp_path / "run", engine), environment=environment)
    assert fired.read_text() == f"{point}:1:raise:{culprit}\n"

    first, last = run_readers.sample_rows(tmp_path / "run", 1), run_readers.sample_rows(tmp_path / "run", 2)
    failed = [row for row in first if row["state"] == "failed"]
    assert [row["rank"] for row in failed] == [culprit]
    assert failed[0]["reason"] == f"InjectedFault: fault injected at {point}, passage 1"
    assert [row["state"] for row in first if row is not failed[0]] == ["done", "done"]
    assert [row["state"] for row in last] == ["done"] * 3
    for rank in range(size):
        moment = said_at(run_readers.rank_log(tmp_path / "run", rank), f"Error during sampling on GPU {culprit}: ")
        assert moment - fired.stat().st_mtime < 5

    whole = unharmed(engine, size)
    assert run_readers.checkpoint_bytes(tmp_path / "run", 2) == run_readers.checkpoint_bytes(whole, 2)
    names = [row["file"] for row in first if row["state"] == "done"]
    mine, theirs = (run_readers.sample_files(folder / "samples/step_0000001") for folder in (tmp_path / "run", whole))
    assert all(mine[name] == theirs[name] for name in names)
    assert run_readers.sample_files(tmp_path / "run/samples/step_0000002") == run_readers.sample_files(
        whole / "samples/step_0000002"
    )


def said_at(log: str, words: str) -> float:
    """When a line with these words was logged, in seconds since 1970."""
    line = next(line for line in log.splitlines() if words in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_raises_inside_a_sharded_forward_ends_all_and_is_named_by_all(
    ranks: RankPool, tmp_path: Path, culprit: int
) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks.run(
            3,
            rank_functions.train,
            config(tmp_path, "fsdp"),
            environment={"HALATION_FAULT": f"sample.forward:1:raise:{culprit}"},
        )
    assert time.monotonic() - began < 15
    assert sorted(caught.value.troubles) == [0, 1, 2]
    for trouble in caught.value.troubles.values():
        assert trouble.kind == "RankFailure"
        assert re.search(rf"\brank {culprit} failed", trouble.message)
    assert "fault injected at sample.forward" in caught.value.troubles[culprit].message


@pytest.mark.slow
@pytest.mark.parametrize("action", ["sleep=5", "stop"])
def test_a_rank_that_hangs_while_sampling_is_named_in_time_with_its_stack(
    ranks: RankPool, tmp_path: Path, action: str
) -> None:
    """A rank that hangs while sampling is named in time, with its stack if it can report one."""
    fired = tmp_path / "fired"
    environment = {"HALATION_FAULT": f"sample.forward:1:{action}:1", "HALATION_FAULT_LOG": str(fired)}
    timeout_s = 2.0
    with pytest.raises(RanksFailed) as caught:
        ranks.run(
            2, train_and_time, config(tmp_path / "run", "ddp", sample_timeout_s=timeout_s), environment=environment
        )
    trouble = caught.value.troubles[0]
    assert trouble.kind == "RankFailure"
    assert "rank 1 has made no progress for 2 s in sampling step 1" in trouble.message
    if action == "stop":
        assert "its process does not respond" in trouble.message
    else:
        assert "fault_point" in trouble.message, "the stack shows where it stands"
    named_at = float((tmp_path / "run/given_up_0").read_text())
    assert named_at - fired.stat().st_mtime < timeout_s + 5


def train_and_time(world: Any, config: TrainConfig) -> None:
    try:
        rank_functions.train(world, config)
    finally:
        (config.output_dir / f"given_up_{world.rank}").write_text(str(time.time()))


@pytest.mark.slow
def test_a_sampler_far_slower_than_the_timeout_of_collectives_is_no_failure(ranks: RankPool, tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    environment = {"HALATION_FAULT": "sample.forward:1+:sleep=1.1:1", "HALATION_FAULT_LOG": str(fired)}
    patient = config(tmp_path / "run", "ddp", n_steps=1, sample_steps=4, dist_timeout_s=3.0)
    began = time.monotonic()
    ranks.run(2, rank_functions.train, patient, environment=environment, world_timeout_s=3.0)
    assert time.monotonic() - began > 4 * 1.1
    assert len(fired.read_text().splitlines()) == 4
    assert [row["state"] for row in run_readers.sample_rows(tmp_path / "run", 1)] == ["done"] * 3


@pytest.mark.parametrize(
    ("action", "culprit", "words"),
    [
        pytest.param("sleep=7", 1, "rank 1 has made no progress", marks=pytest.mark.slow),
        pytest.param("sleep=7", 0, "rank 0 has made no progress", marks=pytest.mark.slow),
        pytest.param("stop", 1, "rank 1 stopped responding", marks=pytest.mark.slow),
        ("kill", 1, "rank 1 stopped responding"),
    ],
)
def test_a_rank_lost_inside_a_sharded_forward_is_named_after_the_timeout(
    ranks: RankPool, tmp_path: Path, action: str, culprit: int, words: str
) -> None:
    """A rank that hangs or dies in a sharded forward is named when the collective times out."""
    environment = {"HALATION_FAULT": f"sample.forward:2:{action}:{culprit}"}
    settings = config(tmp_path, "fsdp", dist_timeout_s=4.0, sample_steps=3)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(3, rank_functions.train, settings, environment=environment, world_timeout_s=4.0)
    for rank, trouble in caught.value.troubles.items():
        if rank != culprit:
            assert trouble.kind == "RankFailure"
            assert words in trouble.message
