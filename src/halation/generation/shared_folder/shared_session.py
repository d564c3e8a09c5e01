"""`halation generate --cluster files`: one of several processes that share a folder.

    config.json                         written once, by the first process
    ledger/{host}-{pid}-{token}.jsonl   outcomes, one file per process
    ledger/plan-*.digests               digests of the planned rows, to compare plans
    ledger/leases/                      ranges of batches in progress
    ledger/{fact}.json                  facts found at run time; the first value counts for all
    ledger/*.summary.json               summary of each process

Every process with `--verify` checks all images before it generates. If reading the folder takes long, give `--verify`
to one process only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halation.config import as_json
from halation.distributed import launcher
from halation.distributed.stop_signals import StopSignals
from halation.errors import InputError, format_count
from halation.generation import metadata_and_summary
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import LEDGER_FILE
from halation.generation.ledger_setup import RENAMED_FILE, claim_ledger_kind
from halation.generation.session import GenerationSession, check_no_foreign_files, find_result_file, lost_ledger_error
from halation.generation.shared_folder import shared_ledger
from halation.generation.shared_folder.leases import BatchRanges, Leases, read_lease
from halation.generation.supervisor import RangeClaims, RunStats
from halation.generation.workers import local_pool
from halation.images import png_codec
from halation.logging_setup import ConsoleWarningHandler, log_to_folder
from halation.models.model_folder import HUB_FACT
from halation.models.model_path_resolver import ModelRef
from halation.progress import GenerationProgress
from halation.prompt_files import PromptFile
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.work_division import BatchPlan

log = logging.getLogger(__name__)
FACT_FILES = {"micro batch": "micro_batch.json", "painter": "painter.json", "computes on": "computes_on.json"}
GPU_BINDING_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND")
PROCESS_SUMMARY_FILE = "{process}.summary.json"
MAX_RESULT_WRITES = 3
"""Limits the rewrites of the results of a process that ends while others still record outcomes."""


def run_shared(
    config: GenerateConfig, prompts: PromptFile, model_ref: ModelRef, slots: list[local_pool.WorkerSlot]
) -> int:
    """Generate together with other processes until no image of the plan is missing."""
    folder = config.output_dir
    if (folder / LEDGER_FILE).exists():
        raise begun_alone_error(folder)
    run = runs.RunFolder(folder)
    if run.config.exists() and (job := runs.read_record(run)["job"]) != "generate":
        raise InputError(
            f"{folder} holds a `{job}` run", "a `generate` run or an empty folder", "choose another --output_dir"
        )
    if not (folder / shared_ledger.SHARED_LEDGER).is_dir():
        check_no_foreign_files(folder)
    if not config.gpu_ids and (gpus := select_slurm_gpus(launcher.num_gpus(), os.environ)):
        slots = local_pool.list_local_slots(dataclasses.replace(config, gpu_ids=gpus))
    with claim_ledger_kind(folder, "files") as kind:
        if kind != "files":
            raise begun_alone_error(folder)
        return _run_process(config, prompts, model_ref, slots)


def _run_process(
    config: GenerateConfig, prompts: PromptFile, model_ref: ModelRef, slots: list[local_pool.WorkerSlot]
) -> int:
    folder = config.output_dir
    process = shared_ledger.ProcessIdentity()
    ledger_folder = folder / shared_ledger.SHARED_LEDGER
    (ledger_folder / shared_ledger.LEASES_FOLDER).mkdir(parents=True, exist_ok=True)
    slots = [dataclasses.replace(slot, label=f"{process.host}-{slot.label}") for slot in slots]
    logs = folder / "logs" / process.name
    with (
        FolderMonitor(folder, ledger_folder) as monitor,
        log_to_folder(logs) as console_handler,
        contextlib.closing(shared_ledger.SharedLedger(ledger_folder, process)) as ledger,
    ):
        session = SharedSession(config, model_ref, ledger, console_handler, monitor)
        session.prepare(prompts, slots)
        return session.run(lambda: local_pool.LocalWorkerPool(slots, session.worker_settings(), logs, config.threads))


def begun_alone_error(folder: Path) -> InputError:
    return InputError(
        f"{folder} was started without --cluster files (it has, or is about to have, a {LEDGER_FILE})",
        "a folder that was started with --cluster files, or an empty one",
        "omit --cluster files to continue there, or choose another --output_dir",
    )


def select_slurm_gpus(num_gpus: int, environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the GPUs of this srun task if all tasks of a machine see all GPUs.

    With n tasks, task k takes the GPUs k, k + n, k + 2n, and so on. Empty if there is nothing to divide: one task per
    machine, one GPU, or tasks that SLURM bound to GPUs.
    """
    num_tasks, task = num_local_slurm_tasks(environment), int(environment.get("SLURM_LOCALID", "0"))
    is_bound = any(environment.get(name, "none") != "none" for name in GPU_BINDING_VARIABLES)
    if num_tasks == 1 or is_bound or num_gpus <= 1:
        return ()
    if task >= num_gpus:
        raise InputError(
            f"task {task} of {num_tasks} on a machine with {format_count(num_gpus, 'GPU')}",
            "at most one task per GPU",
            f"start at most {format_count(num_gpus, 'task')} per node (--ntasks-per-node), or set --gpu_ids for "
            "each task",
        )
    return tuple(range(task, num_gpus, num_tasks))


