"""Who draws what next: sheets in turn to every worker, the slowest's to whoever is done, again after a failure, aside after two.

It imports no torch, holds no picture, and is the only one who writes the ledger. Whatever a worker does, hangs or dies of, costs that
worker's time alone.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from halation.errors import HalationError
from halation.generation.ledger import Ledger, Outcome
from halation.generation.results import WorkerTally
from halation.generation.work_queue import Slot, Table, Work
from halation.generation.workers.local import Crew
from halation.generation.workers.messages import Event
from halation.generation.workers.worker import DEPTH
from halation.plan import Sheets
from halation.progress import Progress

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
        self.crew = crew
        self.progress = progress
        self.rules = rules
        self.stop = stop
        self.hurry = hurry
        self.on_rehearsed = on_rehearsed
        self.on_ready = on_ready
        self.claims = claims
        self.checked = False
        """Whether a worker has said that its model can draw every shape of the plan, and how many pictures at once."""
        self.rehearsing = -1
        self.stopping = False
        self.tries: dict[int, int] = {}
        self.outcomes: list[Outcome] = []
        self.num_retries = 0
        self.num_redone = 0
        self.reasons: dict[str, str] = {}
        """What pictures were set aside for in this call, numbers apart: one of each kind."""
        self._said: set[str] = set()
        self._failed_before = {row.request.spec.index for row in ledger.failures()}
        self.num_new_failures = 0
        self.slots = [Slot(label=label, name=name) for label, name in zip(crew.labels, crew.names, strict=True)]
        self.table = Table(ledger, sheets, rules.sheet_size, self.slots, crew.drop)
        self.table.micro_batch = rules.micro_batch
        if claims is None:
            self.table.deal_all()

    def run(self) -> Effort:
        """Draw until nothing is left to try, or somebody wants it to stop."""
        began = time.monotonic()
        try:
            for worker, slot in enumerate(self.slots):
                if slot.queue or self.claims is not None:
                    self._start(worker)
                else:  # there are fewer sheets than workers
                    slot.state = "spare"
            while not self._settled():
                self._listen()
                self._look_at_clock()
                self._rehearse()
                self._claim()
                self._give_out()
        finally:
            self._commit()
            # Somebody was faster; these are still at it, and may be ended while they write.
            self.num_redone += sum(number not in self.table.live for slot in self.slots for number in slot.begun)
        return self._effort(time.monotonic() - began)

    def _start(self, worker: int) -> None:
        slot = self.slots[worker]
        slot.heard = time.monotonic()
        slot.state = "starting"
        self.progress.state(slot.name, "loading")
        self.crew.start(worker)

    def _claim(self) -> None:
        """Where sheets are claimed, ask for more when the last ones are given out."""
        if self.claims is None:
            return
        self.claims.beat()
        if self.stopping or not self.checked or self.table.has_queued:
            return
        sheets = self.claims.next()
        if sheets is None:
            self.claims = None
        else:
            self.table.deal(sheets)

    def _settled(self) -> bool:
        if self.hurry():
            return True
        if self.stopping:
            return not any(slot.flight for slot in self.slots if slot.state == "ready")
        if self.claims is not None:
            return False
        return self.table.is_empty

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
                    self._rehearsed(event)
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
        """A worker that is ready says whether its model can draw the plan, and finds out the micro-batch; where it dies over it, another one does."""
        ready = [worker for worker, slot in enumerate(self.slots) if slot.state == "ready"]
        if not self.checked and self.rehearsing < 0 and ready and not self.stopping:
            self.rehearsing = min(ready, key=lambda worker: self.slots[worker].deaths)
            examples = self.ledger.examples()
            self.crew.rehearse(self.rehearsing, examples, self.rules.sheet_size, self.rules.micro_batch)

    def _rehearsed(self, event: Event) -> None:
        self.rehearsing = -1
        self.checked = True
        if not self.table.micro_batch:
            self.table.micro_batch = self.on_rehearsed(event.body["micro_batch"])

    def _step(self, slot: Slot, event: Event) -> None:
        done, total = event.body["done"], event.body["total"]
        begun = slot.begun.setdefault(event.task, slot.heard)
        if done:
            slot.expected[event.task] = (slot.heard - begun) * total / done
        self.progress.step(slot.name, done, total)

    def _dropped(self, slot: Slot, event: Event) -> None:
        work = self.table.release(event.worker, event.task)
        if work is not None:  # whoever took it over may have died meanwhile
            self.table.give_back(work)

    def _drawn(self, slot: Slot, event: Event) -> None:
        held = slot.flight[event.task]
        work = self.table.release(event.worker, event.task)
        slot.deaths = 0
        seconds = event.body["seconds"]
        slot.seconds_painting += seconds
        if seconds > 0:
            measured = held.cost / seconds
            slot.speed = measured if not slot.speed else 0.7 * slot.speed + 0.3 * measured
        if work is None:  # another worker was faster; its pictures have these very bytes
            self.num_redone += 1
            return
        self.table.settle(work)
        for values in event.body["outcomes"]:
            outcome = Outcome(**values)
            if outcome.state == "done":
                self._done(slot, outcome)
            else:
                self._try_again(slot, work, outcome.index, outcome.reason)

    def _done(self, slot: Slot, outcome: Outcome) -> None:
        attempts = self.tries.get(outcome.index, 0) + 1
        self.outcomes.append(dataclasses.replace(outcome, attempts=attempts))
        self.table.is_done(outcome.index)
        slot.done += 1
        self.progress.picture(slot.name, 1, 0)

    def _failed(self, slot: Slot, event: Event) -> None:
        work = self.table.release(event.worker, event.task)
        if event.body["disk"]:
            raise HalationError(event.body["reason"])
        if work is None:
            return
        slot.deaths = 0
        self.table.settle(work)
        for index in sorted(work.task.wanted):
            self._try_again(slot, work, index, event.body["reason"])

    def _try_again(self, slot: Slot, work: Work, index: int, reason: str) -> None:
        """Alone, in the same shape, or not at all: it was tried twice."""
        self.tries[index] = self.tries.get(index, 0) + 1
        if self.tries[index] >= MAX_TRIES:
            self._set_aside(slot, work, index, reason)
            return
        self.num_retries += 1
        log.warning("picture %s failed and is tried once more: %s", work.task.id_of(index), reason)
        self.table.give_back_alone(work, index)

    def _set_aside(self, slot: Slot, work: Work, index: int, reason: str) -> None:
        log.error("picture %s is set aside: %s", work.task.id_of(index), reason)
        self.outcomes.append(
            Outcome(index=index, state="failed", worker=slot.label, attempts=self.tries.get(index, 0), reason=reason)
        )
        slot.failed += 1
        self.num_new_failures += index not in self._failed_before
        self.reasons[re.sub(r"\d+", "N", reason)] = reason
        self.progress.picture(slot.name, 0, 1)
        self._give_up_early()

    def _give_up_early(self) -> None:
        """Where everything fails for one reason, the model or the settings are wrong, and a night of failures helps nobody.

        Pictures that failed in an earlier call do not count: a resume may have nothing else to try.
        """
        failed = self.num_new_failures
        alike = len(self.reasons) == 1
        if alike and failed >= max(8, 2 * len(self.slots)) and not any(slot.done for slot in self.slots):
            raise HalationError(
                f"the first {failed} pictures all failed with: {next(iter(self.reasons.values()))}\n"
                "nothing was drawn; mend that and run the same command again"
            )

    def _gone(self, slot: Slot, event: Event) -> None:
        """Its begun sheets are to blame or to pity; the others simply go back."""
        reason = slot.blame or f"the worker {event.body['words']}"
        by_kill = not slot.blame and event.body["code"] in (-signal.SIGKILL, -signal.SIGTERM)
        slot.blame = ""
        begun = set(slot.begun)
        held = {number: self.table.release(event.worker, number) for number in list(slot.flight)}
        self.num_redone += sum(held[number] is None for number in begun & set(held))  # somebody was faster
        if self.stopping:
            slot.state = "ended"
            return
        for number, work in held.items():
            if work is not None and number in begun:
                work.died_with |= {event.worker}
                self._lost(slot, work, reason, by_kill)
            elif work is not None:
                self.table.give_back(work)
        self._replace(slot, event, reason)

    def _lost(self, slot: Slot, work: Work, reason: str, by_kill: bool) -> None:
        work.deaths += 1
        limit = MAX_KILLS if by_kill else MAX_TRIES
        several = len(work.task.wanted) > 1
        self.num_redone += 1
        if work.deaths < limit - several:
            self.table.give_back(work)
            return
        self.table.settle(work)
        for index in sorted(work.task.wanted):
            if several:
                self.num_retries += 1
                self.tries[index] = self.tries.get(index, 0) + 1
                self.table.give_back_alone(work, index)
            else:
                self.tries[index] = work.deaths
                slot.deaths = 0  # the picture is the culprit, not the worker
                self._set_aside(slot, work, index, reason)

    def _replace(self, slot: Slot, event: Event, reason: str) -> None:
        slot.deaths += 1
        if self.rehearsing == event.worker:
            self.rehearsing = -1
        if slot.deaths >= MAX_DEATHS_IN_A_ROW:
            slot.state = "retired"
            self.progress.state(slot.name, "given up")
            log.warning("%s: %s; it ended %d times in a row and is given up", slot.name, reason, slot.deaths)
            spare = next((number for number, other in enumerate(self.slots) if other.state == "spare"), None)
            if spare is not None:
                self._start(spare)
            elif all(other.state == "retired" for other in self.slots):
                raise HalationError(
                    f"no worker is left; the last one {reason.removeprefix('the worker ')}. Their logs are in logs/"
                )
            return
        slot.restarts += 1
        log.warning("%s: %s; started again (%d)", slot.name, reason, slot.restarts)
        self._start(event.worker)

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
            log.warning("stopping: sheets that are begun are finished; once more to stop at once")
            self.table.clear()
            for worker, slot in enumerate(self.slots):
                if slot.state == "ready":
                    self.crew.stop(worker)
                elif slot.state == "starting":
                    self.crew.kill(worker)

    # -- what workers get

    def _give_out(self) -> None:
        if self.stopping or not self.checked:
            return
        for worker, slot in enumerate(self.slots):
            while slot.state == "ready" and len(slot.flight) < DEPTH and not _holds_suspect(slot):
                work = self.table.next(worker)
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


def _holds_suspect(slot: Slot) -> bool:
    return any(work.suspect for work in slot.flight.values())


def _refusal(message: str, exit_code: int) -> HalationError:
    """What a worker could not begin with, with the exit code it means."""
    error = HalationError(message)
    error.exit_code = exit_code
    return error
