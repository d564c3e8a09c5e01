"""What ranks of a pool are asked to do in tests of teachers: the part of a distillation that comes before its first step."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from typing import Any, NamedTuple


class Prepared(NamedTuple):
    num_forwards: int
    """Of the teacher, on this rank."""
    num_alive: int
    """Teachers in memory afterwards."""
    told: list[str]
    """Warnings."""
    stopped: tuple[int, str]
    """Exit code and message of one that was asked to stop."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
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
    logging.getLogger("halation").addHandler(heard)
    try:
        with train.open_run_on_rank_zero(config, world, "distill", distill.open_record):
            task = distill.new_task(world, config, RunFolder(config.output_dir))
            task.open()
            task.resolve_num_steps(config.batch_size * world.size)
            task.prepare(task.sample_settings())
    except Interrupted as interruption:
        stopped = interruption.exit_code, str(interruption)
    finally:
        hook.remove()
        logging.getLogger("halation").removeHandler(heard)
    return Prepared(num_forwards, len(teachers), heard.told, stopped)
