"""The work of one call: queues per worker, stealing, retries and time estimates.

This module only does the bookkeeping: it starts no processes, receives no events and writes no outcomes.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from halation.generation.image_requests import BatchTask
from halation.generation.ledger import Ledger
from halation.sample_specs import SampleSpec
from halation.work_division import BatchPlan, initial_batches


@dataclass(kw_only=True, eq=False)
class WorkItem:
    """A task and the workers that hold it.

    At the end of a run, idle workers duplicate the tasks of the slowest workers.
    """

    task: BatchTask
    cost: float
    num_deaths: int = 0
    dead_workers: frozenset[int] = frozenset()
    """Workers that died while running it. Another worker tries it next, in case the GPU is the cause, not the image."""
    is_retry: bool = False
    holders: set[int] = field(default_factory=set)

    @property
    def is_suspect(self) -> bool:
        """True if a worker died while running it.

        Suspects run alone on a worker, so that another death identifies the cause.
        """
        return self.num_deaths > 0


@dataclass(kw_only=True)
class WorkerState:
    """The state of a worker slot; it outlives the worker process, which may be replaced."""

    label: str
    name: str
    """Name in the progress display: GPU 0, or worker 0."""
    queue: deque[int] = field(default_factory=deque)
    queued_cost: float = 0.0
    status: str = "starting"
    in_flight: dict[int, WorkItem] = field(default_factory=dict)
    start_times: dict[int, float] = field(default_factory=dict)
    expected_s: dict[int, float] = field(default_factory=dict)
    """Total seconds of each started task, estimated from its steps so far; `speed` is that of earlier tasks."""
    last_seen: float = 0.0
    speed: float = 0.0
    """Cost per second, measured on its last batches; 0 before the first."""
    num_deaths: int = 0
    kill_reason: str = ""
    num_done: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    num_restarts: int = 0

    def num_assigned(self, batch_size: int) -> int:
        """Return its images that are finished, in progress or queued."""
        held = sum(len(work.task.wanted) for work in self.in_flight.values())
        return self.num_done + self.num_failed + held + len(self.queue) * batch_size


class WorkQueue:
    """The unfinished work of one call."""

    def __init__(
        self,
        ledger: Ledger,
        batches: BatchPlan,
        batch_size: int,
        workers: Sequence[WorkerState],
        drop: Callable[[int, int], None],
    ) -> None:
        """`drop(worker, number)` takes a task back from a worker that has not started it."""
        self.ledger = ledger
        self.batches = batches
        self.batch_size = batch_size
        self.workers = workers
        self.drop = drop
        self.micro_batch = 0
        self.active: dict[int, WorkItem] = {}
        """Unfinished work items by number, once created for a worker."""
        self.requeued: deque[WorkItem] = deque()
        self._numbers = itertools.count()
        self._open_mask = np.zeros(0, dtype=np.bool_)
        self._costs = np.zeros(0, dtype=np.float32)
        """Relative cost of each image, for ordering and estimates."""

    def prepare(self) -> None:
        """Read from the ledger which images are missing, and compute the cost of each row."""
        self._open_mask = self._read_open_mask()
        self._costs = np.zeros(len(self._open_mask), dtype=np.float32)
        for rows in self.ledger.groups():
            self._costs[rows] = cost(self.ledger.requests([int(rows[0])])[0].spec)

    @property
    def is_empty(self) -> bool:
        return not self.active and not self.requeued and not self.has_queued

    @property
    def has_queued(self) -> bool:
        return any(state.queue for state in self.workers)

    def _read_open_mask(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self.ledger.num_planned, dtype=np.bool_)
        mask[self.ledger.unfinished_indices()] = True
        return mask

    def enqueue_all(self) -> None:
        """Queue every batch that lacks an image."""
        self._distribute(self.batches.find_batches(np.flatnonzero(self._open_mask)))

    def enqueue(self, batches: Sequence[int]) -> None:
        """Queue those of these batches that still lack an image."""
        self._open_mask = self._read_open_mask()
        todo = [batch for batch in batches if self._open_mask[self.batches.rows(batch)].any()]
        self._distribute(np.asarray(todo, dtype=np.int64))

    def _distribute(self, todo: npt.NDArray[np.int64]) -> None:
        """Distribute batches round-robin, the most expensive first, then by number.

        The last batches of a run are then short ones.
        """
        costs = self._costs[self.batches.first_rows(todo)].astype(np.float64)
        order = np.argsort(-costs, kind="stable")
        for worker, state in enumerate(self.workers):
            mine = order[initial_batches(len(todo), len(self.workers), worker)]
            state.queue.extend(todo[mine].tolist())
            state.queued_cost += float(costs[mine].sum())

    def clear(self) -> None:
        """Discard the batches that no worker holds yet."""
        for state in self.workers:
            state.queue.clear()
            state.queued_cost = 0.0

    def mark_done(self, index: int) -> None:
        self._open_mask[index] = False

    def release(self, worker: int, number: int) -> WorkItem | None:
        """Take this task from this worker; return its work item unless it is already complete."""
        state = self.workers[worker]
        work = state.in_flight.pop(number, None)
        state.start_times.pop(number, None)
        state.expected_s.pop(number, None)
        if work is None:
            return None
        work.holders.discard(worker)
        return self.active.get(number)

    def complete(self, work: WorkItem) -> None:
        """Remove a finished or replaced item, and drop it from other workers that hold it."""
        del self.active[work.task.number]
        for holder in work.holders:
            self.drop(holder, work.task.number)

    def requeue(self, work: WorkItem) -> None:
        """Queue an item again, before all others, unless another worker holds it."""
        if not work.holders:
            self.requeued.appendleft(work)

    def requeue_alone(self, work: WorkItem, index: int) -> None:
        """Queue one image of a failed batch as a task of its own."""
        task = work.task.with_single_image(index, next(self._numbers))
        retry = WorkItem(
            task=task, cost=work.cost, num_deaths=work.num_deaths, dead_workers=work.dead_workers, is_retry=True
        )
        self.active[task.number] = retry
        self.requeued.append(retry)

    def next_item(self, worker: int) -> WorkItem | None:
        """Return the next work item for this worker, or None.

        The order is: requeued items, its own queue, the queue of the slowest worker, a copy of a slow worker's task.
        """
        state = self.workers[worker]
        self.requeued = deque(work for work in self.requeued if work.task.number in self.active)
        for work in self.requeued:
            if not work.is_suspect or (not state.in_flight and not self._should_run_elsewhere(worker, work)):
                self.requeued.remove(work)
                return work
        # Stealing takes the most expensive batch, so that the last batches are short on the slowest worker too.
        source = state if state.queue else max(self.workers, key=self._remaining_s)
        if source.queue:
            return self._pop_item(source)
        return self._steal_or_duplicate(state)

    def _should_run_elsewhere(self, worker: int, work: WorkItem) -> bool:
        """Return True if this worker died while running it and another worker did not."""
        others = (number for number, state in enumerate(self.workers) if state.status not in ("retired", "spare"))
        return worker in work.dead_workers and any(number not in work.dead_workers for number in others)

    def _pop_item(self, source: WorkerState) -> WorkItem:
        rows = self.batches.rows(source.queue.popleft())
        source.queued_cost = max(0.0, source.queued_cost - float(self._costs[rows[0]])) if source.queue else 0.0
        requests = tuple(self.ledger.requests(rows.tolist()))
        task = BatchTask(
            number=next(self._numbers),
            requests=requests,
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            wanted=frozenset(rows[self._open_mask[rows]].tolist()),
        )
        work = WorkItem(task=task, cost=cost(requests[0].spec))
        self.active[task.number] = work
        return work

    def _remaining_s(self, state: WorkerState) -> float:
        """Estimate the seconds until its queue is finished; infinite for a slot without a worker."""
        if state.status != "ready":
            return float("inf") if state.queue else 0.0
        return state.queued_cost / (state.speed or self._mean_speed())

    def _mean_speed(self) -> float:
        known = [state.speed for state in self.workers if state.speed]
        return sum(known) / len(known) if known else 1.0

    def _steal_or_duplicate(self, state: WorkerState) -> WorkItem | None:
        """With empty queues, take or copy a task that this worker would finish before its holder."""
        if state.in_flight:
            return None
        best: tuple[float, int, WorkItem] | None = None
        for worker, other in enumerate(self.workers):
            for remaining_s, work in self._estimate_remaining(other):
                own_s = work.cost / (state.speed or self._mean_speed())
                is_available = len(work.holders) == 1 and not work.is_suspect and not work.is_retry
                if is_available and remaining_s > 1.1 * own_s and (best is None or remaining_s > best[0]):
                    best = (remaining_s, worker, work)
        if best is None:
            return None
        _, holder, work = best
        if work.task.number not in self.workers[holder].start_times:
            self.drop(holder, work.task.number)
        return work

    def _estimate_remaining(self, state: WorkerState) -> Iterator[tuple[float, WorkItem]]:
        """Yield the tasks that this worker holds, each with its estimated remaining seconds.

        The estimate is infinite if the worker has sent no event for too long.
        """
        now = time.monotonic()
        remaining_s = 0.0
        speed = state.speed or self._mean_speed()
        for number, work in state.in_flight.items():
            start_time = state.start_times.get(number)
            duration_s = max(work.cost / speed, state.expected_s.get(number, 0.0))
            speed = work.cost / duration_s
            remaining_s += duration_s if start_time is None else max(0.0, duration_s - (now - start_time))
            if start_time is not None and now - state.last_seen > 3 * work.cost / self._mean_speed() + 1.0:
                remaining_s = float("inf")
            if number in self.active:
                yield remaining_s, work


def cost(spec: SampleSpec) -> float:
    """Return the relative cost of an image of this shape.

    Attention makes large images more expensive than this; measured speeds correct for it.
    """
    return float(spec.height * spec.width * spec.num_frames * spec.steps)
