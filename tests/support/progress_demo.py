"""Displays that are fed as commands feed them, for tests that run them on a terminal or pipe of their own.

progress_demo.py KIND NUM_WORKERS SECONDS shows a generation of four workers, two of which die on the way; with `step` or
`watch` after that, a training or a watch.
"""

from __future__ import annotations

import sys
import time

from halation.progress import GenerationProgress, StepProgress, WatchProgress


def play_generation(kind: str, num_workers: int, seconds: float) -> None:
    workers = [f"GPU {number}" for number in range(num_workers)]
    with GenerationProgress(
        kind, workers, num_planned=1000 + 250 * num_workers, num_done=990, num_failed=10
    ) as progress:
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


def play_training(kind: str, seconds: float) -> None:
    with StepProgress(kind, 600, 100) as progress:
        for step in range(101, 601):
            time.sleep(seconds / 500)
            progress.update(step, f"mean loss {1 / step:.4f}  {step} images/s", {"loss": 1 / step})
            if step % 100 == 0:
                progress.print_line(f"checkpoint of step {step}\x1b[2J")


def play_watch(kind: str, seconds: float) -> None:
    with WatchProgress(kind) as progress:
        for step in (200, 400):
            for number in range(10):
                progress.show_status(f"step {step}: drawing", f"{number} of 10 images")
                time.sleep(seconds / 20)
            progress.show_event("scored", f"step {step}: fd 3.2\x1b[2J", step=step, metrics={"fd": 3.2})
        progress.show_event("warning", "step_0000600 was removed before it was scored; skipping it")


if __name__ == "__main__":
    kind, num_workers, seconds, *job = sys.argv[1:]
    if job == ["step"]:
        play_training(kind, float(seconds))
    elif job == ["watch"]:
        play_watch(kind, float(seconds))
    else:
        play_generation(kind, int(num_workers), float(seconds))
