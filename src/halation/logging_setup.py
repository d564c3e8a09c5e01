"""Sets up logging: a file for each rank; warnings and chosen lines on the console."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ON_CONSOLE = {"on_console": True}
"""For `log.info(..., extra=ON_CONSOLE)`: a line that is no warning and that users should see."""


class ConsoleWarningHandler(logging.Handler):
    """Prints warnings and lines with `ON_CONSOLE` through the active progress display.

    Printed past it, they would break its bars.
    """

    def __init__(self) -> None:
        super().__init__()
        self.print_line: Callable[[str], None] | None = None
        self.addFilter(lambda record: record.levelno >= logging.WARNING or hasattr(record, "on_console"))

    def emit(self, record: logging.LogRecord) -> None:
        if self.print_line is not None:
            self.print_line(record.getMessage())
        else:  # before and after the display, for example about a damaged checkpoint
            sys.stderr.write(f"halation: {record.getMessage()}\n")


class _LogFile(logging.FileHandler):
    """A log file that ignores write errors: the disk error is raised when results are written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        del record


@contextlib.contextmanager
def exclusive_console_handler(console_handler: ConsoleWarningHandler) -> Iterator[None]:
    """Use only this console handler, without those left by earlier jobs of this process."""
    logger = logging.getLogger("halation")
    previous_handlers = [handler for handler in logger.handlers if isinstance(handler, ConsoleWarningHandler)]
    for handler in previous_handlers:
        logger.removeHandler(handler)
    logger.addHandler(console_handler)
    level = logger.level
    logger.setLevel(level or logging.INFO)  # for lines with ON_CONSOLE
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(console_handler)
        for handler in previous_handlers:
            logger.addHandler(handler)


def configure_rank_logging(folder: Path, rank: int) -> ConsoleWarningHandler:
    """Log to `train.log` on rank 0 and to `rank_K.log` on rank K; call once per process."""
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("halation")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    file = _LogFile(folder / ("train.log" if rank == 0 else f"rank_{rank}.log"))
    file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [rank {rank}] %(message)s"))
    logger.addHandler(file)
    console_handler = ConsoleWarningHandler()
    if rank == 0:
        logger.addHandler(console_handler)
    return console_handler


@contextlib.contextmanager
def log_duration(step: str) -> Iterator[None]:
    """Log the start of a preparation step, and its duration when it is done."""
    logger = logging.getLogger("halation.prepare")
    logger.info("%s", step)
    start_time = time.perf_counter()
    yield
    logger.info("%s: %.2f s", step, time.perf_counter() - start_time)


@contextlib.contextmanager
def log_to_folder(folder: Path) -> Iterator[ConsoleWarningHandler]:
    """Log everything to generate.log and warnings to the console."""
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("halation")
    file = _LogFile(folder / "generate.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    console_handler = ConsoleWarningHandler()
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(file)
    try:
        with exclusive_console_handler(console_handler):
            yield console_handler
    finally:
        logger.removeHandler(file)
        file.close()
        logger.setLevel(level)
        logger.propagate = propagate
