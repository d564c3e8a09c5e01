"""Who draws what next: sheets in turn to every worker, the slowest's to whoever is done, again after a failure, aside after two.

It imports no torch, holds no picture, and is the only one who writes the ledger. Whatever a worker does, hangs or dies of, costs that
worker's time alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from halation.errors import HalationError
from halation.generation.crew import Crew
from halation.generation.ledger import Ledger, Outcome
from halation.generation.progress import Progress
from halation.generation.results import WorkerTally
from halation.generation.tasks import Event, Task
from halation.generation.worker import DEPTH
from halation.plan import Sheets, turns
from halation.specs import Spec

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_TRIES = 2
MAX_KILLS = 3
"""A kill from outside is no picture's fault, so a picture may be there once more than at an error."""
MAX_DEATHS_IN_A_ROW = 3
LOADING_S = 3600.0


class Claims(Protocol):
    """Where several commands share a folder: which sheets this one may draw, a range at a time."""

    def beat(self) -> None:
        """Called often: keep what is claimed from being taken over."""

    def next(self) -> Sequence[int] | None:
        """Sheets to draw now; none where others hold the rest for the moment; None where nothing is left for anybody."""


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
    queue: deque[int]
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


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What one call of the run took."""

    seconds: float
    num_drawn: int
    num_retries: int
    num_redone_sheets: int
    workers: dict[str, WorkerTally]
    interrupted: bool


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the supervisor goes by."""

    sheet_size: int
    micro_batch: int
    """0: not known yet; found out by a rehearsal on the first worker; `on_rehearsed` hears it and says what it is to be."""
    stall_timeout_s: float


