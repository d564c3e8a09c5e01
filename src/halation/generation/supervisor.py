"""Hands out batches, retries failures, replaces dead workers, records outcomes.

The supervisor does not import torch and holds no images; it is the only writer of the ledger. A worker that fails,
hangs or dies does not delay the others.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from halation.errors import HalationError, format_count
from halation.generation.ledger import ImageOutcome, Ledger
from halation.generation.metadata_and_summary import WorkerStats
from halation.generation.work_queue import WorkerState, WorkItem, WorkQueue
from halation.generation.workers.local_pool import QUEUE_DEPTH, WorkerEvent, WorkerPool
from halation.logging_setup import ON_CONSOLE
from halation.progress import GenerationProgress
from halation.work_division import BatchPlan

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_ATTEMPTS = 2
MAX_KILLS = 3
"""Limit of kills from outside per image: one more than of errors, because the image is probably not the cause."""
MAX_DEATHS_IN_A_ROW = 3
LOAD_TIMEOUT_S = 3600.0


class RangeClaims(Protocol):
    """Claims ranges of batches for this command when several commands share a folder."""

    def heartbeat(self) -> None:
        """Keep the claims alive so that no other process takes them over; called often."""

    def next_batches(self) -> Sequence[int] | None:
        """Claim batches to generate now; empty while others hold the rest, None if none are left."""


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """Counts and times of one call of the run."""

    elapsed_s: float
    num_drawn: int
    num_retries: int
    num_redone_batches: int
    workers: dict[str, WorkerStats]
    interrupted: bool


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """Settings of the supervisor."""

    batch_size: int
    micro_batch: int
    """0 if not known yet: a dry run on the first worker measures it, and `on_dry_run` returns the value to use."""
    stall_timeout_s: float


class Supervisor:
    """Generates the images that the ledger lacks; records a reason for each that fails."""

    def __init__(
        self,
        ledger: Ledger,
        batches: BatchPlan,
        pool: WorkerPool,
        progress: GenerationProgress,
        settings: SupervisorSettings,
        *,
        stop_signal: Callable[[], int],
        is_urgent: Callable[[], bool],
        on_dry_run: Callable[[int], int],
        on_ready: Callable[[dict[str, object]], None],
        claims: RangeClaims | None = None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_folder` raises if the images can no longer be stored."""
        self.ledger = ledger
        self.pool = pool
        self.progress = progress
        self.settings = settings
        self.stop_signal = stop_signal
        self.is_urgent = is_urgent
        self.on_dry_run = on_dry_run
        self.on_ready = on_ready
        self.claims = claims
        self.check_folder = check_folder
        self.has_dry_run_passed = False
        """True once a worker confirmed that its model supports every shape of the plan, and the micro-batch."""
        self.dry_run_worker = -1
        self.is_stopping = False
        self.attempts: dict[int, int] = {}
        self.outcomes: list[ImageOutcome] = []
        self.num_retries = 0
        self.num_redone_batches = 0
        self.failure_reasons: dict[str, str] = {}
        """Failure reasons of this call; of reasons that differ only in numbers, the last one."""
        self._logged_messages: set[str] = set()
        self._failed_earlier: set[int] = set()
        self.num_new_failures = 0
        self.workers = [
            WorkerState(label=label, name=name) for label, name in zip(pool.labels, pool.names, strict=True)
        ]
        self.work_queue = WorkQueue(ledger, batches, settings.batch_size, self.workers, pool.drop)
        self.work_queue.micro_batch = settings.micro_batch

    def prepare(self) -> None:
        """Read the missing and previously failed images from the ledger."""
        self._failed_earlier = {row.request.spec.index for row in self.ledger.failed_rows()}
        self.work_queue.prepare()
        if self.claims is None:
            self.work_queue.enqueue_all()

    def run(self) -> RunStats:
        """Generate until nothing is left to try or a signal arrives."""
        start_time = time.monotonic()
        try:
            for worker, state in enumerate(self.workers):
                if state.queue or self.claims is not None:
                    self._start_worker(worker)
                else:  # there are fewer batches than workers
                    state.status = "spare"
            while not self._is_finished():
                self.check_folder()
                self._handle_events()
                self._kill_stalled_and_handle_stop()
                self._start_dry_run()
                self._claim_batches()
                self._assign_work()
        finally:
            self._commit_outcomes()
            # Duplicates of batches that another worker finished first; these may be killed while they write.
            self.num_redone_batches += sum(
                number not in self.work_queue.active for slot in self.workers for number in slot.start_times
            )
        return self._make_stats(time.monotonic() - start_time)

    def _start_worker(self, worker: int) -> None:
        state = self.workers[worker]
        state.last_seen = time.monotonic()
        state.status = "starting"
        self.progress.set_state(state.name, "loading")
        self.pool.start(worker)

    def _claim_batches(self) -> None:
        """If batches are claimed, claim more once all are handed out."""
        if self.claims is None:
            return
        self.claims.heartbeat()
        if self.is_stopping or not self.has_dry_run_passed or self.work_queue.has_queued:
            return
        batches = self.claims.next_batches()
        if batches is None:
            self.claims = None
        else:
            self.work_queue.enqueue(batches)

    def _is_finished(self) -> bool:
        if self.is_urgent():
            return True
        if self.is_stopping:
            return not any(state.in_flight for state in self.workers if state.status == "ready")
        if self.claims is not None:
            return False
        return self.work_queue.is_empty

    def _make_stats(self, seconds: float) -> RunStats:
        workers = {
            state.label: WorkerStats(
                done=state.num_done, failed=state.num_failed, seconds_painting=state.busy_s, restarts=state.num_restarts
            )
            for state in self.workers
        }
        return RunStats(
            elapsed_s=seconds,
            num_drawn=sum(slot.num_done for slot in self.workers),
            num_retries=self.num_retries,
            num_redone_batches=self.num_redone_batches,
            workers=workers,
            interrupted=self.is_stopping or self.is_urgent(),
        )

    # -- events of workers

    def _handle_events(self) -> None:
        for event in self.pool.events(POLL_S):
            state = self.workers[event.worker]
            state.last_seen = time.monotonic()
            match event.kind:
                case "ready":
                    self._handle_ready(state, event)
                case "rehearsed":
                    self._handle_dry_run(event)
                case "refused":
                    error = HalationError(event.body["message"])
                    error.exit_code = event.body["exit_code"]
                    raise error
                case "said":
                    self._warn_once(state, event.body["words"])
                case "step":
                    self._handle_step(state, event)
                case "drawn":
                    self._handle_drawn(state, event)
                case "failed":
                    self._handle_failed(state, event)
                case "dropped":
                    self._handle_dropped(state, event)
                case "gone":
                    self._handle_exit(state, event)
        self._commit_outcomes()

    def _commit_outcomes(self) -> None:
        if self.outcomes:
            outcomes, self.outcomes = self.outcomes, []
            self.ledger.record(outcomes)

    def _handle_ready(self, state: WorkerState, event: WorkerEvent) -> None:
        state.status = "ready"
        self.on_ready(event.body["facts"])
        self.progress.set_state(state.name, "drawing")

    def _warn_once(self, state: WorkerState, message: str) -> None:
        """Log a warning once, even if every worker sends it."""
        if message not in self._logged_messages:
            self._logged_messages.add(message)
            log.warning("%s: %s", state.name, message)

    def _start_dry_run(self) -> None:
        """Let a ready worker check that its model supports the plan, and measure the micro-batch.

        If that worker dies, another one is used.
        """
        ready = [worker for worker, state in enumerate(self.workers) if state.status == "ready"]
        if not self.has_dry_run_passed and self.dry_run_worker < 0 and ready and not self.is_stopping:
            self.dry_run_worker = min(ready, key=lambda worker: self.workers[worker].num_deaths)
            examples = self.ledger.examples()
            self.pool.dry_run(self.dry_run_worker, examples, self.settings.batch_size, self.settings.micro_batch)

    def _handle_dry_run(self, event: WorkerEvent) -> None:
        self.dry_run_worker = -1
        self.has_dry_run_passed = True
        if not self.work_queue.micro_batch:
            self.work_queue.micro_batch = self.on_dry_run(event.body["micro_batch"])

    def _handle_step(self, state: WorkerState, event: WorkerEvent) -> None:
        done, total = event.body["done"], event.body["total"]
        start_time = state.start_times.setdefault(event.task, state.last_seen)
        if done:
            state.expected_s[event.task] = (state.last_seen - start_time) * total / done
        self.progress.set_step(state.name, done, total)

    def _handle_dropped(self, state: WorkerState, event: WorkerEvent) -> None:
        work = self.work_queue.release(event.worker, event.task)
        if work is not None:  # the worker that took it over may have died meanwhile
            self.work_queue.requeue(work)

    def _handle_drawn(self, state: WorkerState, event: WorkerEvent) -> None:
        held = state.in_flight[event.task]
        work = self.work_queue.release(event.worker, event.task)
        state.num_deaths = 0
        seconds = event.body["seconds"]
        state.busy_s += seconds
        if seconds > 0:
            measured = held.cost / seconds
            state.speed = measured if not state.speed else 0.7 * state.speed + 0.3 * measured
        if work is None:  # another worker was faster; its images are bit-identical
            self.num_redone_batches += 1
            return
        self.work_queue.complete(work)
        for values in event.body["outcomes"]:
            outcome = ImageOutcome(**values)
            if outcome.state == "done":
                self._record_done(state, outcome)
            else:
                self._retry_image(state, work, outcome.index, outcome.reason)

    def _record_done(self, state: WorkerState, outcome: ImageOutcome) -> None:
        attempts = self.attempts.get(outcome.index, 0) + 1
        self.outcomes.append(replace(outcome, attempts=attempts))
        self.work_queue.mark_done(outcome.index)
        state.num_done += 1
        # If another process took the batch over, the image is counted there.
        self.progress.add_images(state.name, 0 if self.ledger.is_done(outcome.index) else 1, 0)

    def _handle_failed(self, state: WorkerState, event: WorkerEvent) -> None:
        work = self.work_queue.release(event.worker, event.task)
        if event.body["disk"]:
            raise HalationError(event.body["reason"])
        if work is None:
            return
        state.num_deaths = 0
        self.work_queue.complete(work)
        for index in sorted(work.task.wanted):
            self._retry_image(state, work, index, event.body["reason"])

    def _retry_image(self, state: WorkerState, work: WorkItem, index: int, reason: str) -> None:
        """Retry an image once, alone and in the same shape; record a failure after that."""
        self.attempts[index] = self.attempts.get(index, 0) + 1
        if self.attempts[index] >= MAX_ATTEMPTS:
            self._record_failure(state, work, index, reason)
            return
        self.num_retries += 1
        log.warning("image %s failed and is retried once: %s", work.task.image_id(index), reason)
        self.work_queue.requeue_alone(work, index)

    def _record_failure(self, state: WorkerState, work: WorkItem, index: int, reason: str) -> None:
        log.error("giving up on image %s: %s", work.task.image_id(index), reason)
        self.outcomes.append(
            ImageOutcome(
                index=index, state="failed", worker=state.label, attempts=self.attempts.get(index, 0), reason=reason
            )
        )
        state.num_failed += 1
        self.num_new_failures += index not in self._failed_earlier
        self.failure_reasons[re.sub(r"\d+", "N", reason)] = reason
        self.progress.add_images(state.name, 0, 1)
        self._raise_if_all_failing()

    def _raise_if_all_failing(self) -> None:
        """Raise if all images fail for one reason: the model or the settings are wrong.

        Images that failed in an earlier call do not count, because a resume may have nothing else to try.
        """
        num_failed = self.num_new_failures
        is_same_reason = len(self.failure_reasons) == 1
        if (
            is_same_reason
            and num_failed >= max(8, 2 * len(self.workers))
            and not any(state.num_done for state in self.workers)
        ):
            raise HalationError(
                f"the first {format_count(num_failed, 'image')} all failed with: "
                f"{next(iter(self.failure_reasons.values()))}\n"
                "no image was generated; fix the cause and run the same command again"
            )

    def _handle_exit(self, state: WorkerState, event: WorkerEvent) -> None:
        """Batches in progress count as suspects; queued ones are requeued."""
        reason = state.kill_reason or f"the worker {event.body['words']}"
        was_killed = not state.kill_reason and event.body["code"] in (-signal.SIGKILL, -signal.SIGTERM)
        state.kill_reason = ""
        started = set(state.start_times)
        held = {number: self.work_queue.release(event.worker, number) for number in list(state.in_flight)}
        self.num_redone_batches += sum(
            held[number] is None for number in started & set(held)
        )  # another worker was faster
        if self.is_stopping:
            state.status = "ended"
            return
        for number, work in held.items():
            if work is not None and number in started:
                work.dead_workers |= {event.worker}
                self._handle_lost_item(state, work, reason, was_killed)
            elif work is not None:
                self.work_queue.requeue(work)
        self._restart_worker(state, event, reason)

    def _handle_lost_item(self, state: WorkerState, work: WorkItem, reason: str, was_killed: bool) -> None:
        work.num_deaths += 1
        limit = MAX_KILLS if was_killed else MAX_ATTEMPTS
        has_several = len(work.task.wanted) > 1
        self.num_redone_batches += 1
        if work.num_deaths < limit - has_several:
            self.work_queue.requeue(work)
            return
        self.work_queue.complete(work)
        for index in sorted(work.task.wanted):
            if has_several:
                self.num_retries += 1
                self.attempts[index] = self.attempts.get(index, 0) + 1
                self.work_queue.requeue_alone(work, index)
            else:
                self.attempts[index] = work.num_deaths
                state.num_deaths = 0  # the image is the culprit, not the worker
                self._record_failure(state, work, index, reason)

    def _restart_worker(self, state: WorkerState, event: WorkerEvent, reason: str) -> None:
        state.num_deaths += 1
        if self.dry_run_worker == event.worker:
            self.dry_run_worker = -1
        if state.num_deaths >= MAX_DEATHS_IN_A_ROW:
            state.status = "retired"
            self.progress.set_state(state.name, "given up")
            log.warning(
                "%s: %s; not restarted after %s in a row",
                state.name,
                reason,
                format_count(state.num_deaths, "death"),
            )
            spare = next((number for number, other in enumerate(self.workers) if other.status == "spare"), None)
            if spare is not None:
                self._start_worker(spare)
            elif all(other.status == "retired" for other in self.workers):
                raise HalationError(
                    f"no worker is left; the last one {reason.removeprefix('the worker ')}. See the logs in logs/"
                )
            return
        state.num_restarts += 1
        log.warning("%s: %s; restarted (%d)", state.name, reason, state.num_restarts)
        self._start_worker(event.worker)

    # -- timeouts and stop signals

    def _kill_stalled_and_handle_stop(self) -> None:
        now = time.monotonic()
        for worker, state in enumerate(self.workers):
            is_loading = state.status == "starting" or worker == self.dry_run_worker
            limit_s = LOAD_TIMEOUT_S if is_loading else self.settings.stall_timeout_s
            silent_s = now - state.last_seen
            if (state.in_flight or is_loading) and silent_s > limit_s and not state.kill_reason:
                state.kill_reason = f"no sign of life for {silent_s:.0f} s"
                self.pool.kill(worker)
        if self.stop_signal() and not self.is_stopping:
            self.is_stopping = True
            log.info("stopping after the batches in progress; signal again to stop immediately", extra=ON_CONSOLE)
            self.work_queue.clear()
            for worker, state in enumerate(self.workers):
                if state.status == "ready":
                    self.pool.stop(worker)
                elif state.status == "starting":
                    self.pool.kill(worker)

    # -- handing out batches

    def _assign_work(self) -> None:
        if self.is_stopping or not self.has_dry_run_passed:
            return
        for worker, state in enumerate(self.workers):
            while state.status == "ready" and len(state.in_flight) < QUEUE_DEPTH:
                if any(work.is_suspect for work in state.in_flight.values()):
                    break
                work = self.work_queue.next_item(worker)
                if work is None:
                    break
                self._assign_item(worker, state, work)
            self.progress.set_assigned(state.name, state.num_assigned(self.settings.batch_size))

    def _assign_item(self, worker: int, state: WorkerState, work: WorkItem) -> None:
        number = work.task.number
        if not state.in_flight:
            state.last_seen = time.monotonic()
        state.in_flight[number] = work
        work.holders.add(worker)
        self.pool.submit(worker, work.task)
