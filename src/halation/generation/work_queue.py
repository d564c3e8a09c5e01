"""All the work of one call: queued in turn for every worker, held, or come back; and who should get what next.

Pure bookkeeping: no process is started, no event heard and no outcome written here.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from halation.generation.ledger import Ledger
from halation.generation.workers.messages import Task
from halation.plan import Sheets, turns
from halation.specs import Spec


@dataclass(kw_only=True, eq=False)
class Work:
    """A task on its way to being settled, and who holds it: at the end of a run idle workers draw the slowest ones' once more."""

    task: Task
    cost: float
    deaths: int = 0
    died_with: frozenset[int] = frozenset()
    """Workers that died over it; another one tries it next, so that a broken GPU is not taken for a bad picture."""
    retried: bool = False
    holders: set[int] = field(default_factory=set)

    @property
    def suspect(self) -> bool:
        """Whether a worker died over it: it is drawn with nothing beside it, so that the next death says whose fault it is."""
        return self.deaths > 0


@dataclass(kw_only=True)
class Slot:
    """A worker's place: the worker in it may be replaced, the place goes on."""

    label: str
    name: str
    """What it is called in the progress: GPU 0, or worker 0."""
    queue: deque[int] = field(default_factory=deque)
    queued_cost: float = 0.0
    state: str = "starting"
    flight: dict[int, Work] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)
    expected: dict[int, float] = field(default_factory=dict)
    """Seconds that what it has begun will take in all, by its steps so far: a worker that slows down has not told its speed yet."""
    heard: float = 0.0
    speed: float = 0.0
    """Cost a second, as measured on its last sheets; 0 before the first."""
    deaths: int = 0
    blame: str = ""
    done: int = 0
    failed: int = 0
    seconds_painting: float = 0.0
    restarts: int = 0

    def share(self, sheet_size: int) -> int:
        """Pictures it has drawn, is drawing and will draw if nobody takes them over."""
        held = sum(len(work.task.wanted) for work in self.flight.values())
        return self.done + self.failed + held + len(self.queue) * sheet_size


