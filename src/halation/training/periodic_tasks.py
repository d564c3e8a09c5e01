"""Validation loss, samples and evaluations during training, and their schedule.

All ranks take part in them, with the EMA swapped in for the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from halation import work_division
from halation.data.dataset_protocol import ImageDataset
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.world import HeartbeatMonitor, World
from halation.errors import HalationError, InputError, Interrupted, RankFailure
from halation.flow.ema import Ema
from halation.flow.seeded_noise import training_draw
from halation.images.png_codec import read_png
from halation.models.denoiser import Denoiser
from halation.runs import run_folder as runs
from halation.runs.run_folder import write_json_with_digest
from halation.sampling.all_rank_sampler import DenoiserSampler, SampleSettings, ShareMode
from halation.sampling.sample_folder import (
    ComparisonImages,
    RankNaming,
    SampleFolder,
    SampleRow,
    is_drawn,
    publish_index,
)
from halation.training import evaluation
from halation.training.config import TrainConfig
from halation.training.loop import MicroBatch, Objective, denoising_objective, mixed_precision
from halation.training.reporting import Tracker

SaveKind = Literal["kept", "latest"]


@dataclass(frozen=True, kw_only=True)
class CheckpointSchedule:
    """The scheduled steps of one run.

    Epoch ends are scheduled too. If epochs are short only some of them are, or a run on a small folder would do little
    but save.
    """

    n_steps: int
    ckpt_every: int
    ckpt_latest_every: int
    num_images: int
    global_batch: int
    eval_every: int = 0
    epoch_interval: int = 0
    """Epochs between scheduled epoch ends, for runs that count in epochs of whole steps (at least one).

    0 derives it from the other intervals (`default_epoch_interval`)."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_images // self.global_batch)

    @property
    def default_epoch_interval(self) -> int:
        """Epochs between scheduled epoch ends: at least the shortest interval of the others."""
        intervals = [every for every in (self.ckpt_every, self.ckpt_latest_every) if every > 0]
        apart = min(intervals, default=self.n_steps) * self.global_batch
        return max(1, -(-apart // self.num_images))

    def is_epoch_end(self, step: int) -> bool:
        """Return True if a scheduled epoch end falls into this step."""
        if self.epoch_interval:
            return step % (self.steps_per_epoch * self.epoch_interval) == 0
        images = self.num_images * self.default_epoch_interval
        if images == self.num_images or self.num_images <= (step - 1) * self.global_batch:
            return step * self.global_batch // images > (step - 1) * self.global_batch // images
        return step * self.global_batch >= self.num_images  # the end of the first epoch is always scheduled

    def epoch(self, step: int) -> int:
        """The epoch of this step, counted in whole steps from 1."""
        return -(-step // self.steps_per_epoch)

    def save_kind(self, step: int) -> SaveKind | None:
        """Kind of the checkpoint to save after this step, or None. Samples follow each of them."""
        if step == self.n_steps or (self.ckpt_every > 0 and step % self.ckpt_every == 0):
            return "kept"
        if (self.ckpt_latest_every > 0 and step % self.ckpt_latest_every == 0) or self.is_epoch_end(step):
            return "latest"
        return None

    def should_evaluate(self, step: int) -> bool:
        """Return True if this step is evaluated, which does not schedule a checkpoint.

        The last step has both.
        """
        return self.eval_every > 0 and (step % self.eval_every == 0 or step == self.n_steps)


log = logging.getLogger(__name__)


def remove_reports_after(run: runs.RunFolder, step: int) -> None:
    """Remove evaluations of steps that are about to be trained again; -1 removes all."""
    for path in (run.folder / "evaluation").glob("step_*"):
        if path.name.removesuffix(".json") > runs.step_name(step) or step < 0:
            runs.remove_path(path)


@dataclasses.dataclass(kw_only=True)
class PeriodicTasks:
    """Validation loss and samples of saved steps, and evaluations.

    A second call for the same step does only what is still missing.
    """

    world: World
    config: TrainConfig
    run: runs.RunFolder
    source: ImageDataset
    denoiser: Denoiser
    engine: Engine
    ema: Ema | None
    settings: SampleSettings
    metrics: runs.MetricsFile
    trackers: list[Tracker]
    stop: Callable[[], int]
    print_line: Callable[[str], None]
    epoch_of: Callable[[int], int]
    evaluator: evaluation.TrainingEvaluator | None = None
    comparison_folder: SampleFolder | None = None
    other_engines: tuple[Engine, ...] = ()
    """Engines of networks that are trained but not sampled from."""

    def __post_init__(self) -> None:
        self.num_validation = min(self.config.validation_images, self.source.num_validation)
        self.draw_counter = itertools.count()

    def run_pending(self, step: int, loss: float) -> None:
        """Run every task of this step whose results are missing."""
        tasks, num_ranks = self.world.broadcast_from_rank_zero(
            self._remove_outdated_and_find_pending(step) if self.world.is_rank_zero else None
        )
        self._run_tasks(step, loss, tasks, self._sample_folder(step, num_ranks))

    def draw_samples(self, step: int, loss: float | None) -> None:
        """Sample at a step that is not scheduled, into a folder of the step; run no other task.

        Step 0 is before the first step, and has no loss.
        File names by epoch are reserved for the scheduled step of the epoch.
        """
        sample_folder = SampleFolder(folder=self.run.samples_at(step), naming=self._naming(), label=self._label())
        if self.world.is_rank_zero:
            sample_folder.clear()  # an earlier start that never saved this step may have left files
        self._run_tasks(step, loss, ["samples", *(["raw"] if self.config.sample_raw else [])], sample_folder)

    def _run_tasks(self, step: int, loss: float | None, tasks: list[str], sample_folder: SampleFolder) -> None:
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
        """Return the tasks without results, and the number of ranks for the file names.

        After a save these are all tasks, after a kill those that it interrupted. Samples with other settings, or of
        another step of the epoch, are removed first.
        """
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
            # Sampled with other settings or at another step of this epoch; the file names would be the same.
            sample_folder.clear()
        elif not recorded and sample_folder.prefix:
            sample_folder.clear()  # files without an index may be of any step
        sample_folder = self._sample_folder(
            step, recorded.get("ranks", self.world.size)
        )  # the number of ranks that started these samples, even if it has changed
        sample_folders = (
            [sample_folder, dataclasses.replace(sample_folder, suffix="_raw")]
            if self.config.sample_raw
            else [sample_folder]
        )
        # An index that a kill left empty, or that was damaged since, is rebuilt from the images.
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
        """Record the sample settings before the first image; a kill may leave some images."""
        with contextlib.suppress(OSError):  # an unwritable disk costs the samples, not the training
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
            losses = compute_validation_losses(
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
        values = summarize_losses(rank_losses, self.num_validation)
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
        """Evaluate this step. A failed evaluation is logged, and training continues."""
        if self.evaluator is None:
            return
        report = self.evaluator.read_report(step) if self.world.is_rank_zero else None
        if self.world.broadcast_from_rank_zero(report is None):
            report = self._run_evaluation(self.evaluator, step)
            self.world.free_memory()  # only here, where no traceback of an error still references the extractors
        if self.world.is_rank_zero and report is not None:
            self._log_report(report)

    def _run_evaluation(self, evaluator: evaluation.TrainingEvaluator, step: int) -> evaluation.EvaluationReport | None:
        try:
            with self._offload_optimizers():
                return evaluator.run(step, self._make_sampler(evaluator.settings), self._swap_in_ema, self.stop)
        except (RankFailure, Interrupted):
            raise
        except HalationError as error:
            log.error("the evaluation of step %d failed; training continues: %s", step, error)
            self.engine.sync_master_weights()  # an evaluation fails on all ranks or on none
            return None

    @contextlib.contextmanager
    def _offload_optimizers(self) -> Iterator[None]:
        """Free device memory for sampling, if --sample_offload is set."""
        with contextlib.ExitStack() as stack:
            for engine in (self.engine, *self.other_engines) if self.config.sample_offload else ():
                stack.enter_context(engine.offload_optimizer_state())
            yield

    @contextlib.contextmanager
    def _swap_in_ema(self) -> Iterator[None]:
        """Swap the EMA in for the weights, and back again; without an EMA the weights stay.

        Parameters are resharded before the swap back, even after an error: the EMA expects shards. After an error
        `sync_master_weights` is not called, because it may be collective and the error may be on one rank only.
        """
        if self.ema is None:
            try:
                yield
            finally:
                self.engine.reshard()
            return
        self.ema.swap()
        try:
            self.engine.sync_master_weights()
            yield
        finally:
            self.engine.reshard()
            self.ema.swap()
        self.engine.sync_master_weights()

    def _log_report(self, report: evaluation.EvaluationReport) -> None:
        """Log the scores of a report to metrics.jsonl and the trackers, unless already logged.

        A kill may have come between the report and its lines.
        """
        step, lines = report["step"], evaluation.evaluation_rows(report)
        known = [row for row in self.metrics.read_rows() if row["step"] == step and evaluation.is_evaluation_row(row)]
        lines = [line for line in lines if line not in known]
        if not lines:
            return
        for line in lines:
            self.metrics.append(line)
        for tracker in self.trackers:
            tracker.log_scalars(step, {f"eval/{line['metric']}": line["value"] for line in lines})
        try:
            evaluation.publish_plot(self.run, self.metrics.read_rows())
        except OSError as error:
            log.error("cannot plot the evaluations; training continues: %s", error)
        summary = ", ".join(f"{line['metric']} {line['value']:.4g}" for line in lines)
        few = " (few images: rough scores)" if any(line["few"] for line in lines) else ""
        self.print_line(f"evaluation of step {step}: {summary}{few}")
        log.info("evaluation of step %d in %.1f s: %s", step, report["seconds"], summary)

    def _publish_samples(
        self, step: int, loss: float | None, drawn: list[tuple[SampleFolder, list[SampleRow]]]
    ) -> None:
        """Write grid and index, and log the images to the trackers, one tag per prompt."""
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
                "cannot write to directory %s: %s; training continues", sample_folder.folder, error.strerror or error
            )
            return
        except InputError as error:  # an image was removed or damaged after it was written
            log.error("cannot read a sample back; training continues: %s", error)
            return
        for tracker in self.trackers:
            tracker.log_images(step, images)
        missing = sum(row["state"] != "done" for row in rows)
        self.print_line(
            f"samples of step {step}: {sample_folder.grid_path}" + (f" ({missing} missing)" if missing else "")
        )


NUM_BINS = 8
VALIDATION_BATCH_SIZE = 32
NOISE_SEED = 0x48414C41  # a separate stream: the same validation noise for every run, whatever its seed


def compute_validation_losses(
    world: World,
    denoiser: Denoiser,
    source: ImageDataset,
    objective: Objective,
    *,
    num_images: int,
    dtype: str,
    heartbeat: Callable[[], None],
) -> dict[int, list[float]]:
    """Return this rank's validation losses, a list of rows for each batch.

    A row is image `row // NUM_BINS` at the middle of time bin `row % NUM_BINS`. Rows are split into batches of one size
    and assigned round-robin, so that every rank runs the same number of forwards and no loss depends on the number of
    ranks.
    """
    num_rows = num_images * NUM_BINS
    num_batches = -(-num_rows // VALIDATION_BATCH_SIZE)
    losses: dict[int, list[float]] = {}
    for round_index in range(work_division.num_rounds(num_batches, world.size)):
        batch = work_division.round_robin_batch(round_index, world.rank, world.size, num_batches)
        rows = np.arange(VALIDATION_BATCH_SIZE) + (batch or 0) * VALIDATION_BATCH_SIZE
        inputs = _make_micro_batch(denoiser, source, np.minimum(rows, num_rows - 1), world.device)
        with torch.no_grad(), mixed_precision(world.device, dtype):
            values = objective(denoiser.module, inputs)
        heartbeat()
        if batch is not None:
            losses[batch] = values.double().tolist()[: max(0, num_rows - batch * VALIDATION_BATCH_SIZE)]
    return losses


def _make_micro_batch(denoiser: Denoiser, source: ImageDataset, rows: np.ndarray, device: torch.device) -> MicroBatch:
    image_indices = [int(row) // NUM_BINS for row in rows]
    decoded = {
        number: source.validation(number) for number in dict.fromkeys(image_indices)
    }  # decode an image once, not once per bin
    images = [decoded[number] for number in image_indices]
    samples = torch.from_numpy(np.stack([image.pixels for image in images])).to(device)
    if samples.is_floating_point():
        x0 = samples.float()
    else:  # large images in smaller batches: an autoencoder takes more memory per image than the model
        size = VALIDATION_BATCH_SIZE * 256**2 // (samples.shape[1] * samples.shape[2])
        pieces = samples.split(max(1, min(VALIDATION_BATCH_SIZE, size)))
        x0 = torch.cat([denoiser.space.encode(piece) for piece in pieces])
    noise = np.stack([training_draw(NOISE_SEED, int(row), tuple(x0.shape[1:])).noise for row in rows])
    condition = denoiser.encode_captions([image.caption for image in images], [image.label for image in images])
    originals = torch.tensor([image.original_size for image in images], dtype=torch.int64)
    condition = denoiser.add_size_condition(condition, originals, source.height, source.width)
    return MicroBatch(
        x0=x0,
        noise=torch.from_numpy(noise).to(device),
        t=torch.from_numpy(((rows % NUM_BINS) + 0.5) / NUM_BINS).float().to(device),
        condition={name: value.to(device) for name, value in condition.items()},
        weight=torch.ones(len(rows), device=device),
    )


def summarize_losses(rank_losses: list[dict[str, Any]], num_images: int) -> dict[str, float]:
    """Mean loss per bin and overall, from the rows of all ranks in their order."""
    by_batch = {int(batch): values for losses in rank_losses for batch, values in losses.items()}
    rows = np.array([value for batch in sorted(by_batch) for value in by_batch[batch]])
    assert len(rows) == num_images * NUM_BINS, "a validation row is missing"
    bins = rows.reshape(num_images, NUM_BINS).mean(0)
    bin_losses = {f"heldout_loss_t{(index + 0.5) / NUM_BINS:.2f}": float(value) for index, value in enumerate(bins)}
    return {"heldout_loss": float(rows.mean()), **bin_losses}
