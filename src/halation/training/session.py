"""One rank's training session: `prepare()` builds the components, `run()` trains."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from halation import logging_setup, work_division
from halation.config import as_json
from halation.distributed import launcher, rng
from halation.distributed.checkpoint.reader import CheckpointReader
from halation.distributed.checkpoint.writer import CheckpointWriter
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.stop_signals import StopSignals, exit_code
from halation.distributed.world import HeartbeatMonitor, World, check_ranks_agree, run_on_rank_zero, run_with_heartbeat
from halation.errors import HalationError, InputError, Interrupted, RankFailure, format_count
from halation.flow.ema import Ema
from halation.logging_setup import ON_CONSOLE, log_duration
from halation.models.denoiser import compile_blocks
from halation.models.dtypes import DTYPES
from halation.progress import StepProgress
from halation.runs import control_requests
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.sampling import sample_folder
from halation.training import (
    build_components,
    checkpoint_state,
    evaluation,
    memory_fit_check,
    pipeline_finetuning,
    reporting,
    training_task,
)
from halation.training.config import TrainConfig, missing_settings
from halation.training.loop import StepReport, StepSettings, TrainState, train_steps
from halation.training.periodic_tasks import CheckpointSchedule, PeriodicTasks, remove_reports_after
from halation.training.reporting import ThroughputWindow
from halation.training.training_task import TaskFactory, TrainingTask

log = logging.getLogger(__name__)


class TrainingSession:
    """One rank of a training run: `prepare()` does the long collective setup, `run()` trains."""

    def __init__(
        self,
        world: World,
        config: TrainConfig,
        new_task: TaskFactory = TrainingTask,
        monitor: FolderMonitor | None = None,
    ) -> None:
        """`monitor` is that of the run folder, on the one rank whose process has locked it."""
        self.monitor = monitor
        self.world = world
        self.config = config
        self.folder = runs.RunFolder(config.output_dir)
        self.task = new_task(world, config, self.folder)
        self.train_state = TrainState(loss_scale=2.0**16 if config.dtype == "fp16" else 1.0)
        self.metrics = runs.MetricsFile(self.folder.metrics)
        self.trackers: list[reporting.Tracker] = []
        self.inbox = control_requests.ControlInbox(config.output_dir, is_enabled=world.is_rank_zero)
        self.cleanup = contextlib.ExitStack()
        self.smoothed_loss = 0.0
        self.is_prepared = False

    def prepare(self) -> None:
        """Open model and data, cache encoded inputs, build the engines; likely failures first."""
        world, config = self.world, self.config
        self.echo = logging_setup.configure_rank_logging(self.folder.logs, world.rank)
        rng.seed_all(config.seed, world.rank)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        config, missing = pipeline_finetuning.read_recorded_settings(world, config, self.folder)
        self.task.config = config
        self._resolve_global_batch(config)
        self.task.open()
        self.denoiser, self.source = self.task.denoiser, self.task.source
        self.task.config = pipeline_finetuning.resolve_defaults(
            world,
            config,
            missing,
            self.folder,
            self.denoiser,
            self.source.num_train,
            lambda: memory_fit_check.num_images_that_fit(world, self.task.config, self.denoiser),
        )
        self._resolve_global_batch(self.task.config)
        self.config = config = self.task.resolve_num_steps(self.global_batch)
        memory_fit_check.check_weights_fit(world, config, self.denoiser)
        self.sample_settings = settings = self.task.sample_settings()
        if world.is_rank_zero and missing:
            guidance = settings.guidance_scale
            defaults = pipeline_finetuning.describe_defaults(missing, config, self.denoiser.name, guidance)
            log.info("%s", defaults, extra=ON_CONSOLE)
        num_drawn = len(settings.prompts) if config.sample_all else world.size
        self.checkpoint_settings = dataclasses.replace(settings, prompts=settings.prompts[:num_drawn])
        self.evaluator: evaluation.TrainingEvaluator | None = None
        if config.eval_every:
            with log_duration("preparing the evaluation"):
                self.evaluator = evaluation.TrainingEvaluator(world, config, self.folder, self.source, settings)
                self.evaluator.prepare()
        if config.model_path:
            prompts = (*settings.texts(), *(self.evaluator.settings.prompts if self.evaluator else ()))
            with log_duration("encoding texts"):
                pipeline_finetuning.cache_texts(world, config, self.folder, self.denoiser, self.source, prompts)
        self.task.prepare(self.checkpoint_settings)
        with log_duration("building the engine"):
            self._build_networks()
        self.checkpoints = CheckpointWriter(
            world, self.folder.checkpoints, keep_last=config.keep_last, sharded=self.engine.saves_shards
        )
        self.schedule = CheckpointSchedule(
            n_steps=config.n_steps,
            ckpt_every=config.ckpt_every,
            ckpt_latest_every=config.ckpt_latest_every,
            num_images=self.source.num_train,
            global_batch=self.global_batch,
            eval_every=config.eval_every,
            epoch_interval=self.task.epoch_interval,
        )
        self.is_prepared = True

    def _resolve_global_batch(self, config: TrainConfig) -> None:
        """Record the global batch and check the engine's settings, before loading the model if it is known by then."""
        if not {"batch_size", "accumulate"} & set(missing_settings(config)):
            self.global_batch = build_components.resolve_global_batch(self.world, config, self.folder)
        elif config.engine == "deepspeed":  # its JSON file may contain the batch
            return
        else:
            config, self.global_batch = dataclasses.replace(config, batch_size=1, accumulate=1), self.world.size
        settings = build_components.engine_settings(self.world, config, self.global_batch)
        build_components.check_engine_settings(config.engine, self.world, settings)

    def _build_networks(self) -> None:
        self.denoiser.module.train()
        if self.config.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        if self.world.device.type == "cuda":
            estimate = memory_fit_check.check_batch_fits(self.task, self.config, self.global_batch)
            log.info("estimated memory of a step: %.1f GiB (%s)", estimate.total / 2**30, estimate)
        # FSDP moves one unit after the other to the device; a model that only fits in shards must not be moved as a
        # whole.
        self.denoiser.to(self.world.device, module=self.config.engine != "fsdp")
        if self.config.compile:
            compile_blocks(self.denoiser.shard_units())
        self.engine = self._build_engine(self.denoiser.module, self.denoiser.shard_units())
        decay = self.config.ema_decay
        self.ema = Ema(self.engine.master_weights(), decay) if decay else None
        self.networks = self.task.build_networks(self.engine, self.ema, self._build_engine)

    def _build_engine(self, module: torch.nn.Module, units: list[torch.nn.Module]) -> Engine:
        config = self.config
        settings = build_components.engine_settings(self.world, config, self.global_batch)
        engine = build_components.build_engine(config.engine, self.world, module, units, settings)
        engine.prepare_optimizer(config.lr, config.betas, config.weight_decay)
        return engine

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_prepared:
            return
        if error is None or isinstance(error, Interrupted):  # after other errors, restarted ranks take the requests
            self.inbox.close(self.train_state.step)
        if error is not None:
            self.checkpoints.shorten_timeout()
        self.checkpoints.wait()
        self.cleanup.close()
        for tracker in self.trackers:
            tracker.close()

    # -- running

    def run(self) -> None:
        """Resume if there is a checkpoint, train to the last step, save, sample and export."""
        world, config = self.world, self.config
        fresh = not self._resume()
        memory_fit_check.warm_up(self.task, config, self.networks, self.checkpoints, self.global_batch)
        if world.device.type == "cuda":
            memory_fit_check.check_samples_fit(self.task, config, self.networks, self.sample_settings)
        if world.is_rank_zero:
            names = reporting.select_trackers(config.report_to, required=config.report_to != TrainConfig.report_to)
            tracked = reporting.TrackedRun(
                folder=self.folder.folder,
                step=self.train_state.step,
                project=config.tracker_project,
                entity=config.tracker_entity,
                run_name=config.run_name,
                config=as_json(config),
            )
            self.trackers = reporting.open_trackers(names, tracked)
        kind = config.progress if world.is_rank_zero else "none"
        with StopSignals() as signals, StepProgress(kind, config.n_steps, self.train_state.step) as progress:
            self.echo.print_line = progress.print_line
            self.progress = progress
            self.signals = signals
            self.step_logger = reporting.StepLogger(
                world=world,
                config=config,
                progress=progress,
                metrics=self.metrics,
                trackers=self.trackers,
                flops_per_image=self.denoiser.flops_per_image(),
                peak_flops=self.peak_flops,
                measure_peak_flops=self._measure_peak_again,
                peak_memory_gib=lambda: memory_fit_check.peak_memory_gib(world.device),
                num_train=self.source.num_train,
                start_time=self.start_time,
            )
            self.periodic_tasks = self._make_periodic_tasks()
            if world.is_rank_zero:
                resumed_at = None if fresh else self.train_state.step
                reporting.log_run_start(
                    self.task, config, self.engine, self.checkpoint_settings, self.global_batch, resumed_at
                )
            try:
                if fresh and config.sample and self.sample_settings.prompts and self.task.has_initial_samples():
                    self.periodic_tasks.draw_samples(0, None)
                if not fresh:
                    self._after_save(self.train_state.step)
                    self._evaluate(self.train_state.step, saved=True)
                self._train()
            finally:
                self.echo.print_line = None
            self._export()

    def _train(self) -> None:
        config, world = self.config, self.world
        number, rows = work_division.micro_batch_layout(self.global_batch, world.size, config.batch_size)
        log.info(
            "global batch %d: %s of %s on %s",
            self.global_batch,
            format_count(number, "micro-batch"),
            format_count(rows, "row"),
            f"each of {world.size} ranks" if world.size > 1 else "1 rank",
        )
        loader = self.task.open_loader(self.train_state, self.global_batch)
        self.cleanup.callback(loader.close)
        settings = StepSettings(
            global_batch=self.global_batch,
            lr=config.lr,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            grad_clip=config.grad_clip,
            dtype=config.dtype,
            nan_policy=config.nan_policy,
        )
        steps = train_steps(
            world,
            self.networks,
            (training_task.to_micro_batches(self.denoiser.space, batch, rows, world.device) for batch in loader),
            settings,
            self.train_state,
            stop=lambda: self.signals.number,
            save_failed=lambda: self.checkpoints.error is not None or self._is_folder_lost(),
            before_update=self.checkpoints.wait_for_copy,
            active_networks=self.task.active_networks,
            poll_requests=self.inbox.poll,
        )
        window = ThroughputWindow()
        for report in steps:
            window.add(self.global_batch)
            if report.save_failed:
                if self.monitor is not None:
                    self.monitor.check()
                self.checkpoints.raise_if_failed()
                raise RankFailure("another rank could not save its part of a checkpoint; see its log for the reason")
            save_kind = self.schedule.save_kind(report.step)
            requested = self._accept_requests(report) if report.requests else frozenset()
            is_saved = bool(save_kind or report.stop_signal or requested & {"save", "stop"})
            self._log(report, window, is_saved)
            if is_saved:
                self._save(save_kind or "latest")
                window.reset()
            if report.stop_signal:
                self._interrupt(report.step, report.stop_signal)
            if save_kind and requested != {"stop"}:
                self._after_save(report.step)
                window.reset()
            elif "sample" in requested:
                self.checkpoints.wait_for_copy()
                self.periodic_tasks.draw_samples(report.step, self.smoothed_loss)
                window.reset()
            if "stop" in requested:
                self._interrupt(report.step)
            if self._evaluate(report.step, saved=bool(save_kind)):
                window.reset()

    def _measure_peak_again(self) -> float:
        # On a GPU the matrices may not fit beside the model.
        return measure_peak_flops(self.world.device, self.config.dtype) if self.world.device.type == "cpu" else 0.0

    def _is_folder_lost(self) -> bool:
        return self.monitor is not None and bool(self.monitor.problem)

    def _log(self, report: StepReport, window: ThroughputWindow, is_saved: bool) -> None:
        if report.skipped:
            log.warning("step %d was skipped: the gradient was not finite", report.step)
        if math.isfinite(report.loss):
            self.smoothed_loss = (
                report.loss if self.smoothed_loss == 0.0 else 0.9 * self.smoothed_loss + 0.1 * report.loss
            )
        if self.world.is_rank_zero:
            self.step_logger.write(
                report, window.images_per_s(), self.smoothed_loss, self.train_state.num_images, is_saved
            )

    # -- checkpoints and the tasks after them

    def _save(self, kind: str) -> None:
        for network in self.networks.values():
            check_ranks_agree(self.world, network.engine.replicated_parameters(), f"at step {self.train_state.step}")
        shared_state = checkpoint_state.shared_state(
            self.train_state, self.ema, self.denoiser.describe(), self.sample_settings.as_json()
        )
        rank_state = {"rng": rng.capture(self.world.device)}
        self.checkpoints.save(
            self.train_state.step, kind, checkpoint_state.checkpoint_parts(self.networks), shared_state, rank_state
        )
        blocked_s, queued_s = self.checkpoints.blocked_s, self.checkpoints.queued_s
        log.info("checkpoint %d (%s): training waited %.3f s", self.train_state.step, kind, blocked_s + queued_s)
        if queued_s > 1.0:
            log.info("%.1f s of this for the previous checkpoint to be written; checkpoints are too frequent", queued_s)

    def _resume(self) -> bool:
        """Load the newest valid checkpoint; return False if there is none."""

        def find_checkpoint(_heartbeat: Any) -> list[Any]:
            found = checkpoint_state.find_checkpoint(self.folder.checkpoints, restart=self.config.restart)
            return [str(found.folder), found.step] if found else ["", 0]

        folder_name, step = run_on_rank_zero(
            self.world, "looking for a checkpoint", find_checkpoint, self.config.dist_timeout_s
        )
        self.start_time = time.monotonic()
        self.peak_flops = measure_peak_flops(self.world.device, self.config.dtype)
        if not folder_name:
            if self.world.is_rank_zero:
                self._discard_results_after(-1)  # results of an earlier start that never saved
            return False
        if step > self.config.n_steps:
            raise InputError(
                f"--n_steps {self.config.n_steps}, but the run is at step {step}",
                "at least as many steps as are done",
                f"give --n_steps {step} or more",
            )
        reader = CheckpointReader(Path(folder_name))
        self.train_state = checkpoint_state.restore(reader, self.networks)
        rank_state = reader.read_rank_state(self.world.rank)
        if rank_state:
            rng.restore(rank_state["rng"], self.world.device)
        if self.world.is_rank_zero:
            self._discard_results_after(step)
            known = self.metrics.read_rows()
            self.start_time -= max((row.get("time_s", 0.0) for row in known), default=0.0)
            self.smoothed_loss = next((row["loss"] for row in reversed(known) if row.get("loss") is not None), 0.0)
        return True

    def _discard_results_after(self, step: int) -> None:
        """Remove metrics, samples and evaluations of steps that are about to be trained again."""
        self.metrics.truncate_after(step)
        sample_folder.remove_samples_after(self.folder.samples, step)
        remove_reports_after(self.folder, step)

    def _wait_for_save(self) -> None:
        """Wait until every rank knows that the last checkpoint is committed.

        A rank that exited earlier would make the others fail.
        """
        with HeartbeatMonitor(
            self.world, f"saving step {self.train_state.step}", self.config.dist_timeout_s
        ) as monitor:
            self.checkpoints.wait(monitor.heartbeat)
            if self.checkpoints.error:  # publish without waiting: rank 0 may be waiting for this rank's part
                monitor.publish_result(self.checkpoints.error)
                self.checkpoints.raise_if_failed()
            errors = [error for error in monitor.gather_results("") if error]
        if errors:
            raise HalationError(errors[0])

    def _accept_requests(self, report: StepReport) -> frozenset[str]:
        """Return the requests of this step that are accepted, the same on every rank."""
        requested = control_requests.decode_actions(report.requests)
        refused = {}
        if report.step == self.config.n_steps:
            refused = dict.fromkeys(requested, "the run ends with this step, which is saved anyway")
        elif not (self.config.sample and self.sample_settings.prompts):
            refused = {"sample": "this run draws no samples (--sample False, or no prompts)"}
        self.inbox.respond(report.step, refused)
        return requested - refused.keys()

    def _interrupt(self, step: int, stop_signal: int = 0) -> None:
        """End the run after a save, for a signal or, with 0, for a request to stop.

        Only rank 0 knows the sender of a request.
        """
        by = (
            f"(signal {stop_signal})"
            if stop_signal
            else f"by {self.world.broadcast_from_rank_zero(self.inbox.requested_by.get('stop'))}"
        )
        self._wait_for_save()
        code = exit_code(stop_signal or signal.SIGINT)
        if not stop_signal and launcher.has_restarts_left():
            code = 0
        raise Interrupted(f"asked to stop {by}: saved at step {step}; run the same command to resume", code)

    def _make_periodic_tasks(self) -> PeriodicTasks:
        return PeriodicTasks(
            world=self.world,
            config=self.config,
            run=self.folder,
            source=self.source,
            denoiser=self.denoiser,
            engine=self.engine,
            ema=self.ema,
            settings=self.checkpoint_settings,
            metrics=self.metrics,
            trackers=self.trackers,
            stop=lambda: self.signals.number,
            print_line=self.progress.print_line,
            epoch_of=self.schedule.epoch,
            evaluator=self.evaluator,
            comparison_folder=self.task.comparison_folder,
            other_engines=tuple(
                network.engine for network in self.networks.values() if network.engine is not self.engine
            ),
        )

    def _after_save(self, step: int) -> None:
        self.checkpoints.wait_for_copy()
        self.periodic_tasks.run_pending(step, self.smoothed_loss)
        self._raise_if_stopped(step)

    def _evaluate(self, step: int, saved: bool) -> bool:
        """Evaluate this step if it is scheduled; return True if it was.

        After an unsaved step the session does not stop here: the next step handles the signal and saves.
        """
        if not self.schedule.should_evaluate(step):
            return False
        self.checkpoints.wait_for_copy()
        self.periodic_tasks.evaluate(step)
        if saved:
            self._raise_if_stopped(step)
        return True

    def _raise_if_stopped(self, step: int) -> None:
        # A signal may arrive during sampling, and after the last step there is no next one to notice it.
        stop_signal = max(self.world.all_gather_object(self.signals.number))
        if stop_signal:
            self._interrupt(step, stop_signal)

    def newest_checkpoint(self) -> Path:
        return self.folder.checkpoints / runs.step_name(self.train_state.step)

    def _export(self) -> None:
        """Wait for the last checkpoint on all ranks, then export that checkpoint on rank 0."""
        self._wait_for_save()

        def write_export(heartbeat: Callable[[], None]) -> None:
            run_with_heartbeat(
                lambda: checkpoint_state.export_checkpoint(
                    CheckpointReader(self.newest_checkpoint()), self.folder.export, self.denoiser
                ),
                heartbeat,
            )

        run_on_rank_zero(self.world, "exporting", write_export, self.config.dist_timeout_s)


def measure_peak_flops(device: torch.device, dtype: str) -> float:
    """Measure the FLOP/s of a large matrix product in the training precision on this device.

    The fastest round counts: other processes can only slow one down.
    """
    kind = DTYPES[dtype]
    size, repeats, rounds = (8192, 10, 3) if device.type == "cuda" else (512, 1, 50)
    # Not zeros, on which some devices run faster; not random, to leave every generator unchanged.
    ramp = torch.arange(size * size, device=device, dtype=torch.float32).reshape(size, size).sin()
    matrix = ramp.to(kind)
    fastest_s = math.inf
    for _ in range(rounds + 1):  # the first one warms up
        _synchronize(device)
        start_time = time.perf_counter()
        for _ in range(repeats):
            matrix @ matrix
        _synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - start_time)
    return 2 * size**3 * repeats / fastest_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
