"""One worker of `halation generate`, as its crew starts it: `python -m halation.jobs.paint SOCKET`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from halation.generation.worker import Worker
from halation.world import launch


def main() -> int:
    launch.tie_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from halation.jobs.painters import open_easel

    Worker(Connection(int(sys.argv[1]))).serve(open_easel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' own threads have nothing left to say, and some never end


if __name__ == "__main__":
    sys.exit(main())
