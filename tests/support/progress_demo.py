"""A call of four workers, two of which die on the way, told to a Progress: what the tests of the bars run on a terminal of their own."""

from __future__ import annotations

import sys
import time

from halation.generation_progress_display import GenerationProgress


def play(kind: str, num_workers: int, seconds: float) -> None:
    workers = [f"GPU {number}" for number in range(num_workers)]
    with GenerationProgress(
        kind, workers, num_planned=1000 + 250 * num_workers, num_done=990, num_failed=10
    ) as progress:  # type: ignore[arg-type]
        for worker in workers:
            progress.set_assigned(worker, 250)
            progress.set_state(worker, "loading")
        for tick in range(40):
            time.sleep(seconds / 40)
            for number, worker in enumerate(workers):
                if number in (1, 2) and tick == 15:
                    progress.set_state(worker, "gone, started again (1)")
                    progress.print_line(
                        f"{worker} died of signal 9; its batch with the prompt '\x1b[2J\x07 a street' is drawn again"
                    )
                elif tick >= 5 and not (number in (1, 2) and 15 <= tick < 25):
                    progress.set_step(worker, tick % 20 + 1, 20)
                    progress.add_images(worker, 6, int(number == 3 and tick % 10 == 0))
        for worker in workers:
            progress.set_state(worker, "finished")


if __name__ == "__main__":
    play(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
