"""A call of four workers, two of which die on the way, told to a Progress: what the tests of the bars run on a terminal of their own."""

from __future__ import annotations

import sys
import time

from halation.progress import Progress


def play(kind: str, num_workers: int, seconds: float) -> None:
    workers = [f"GPU {number}" for number in range(num_workers)]
    with Progress(kind, workers, planned=1000 + 250 * num_workers, done=990, failed=10) as progress:  # type: ignore[arg-type]
        for worker in workers:
            progress.give(worker, 250)
            progress.state(worker, "loading")
        for tick in range(40):
            time.sleep(seconds / 40)
            for number, worker in enumerate(workers):
                if number in (1, 2) and tick == 15:
                    progress.state(worker, "gone, started again (1)")
                    progress.say(
                        f"{worker} died of signal 9; its sheet with the prompt '\x1b[2J\x07 a street' is drawn again"
                    )
                elif tick >= 5 and not (number in (1, 2) and 15 <= tick < 25):
                    progress.step(worker, tick % 20 + 1, 20)
                    progress.picture(worker, 6, int(number == 3 and tick % 10 == 0))
        for worker in workers:
            progress.state(worker, "finished")


if __name__ == "__main__":
    play(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
