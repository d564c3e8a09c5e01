"""One rank of the communication check of `halation doctor`: join, all-reduce, check the sum, measure, write the figure.

A process of its own, so that a rank that hangs or dies inside a library cannot take the doctor with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from halation.fault_injection import fault_point

NUM_REPEATS = 5


def main(folder: Path, backend: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _write_phase(folder, rank, "joining the group")
    # The limit of a group is for talking: on a busy machine one rank imports torch seconds before another. Our parent ends us if one never comes.
    while not all((folder / f"phase_{other}").exists() for other in range(world_size)):
        time.sleep(0.02)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    _write_phase(folder, rank, "reducing")
    num_values = (64 if device.type == "cuda" else 4) * 1024 * 1024
    values = torch.full((num_values,), float(rank + 1), device=device)
    fault_point("doctor.all_reduce")
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    if not bool((values == expected).all()):
        raise SystemExit(f"the sum over {world_size} ranks is {values[0].item()}, not {expected}")
    seconds = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    num_bytes = num_values * values.element_size()
    # Each byte crosses a link 2 (n - 1) / n times in a ring: the figure that can be held against the link's own.
    crossings = 2 * (world_size - 1) / world_size
    median_s = sorted(seconds)[NUM_REPEATS // 2]
    figures = {
        "megabytes": num_bytes / 1e6,
        "median_s": median_s,
        "bus_gb_per_s": num_bytes * crossings / median_s / 1e9,
    }
    (folder / f"figures_{rank}.json").write_text(json.dumps(figures))


def _write_phase(folder: Path, rank: int, phase: str) -> None:
    """What this rank is doing, for the message of a doctor who got no answer from it."""
    (folder / f"phase_{rank}").write_text(phase)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
