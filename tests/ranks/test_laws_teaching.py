"""Laws of teacher targets before step 1: computed once, interruptible, teacher released."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from halation.distillation.config import DistillConfig
from halation.distillation.teacher import DEFAULT_TEACHER_BATCH_SIZE, default_batch_size
from halation.logging_setup import ConsoleWarningHandler, exclusive_console_handler
from support import rank_functions
from support.rank_pool import RankPool

pytestmark = pytest.mark.ranks

PATIENCE = {"timeout_s": 120.0, "world_timeout_s": 60.0}


class Prepared(NamedTuple):
    num_forwards: int
    """Of the teacher, on this rank."""
    num_alive: int
    """Teachers in memory afterwards."""
    told: list[str]
    """Lines for the console."""
    stopped: tuple[int, str]
    """Exit code and message of one that was asked to stop."""


class _Heard(ConsoleWarningHandler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def prepared(world: Any, config: Any, stop_at: int = 0, rank: int = 0) -> Prepared:
    """Ask the teacher what it need say only once. `rank` alone sends itself SIGTERM after `stop_at` forwards."""
    from torch.nn.modules.module import register_module_forward_hook

    from halation.distillation import command as distill
    from halation.errors import Interrupted
    from halation.models.dit.network import DiT
    from halation.runs.run_folder import RunFolder
    from halation.training import command as train

    teachers: weakref.WeakSet[Any] = weakref.WeakSet()
    num_forwards, stopped = 0, (0, "")

    def note(module: Any, _args: Any, _output: Any) -> None:
        nonlocal num_forwards
        if isinstance(module, DiT):
            teachers.add(module)
            num_forwards += 1
            if num_forwards == stop_at and world.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    heard, hook = _Heard(), register_module_forward_hook(note)
    try:
        with (
            exclusive_console_handler(heard),
            train.open_run_on_rank_zero(config, world, "distill", distill.open_record),
        ):
            task = distill.new_task(world, config, RunFolder(config.output_dir))
            task.open()
            task.resolve_num_steps(config.batch_size * world.size)
            task.prepare(task.sample_settings())
    except Interrupted as interruption:
        stopped = interruption.exit_code, str(interruption)
    finally:
        hook.remove()
    return Prepared(num_forwards, len(teachers), heard.told, stopped)


def asked(folder: Path, **changes: Any) -> DistillConfig:
    usual: dict[str, Any] = {"teacher_guidance": 1.0, "teacher_batch_size": 1, "sample": False}
    return rank_functions.small_distill_config(folder, **usual | changes)


def test_a_stopped_build_keeps_what_all_ranks_have_and_resumes_with_the_rest(ranks: RankPool, tmp_path: Path) -> None:
    """A build stopped on one rank keeps what all ranks have and resumes with the rest."""
    config = asked(tmp_path / "run", trajectories=6)
    first = ranks.run(2, prepared, config, 6, 1, **PATIENCE)
    said = "asked to stop: 4 of 6 items are saved; run the same command to resume"
    assert [one.stopped for one in first] == [(143, said)] * 2
    assert [one.num_forwards for one in first] == [3 * 4, 6], (
        "the rank that was not asked was busy, the other stops at once"
    )
    again = ranks.run(2, prepared, config, **PATIENCE)
    assert [(one.stopped, one.num_forwards) for one in again] == [((0, ""), 4)] * 2, "one item is left for each"


@pytest.mark.parametrize(
    ("changes", "num_alive"),
    [
        ({}, 0),
        ({"sample": True}, 0),
        ({"objective": "trajectory"}, 0),
        ({"feature_weight": 0.5, "teacher_batch_size": 0}, 1),
    ],
)
def test_a_teacher_is_freed_where_it_is_not_asked_again(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Any], num_alive: int
) -> None:
    (one,) = ranks.run(1, prepared, asked(tmp_path / "run", **changes), **PATIENCE)
    assert one.num_forwards >= 4
    assert one.num_alive == num_alive


def test_what_a_teacher_is_asked_is_told_before_and_few_lessons_for_many_steps_too(
    ranks: RankPool, tmp_path: Path
) -> None:
    for name, num_steps in (("few", 500), ("many", 501)):
        config = asked(tmp_path / name, trajectories=5, n_steps=num_steps)  # 5 x 4 teacher targets, 2 rows a step
        (one,) = ranks.run(1, prepared, config, **PATIENCE)
        assert "of 5 trajectories once, with 20 teacher predictions" in one.told[0]
        assert one.num_forwards == 20
        assert len(one.told) == (1 if name == "few" else 2)
    assert "20 cached teacher targets will be used" in one.told[1]
    assert "--trajectories" in one.told[1]


def test_a_teacher_on_the_cpu_beside_a_student_on_a_gpu_is_asked_one_item_at_a_time() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert default_batch_size(cpu, gpu, 512) == 1
    assert default_batch_size(cpu, cpu, 512) == default_batch_size(gpu, gpu, 2) == DEFAULT_TEACHER_BATCH_SIZE > 1


def test_a_teacher_on_a_gpu_takes_a_batch_of_the_students_at_once() -> None:
    gpu = torch.device("cuda", 0)
    assert default_batch_size(gpu, gpu, 512) == 512
