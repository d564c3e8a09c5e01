"""One call of `halation generate` on a locked folder: config, plan, images, summary."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from halation.config import as_json, fixed_settings
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.errors import InputError, Interrupted, format_count
from halation.generation import metadata_and_summary
from halation.generation.config import RESOLVED_SETTINGS, GenerateConfig
from halation.generation.image_requests import ImageRequest, RequestDefaults, RowCheck
from halation.generation.ledger import Ledger
from halation.generation.ledger_setup import plan, repair
from halation.generation.supervisor import RangeClaims, RunStats, Supervisor, SupervisorSettings
from halation.generation.workers.local_pool import WorkerPool, WorkerSlot
from halation.images import png_codec
from halation.logging_setup import ConsoleWarningHandler
from halation.models.model_path_resolver import ModelRef
from halation.progress import GenerationProgress, StepProgress
from halation.prompt_files import PromptFile, PromptRow
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.sample_specs import SampleSpec
from halation.work_division import BatchPlan, plan_batches

log = logging.getLogger(__name__)
RESULT_FILES = (metadata_and_summary.METADATA_FILE, metadata_and_summary.SUMMARY_FILE)
IMAGE_NAME = re.compile(r".*_seed\d+(\.png|\.mp4)?")


def remove_temporary_files(folder: Path) -> None:
    """Remove files that killed writers left in a locked folder.

    The folder, which may hold a million files, is listed once.
    """
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(".tmp"):
            runs.remove_path(folder / name)


def find_result_file(folder: Path) -> str:
    """Return a result file of a run, such as an image, or "" if there is none."""
    return next((name for name in os.listdir(folder) if name in RESULT_FILES or IMAGE_NAME.fullmatch(name)), "")


def check_no_foreign_files(folder: Path) -> None:
    """Raise if a folder without a ledger holds files that this run would overwrite."""
    found = find_result_file(folder) or (runs.CONFIG_FILE if runs.RunFolder(folder).config.exists() else "")
    if found:
        raise InputError(
            f"{folder} holds {found} but no ledger of `halation generate`",
            "an empty folder, or one with a ledger",
            "choose another --output_dir",
        )


def lost_ledger_error(
    folder: Path, found: str, ledger_name: str, problem: str = "has no images: it was emptied or replaced"
) -> InputError:
    return InputError(
        f"{folder} holds {found}, but its {ledger_name} {problem}",
        "the ledger in which the images of this folder were recorded",
        "restore it from a copy; or keep the images and choose another --output_dir",
    )


def parse_pipeline_args(words: tuple[str, ...]) -> dict[str, Any]:
    """Parse KEY=VALUE arguments; values are JSON, or plain text if they are not valid JSON."""
    arguments = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(
                f"--pipeline_args {word}", "KEY=VALUE, for example max_sequence_length=256", "use this form"
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def resolve_config(
    config: GenerateConfig, model_ref: ModelRef, slots: Sequence[WorkerSlot], recorded: Mapping[str, Any]
) -> GenerateConfig:
    """Fill in the settings that are not given: those of an existing folder, else those of the model."""
    device = "cpu" if slots[0].device == "cpu" else "cuda"
    dtype = recorded["dtype"] if recorded.get("device") == device and "dtype" in recorded else ""
    chosen: dict[str, Any] = {"dtype": config.dtype or dtype or ("fp32" if device == "cpu" else "bf16")}
    own = {"num_inference_steps": model_ref.steps, "guidance_scale": model_ref.guidance_scale}
    own |= {"height": model_ref.height, "width": model_ref.width}
    for name in RESOLVED_SETTINGS:
        given = getattr(config, name)
        chosen[name] = (recorded[name] if name in recorded else own[name]) if given is None else given
    if not chosen["height"] or not chosen["width"]:
        raise model_ref.no_size_error()
    return replace(config, **chosen)


class GenerationSession:
    """One call on a locked folder.

    `prepare()` creates or resumes the run, `run()` generates the missing images.
    """

    def __init__(
        self,
        config: GenerateConfig,
        model_ref: ModelRef,
        ledger: Ledger,
        console_handler: ConsoleWarningHandler,
        monitor: FolderMonitor | None = None,
    ) -> None:
        self.config = config
        self.model_ref = model_ref
        self.ledger = ledger
        self.console_handler = console_handler
        self.folder = config.output_dir
        self.monitor = monitor or FolderMonitor(self.folder)
        self.record: dict[str, Any] = {}
        self.arguments = parse_pipeline_args(config.pipeline_args)
        self.model_facts: dict[str, Any] = {}
        self.devices: set[str] = set()
        self.check_row: RowCheck | None = None

    # -- before

    def prepare(self, prompts: PromptFile, slots: Sequence[WorkerSlot]) -> None:
        """Create or resume the run, plan new rows, and find missing images."""
        if prompts.ignored_columns:
            log.warning("%s: unknown columns are ignored: %s", prompts.name, ", ".join(prompts.ignored_columns))
        self._check_ledger(prompts)
        unrecorded = [
            request for request, is_own in metadata_and_summary.iter_unrecorded(self.folder, self.ledger) if is_own
        ]
        # Settings are fixed only once an image is done: failures may be caused by a setting.
        has_done_images = self.ledger.counts()["done"] > 0 or bool(unrecorded)
        self._resolve_settings(slots, has_done_images)
        config = runs.RunFolder(self.folder).config
        previous_config = config.read_bytes() if has_done_images and config.exists() else b""
        self.record = self._open_record(self._fixed_settings(slots), has_done_images)
        self.ledger.epoch = len(self.record["changes"])
        try:
            self._plan(prompts, has_done_images, self.folder, unrecorded)
        except InputError:
            if previous_config:  # do not record a rejected change
                runs.write_atomic(config, previous_config)
            raise
        self._reopen_damaged()
        self._check_unrecorded_images()
        counts = self.ledger.counts()
        rows = islice(prompts.rows(), self.config.num_samples or None) if counts["done"] < counts["planned"] else ()
        for warning in self._warnings(row.prompt for row in rows):
            log.warning("%s", warning)

    def _resolve_settings(self, slots: Sequence[WorkerSlot], has_done_images: bool) -> None:
        """Fill in the settings that are not given, and check the given ones of a new run."""
        is_new = not has_done_images or self.config.accept_changes
        if is_new:
            self.model_ref.check(self.config, arguments=self.arguments)
            self.check_row = self._check_row
        given = {name for name in RESOLVED_SETTINGS if getattr(self.config, name) is not None}
        recorded = self._recorded_settings(has_done_images)
        self.config = config = resolve_config(self.config, self.model_ref, slots, recorded)
        guidance = "no guidance scale" if config.guidance_scale is None else f"guidance {config.guidance_scale:g}"
        text = f"{config.height} x {config.width}, {config.num_inference_steps} steps, {guidance}"
        if others := [name for name in RESOLVED_SETTINGS if name not in given]:
            source = "this folder" if recorded else self.model_ref.defaults_of
            text += f" ({', '.join(others)}: of {source})"
        log.info("%s", text)
        if config.progress not in ("json", "none"):
            sys.stderr.write(f"{text}\n")

    def _recorded_settings(self, has_done_images: bool) -> dict[str, Any]:
        """Return the settings that the folder was started with; they are fixed once an image is done."""
        run = runs.RunFolder(self.folder)
        return runs.read_record(run)["fixed"] if has_done_images and run.config.exists() else {}

    def _check_row(self, row: PromptRow, spec: SampleSpec) -> None:
        self.model_ref.check(row, spec.guidance_scale, self.arguments)

    def _warnings(self, prompts: Iterable[str]) -> Iterator[str]:
        """Yield warnings about settings without effect and about words that the model does not know."""
        config, steps = self.config, self.config.num_inference_steps or 0
        if config.enable_half_frame and config.num_frames == 1:
            yield "--enable_half_frame has no effect with one frame"
        if config.cfg_truncation_step is not None and config.cfg_truncation_step >= steps:
            only = format_count(steps, "step")
            yield f"--cfg_truncation_step {config.cfg_truncation_step} has no effect: there are only {only}"
        yield from self.model_ref.warnings(steps, config.guidance_scale, prompts)

    def _check_ledger(self, prompts: PromptFile) -> None:
        """Repair damaged rows; raise if the ledger is empty or belongs to other images."""
        repair(self.ledger, prompts, self.folder)
        # A first call that was killed before planning leaves a config and an empty ledger, but no results.
        if not self.ledger.num_planned and (found := find_result_file(self.folder)):
            raise lost_ledger_error(self.folder, found, self.ledger.path.name)
        if found := metadata_and_summary.find_image_of_another_run(self.folder, self.ledger.sample_done()):
            raise lost_ledger_error(self.folder, found, self.ledger.path.name, "is the ledger of another run")

    def _fixed_settings(self, slots: Sequence[WorkerSlot]) -> dict[str, Any]:
        """Return the settings that a later call must not change."""
        kind = self.model_ref.load_args["kind"]
        names = ("torch", "diffusers", "transformers") if kind == "pipeline" else ("torch", "numpy")
        settings = fixed_settings(self.config) | {"model": self.model_ref.digest, "model name": self.model_ref.name}
        settings |= {"device": "cpu" if slots[0].device == "cpu" else "cuda"}
        return settings | {f"{name} version": version(name) for name in names if kind != "testcard"}

    def _open_record(self, settings: dict[str, Any], has_done_images: bool) -> dict[str, Any]:
        """Create the run record, or read the existing one."""
        config, run = self.config, runs.RunFolder(self.folder)
        runs.create_or_resume_run(run, "generate", as_json(config), settings, config.accept_changes, has_done_images)
        chosen = runs.read_record(run)["fixed"].get("png coder") if has_done_images else None
        coder = config.png if config.png != "auto" else chosen or png_codec.fastest_coder()
        return runs.record_facts(run, {"png coder": coder, **self.model_ref.hub_fact}, config.accept_changes)

    def _plan(
        self, prompts: PromptFile, has_done_images: bool, folder: Path, unrecorded: Sequence[ImageRequest]
    ) -> None:
        config = self.config
        defaults = RequestDefaults(
            seed_start=config.seed_start,
            height=config.height or 0,
            width=config.width or 0,
            num_frames=config.num_frames,
            steps=config.num_inference_steps or self.model_ref.steps,
            guidance_scale=config.guidance_scale,
            negative_prompt=config.negative_prompt,
        )
        plan(
            self.ledger,
            prompts,
            limit=config.num_samples,
            defaults=defaults,
            has_done_images=has_done_images,
            folder=folder,
            accept_changes=config.accept_changes,
            unrecorded=unrecorded,
            check=self.check_row,
        )

    def _check_unrecorded_images(self) -> None:
        """Raise if an image that is not of this run would be overwritten.

        Images that a killed call published but did not record are accepted: they carry the spec of their row.
        """
        found = metadata_and_summary.find_foreign_images(self.folder, self.ledger)
        if found:
            more = f" (also {', '.join(found[1:])})" if found[1:] else ""
            raise InputError(
                f"{self.folder / found[0]} exists but is not an image of this run: "
                f"it does not carry the spec of that image{more}",
                "a folder without images of other runs",
                "move these files elsewhere, or choose another --output_dir",
            )

    def _reopen_damaged(self) -> None:
        """Reopen done rows whose files are missing or, with --verify, damaged."""
        missing = metadata_and_summary.find_missing(self.folder, self.ledger.done_names())
        if missing:
            log.warning("%s done, but without a file: generating again", format_count(len(missing), "image"))
            self._reopen(missing)
        if self.config.verify:
            damages = self._verify()
            for damage in damages:
                log.warning("%s is damaged: %s; generating it again", damage.file, damage.reason)
            self._reopen([damage.index for damage in damages])
            if not damages:
                log.info("all images match the ledger")

    def _reopen(self, indices: Sequence[int]) -> None:
        """Set rows back to open and remove their files.

        A later call would otherwise reject the files as images of another run.
        """
        for request in self.ledger.requests(indices):
            metadata_and_summary.remove_result(self.folder, request.name, request.spec.num_frames)
        self.ledger.mark_open(indices)

    def _verify(self) -> list[metadata_and_summary.DamagedImage]:
        num_done = self.ledger.counts()["done"]
        with StepProgress(self.config.progress, num_done, 0, "checking") as bar:
            self.console_handler.print_line = bar.print_line
            try:
                return metadata_and_summary.verify(
                    self.folder,
                    self.ledger.done_rows(),
                    lambda checked, damaged: bar.update(checked, f"{damaged} damaged", {"damaged": damaged}),
                )
            finally:
                self.console_handler.print_line = None

    def worker_settings(self) -> dict[str, Any]:
        """Return the settings for all workers, without their device."""
        config = self.config
        style = {
            "model": self.record["fixed"]["model name"],
            "sampler": config.scheduler,
            "coder": self.record["fixed"]["png coder"],
            "fps": config.fps,
        }
        return {
            "folder": str(self.folder.resolve()),
            "folder_identity": self.monitor.watched[0].identity,
            "model": self.model_ref.load_args,
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

    def run(self, make_pool: Callable[[], WorkerPool]) -> int:
        before = self.ledger.counts()
        stats = None
        if before["done"] < before["planned"]:
            with StopSignals(exit_on_second=False) as signals:
                try:
                    stats = self._generate(make_pool(), before, signals)
                finally:
                    # If skipped, the next call writes the results.
                    if not signals.is_urgent and not self.monitor.find_problem():
                        self._write_results(stats)
            if signals.number:
                left = self.ledger.counts()
                raise Interrupted(
                    f"stopped with {left['planned'] - left['done']} of {format_count(left['planned'], 'image')} "
                    "missing; run the same command to generate them",
                    exit_code(signals.number),
                )
        else:
            self._write_results(None)
        return self._print_summary(stats)

    def _generate(self, pool: WorkerPool, before: dict[str, int], signals: StopSignals) -> RunStats:
        config = self.config
        batches = plan_batches(self.ledger.groups(), config.batch_size)
        micro_batch = config.micro_batch or self.record["fixed"].get("micro batch", 0)
        if micro_batch > config.batch_size:  # measured when the batch size was larger
            micro_batch = 0
        progress = GenerationProgress(config.progress, pool.names, before["planned"], before["done"])
        rules = SupervisorSettings(
            batch_size=config.batch_size, micro_batch=micro_batch, stall_timeout_s=config.stall_timeout_s
        )
        supervisor = Supervisor(
            self.ledger,
            batches,
            pool,
            progress,
            rules,
            stop_signal=lambda: signals.number,
            is_urgent=lambda: signals.is_urgent,
            on_dry_run=self._on_dry_run,
            on_ready=self._on_ready,
            claims=self._make_claims(batches, pool, progress),
            check_folder=self.monitor.check,
        )
        supervisor.prepare()
        with progress:
            self.console_handler.print_line = progress.print_line
            is_clean = False
            try:
                stats = supervisor.run()
                is_clean = not supervisor.num_redone_batches and not signals.is_urgent
                return stats
            finally:
                self.console_handler.print_line = None
                is_lost = bool(self.monitor.find_problem())
                pool.shutdown(at_once=signals.is_urgent or is_lost)
                if not is_clean and not is_lost:  # a worker may have been killed while it wrote
                    self._remove_temporary_files()

    def _make_claims(self, batches: BatchPlan, pool: WorkerPool, progress: GenerationProgress) -> RangeClaims | None:
        """Return None: without other processes, this one generates every batch."""
        return None

    def _remove_temporary_files(self) -> None:
        remove_temporary_files(self.folder)

    def _on_dry_run(self, size: int) -> int:
        """Record the micro-batch that the dry run found and return the one of the run."""
        self._record_facts({"micro batch": size})
        found: int = self.record["fixed"]["micro batch"]
        return found

    def _record_facts(self, facts: dict[str, Any]) -> None:
        self.record = runs.record_facts(runs.RunFolder(self.folder), facts, self.config.accept_changes)

    def _on_ready(self, facts: dict[str, Any]) -> None:
        """Record the facts of a worker's model; on a resume they must match the run.

        Warns if workers use different devices.
        """
        device = str(facts.pop("computes on", "cpu"))
        if self.devices and device not in self.devices:
            log.warning(
                "workers on different devices (%s): rounding of images differs between them",
                ", ".join(sorted({device, *self.devices})),
            )
        is_first = not self.devices
        self.devices.add(device)
        self.model_facts = facts
        if is_first:
            # Options that change no bit (E0) may differ between calls.
            fixed_options = {name: kind for name, kind in facts.get("options", {}).items() if kind != "E0"}
            self._record_facts({"computes on": device, "painter": {**facts, "options": fixed_options}})

    # -- after

    def _write_results(self, stats: RunStats | None) -> None:
        metadata_sha256 = metadata_and_summary.write_metadata(self.folder, self.ledger.done_rows())
        metadata_and_summary.write_failures(
            self.folder, list(stats.workers) if stats else [], self.ledger.failed_rows()
        )
        summary = replace(self._summarize(stats), metadata_sha256=metadata_sha256)
        if stats is not None or not metadata_and_summary.is_summary_current(self.folder, summary):
            metadata_and_summary.write_summary(self.folder, summary)

    def _summarize(self, stats: RunStats | None) -> metadata_and_summary.RunSummary:
        counts = self.ledger.counts()
        return metadata_and_summary.RunSummary(
            planned=counts["planned"],
            done=counts["done"],
            failed=counts["failed"],
            open=counts["open"],
            drawn_now=stats.num_drawn if stats else 0,
            seconds=stats.elapsed_s if stats else 0.0,
            workers=stats.workers if stats else {},
            retries=stats.num_retries if stats else 0,
            num_redone_batches=stats.num_redone_batches if stats else 0,
            failures_by_reason=metadata_and_summary.count_reasons(self.ledger.failed_rows()),
            smaller_micro_batches=self.ledger.num_images_in_smaller_micro_batches(),
            equality_classes=dict(
                self.model_facts.get("options") or self.record["fixed"].get("painter", {}).get("options", {})
            ),
            interrupted=stats.interrupted if stats else False,
        )

    def _print_summary(self, stats: RunStats | None) -> int:
        """Print the result of the call and return the exit code."""
        counts = self.ledger.counts()
        missing = counts["planned"] - counts["done"]
        if self.config.progress not in ("json", "none"):
            rate = f", {stats.num_drawn} generated now in {stats.elapsed_s:.0f} s" if stats else ", all already done"
            lines = [f"{counts['done']} of {format_count(counts['planned'], 'image')} in {self.folder}{rate}"]
            for reason, number in list(metadata_and_summary.count_reasons(self.ledger.failed_rows()).items())[:5]:
                lines.append(f"  {number} failed: {reason}")
            if missing:
                lines.append(f"  failed prompts: {self.folder}/failed_prompts_gpu*.txt; run the same command to retry")
            sys.stderr.write("\n".join(lines) + "\n")
        return 1 if missing else 0
