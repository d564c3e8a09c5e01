"""`halation generate --cluster files`: one of several plain processes on one folder, which meet nowhere but in its files.

    config.json                     the first process's, once and for good
    ledger/{host}-{pid}-{token}.jsonl   outcomes, one file a process
    ledger/plan-*.digests           what was planned, to recognise it by
    ledger/leases/                  ranges of sheets that are being drawn
    ledger/{fact}.json              what was found out on the way: the first word counts for all
    ledger/*.summary.json           what each process did

`--verify` is each process's own: all that are given it check everything before they draw. Give it to one process, alone, where
reading the folder takes long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halation.config import as_json
from halation.distributed import launcher
from halation.distributed.signals import StopSignals
from halation.errors import InputError
from halation.generation import results
from halation.generation.config import GenerateConfig
from halation.generation.ledger import LEDGER_FILE
from halation.generation.planning import RENAMED_FILE
from halation.generation.results import Tally, WorkerTally
from halation.generation.session import Session
from halation.generation.shared_folder.leases import Leases, Ranges, look
from halation.generation.shared_folder.ledger import SHARED_LEDGER, Process, SharedLedger, create_once
from halation.generation.supervisor import Claims, Effort
from halation.generation.workers.local import Crew, LocalCrew, Place, places_of
from halation.generation.workers.worker import DEPTH
from halation.images import png
from halation.logs import Echo, logging_to
from halation.models.model_ref import Subject
from halation.plan import Sheets
from halation.progress import Progress
from halation.prompts import PromptFile
from halation.runs import folder as runs
from halation.runs.folder import Run

log = logging.getLogger(__name__)
FACTS = {"micro batch": "micro_batch.json", "painter": "painter.json", "computes on": "computes_on.json"}
BINDINGS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND")
SUMMARY = "{process}.summary.json"
MAX_WORDS = 3
"""One who stops early does not wait until the others have no more news."""


def run_shared(config: GenerateConfig, prompts: PromptFile, subject: Subject, places: list[Place]) -> int:
    """Draw until nothing of the whole plan is missing, together with whoever else is at it."""
    folder = config.output_dir
    refuse_local(config, folder)
    if not config.gpu_ids and (gpus := own_gpus(launcher.num_gpus(), os.environ)):
        places = places_of(dataclasses.replace(config, gpu_ids=gpus))
    process = Process()
    ledger_folder = folder / SHARED_LEDGER
    (ledger_folder / "leases").mkdir(parents=True, exist_ok=True)
    places = [dataclasses.replace(place, label=f"{process.host}-{place.label}") for place in places]
    logs = folder / "logs" / process.name
    with logging_to(logs) as echo, contextlib.closing(SharedLedger(ledger_folder, process)) as ledger:
        session = SharedSession(config, subject, ledger, echo)
        session.begin(prompts, places)
        return session.run(lambda: LocalCrew(places, session.orders(), logs, config.threads))


def refuse_local(config: GenerateConfig, folder: Path) -> None:
    if (folder / LEDGER_FILE).exists():
        raise InputError(
            f"{folder} was begun by one command alone (it has a {LEDGER_FILE})",
            "a folder that was begun with --cluster files, or an empty one",
            "leave --cluster files out to go on there, or choose another --output_dir",
        )
    run = Run(folder)
    if run.config.exists() and runs.read_record(run)["job"] != "generate":
        raise InputError(
            f"{folder} holds a `{runs.read_record(run)['job']}` run",
            "a `generate` run or an empty folder",
            "choose another --output_dir",
        )
    if config.accept_changes:
        raise InputError(
            "--accept_changes with --cluster files",
            "the settings the folder was begun with: other processes may be drawing with them now",
            "use the old settings, or another --output_dir",
        )


def own_gpus(num_gpus: int, environment: Mapping[str, str]) -> tuple[int, ...]:
    """Among srun's tasks of one machine that all see all of its GPUs: this task's share, task k's being k, k + tasks ...

    Empty where there is nothing to share: one task a machine, one GPU each, or tasks that SLURM has given GPUs of their own.
    """
    tasks, task = slurm_tasks_here(environment), int(environment.get("SLURM_LOCALID", "0"))
    bound = any(environment.get(name, "none") != "none" for name in BINDINGS)
    if tasks == 1 or bound or num_gpus <= 1:
        return ()
    if task >= num_gpus:
        raise InputError(
            f"task {task} of {tasks} on a machine that shows {num_gpus} GPUs",
            "at most one task a GPU",
            f"start at most {num_gpus} tasks a node (--ntasks-per-node), or say with --gpu_ids what each is to use",
        )
    return tuple(range(task, num_gpus, tasks))


def slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """How many of srun's tasks run on this machine, from lists such as 4(x2),3; 1 outside srun."""
    words = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    nodes = [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", words) for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return nodes[node] if "SLURM_LOCALID" in environment and node < len(nodes) else 1


class SharedSession(Session):
    """A session on a folder that nobody holds alone."""

    ledger: SharedLedger

    def __init__(self, config: GenerateConfig, subject: Subject, ledger: SharedLedger, echo: Echo) -> None:
        super().__init__(config, subject, ledger, echo)
        self.process = ledger.process
        self.leases: Leases | None = None
        self.began = os.stat(ledger.path).st_mtime

    # -- before

    def _recognised(self, settings: dict[str, Any], bound: bool) -> dict[str, Any]:
        """config.json as its first writer made it: it binds from then on, because others may be drawing by it."""
        config, run = self.config, Run(self.folder)
        coder = config.png if config.png != "auto" else png.best_coder()
        begun = {
            "job": "generate",
            "settings": as_json(config),
            "fixed": settings | {"png coder": coder},
            "changes": [],
        }
        if not run.config.exists():
            create_once(run.config, (json.dumps(begun, indent=2, ensure_ascii=False) + "\n").encode(), self.process)
        record = runs.read_record(run)
        chosen = record["fixed"]["png coder"] if config.png == "auto" else coder
        self._refuse(record["fixed"], settings | {"png coder": chosen})
        for fact, name in FACTS.items():
            path = self.ledger.folder / name
            if path.exists():
                record["fixed"][fact] = runs.read_json(path)
        return record

    def _refuse(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        lines = runs.difference(old, new)
        if lines:
            raise InputError(
                f"{self.folder} was started with other settings:\n" + "\n".join(lines),
                "the same settings as before, in every process that shares the folder",
                "use the old settings, or another --output_dir",
            )

    def _plan(self, prompts: PromptFile, bound: bool, folder: Path) -> None:
        """Every process plans for itself, to the same rows, and none may add to what another wrote."""
        with tempfile.TemporaryDirectory(prefix="halation_plan_") as scratch:
            super()._plan(prompts, False, Path(scratch))
            self.ledger.agree_on_plan()
            renamed = Path(scratch) / RENAMED_FILE
            if renamed.exists():
                runs.publish(folder / RENAMED_FILE, renamed.read_bytes())
        self._sweep()
        self.ledger.refresh()

    def _sweep(self) -> None:
        """Remove what killed writers left behind: what was not touched for a lease is nobody's."""
        probe = self.ledger.folder / f".{self.process.name}.probe.tmp"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        for folder in (self.folder, self.ledger.folder, self.ledger.folder / "leases"):
            for name in os.listdir(folder):
                if name.startswith(".") and name.endswith((".tmp", ".card")):
                    _remove_older(folder / name, now, self.config.lease_s)

    # -- during

    def _draw(self, crew: Crew, before: dict[str, int], signals: StopSignals) -> Effort:
        try:
            return super()._draw(crew, before, signals)
        finally:
            if self.leases is not None:
                self.leases.release()
                if self.leases.num_taken_over:
                    self._sweep()

    def _claims(self, sheets: Sheets, crew: Crew, progress: Progress) -> Claims:
        def on_refresh() -> None:
            elsewhere = self.ledger.num_elsewhere
            progress.elsewhere(elsewhere["done"], elsewhere["failed"])

        self.leases = Leases(
            self.ledger,
            Ranges(sheets),
            lease_s=self.config.lease_s,
            num_wanted=DEPTH * len(crew.labels),
            on_refresh=on_refresh,
            say=progress.say,
        )
        return self.leases

    def _confirm(self, facts: dict[str, Any]) -> None:
        """The first process's word counts: its micro-batch is taken, its painter must be ours, another device is only said."""
        for fact, value in facts.items():
            told = create_once(self.ledger.folder / FACTS[fact], (json.dumps(value) + "\n").encode(), self.process)
            first = json.loads(told)
            self.record["fixed"][fact] = first
            if fact == "painter":
                self._refuse(first, json.loads(json.dumps(value)))
            elif fact == "computes on" and first != value:
                log.warning(
                    "this process computes on %s, the first on %s: pictures round differently on them", value, first
                )

    # -- after

    def _write_results(self, effort: Effort | None) -> None:
        """Whoever ends writes what it knows, and once more where others told news meanwhile: the last word is then the whole."""
        if effort is not None:
            own = results.summary(self._tally(effort))
            runs.publish_json(self.ledger.folder / SUMMARY.format(process=self.process.name), own)
        self.ledger.refresh()
        for _ in range(MAX_WORDS):
            if self.ledger.outgrown():
                break
            tally = self._whole(self._tally(effort))
            results.write_metadata(self.folder, self.ledger.rows())
            results.write_failures(self.folder, list(tally.workers), self.ledger.failures())
            if effort is not None or not (self.folder / results.SUMMARY_FILE).exists():
                results.write_summary(self.folder, tally)
            if not self.ledger.refresh():
                break

    def _whole(self, own: Tally) -> Tally:
        """What this process and those that ended since it began did together."""
        workers = dict(own.workers)
        others = [self._summary(path) for path in self.ledger.folder.glob(SUMMARY.format(process="*"))]
        told = [summary for summary in others if summary]
        for summary in told:
            for label, values in summary["workers"].items():
                values = {key: value for key, value in values.items() if key != "busy_share"}
                workers[label] = _sum(workers.get(label, WorkerTally()), WorkerTally(**values))
        return dataclasses.replace(
            own,
            workers=dict(sorted(workers.items())),
            seconds=max([own.seconds, *(summary["seconds"] for summary in told)]),
            drawn_now=own.drawn_now + sum(summary["drawn_now"] for summary in told),
            retries=own.retries + sum(summary["retries"] for summary in told),
            redone_sheets=own.redone_sheets + sum(summary["redone_sheets"] for summary in told),
            interrupted=own.interrupted and own.done < own.planned,
        )

    def _summary(self, path: Path) -> dict[str, Any]:
        """Another process's of this time; empty for an earlier one's."""
        if path.name == SUMMARY.format(process=self.process.name) or path.stat().st_mtime < self.began:
            return {}
        summary: dict[str, Any] = runs.read_json(path)
        return summary


def _sum(one: WorkerTally, other: WorkerTally) -> WorkerTally:
    """Processes of one machine may have workers of one name."""
    names = [each.name for each in dataclasses.fields(WorkerTally)]
    return WorkerTally(**{name: getattr(one, name) + getattr(other, name) for name in names})


def _remove_older(path: Path, now: float, lease_s: float) -> None:
    try:
        promised_s = look(path).lease_s if path.suffix == ".card" else 0.0
        if now - path.lstat().st_mtime <= max(lease_s, promised_s):
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    except FileNotFoundError:
        return  # another process sweeps too
