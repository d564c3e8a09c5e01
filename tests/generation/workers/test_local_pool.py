"""A local worker pool: a worker that reads nothing blocks no other worker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from halation.generation.image_requests import BatchTask, ImageRequest
from halation.generation.workers.local_pool import LocalWorkerPool, WorkerEvent, WorkerSlot
from halation.sample_specs import SampleSpec

STYLE = {"model": "testcard", "sampler": "", "coder": "zlib", "fps": 16}


def start_pool(folder: Path, num_workers: int) -> LocalWorkerPool:
    orders = {"folder": str(folder), "model": {"kind": "testcard", "seconds": 0.0}, "style": STYLE, "threads": 1}
    return LocalWorkerPool(
        [WorkerSlot(label=str(n), device="cpu") for n in range(num_workers)], orders, folder / "logs", 1
    )


def task(number: int, prompt: str) -> BatchTask:
    spec = SampleSpec(
        index=number, id=f"{number:06d}", prompt=prompt, seed=number, height=8, width=8, steps=1, guidance_scale=1.0
    )
    request = ImageRequest(spec=spec, name=f"{spec.id}_seed{spec.seed}")
    return BatchTask(number=number, requests=(request,), batch_size=1, micro_batch=1, wanted=frozenset({number}))


def await_kind(workers: LocalWorkerPool, kind: str, *who: int) -> list[WorkerEvent]:
    """The first word of this kind from each of these workers."""
    found: dict[int, WorkerEvent] = {}
    deadline = time.monotonic() + 30
    while found.keys() < set(who) and time.monotonic() < deadline:
        for event in workers.events(0.2):
            if event.kind == kind and event.worker in who:
                found.setdefault(event.worker, event)
    assert found.keys() == set(who), f"only {sorted(found)} said {kind}"
    return [found[worker] for worker in who]


@pytest.mark.faults
def test_orders_to_a_stopped_worker_do_not_keep_the_supervisor_waiting(tmp_path: Path) -> None:
    workers = start_pool(tmp_path, 2)
    try:
        for worker in range(2):
            workers.start(worker)
        await_kind(workers, "ready", 0, 1)
        os.kill(workers._processes[0].pid, signal.SIGSTOP)
        began = time.monotonic()
        for number in range(8):
            workers.submit(0, task(number, "x" * 2**20))
        workers.submit(1, task(9, "short"))
        assert await_kind(workers, "drawn", 1)[0].task == 9
        assert time.monotonic() - began < 10
        os.kill(workers._processes[0].pid, signal.SIGCONT)
        assert await_kind(workers, "drawn", 0)[0].body["outcomes"][0]["state"] == "done"
    finally:
        workers.shutdown(at_once=True)
    assert all(process.returncode is not None for process in workers._processes.values())
