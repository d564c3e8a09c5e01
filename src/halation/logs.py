"""Where log lines go: a file for each rank, and warnings of rank 0 to the person."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


class Echo(logging.Handler):
    """Hands warnings to whoever draws the progress bar, so that a line does not tear it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.say: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.say is not None:
            self.say(record.getMessage())
        else:  # before the bar and after it: a damaged checkpoint is found then
            sys.stderr.write(f"halation: {record.getMessage()}\n")


@contextlib.contextmanager
def alone(echo: Echo) -> Iterator[None]:
    """This one speaks to the person, and not also one that an earlier job of this process left behind."""
    logger = logging.getLogger("halation")
    before = [handler for handler in logger.handlers if isinstance(handler, Echo)]
    for handler in before:
        logger.removeHandler(handler)
    logger.addHandler(echo)
    try:
        yield
    finally:
        logger.removeHandler(echo)
        for handler in before:
            logger.addHandler(handler)


def set_up(folder: Path, rank: int) -> Echo:
    """Log to `train.log` on rank 0 and `rank_K.log` elsewhere; called once in a process."""
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("halation")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    file = logging.FileHandler(folder / ("train.log" if rank == 0 else f"rank_{rank}.log"), encoding="utf-8")
    file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [rank {rank}] %(message)s"))
    logger.addHandler(file)
    echo = Echo()
    if rank == 0:
        logger.addHandler(echo)
    return echo


@contextlib.contextmanager
def logging_to(folder: Path) -> Iterator[Echo]:
    """generate.log for everything, and warnings for the person."""
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("halation")
    file = logging.FileHandler(folder / "generate.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    echo = Echo()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(file)
    try:
        with alone(echo):
            yield echo
    finally:
        logger.removeHandler(file)
        file.close()
        logger.setLevel(level)
        logger.propagate = propagate
