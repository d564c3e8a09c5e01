"""What is due at its dates: validation loss and samples after a save, and evaluations, by all ranks, with the EMA in the model's place."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from halation.data.dataset_protocol import ImageDataset
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import HeartbeatMonitor, World
from halation.errors import HalationError, InputError, Interrupted, RankFailure
from halation.flow.ema import Ema
from halation.images.png_codec import read_png
from halation.models.denoiser import Denoiser
from halation.runs import run_folder as runs
from halation.runs.run_folder import write_json_with_digest
from halation.sampling.denoiser_sampler import DenoiserSampler, SampleSettings, ShareMode
from halation.sampling.sample_folder import (
    ComparisonImages,
    RankNaming,
    SampleFolder,
    SampleRow,
    is_drawn,
    publish_index,
)
from halation.training import validation_loss
from halation.training.config import TrainConfig
from halation.training.evaluation import (
    EvaluationReport,
    TrainingEvaluator,
    evaluation_rows,
    free_memory,
    is_evaluation_row,
    publish_plot,
)
from halation.training.objectives import denoising_objective
from halation.training.trackers import Tracker

log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class PeriodicTasks:
    """Validation loss and samples of saved steps, and evaluations; called again for a step they do only what is still open."""

    world: World
    config: TrainConfig
    run: runs.RunFolder
    source: ImageDataset
    denoiser: Denoiser
    engine: Engine
    ema: Ema
    settings: SampleSettings
    metrics: runs.MetricsFile
    trackers: list[Tracker]
    stop: Callable[[], int]
    print_line: Callable[[str], None]
    epoch_of: Callable[[int], int]
    evaluator: TrainingEvaluator | None = None
    comparison_folder: SampleFolder | None = None
    other_engines: tuple[Engine, ...] = ()
    """Engines of networks that are trained and not drawn from."""

    def __post_init__(self) -> None:
        self.num_validation = min(self.config.validation_images, self.source.num_validation)
        self.draw_counter = itertools.count()

    def run_pending(self, step: int, loss: float) -> None:
        """Everything that is open for this step."""
        tasks, num_ranks = self.world.broadcast_from_rank_zero(
            self._remove_outdated_and_find_pending(step) if self.world.is_rank_zero else None
        )
        self._run_tasks(step, loss, tasks, self._sample_folder(step, num_ranks))

    def draw_samples(self, step: int, loss: float) -> None:
        """The samples of a step that is no date, and nothing else, in a folder of its own: names by the epoch belong to its date."""
        sample_folder = SampleFolder(folder=self.run.samples_at(step), naming=self._naming(), label=self._label())
        if self.world.is_rank_zero:
            sample_folder.clear()  # what a start that never saved this step may have left
        self._run_tasks(step, loss, ["samples", *(["raw"] if self.config.sample_raw else [])], sample_folder)

    def _run_tasks(self, step: int, loss: float, tasks: list[str], sample_folder: SampleFolder) -> None:
        if "samples" in tasks and self.world.is_rank_zero:
            self._write_empty_index(step, sample_folder)
        drawn: list[tuple[SampleFolder, list[SampleRow]]] = []
        with self._offload_optimizers():
            with self._swap_in_ema():
                if "heldout" in tasks:
                    self._log_validation_loss(step)
                if "samples" in tasks:
                    drawn.append(self._draw_to(step, sample_folder))
            if "raw" in tasks:
                drawn.append(self._draw_to(step, dataclasses.replace(sample_folder, suffix="_raw")))
                self.engine.reshard()
        if drawn and self.world.is_rank_zero:
            self._publish_samples(step, loss, drawn)

    def _remove_outdated_and_find_pending(self, step: int) -> tuple[list[str], int]:
        """What is not there yet, everything after a save and after a kill what it left undone, and the ranks its names are made for."""
        tasks = []
        known = any(row.get("metric") == "heldout_loss" and row["step"] == step for row in self.metrics.read_rows())
        if self.num_validation and not known:
            tasks.append("heldout")
        if not (self.config.sample and self.settings.prompts):
            return tasks, self.world.size
        sample_folder = self._sample_folder(step, self.world.size)
        recorded = sample_folder.read_index()
        if (
            recorded.get("step", step) != step
            or recorded.get("settings", self._settings_json()) != self._settings_json()
        ):
            recorded = {}
            sample_folder.clear()  # drawn another way before this start, or at another step of this epoch; the names would hide it
        elif not recorded and sample_folder.prefix:
            sample_folder.clear()  # whatever these are of
        sample_folder = self._sample_folder(
            step, recorded.get("ranks", self.world.size)
        )  # as many as began, if now there are others
        sample_folders = (
            [sample_folder, dataclasses.replace(sample_folder, suffix="_raw")]
            if self.config.sample_raw
            else [sample_folder]
        )
        # An index that a kill left empty, or that was damaged since, is made again from the images.
        is_listed = bool(recorded.get("samples")) and sample_folder.grid_path.exists()
        done = is_listed and all(is_drawn(each, spec) for each in sample_folders for spec in self.settings.specs())
        if not done:
            tasks += ["samples", *(["raw"] if self.config.sample_raw else [])]
        return tasks, recorded.get("ranks", self.world.size)

    def _sample_folder(self, step: int, num_ranks: int) -> SampleFolder:
        if self.config.sample_names == "rank":
            by_rank = RankNaming(epoch=self.epoch_of(step), num_prompts=len(self.settings.prompts), num_ranks=num_ranks)
            return SampleFolder(folder=self.run.samples, naming=by_rank, label=self._label(), depth=1)
        return SampleFolder(folder=self.run.samples_at(step), naming=self._naming(), label=self._label())

    def _naming(self) -> Literal["index", "gpu"]:
        return "gpu" if self.config.sample_names == "gpu" else "index"

    def _label(self) -> str:
        return "student" if self.comparison_folder else ""

    def _write_empty_index(self, step: int, sample_folder: SampleFolder) -> None:
        """Say how the images of this folder are drawn before the first is there: a kill may leave some of them behind."""
        with contextlib.suppress(OSError):  # a disk that cannot be written costs the samples, not the training
            sample_folder.create()
            write_json_with_digest(
                sample_folder.index_path, self._index_metadata(step, sample_folder) | {"samples": []}
            )

    def _index_metadata(self, step: int, sample_folder: SampleFolder) -> dict[str, Any]:
        names = sample_folder.naming
        by_rank = {"epoch": names.epoch, "ranks": names.num_ranks} if isinstance(names, RankNaming) else {}
        return {"step": step, **by_rank, "settings": self._settings_json()}

    def _settings_json(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(json.dumps(self.settings.as_json()))
        return settings

    def _log_validation_loss(self, step: int) -> None:
        with HeartbeatMonitor(self.world, f"validation loss at step {step}", self.config.dist_timeout_s) as monitor:
            losses = validation_loss.compute_validation_losses(
                self.world,
                self.denoiser,
                self.source,
                denoising_objective(self.denoiser),
                num_images=self.num_validation,
                dtype=self.config.dtype,
                heartbeat=monitor.heartbeat,
            )
            rank_losses = monitor.gather_results(losses)
        if not self.world.is_rank_zero:
            return
        values = validation_loss.summarize_losses(rank_losses, self.num_validation)
        bins = {name: value for name, value in values.items() if name != "heldout_loss"}
        self.metrics.append({"step": step, "metric": "heldout_loss", "value": values["heldout_loss"], "bins": bins})
        for tracker in self.trackers:
            tracker.log_scalars(step, {f"heldout/{name}": value for name, value in values.items()})

    def _draw_to(self, step: int, sample_folder: SampleFolder) -> tuple[SampleFolder, list[SampleRow]]:
        start_time = time.perf_counter()
        suffix = sample_folder.suffix
        sampler = self._make_sampler(self.settings, "contiguous" if sample_folder.prefix else "round")
        rows = sampler.run(sample_folder, f"step {step}{suffix} #{next(self.draw_counter)}")
        failed = sum(row["state"] == "failed" for row in rows)
        seconds = time.perf_counter() - start_time
        log.info("samples of step %d%s: %d done, %d failed, %.2f s", step, suffix, len(rows) - failed, failed, seconds)
        return sample_folder, rows

    def _make_sampler(self, settings: SampleSettings, shares: ShareMode = "round") -> DenoiserSampler:
        return DenoiserSampler(
            self.world,
            self.denoiser,
            settings,
            sharded=self.engine.sharded,
            timeout_s=self.config.sample_timeout_s or self.config.dist_timeout_s,
            stop=self.stop,
            share_mode=shares,
        )

    def evaluate(self, step: int) -> None:
        """The numbers of this step; one that cannot be made is reported, and training goes on."""
        if self.evaluator is None:
            return
        report = self.evaluator.read_report(step) if self.world.is_rank_zero else None
        if self.world.broadcast_from_rank_zero(report is None):
            report = self._run_evaluation(self.evaluator, step)
            free_memory(self.world.device)
        if self.world.is_rank_zero and report is not None:
            self._log_report(report)

    def _run_evaluation(self, evaluator: TrainingEvaluator, step: int) -> EvaluationReport | None:
        try:
            with self._offload_optimizers():
                return evaluator.run(step, self._make_sampler(evaluator.settings), self._swap_in_ema, self.stop)
        except (RankFailure, Interrupted):
            raise
        except HalationError as error:
            log.error("the evaluation of step %d failed; training goes on: %s", step, error)
            self.engine.sync_master_weights()  # an evaluation fails on all ranks or on none
            return None

    @contextlib.contextmanager
    def _offload_optimizers(self) -> Iterator[None]:
        """Memory for drawing where it is scarce."""
        with contextlib.ExitStack() as stack:
            for engine in (self.engine, *self.other_engines) if self.config.sample_offload else ():
                stack.enter_context(engine.offload_optimizer_state())
            yield

    @contextlib.contextmanager
    def _swap_in_ema(self) -> Iterator[None]:
        """The averages in the model's place; whatever happens inside, shards are where the EMA expects them when it goes back.

        After an error the module is not told of its own weights again: that may take all ranks, and the error may be one rank's.
        """
        self.ema.swap()
        try:
            self.engine.sync_master_weights()
            yield
        finally:
            self.engine.reshard()
            self.ema.swap()
        self.engine.sync_master_weights()

    def _log_report(self, report: EvaluationReport) -> None:
        """The report's numbers to metrics.jsonl and the trackers, unless a kill came between the report and the rest of this."""
        step, lines = report["step"], evaluation_rows(report)
        known = [row for row in self.metrics.read_rows() if row["step"] == step and is_evaluation_row(row)]
        lines = [line for line in lines if line not in known]
        if not lines:
            return
        for line in lines:
            self.metrics.append(line)
        for tracker in self.trackers:
            tracker.log_scalars(step, {f"eval/{line['metric']}": line["value"] for line in lines})
        try:
            publish_plot(self.run, self.metrics.read_rows())
        except OSError as error:
            log.error("cannot plot the evaluations; training goes on: %s", error)
        summary = ", ".join(f"{line['metric']} {line['value']:.4g}" for line in lines)
        few = " (few images: a quick look)" if any(line["few"] for line in lines) else ""
        self.print_line(f"evaluation of step {step}: {summary}{few}")
        log.info("evaluation of step %d in %.1f s: %s", step, report["seconds"], summary)

    def _publish_samples(self, step: int, loss: float, drawn: list[tuple[SampleFolder, list[SampleRow]]]) -> None:
        """Grid and index, and the images to the trackers under one tag a prompt."""
        (sample_folder, rows), *others = drawn
        comparison = None
        if self.comparison_folder:
            files = {spec.index: self.comparison_folder.image_path(spec) for spec in self.settings.specs()}
            comparison = ComparisonImages(label=self.comparison_folder.label, files=files)
        try:
            publish_index(
                sample_folder, rows, self._index_metadata(step, sample_folder) | {"loss": loss}, others, comparison
            )
            images = {
                f"samples{where.suffix}/{row['index']:02d} {row['prompt'][:60]}": read_png(where.folder / row["file"])[
                    0
                ]
                for where, those in drawn
                for row in those
                if row["state"] == "done"
            }
        except OSError as error:
            log.error(
                "cannot write to directory %s: %s; training goes on", sample_folder.folder, error.strerror or error
            )
            return
        except InputError as error:  # somebody removed or damaged an image between its writing and now
            log.error("a sample cannot be read again; training goes on: %s", error)
            return
        for tracker in self.trackers:
            tracker.log_images(step, images)
        missing = sum(row["state"] != "done" for row in rows)
        self.print_line(
            f"samples of step {step}: {sample_folder.grid_path}" + (f" ({missing} missing)" if missing else "")
        )