class Supervisor:
    """One call of the run: from what the ledger says is missing to nothing missing, or a reason for each that is."""

    def __init__(
        self,
        ledger: Ledger,
        sheets: Sheets,
        crew: Crew,
        progress: Progress,
        rules: Rules,
        *,
        stop: Callable[[], int],
        hurry: Callable[[], bool],
        on_rehearsed: Callable[[int], int],
        on_ready: Callable[[dict[str, object]], None],
        claims: Claims | None = None,
    ) -> None:
        self.ledger = ledger
        self.sheets = sheets
        self.crew = crew
        self.progress = progress
        self.rules = rules
        self.stop = stop
        self.hurry = hurry
        self.on_rehearsed = on_rehearsed
        self.on_ready = on_ready
        self.claims = claims
        self.micro_batch = rules.micro_batch
        self.rehearsing = -1
        self.stopping = False
        self.live: dict[int, Work] = {}
        self.returned: deque[Work] = deque()
        self.tries: dict[int, int] = {}
        self.outcomes: list[Outcome] = []
        self.num_retries = 0
        self.num_redone = 0
        self.last_reason = ""
        self._said: set[str] = set()
        self._numbers = itertools.count()
        self._open = self._mask()
        self._failed_before = {row.request.spec.index for row in ledger.failures()}
        self.num_new_failures = 0
        self._costs = self._row_costs()
        self.slots = [
            Slot(label=label, name=name, queue=queue)
            for label, name, queue in zip(crew.labels, crew.names, self._shares(), strict=True)
        ]

    # -- the plan of this call

    def _mask(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self.ledger.num_planned, dtype=np.bool_)
        mask[self.ledger.unfinished()] = True
        return mask

    def _row_costs(self) -> npt.NDArray[np.float32]:
        """What each picture costs against the others, for turns and for estimates."""
        costs = np.zeros(len(self._open), dtype=np.float32)
        for rows, spec in zip(self.ledger.groups(), self.ledger.examples(), strict=True):
            costs[rows] = cost(spec)
        return costs

    def _shares(self) -> list[deque[int]]:
        """Dear sheets first, so that the last ones are short; then by number; then in turn to every worker."""
        if self.claims is not None:
            return [deque() for _ in self.crew.labels]
        return self._dealt(self.sheets.containing(np.flatnonzero(self._open)))

    def _dealt(self, todo: npt.NDArray[np.int64]) -> list[deque[int]]:
        todo = todo[np.argsort(-self._costs[self.sheets.first_rows(todo)], kind="stable")]
        num_workers = len(self.crew.labels)
        return [deque(todo[turns(len(todo), num_workers, worker)].tolist()) for worker in range(num_workers)]

    def run(self) -> Effort:
        """Draw until nothing is left to try, or somebody wants it to stop."""
        began = time.monotonic()
        try:
            for worker, slot in enumerate(self.slots):
                slot.heard = began
                self.progress.state(slot.name, "loading")
                self.crew.start(worker)
            while not self._settled():
                self._listen()
                self._look_at_clock()
                self._rehearse()
                self._claim()
                self._give_out()
        finally:
            self._commit()
            # Somebody was faster; these are still at it, and may be ended while they write.
            self.num_redone += sum(number not in self.live for slot in self.slots for number in slot.begun)
        return self._effort(time.monotonic() - began)

    def _claim(self) -> None:
        """Where sheets are claimed, ask for more when the last ones are given out."""
        if self.claims is None:
            return
        self.claims.beat()
        if self.stopping or not self.micro_batch or any(slot.queue for slot in self.slots):
            return
        sheets = self.claims.next()
        if sheets is None:
            self.claims = None
            return
        self._open = self._mask()
        todo = np.asarray([sheet for sheet in sheets if self._open[self.sheets.rows(sheet)].any()], dtype=np.int64)
        for slot, queue in zip(self.slots, self._dealt(todo), strict=True):
            slot.queue.extend(queue)

    def _settled(self) -> bool:
        if self.hurry():
            return True
        if self.stopping:
            return not any(slot.flight for slot in self.slots if slot.state == "ready")
        if self.claims is not None:
            return False
        return not self.live and not self.returned and not any(slot.queue for slot in self.slots)

    def _effort(self, seconds: float) -> Effort:
        workers = {
            slot.label: WorkerTally(
                done=slot.done, failed=slot.failed, seconds_painting=slot.seconds_painting, restarts=slot.restarts
            )
            for slot in self.slots
        }
        return Effort(
            seconds=seconds,
            num_drawn=sum(slot.done for slot in self.slots),
            num_retries=self.num_retries,
            num_redone_sheets=self.num_redone,
            workers=workers,
            interrupted=self.stopping or self.hurry(),
        )

    # -- what workers say

    def _listen(self) -> None:
        for event in self.crew.events(POLL_S):
            slot = self.slots[event.worker]
            slot.heard = time.monotonic()
            match event.kind:
                case "ready":
                    self._ready(slot, event)
                case "rehearsed":
                    self.rehearsing = -1
                    self.micro_batch = self.on_rehearsed(event.body["micro_batch"])
                case "refused":
                    raise _refusal(event.body["message"], event.body["exit_code"])
                case "said":
                    self._say_once(slot, event.body["words"])
                case "step":
                    self._step(slot, event)
                case "drawn":
                    self._drawn(slot, event)
                case "failed":
                    self._failed(slot, event)
                case "dropped":
                    self._dropped(slot, event)
                case "gone":
                    self._gone(slot, event)
        self._commit()

    def _commit(self) -> None:
        if self.outcomes:
            outcomes, self.outcomes = self.outcomes, []
            self.ledger.record(outcomes)

    def _ready(self, slot: Slot, event: Event) -> None:
        slot.state = "ready"
        self.on_ready(event.body["facts"])
        self.progress.state(slot.name, "drawing")

    def _say_once(self, slot: Slot, words: str) -> None:
        """What every worker says in the same words is said for all of them once."""
        if words not in self._said:
            self._said.add(words)
            log.warning("%s: %s", slot.name, words)

    def _rehearse(self) -> None:
        """A worker that is ready finds out the micro-batch; where it dies over it, another one does."""
        ready = [worker for worker, slot in enumerate(self.slots) if slot.state == "ready"]
        if not self.micro_batch and self.rehearsing < 0 and ready and not self.stopping:
            self.rehearsing = min(ready, key=lambda worker: self.slots[worker].deaths)
            self.crew.rehearse(self.rehearsing, self.ledger.examples(), self.rules.sheet_size)

    def _release(self, slot: Slot, worker: int, number: int) -> Work | None:
        """This worker no longer holds this task; the work itself, unless it is settled already."""
        work = slot.flight.pop(number, None)
        slot.begun.pop(number, None)
        slot.expected.pop(number, None)
        if work is None:
            return None
        work.holders.discard(worker)
        return self.live.get(number)

    def _step(self, slot: Slot, event: Event) -> None:
        done, total = event.body["done"], event.body["total"]
        begun = slot.begun.setdefault(event.task, slot.heard)
        if done:
            slot.expected[event.task] = (slot.heard - begun) * total / done
        self.progress.step(slot.name, done, total)

    def _dropped(self, slot: Slot, event: Event) -> None:
        work = self._release(slot, event.worker, event.task)
        if work is not None and not work.holders:  # whoever took it over has died meanwhile
            self.returned.appendleft(work)

    def _drawn(self, slot: Slot, event: Event) -> None:
        held = slot.flight[event.task]
        work = self._release(slot, event.worker, event.task)
        slot.deaths = 0
        seconds = event.body["seconds"]
        slot.seconds_painting += seconds
        if seconds > 0:
            measured = held.cost / seconds
            slot.speed = measured if not slot.speed else 0.7 * slot.speed + 0.3 * measured
        if work is None:  # another worker was faster; its pictures have these very bytes
            self.num_redone += 1
            return
        self._settle(work)
        for values in event.body["outcomes"]:
            outcome = Outcome(**values)
            if outcome.state == "done":
                self._done(slot, outcome)
            else:
                self._try_again(slot, work, outcome.index, outcome.reason)

    def _done(self, slot: Slot, outcome: Outcome) -> None:
        attempts = self.tries.get(outcome.index, 0) + 1
        self.outcomes.append(dataclasses.replace(outcome, attempts=attempts))
        self._open[outcome.index] = False
        slot.done += 1
        self.progress.picture(slot.name, 1, 0)

    def _settle(self, work: Work) -> None:
        del self.live[work.task.number]
        for holder in work.holders:
            self.crew.drop(holder, work.task.number)

    def _failed(self, slot: Slot, event: Event) -> None:
        work = self._release(slot, event.worker, event.task)
        if event.body["disk"]:
            raise HalationError(event.body["reason"])
        if work is None:
            return
        slot.deaths = 0
        self._settle(work)
        for index in sorted(work.task.wanted):
            self._try_again(slot, work, index, event.body["reason"])

    def _try_again(self, slot: Slot, work: Work, index: int, reason: str) -> None:
        """Alone, in the same shape, or not at all: it was tried twice."""
        self.tries[index] = self.tries.get(index, 0) + 1
        self.last_reason = reason
        if self.tries[index] >= MAX_TRIES:
            self._set_aside(slot, index, reason)
            return
        self.num_retries += 1
        log.warning("picture %d failed and is tried once more: %s", index, reason)
        self._return_alone(work, index)

    def _return_alone(self, work: Work, index: int) -> None:
        task = work.task.alone(index, next(self._numbers))
        again = Work(task=task, cost=work.cost, deaths=work.deaths, died_with=work.died_with, retried=True)
        self.live[task.number] = again
        self.returned.append(again)

    def _set_aside(self, slot: Slot, index: int, reason: str) -> None:
        log.error("picture %d is set aside: %s", index, reason)
        self.outcomes.append(
            Outcome(index=index, state="failed", worker=slot.label, attempts=self.tries.get(index, 0), reason=reason)
        )
        slot.failed += 1
        self.num_new_failures += index not in self._failed_before
        self.progress.picture(slot.name, 0, 1)
        self._give_up_early()

    def _give_up_early(self) -> None:
        """Where nothing at all succeeds, the model or the settings are wrong, and a night of failures helps nobody.

        Pictures that failed in an earlier call do not count: a resume may have nothing else to try.
        """
        failed = self.num_new_failures
        if failed >= max(8, 2 * len(self.slots)) and not any(slot.done for slot in self.slots):
            raise HalationError(
                f"the first {failed} pictures all failed, the last one with: {self.last_reason}\n"
                "nothing was drawn; mend that and run the same command again"
            )

    def _gone(self, slot: Slot, event: Event) -> None:
        """Its begun sheets are to blame or to pity; the others simply go back."""
        reason = slot.blame or f"the worker {event.body['words']}"
        by_kill = not slot.blame and event.body["code"] in (-signal.SIGKILL, -signal.SIGTERM)
        slot.blame = ""
        begun = set(slot.begun)
        held = {number: self._release(slot, event.worker, number) for number in list(slot.flight)}
        self.num_redone += sum(held[number] is None for number in begun & set(held))  # somebody was faster
        if self.stopping:
            slot.state = "ended"
            return
        for number, work in held.items():
            if work is not None and number in begun:
                work.died_with |= {event.worker}
                self._lost(slot, work, reason, by_kill)
            elif work is not None and not work.holders:
                self.returned.appendleft(work)
        self._replace(slot, event, reason)

    def _lost(self, slot: Slot, work: Work, reason: str, by_kill: bool) -> None:
        work.deaths += 1
        limit = MAX_KILLS if by_kill else MAX_TRIES
        several = len(work.task.wanted) > 1
        self.num_redone += 1
        if work.deaths < limit - several:
            if not work.holders:
                self.returned.appendleft(work)
            return
        self._settle(work)
        for index in sorted(work.task.wanted):
            if several:
                self.num_retries += 1
                self.tries[index] = self.tries.get(index, 0) + 1
                self._return_alone(work, index)
            else:
                self.tries[index] = work.deaths
                self.last_reason = reason
                slot.deaths = 0  # the picture is the culprit, not the worker
                self._set_aside(slot, index, reason)

    def _replace(self, slot: Slot, event: Event, reason: str) -> None:
        slot.deaths += 1
        if self.rehearsing == event.worker:
            self.rehearsing = -1
        if slot.deaths >= MAX_DEATHS_IN_A_ROW:
            slot.state = "retired"
            self.progress.state(slot.name, "given up")
            self.progress.say(
                f"{slot.name}: {reason}; it ended {slot.deaths} times in a row and is given up, the others take over its share"
            )
            if all(other.state == "retired" for other in self.slots):
                raise HalationError(
                    f"no worker is left; the last one {reason.removeprefix('the worker ')}. Their logs are in logs/"
                )
            return
        slot.restarts += 1
        slot.state = "starting"
        self.progress.say(f"{slot.name}: {reason}; started again ({slot.restarts})")
        self.progress.state(slot.name, "loading")
        self.crew.start(event.worker)

    # -- what the clock and people say

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for worker, slot in enumerate(self.slots):
            loading = slot.state == "starting" or worker == self.rehearsing
            limit = LOADING_S if loading else self.rules.stall_timeout_s
            silent = now - slot.heard
            if (slot.flight or loading) and silent > limit and not slot.blame:
                slot.blame = f"no sign of life for {silent:.0f} s"
                self.crew.kill(worker)
        if self.stop() and not self.stopping:
            self.stopping = True
            self.progress.say("stopping: sheets that are begun are finished; once more to stop at once")
            for worker, slot in enumerate(self.slots):
                slot.queue.clear()
                if slot.state == "ready":
                    self.crew.stop(worker)
                elif slot.state == "starting":
                    self.crew.kill(worker)

    # -- what workers get

    def _give_out(self) -> None:
        if self.stopping or not self.micro_batch:
            return
        for worker, slot in enumerate(self.slots):
            while slot.state == "ready" and len(slot.flight) < DEPTH and not _holds_suspect(slot):
                work = self._next(worker, slot)
                if work is None:
                    break
                self._hand(worker, slot, work)
            self.progress.give(slot.name, slot.share(self.rules.sheet_size))

    def _hand(self, worker: int, slot: Slot, work: Work) -> None:
        number = work.task.number
        if not slot.flight:
            slot.heard = time.monotonic()
        slot.flight[number] = work
        work.holders.add(worker)
        self.crew.give(worker, work.task)

    def _next(self, worker: int, slot: Slot) -> Work | None:
        self.returned = deque(work for work in self.returned if work.task.number in self.live)
        for work in self.returned:
            if not work.suspect or (not slot.flight and not self._better_elsewhere(worker, work)):
                self.returned.remove(work)
                return work
        if slot.queue:
            return self._begin(slot.queue.popleft())
        slowest = max(self.slots, key=self._time_left)
        if slowest.queue:
            # Its dearest, so that the last sheets of all, on the slowest worker too, are short ones.
            return self._begin(slowest.queue.popleft())
        return self._taken_over(slot)

    def _better_elsewhere(self, worker: int, work: Work) -> bool:
        """Whether this worker died over it and there is one that did not."""
        others = (number for number, slot in enumerate(self.slots) if slot.state != "retired")
        return worker in work.died_with and any(number not in work.died_with for number in others)

    def _begin(self, sheet: int) -> Work:
        rows = self.sheets.rows(sheet)
        requests = tuple(self.ledger.requests(rows.tolist()))
        task = Task(
            number=next(self._numbers),
            requests=requests,
            sheet_size=self.rules.sheet_size,
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
        cost = self._costs[self.sheets.first_rows(np.fromiter(slot.queue, np.int64, len(slot.queue)))].sum(
            dtype=np.float64
        )
        return float(cost) / (slot.speed or self._mean_speed())

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
            self.crew.drop(holder, work.task.number)
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


def _holds_suspect(slot: Slot) -> bool:
    return any(work.suspect for work in slot.flight.values())


def _refusal(message: str, exit_code: int) -> HalationError:
    """What a worker could not begin with, with the exit code it means."""
    error = HalationError(message)
    error.exit_code = exit_code
    return error
