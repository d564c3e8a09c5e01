"""One call of `halation generate` on a folder that is held: its record and plan, the drawing, and what is left to read afterwards."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from halation import step_progress
from halation.config import as_json, fixed
from halation.distributed.signals import StopSignals, exit_code
from halation.errors import InputError, Interrupted
from halation.generation import results
from halation.generation.config import GenerateConfig
from halation.generation.ledger import Ledger
from halation.generation.planning import plan
from halation.generation.requests import Defaults
from halation.generation.supervisor import Claims, Effort, Rules, Supervisor
from halation.generation.workers.local import Crew, Place
from halation.images import png
from halation.logs import Echo
from halation.models.dit.prompt_warnings import remarks
from halation.models.model_ref import Subject
from halation.plan import Sheets, sheets_of
from halation.progress import Progress
from halation.prompts import PromptFile
from halation.runs import folder as runs
from halation.runs.folder import Run

log = logging.getLogger(__name__)


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind; the folder is held. One look at its names: there may be a million files."""
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(".tmp"):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def pipeline_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE words with JSON values; a value that is no JSON is text."""
    arguments = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(
                f"--pipeline_args {word}", "KEY=VALUE, for instance max_sequence_length=256", "write it so"
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


class Session:
    """One call on a held folder: the record, the plan, the drawing, and what is left to read afterwards."""

    def __init__(self, config: GenerateConfig, subject: Subject, ledger: Ledger, echo: Echo) -> None:
        self.config = config
        self.subject = subject
        self.ledger = ledger
        self.echo = echo
        self.folder = config.output_dir
        self.record: dict[str, Any] = {}
        self.arguments = pipeline_arguments(config.pipeline_args)
        self.facts: dict[str, Any] = {}
        self.mixed: set[str] = set()

    # -- before

    def begin(self, prompts: PromptFile, places: Sequence[Place]) -> None:
        """Recognise the run or begin it, plan what is new, and find out what is missing."""
        if self.config.enable_half_frame and self.config.num_frames == 1:
            log.warning("--enable_half_frame changes nothing for pictures of one frame")
        truncated, steps = self.config.cfg_truncation_step, self.config.num_inference_steps or self.subject.steps
        if truncated is not None and truncated >= steps:
            log.warning("--cfg_truncation_step %d changes nothing: there are %d steps", truncated, steps)
        misuse = self.subject.misuse(steps)
        if misuse:
            log.warning("--num_inference_steps: %s", misuse)
        guidance = self.config.guidance_scale
        misguided = self.subject.misguided(guidance) if guidance is not None else ""
        if misguided:
            log.warning("--guidance_scale %s", misguided)
        if prompts.ignored:
            log.warning("%s: columns that are not read: %s", prompts.name, ", ".join(prompts.ignored))
        counts = self.ledger.counts()
        bound = counts["done"] > 0  # failures bind nobody: what they failed of may have been the settings
        config = Run(self.folder).config
        before = config.read_bytes() if bound and config.exists() else b""
        self.record = self._recognised(self._settings(places), bound)
        self.ledger.epoch = len(self.record["changes"])
        try:
            self._plan(prompts, bound, self.folder)
        except InputError:
            if before:  # a change that was refused after all is none
                runs.publish(config, before)
            raise
        self._reopen()
        self._remark(prompts)

    def _remark(self, prompts: PromptFile) -> None:
        """What the model cannot read of its prompts, if any are still to be drawn."""
        counts, order = self.ledger.counts(), self.subject.order
        if order["kind"] != "checkpoint" or counts["done"] == counts["planned"]:
            return
        rows = islice(prompts.rows(), self.config.num_samples or None)
        for words in remarks(Path(order["path"]), self.subject.name, (row.prompt for row in rows)):
            log.warning("%s", words)

    def _settings(self, places: Sequence[Place]) -> dict[str, Any]:
        """What a later call must not change."""
        kind = self.subject.order["kind"]
        names = ("torch", "diffusers", "transformers") if kind == "pipeline" else ("torch", "numpy")
        settings = fixed(self.config) | {"model": self.subject.digest, "model name": self.subject.name}
        settings |= {"device": "cpu" if places[0].device == "cpu" else "cuda"}
        return settings | {f"{name} version": version(name) for name in names if kind != "testcard"}

    def _recognised(self, settings: dict[str, Any], bound: bool) -> dict[str, Any]:
        """The run's record: begun now, or as it was."""
        config, run = self.config, Run(self.folder)
        runs.begin(run, "generate", as_json(config), settings, config.accept_changes, bound)
        chosen = runs.read_record(run)["fixed"].get("png coder") if bound else None
        coder = config.png if config.png != "auto" else chosen or png.best_coder()
        return runs.confirm(run, {"png coder": coder}, config.accept_changes)

    def _plan(self, prompts: PromptFile, bound: bool, folder: Path) -> None:
        config = self.config
        defaults = Defaults(
            seed_start=config.seed_start,
            height=config.height or 0,
            width=config.width or 0,
            num_frames=config.num_frames,
            steps=config.num_inference_steps or self.subject.steps,
            guidance_scale=config.guidance_scale or 0.0,
            negative_prompt=config.negative_prompt,
        )
        plan(
            self.ledger,
            prompts,
            limit=config.num_samples,
            defaults=defaults,
            bound=bound,
            folder=folder,
            accept=config.accept_changes,
        )

    def _reopen(self) -> None:
        """A done picture whose file is gone is missing; with --verify, so is one whose bytes are not what they were."""
        gone = results.missing(self.folder, self.ledger.names_done())
        if gone:
            log.warning("%d pictures were drawn but their files are gone: drawing them again", len(gone))
            self.ledger.reopen(gone)
        if self.config.verify:
            damages = self._verified()
            for damage in damages:
                log.warning("%s is damaged: %s; drawing it again", damage.file, damage.why)
            self.ledger.reopen(damage.index for damage in damages)
            if not damages:
                log.info("every picture is as the ledger says")

    def _verified(self) -> list[results.Damage]:
        num_done = self.ledger.counts()["done"]
        with step_progress.Progress(self.config.progress, num_done, 0, "checking") as bar:
            self.echo.say = bar.say
            try:
                return results.verify(
                    self.folder,
                    self.ledger.done(),
                    lambda checked, damaged: bar.update(checked, f"{damaged} damaged", {"damaged": damaged}),
                )
            finally:
                self.echo.say = None

    def orders(self) -> dict[str, Any]:
        """What every worker is told, besides its device."""
        config = self.config
        style = {
            "model": self.record["fixed"]["model name"],
            "sampler": config.scheduler,
            "coder": self.record["fixed"]["png coder"],
            "fps": config.fps,
        }
        return {
            "folder": str(self.folder.resolve()),
            "model": self.subject.order,
            "style": style,
            "dtype": config.dtype,
            "scheduler": config.scheduler,
            "offload": config.offload,
            "compile": config.compile,
            "arguments": self.arguments,
            "cfg_truncation_step": config.cfg_truncation_step,
            "half_frame": config.enable_half_frame and config.num_frames > 1,
            "threads": config.threads,
            "raw": config.raw,
        }

    # -- during

    def run(self, make_crew: Callable[[], Crew]) -> int:
        before = self.ledger.counts()
        effort = None
        if before["done"] < before["planned"]:
            with StopSignals(ends_at_once=False) as signals:
                try:
                    effort = self._draw(make_crew(), before, signals)
                finally:
                    if not signals.urgent:  # the next call writes them
                        self._write_results(effort)
            if signals.number:
                left = self.ledger.counts()
                raise Interrupted(
                    f"stopped with {left['planned'] - left['done']} of {left['planned']} pictures to go; the same command draws them",
                    exit_code(signals.number),
                )
        else:
            self._write_results(None)
        return self._tell(effort)

    def _draw(self, crew: Crew, before: dict[str, int], signals: StopSignals) -> Effort:
        config = self.config
        sheets = sheets_of(self.ledger.groups(), config.batch_size)
        micro_batch = config.micro_batch or self.record["fixed"].get("micro batch", 0)
        if micro_batch > config.batch_size:  # the sheet was larger when that was found out
            micro_batch = 0
        progress = Progress(config.progress, crew.names, before["planned"], before["done"])
        rules = Rules(sheet_size=config.batch_size, micro_batch=micro_batch, stall_timeout_s=config.stall_timeout_s)
        supervisor = Supervisor(
            self.ledger,
            sheets,
            crew,
            progress,
            rules,
            stop=lambda: signals.number,
            hurry=lambda: signals.urgent,
            on_rehearsed=self._on_rehearsed,
            on_ready=self._on_ready,
            claims=self._claims(sheets, crew, progress),
        )
        with progress:
            self.echo.say = progress.say
            calm = False
            try:
                effort = supervisor.run()
                calm = not supervisor.num_redone and not signals.urgent
                return effort
            finally:
                self.echo.say = None
                crew.end(at_once=signals.urgent)
                if not calm:  # a worker may have been killed while it wrote
                    self._sweep()

    def _claims(self, sheets: Sheets, crew: Crew, progress: Progress) -> Claims | None:
        """Alone in the folder, every sheet may be drawn."""
        return None

    def _sweep(self) -> None:
        sweep(self.folder)

    def _on_rehearsed(self, size: int) -> int:
        """The micro-batch of the run, from what a rehearsal here found."""
        self._confirm({"micro batch": size})
        found: int = self.record["fixed"]["micro batch"]
        return found

    def _confirm(self, facts: dict[str, Any]) -> None:
        self.record = runs.confirm(Run(self.folder), facts, self.config.accept_changes)

    def _on_ready(self, facts: dict[str, Any]) -> None:
        """What a worker draws with; on a resume it must be what the run was begun with, and workers should be alike."""
        device = str(facts.pop("computes on", "cpu"))
        if self.mixed and device not in self.mixed:
            log.warning(
                "workers on different devices (%s): pictures round differently on them",
                ", ".join(sorted({device, *self.mixed})),
            )
        first = not self.mixed
        self.mixed.add(device)
        self.facts = facts
        if first:
            # What changes no bit (E0) may change from call to call.
            lasting = {name: kind for name, kind in facts.get("options", {}).items() if kind != "E0"}
            self._confirm({"computes on": device, "painter": {**facts, "options": lasting}})

    # -- after

    def _write_results(self, effort: Effort | None) -> None:
        results.write_metadata(self.folder, self.ledger.done())
        results.write_failures(self.folder, list(effort.workers) if effort else [], self.ledger.failures())
        tally = self._tally(effort)
        if effort is not None or not results.is_summed_up(self.folder, tally):
            results.write_summary(self.folder, tally)

    def _tally(self, effort: Effort | None) -> results.Tally:
        counts = self.ledger.counts()
        return results.Tally(
            planned=counts["planned"],
            done=counts["done"],
            failed=counts["failed"],
            open=counts["open"],
            drawn_now=effort.num_drawn if effort else 0,
            seconds=effort.seconds if effort else 0.0,
            workers=effort.workers if effort else {},
            retries=effort.num_retries if effort else 0,
            redone_sheets=effort.num_redone_sheets if effort else 0,
            failures_by_reason=results.count_reasons(self.ledger.failures()),
            smaller_micro_batches=self.ledger.num_smaller(),
            equality_classes=dict(
                self.facts.get("options") or self.record["fixed"].get("painter", {}).get("options", {})
            ),
            interrupted=effort.interrupted if effort else False,
        )

    def _tell(self, effort: Effort | None) -> int:
        """The last words, and the exit code they stand for."""
        counts = self.ledger.counts()
        missing = counts["planned"] - counts["done"]
        if self.config.progress not in ("json", "none"):
            rate = (
                f", {effort.num_drawn} of them now in {effort.seconds:.0f} s"
                if effort
                else ", all of them there before"
            )
            lines = [f"{counts['done']} of {counts['planned']} pictures in {self.folder}{rate}"]
            for reason, number in list(results.count_reasons(self.ledger.failures()).items())[:5]:
                lines.append(f"  {number} failed: {reason}")
            if missing:
                lines.append(f"  which ones: {self.folder}/failed_prompts_gpu*.txt; the same command tries them again")
            sys.stderr.write("\n".join(lines) + "\n")
        return 1 if missing else 0
