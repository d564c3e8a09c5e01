"""One worker of `halation generate`, as its crew starts it: `python -m halation.generation.workers.process SOCKET`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from halation.distributed import launcher
from halation.distributed.signals import STOPPING
from halation.generation.workers.worker import Worker


def main() -> int:
    launcher.tie_to_parent()
    for number in STOPPING:  # a scheduler signals every process of a job; the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from halation.generation.workers.open_model import open_easel

    Worker(Connection(int(sys.argv[1]))).serve(open_easel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' own threads have nothing left to say, and some never end


if __name__ == "__main__":
    sys.exit(main())