def num_local_slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the number of srun tasks on this machine; 1 outside srun.

    SLURM gives the tasks per node as a list such as 4(x2),3.
    """
    task_list = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes = [
        int(tasks)
        for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", task_list)
        for _ in range(int(repeats or 1))
    ]
    node = int(environment.get("SLURM_NODEID", "0"))
    return nodes[node] if "SLURM_LOCALID" in environment and node < len(nodes) else 1


class SharedSession(GenerationSession):
    """A session on a folder that several processes share."""

    ledger: shared_ledger.SharedLedger

    def __init__(
        self,
        config: GenerateConfig,
        model_ref: ModelRef,
        ledger: shared_ledger.SharedLedger,
        console_handler: ConsoleWarningHandler,
        monitor: FolderMonitor,
    ) -> None:
        super().__init__(config, model_ref, ledger, console_handler, monitor)
        self.process = ledger.process
        self.leases: Leases | None = None
        self.start_time = os.stat(ledger.path).st_mtime

    # -- before

    def _check_ledger(self, prompts: PromptFile) -> None:
        """Raise if the folder holds results but no plan.

        There is nothing to repair: each process builds its own index, and outcome lines are checked as they are read.
        """
        # List images before plans: processes plan before they generate, so images without a plan have no run here.
        found = find_result_file(self.folder)
        if found and not any(self.ledger.folder.glob("plan-*")):
            raise lost_ledger_error(self.folder, found, f"{shared_ledger.SHARED_LEDGER}/")

    def _recorded_settings(self, has_done_images: bool) -> dict[str, Any]:
        """Return the settings of config.json, which never changes."""
        run = runs.RunFolder(self.folder)
        return runs.read_record(run)["fixed"] if run.config.exists() else {}

    def _open_record(self, settings: dict[str, Any], has_done_images: bool) -> dict[str, Any]:
        """Create config.json, or check the settings against the existing one.

        It is never changed, because other processes may be using it.
        """
        config, run = self.config, runs.RunFolder(self.folder)
        coder = config.png if config.png != "auto" else png_codec.fastest_coder()
        new_record = {
            "job": "generate",
            "settings": as_json(config),
            "fixed": settings | {"png coder": coder, **self.model_ref.hub_fact},
            "changes": [],
        }
        if not run.config.exists():
            runs.create_once(run.config, runs.json_with_digest(new_record))
        record = runs.read_record(run)
        chosen = record["fixed"].get("png coder", coder) if config.png == "auto" else coder
        if chosen not in png_codec.CODERS:
            raise shared_ledger.damaged_file_error(run.config)
        known = {HUB_FACT: record["fixed"][HUB_FACT]} if HUB_FACT in record["fixed"] else {}
        hub_fact = {name: self.model_ref.hub_fact.get(name, fact) for name, fact in known.items()}
        self._check_unchanged(record["fixed"], settings | {"png coder": chosen, **hub_fact})
        for fact, name in FACT_FILES.items():
            path = self.ledger.folder / name
            if path.exists():
                record["fixed"][fact] = shared_ledger.parse_fact(path, path.read_bytes())
        return record

    def _check_unchanged(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        runs.check_unchanged(
            old,
            new,
            f"{self.folder} was started with other settings",
            "the same settings as before, in every process that shares the folder",
            "use the old settings, or another --output_dir",
        )

    def _plan(
        self, prompts: PromptFile, has_done_images: bool, folder: Path, unrecorded: Sequence[ImageRequest]
    ) -> None:
        """Plan the rows in this process; all processes must arrive at the same plan."""
        with runs.scratch_folder("halation_plan_") as scratch:
            super()._plan(prompts, False, scratch, ())
            self.ledger.agree_on_plan()
            renamed = scratch / RENAMED_FILE
            if renamed.exists():
                runs.write_atomic(folder / RENAMED_FILE, renamed.read_bytes())
        self._remove_temporary_files()
        self.ledger.refresh()

    def _remove_temporary_files(self) -> None:
        """Remove files of killed writers: those not touched for the duration of a lease."""
        probe = self.ledger.folder / f".{self.process.name}.probe.tmp"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        for folder in (self.folder, self.ledger.folder, self.ledger.folder / shared_ledger.LEASES_FOLDER):
            for name in os.listdir(folder) if folder.exists() else ():
                if not name.startswith(".") or not name.endswith((".tmp", shared_ledger.OWNER_FILE_SUFFIX)):
                    continue
                path = folder / name
                with contextlib.suppress(FileNotFoundError):  # another process removes them too
                    owner_lease_s = read_lease(path).lease_s if path.suffix == shared_ledger.OWNER_FILE_SUFFIX else 0.0
                    if now - path.lstat().st_mtime > max(self.config.lease_s, owner_lease_s):
                        runs.remove_path(path)

    # -- during

    def _generate(self, pool: local_pool.WorkerPool, before: dict[str, int], signals: StopSignals) -> RunStats:
        try:
            return super()._generate(pool, before, signals)
        finally:
            if self.leases is not None:
                self.leases.release()
                if self.leases.num_taken_over and not self.monitor.find_problem():
                    self._remove_temporary_files()

    def _make_claims(
        self, batches: BatchPlan, pool: local_pool.WorkerPool, progress: GenerationProgress
    ) -> RangeClaims:
        def on_refresh() -> None:
            num_by_others = self.ledger.num_by_others
            progress.set_other_process_counts(num_by_others["done"], num_by_others["failed"])

        self.leases = Leases(
            self.ledger,
            BatchRanges(batches),
            lease_s=self.config.lease_s,
            num_batches_wanted=local_pool.QUEUE_DEPTH * len(pool.labels),
            on_refresh=on_refresh,
            print_line=progress.print_line,
        )
        return self.leases

    def _record_facts(self, facts: dict[str, Any]) -> None:
        """Compare facts with those of the first process.

        Its micro-batch is used, its model must be the same, and a different device is a warning.
        """
        for fact, value in facts.items():
            first_value = self.ledger.agree_on_fact(FACT_FILES[fact], value)
            self.record["fixed"][fact] = first_value
            if fact == "painter":
                self._check_unchanged(first_value, json.loads(json.dumps(value)))
            elif fact == "computes on" and first_value != value:
                log.warning(
                    "this process computes on %s, the first one on %s: rounding of images differs between them",
                    value,
                    first_value,
                )

    # -- after

    def _write_results(self, stats: RunStats | None) -> None:
        """Write the results at the end; again if other processes recorded outcomes meanwhile."""
        if stats is not None:
            own = metadata_and_summary.summary_json(self._summarize(stats))
            runs.write_json_atomic(self.ledger.folder / PROCESS_SUMMARY_FILE.format(process=self.process.name), own)
        self.ledger.refresh()
        for _ in range(MAX_RESULT_WRITES):
            if self.ledger.has_longer_plan():
                break
            summary = self._merge_summaries(self._summarize(stats))
            metadata_sha256 = metadata_and_summary.write_metadata(self.folder, self.ledger.rows())
            metadata_and_summary.write_failures(self.folder, list(summary.workers), self.ledger.failed_rows())
            summary = dataclasses.replace(summary, metadata_sha256=metadata_sha256)
            if stats is not None or not metadata_and_summary.is_summary_current(self.folder, summary):
                metadata_and_summary.write_summary(self.folder, summary)
            if not self.ledger.refresh():
                break

    def _merge_summaries(self, own: metadata_and_summary.RunSummary) -> metadata_and_summary.RunSummary:
        """Merge the summary of this process with those of processes that ended since it started."""
        workers = dict(own.workers)
        read_summaries = [
            self._read_summary(path) for path in self.ledger.folder.glob(PROCESS_SUMMARY_FILE.format(process="*"))
        ]
        other_summaries = [summary for summary in read_summaries if summary]
        for summary in other_summaries:
            for label, values in summary["workers"].items():
                values = {key: value for key, value in values.items() if key != "busy_share"}
                workers[label] = workers.get(
                    label, metadata_and_summary.WorkerStats()
                ) + metadata_and_summary.WorkerStats(**values)
        return dataclasses.replace(
            own,
            workers=dict(sorted(workers.items())),
            seconds=max([own.seconds, *(summary["seconds"] for summary in other_summaries)]),
            drawn_now=own.drawn_now + sum(summary["drawn_now"] for summary in other_summaries),
            retries=own.retries + sum(summary["retries"] for summary in other_summaries),
            num_redone_batches=own.num_redone_batches + sum(summary["redone_sheets"] for summary in other_summaries),
            interrupted=own.interrupted and own.done < own.planned,
        )

    def _read_summary(self, path: Path) -> dict[str, Any]:
        """Read the summary of another process that ended since this one started; else empty."""
        if (
            path.name == PROCESS_SUMMARY_FILE.format(process=self.process.name)
            or path.stat().st_mtime < self.start_time
        ):
            return {}
        summary: dict[str, Any] = runs.read_json(path)
        return summary