class Table:
    """Where the work of a call lies until it is settled."""

    def __init__(
        self, ledger: Ledger, sheets: Sheets, sheet_size: int, slots: Sequence[Slot], drop: Callable[[int, int], None]
    ) -> None:
        """`drop(worker, number)` takes a task back from a worker that has not begun it."""
        self.ledger = ledger
        self.sheets = sheets
        self.sheet_size = sheet_size
        self.slots = slots
        self.drop = drop
        self.micro_batch = 0
        self.live: dict[int, Work] = {}
        """Work that was begun to be given out and is not settled, by its number."""
        self.returned: deque[Work] = deque()
        self._numbers = itertools.count()
        self._open = self._mask()
        self._costs = self._row_costs()

    @property
    def is_empty(self) -> bool:
        return not self.live and not self.returned and not self.has_queued

    @property
    def has_queued(self) -> bool:
        return any(slot.queue for slot in self.slots)

    def _mask(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self.ledger.num_planned, dtype=np.bool_)
        mask[self.ledger.unfinished()] = True
        return mask

    def _row_costs(self) -> npt.NDArray[np.float32]:
        """What each picture costs against the others, for turns and for estimates."""
        costs = np.zeros(len(self._open), dtype=np.float32)
        for rows in self.ledger.groups():
            costs[rows] = cost(self.ledger.requests([int(rows[0])])[0].spec)
        return costs

    def deal_all(self) -> None:
        """Queue every sheet that lacks a picture."""
        self._deal(self.sheets.containing(np.flatnonzero(self._open)))

    def deal(self, sheets: Sequence[int]) -> None:
        """Queue those of these sheets that lack a picture by now."""
        self._open = self._mask()
        todo = [sheet for sheet in sheets if self._open[self.sheets.rows(sheet)].any()]
        self._deal(np.asarray(todo, dtype=np.int64))

    def _deal(self, todo: npt.NDArray[np.int64]) -> None:
        """Dear sheets first, so that the last ones are short; then by number; then in turn to every worker."""
        costs = self._costs[self.sheets.first_rows(todo)].astype(np.float64)
        order = np.argsort(-costs, kind="stable")
        for worker, slot in enumerate(self.slots):
            mine = order[turns(len(todo), len(self.slots), worker)]
            slot.queue.extend(todo[mine].tolist())
            slot.queued_cost += float(costs[mine].sum())

    def clear(self) -> None:
        """Forget what nobody holds yet."""
        for slot in self.slots:
            slot.queue.clear()
            slot.queued_cost = 0.0

    def is_done(self, index: int) -> None:
        self._open[index] = False

    def release(self, worker: int, number: int) -> Work | None:
        """This worker no longer holds this task; the work itself, unless it is settled already."""
        slot = self.slots[worker]
        work = slot.flight.pop(number, None)
        slot.begun.pop(number, None)
        slot.expected.pop(number, None)
        if work is None:
            return None
        work.holders.discard(worker)
        return self.live.get(number)

    def settle(self, work: Work) -> None:
        """It is drawn, or replaced by other work: whoever else holds it need not begin it."""
        del self.live[work.task.number]
        for holder in work.holders:
            self.drop(holder, work.task.number)

    def give_back(self, work: Work) -> None:
        """Nobody holds it any more; it goes out before anything else."""
        if not work.holders:
            self.returned.appendleft(work)

    def give_back_alone(self, work: Work, index: int) -> None:
        """One picture of a sheet that failed is to be drawn by itself."""
        task = work.task.alone(index, next(self._numbers))
        again = Work(task=task, cost=work.cost, deaths=work.deaths, died_with=work.died_with, retried=True)
        self.live[task.number] = again
        self.returned.append(again)

    def next(self, worker: int) -> Work | None:
        """What this worker should draw next: what came back, its own, the slowest one's, or what another will be long over."""
        slot = self.slots[worker]
        self.returned = deque(work for work in self.returned if work.task.number in self.live)
        for work in self.returned:
            if not work.suspect or (not slot.flight and not self._better_elsewhere(worker, work)):
                self.returned.remove(work)
                return work
        # Of another's, its dearest, so that the last sheets of all, on the slowest worker too, are short ones.
        source = slot if slot.queue else max(self.slots, key=self._time_left)
        if source.queue:
            return self._begin(source)
        return self._taken_over(slot)

    def _better_elsewhere(self, worker: int, work: Work) -> bool:
        """Whether this worker died over it and there is one that did not."""
        others = (number for number, slot in enumerate(self.slots) if slot.state not in ("retired", "spare"))
        return worker in work.died_with and any(number not in work.died_with for number in others)

    def _begin(self, source: Slot) -> Work:
        rows = self.sheets.rows(source.queue.popleft())
        source.queued_cost = max(0.0, source.queued_cost - float(self._costs[rows[0]])) if source.queue else 0.0
        requests = tuple(self.ledger.requests(rows.tolist()))
        task = Task(
            number=next(self._numbers),
            requests=requests,
            sheet_size=self.sheet_size,
            micro_batch=self.micro_batch,
            wanted=frozenset(rows[self._open[rows]].tolist()),
        )
        work = Work(task=task, cost=cost(requests[0].spec))
        self.live[task.number] = work
        return work

    def _time_left(self, slot: Slot) -> float:
        """Until its own queue is drawn; a place without a worker will never get there."""
        if slot.state != "ready":
            return float("inf") if slot.queue else 0.0
        return slot.queued_cost / (slot.speed or self._mean_speed())

    def _mean_speed(self) -> float:
        known = [slot.speed for slot in self.slots if slot.speed]
        return sum(known) / len(known) if known else 1.0

    def _taken_over(self, slot: Slot) -> Work | None:
        """Nothing is left to begin: draw what another worker will be done with later than this one, and spare it what it has not begun."""
        if slot.flight:
            return None
        best: tuple[float, int, Work] | None = None
        for worker, other in enumerate(self.slots):
            for left, work in self._ends(other):
                mine = work.cost / (slot.speed or self._mean_speed())
                free = len(work.holders) == 1 and not work.suspect and not work.retried
                if free and left > 1.1 * mine and (best is None or left > best[0]):
                    best = (left, worker, work)
        if best is None:
            return None
        _, holder, work = best
        if work.task.number not in self.slots[holder].begun:
            self.drop(holder, work.task.number)
        return work

    def _ends(self, slot: Slot) -> Iterator[tuple[float, Work]]:
        """What this worker holds, and in how many seconds it will be done with it; never, where it is silent for too long."""
        now = time.monotonic()
        ends = 0.0
        speed = slot.speed or self._mean_speed()
        for number, work in slot.flight.items():
            begun = slot.begun.get(number)
            takes = max(work.cost / speed, slot.expected.get(number, 0.0))
            speed = work.cost / takes
            ends += takes if begun is None else max(0.0, takes - (now - begun))
            if begun is not None and now - slot.heard > 3 * work.cost / self._mean_speed() + 1.0:
                ends = float("inf")
            if number in self.live:
                yield ends, work


def cost(spec: Spec) -> float:
    """What a picture of this shape costs, against others; attention makes large ones dearer still, which speeds even out."""
    return float(spec.height * spec.width * spec.num_frames * spec.steps)
