"""One rank's training session: the parts of a run put together, the loop over them, and what is due at its dates."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from halation import logs, plan
from halation.config import as_json
from halation.data.prefetch import Batches
from halation.data.shuffle import BucketOrder
from halation.distributed import launcher, rng
from halation.distributed.checkpoint.reader import Reader
from halation.distributed.checkpoint.writer import Checkpoints, Found, newest_good
from halation.distributed.engines.ddp_fsdp import Engine
from halation.distributed.engines.registry import check, spread
from halation.distributed.signals import StopSignals, exit_code
from halation.distributed.world import Vigil, World, alive, check_ranks_agree, on_first
from halation.errors import HalationError, InputError, Interrupted, RankFailure
from halation.flow.ema import Ema
from halation.models.blocks import compile_units
from halation.runs import control
from halation.runs import folder as runs
from halation.sampling import files
from halation.sampling.denoiser_sampler import SampleSettings
from halation.step_progress import Progress
from halation.training import batches, evaluation, export, finetune, memory_checks, reporting, setup, state, trackers
from halation.training.checkpoint_hooks import Duties
from halation.training.config import TrainConfig
from halation.training.loop import Position, StepReport, train_steps
from halation.training.reporting import Window, matrix_rate
from halation.training.schedule import Cadence
from halation.training.task import NewTask, Task

log = logging.getLogger(__name__)

MEMORY_CACHE_BYTES = 2 * 2**30
LOADER_THREADS = 4
"""Beside a GPU: noise is drawn here, and a small model takes thousands of pictures a second."""


class Session:
    """Everything one rank needs, built in the order in which it can fail."""

    def __init__(self, world: World, config: TrainConfig, new_task: NewTask = Task) -> None:
        self.world = world
        self.config = config
        self.folder = runs.Run(config.output_dir)
        self.echo = logs.set_up(self.folder.logs, world.rank)
        self.cleanup = contextlib.ExitStack()
        rng.begin(config.seed, world.rank)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.global_batch = setup.global_batch(world, config, self.folder)
        check(config.engine, world, setup.engine_settings(world, config, self.global_batch))
        self.task = new_task(world, config, self.folder)
        self.denoiser, self.source = self.task.open()
        self.config = config = self.task.dated(self.global_batch)
        memory_checks.refuse_weights(world, config, self.denoiser)
        self.sample_settings = self._sample_settings()
        self.appraisal = (
            evaluation.Appraisal(world, config, self.folder, self.source, self.sample_settings)
            if config.eval_every
            else None
        )
        if config.model_path:
            evaluated = self.appraisal.settings.prompts if self.appraisal else ()
            prompts = (*self.sample_settings.prompts, *evaluated)
            finetune.cache_texts(world, config, self.folder, self.denoiser, self.source, prompts)
        self.task.prepare(self.drawn_settings())
        # Sharding takes one unit after the other to the device; a model that only fits in shards must not be there as a whole before.
        self.denoiser.to(world.device, module=config.engine != "fsdp")
        self.denoiser.module.train()
        if config.activation_checkpointing:
            self.denoiser.keep_no_activations()
        if config.compile:
            compile_units(self.denoiser.shard_units())
        self.engine = self._spread(self.denoiser.module, self.denoiser.shard_units())
        self.ema = Ema(self.engine.masters(), config.ema_decay)
        self.parts = self.task.parts(self.engine, self.ema, self._spread)
        self.position = Position(loss_scale=2.0**16 if config.dtype == "fp16" else 1.0)
        self.checkpoints = Checkpoints(
            world, self.folder.checkpoints, keep_last=config.keep_last, sharded=self.engine.saves_pieces
        )
        self.cadence = Cadence(
            n_steps=config.n_steps,
            ckpt_every=config.ckpt_every,
            ckpt_latest_every=config.ckpt_latest_every,
            num_pictures=self.source.num_train,
            global_batch=self.global_batch,
            eval_every=config.eval_every,
            epochs_every=self.task.epochs_every,
        )
        self.metrics = runs.Metrics(self.folder.metrics)
        self.trackers: list[trackers.Tracker] = []
        self.inbox = control.Inbox(config.output_dir, listens=world.first)
        self.last_loss = 0.0

    def _spread(self, module: torch.nn.Module, units: list[torch.nn.Module]) -> Engine:
        config = self.config
        settings = setup.engine_settings(self.world, config, self.global_batch)
        engine = spread(config.engine, self.world, module, units, settings)
        engine.prepare_optimizer(config.lr, config.betas, config.weight_decay)
        return engine

    def _sample_settings(self) -> SampleSettings:
        """The prompts that follow from model and data, and how they are drawn."""
        config, denoiser = self.config, self.denoiser
        denoiser.sample_shape(*config.image_size)
        prompts = config.sample_prompts or setup.default_prompts(self.source, config.data)
        if self.source.class_names and not config.model_path:
            denoiser.encode_prompts(prompts)  # an unknown class is refused now, not at the first checkpoint
        return self.task.sampling(prompts)

    def saved_bytes(self) -> Iterator[int]:
        """Bytes of the tensors of a save, in its order: weights, averages where there are any, and two moments of each weight."""
        for part in self.parts.values():
            pieces = [piece.local for piece in part.engine.pieces()["model"].values()]
            # What does not lie on a GPU needs no pinned copy.
            weights = [(local.numel(), local.element_size()) for local in pieces if local.is_cuda]
            yield from (num * size for num, size in weights)
            yield from (num * 4 for num, _ in weights if part.ema is not None)
            yield from (num * size for num, size in weights for _ in range(2))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Interrupted):  # ranks that are started again still take what was asked
            self.inbox.close(self.position.step)
        if error is not None:
            self.checkpoints.hurry()
        self.checkpoints.wait()
        self.cleanup.close()
        for tracker in self.trackers:
            tracker.close()

    # -- running

    def run(self) -> None:
        """Resume if there is something to resume, train to the last step, save, sample and export."""
        world, config = self.world, self.config
        fresh = not self._resume()
        saved = self.saved_bytes()
        memory_checks.warm_up(self.task, config, self.parts, self.checkpoints, self.global_batch, saved)
        if world.device.type == "cuda":
            memory_checks.probe(self.task, config, self.parts, self.sample_settings)
        if world.first:
            names = trackers.check(config.report_to, asked=config.report_to != TrainConfig.report_to)
            name = config.run_name or self.folder.folder.resolve().name
            self.trackers = trackers.open_trackers(names, self.folder.folder, name, as_json(config), self.position.step)
        kind = config.progress if world.first else "none"
        with StopSignals() as signals, Progress(kind, config.n_steps, self.position.step) as progress:
            self.echo.say = progress.say
            self.progress = progress
            self.signals = signals
            self.step_log = reporting.StepLog(
                world=world,
                config=config,
                progress=progress,
                metrics=self.metrics,
                trackers=self.trackers,
                flops_per_picture=self.denoiser.flops_per_picture(),
                peak=self.peak,
                num_train=self.source.num_train,
                began=self.began,
            )
            self.duties = self._make_duties()
            if world.first:
                resumed_at = None if fresh else self.position.step
                settings = self.drawn_settings()
                reporting.of_beginning(self.task, config, self.engine, settings, self.global_batch, resumed_at)
            try:
                if not fresh:
                    self._after_save(self.position.step)
                    self._evaluate(self.position.step, saved=True)
                self._train()
            finally:
                self.echo.say = None
            self._finish()

    def _train(self) -> None:
        config, world = self.config, self.world
        number, rows = plan.micro_batches(self.global_batch, world.size, config.batch_size)
        micro = f"{number} micro-batch{'es' if number > 1 else ''}"
        log.info("global batch %d: %s of %d rows on each of %d ranks", self.global_batch, micro, rows, world.size)
        prepare = self.task.preparer(len(plan.share(self.global_batch, world.size, world.rank)))
        order = setup.order(config.seed, self.source, self.global_batch)
        if isinstance(
            order, BucketOrder
        ):  # only another global batch (--accept_changes) leaves it in the middle of one
            self.position.pictures = -(-self.position.pictures // self.global_batch) * self.global_batch
        coming = batches.positions(
            self.position.step,
            self.position.pictures,
            config.n_steps,
            self.global_batch,
            world.size,
            world.rank,
            config.batch_size,
        )
        memory_bytes = 0 if config.cache in ("none", "pixels", "latents") else MEMORY_CACHE_BYTES
        num_threads = LOADER_THREADS if world.device.type == "cuda" else 1
        loader = Batches(
            self.source,
            order,
            coming,
            num_threads=num_threads,
            depth=max(4, 2 * num_threads),
            num_workers=config.num_workers,
            memory_bytes=memory_bytes,
            transform=prepare,
        )
        self.cleanup.callback(loader.close)
        steps = train_steps(
            world,
            self.parts,
            (batches.on_device(self.denoiser, batch, rows, world.device) for batch in loader),
            setup.step_settings(config, self.global_batch),
            self.position,
            stop=lambda: self.signals.number,
            save_failed=lambda: self.checkpoints.error is not None,
            let_change=self.checkpoints.let_change,
            turn=self.task.turn,
            asked=self.inbox.look,
        )
        window = Window()
        for report in steps:
            window.add(self.global_batch)
            self._log(report, window)
            if report.save_failed:
                self.checkpoints.raise_error()
                raise RankFailure("another rank could not save its part of a checkpoint; its log says why")
            due = self.cadence.due(report.step)
            asked = self._granted(report) if report.asked else frozenset()
            if due or report.stop or asked & {"save", "stop"}:
                self._save(due or "latest")
                window.reset()
            if report.stop:
                self._interrupt(report.step, report.stop)
            if due and asked != {"stop"}:
                self._after_save(report.step)
                window.reset()
            elif "sample" in asked:
                self.checkpoints.let_change()
                self.duties.sample(report.step, self.last_loss)
                window.reset()
            if "stop" in asked:
                self._interrupt(report.step)
            if self._evaluate(report.step, saved=bool(due)):
                window.reset()

    def _log(self, report: StepReport, window: Window) -> None:
        if report.skipped:
            log.warning("step %d was skipped: the gradient was not finite", report.step)
        if math.isfinite(report.loss):
            self.last_loss = report.loss if self.last_loss == 0.0 else 0.9 * self.last_loss + 0.1 * report.loss
        if self.world.first:
            self.step_log.write(report, window.pictures_per_s(), self.last_loss, self.position.pictures)

    # -- saving and what follows

    def _save(self, kind: str) -> None:
        for part in self.parts.values():
            check_ranks_agree(self.world, part.engine.parameters_agree(), f"at step {self.position.step}")
        whole = state.state(self.position, self.ema, self.denoiser.describe(), dataclasses.asdict(self.sample_settings))
        mine = {"rng": rng.capture(self.world.device)}
        self.checkpoints.save(self.position.step, kind, state.parts(self.parts), whole, mine)
        waited, before = self.checkpoints.blocked_s, self.checkpoints.queued_s
        log.info("checkpoint %d (%s): training waited %.3f s", self.position.step, kind, waited + before)
        if before > 1.0:
            log.info("of these %.1f s for the checkpoint before to be written; they are close together", before)

    def _resume(self) -> bool:
        """Fill everything from the newest good checkpoint; whether there was one."""
        folder = self.folder.checkpoints

        def find(_beat: Any) -> list[Any]:
            found = newest_good(folder, on_damage=set_aside)
            return [str(found.folder), found.step] if found else ["", 0]

        place, step = on_first(self.world, "looking for a checkpoint", find, self.config.dist_timeout_s)
        self.began = time.monotonic()
        self.peak = matrix_rate(self.world.device, self.config.dtype)
        if not place:
            if self.world.first:
                self.metrics.rewind(-1)
                files.forget_after(self.folder.samples, -1)  # of a start that never saved
                evaluation.forget_after(self.folder, -1)
            return False
        if step > self.config.n_steps:
            raise InputError(
                f"--n_steps {self.config.n_steps}, but the run is at step {step}",
                "more steps than were done",
                f"--n_steps {step} or more",
            )
        reader = Reader(Path(place))
        self.position = state.restore(reader, self.parts)
        mine = reader.rank_state(self.world.rank)
        if mine:
            rng.restore(mine["rng"], self.world.device)
        if self.world.first:
            self.metrics.rewind(step)
            known = self.metrics.lines()
            self.began -= max((row.get("time_s", 0.0) for row in known), default=0.0)
            self.last_loss = next((row["loss"] for row in reversed(known) if row.get("loss") is not None), 0.0)
            evaluation.forget_after(self.folder, step)
            files.forget_after(self.folder.samples, step)
        return True

    def _await_save(self) -> None:
        """Until all ranks know the last save to be whole. Nobody leaves earlier: who stays behind a leaver is soon ended too."""
        with Vigil(self.world, f"saving step {self.position.step}", self.config.dist_timeout_s) as vigil:
            self.checkpoints.wait(vigil.beat)
            if self.checkpoints.error:  # told, and not waited for: rank 0 may be waiting for this very rank's part
                vigil.leave(self.checkpoints.error)
                self.checkpoints.raise_error()
            errors = [error for error in vigil.finish("") if error]
        if errors:
            raise HalationError(errors[0])

    def _granted(self, report: StepReport) -> frozenset[str]:
        """What of the wishes that came with this step is done; every rank finds the same."""
        asked = control.actions(report.asked)
        refused = {}
        if report.step == self.config.n_steps:
            refused = dict.fromkeys(asked, "the run ends with this step, which is saved anyway")
        elif not (self.config.sample and self.sample_settings.prompts):
            refused = {"sample": "this run draws no samples (--sample False, or no prompts)"}
        self.inbox.answer(report.step, refused)
        return asked - refused.keys()

    def _interrupt(self, step: int, stop: int = 0) -> None:
        """End after a save, because of a signal or (0) because somebody asked for it, whom the first rank knows."""
        by = f"(signal {stop})" if stop else f"by {self.world.from_first(self.inbox.asked_by.get('stop'))}"
        self._await_save()
        code = exit_code(stop or signal.SIGINT)
        if not stop and launcher.would_start_again():
            code = 0
        raise Interrupted(f"asked to stop {by}: saved at step {step}; the same command goes on from there", code)

    def _make_duties(self) -> Duties:
        return Duties(
            world=self.world,
            config=self.config,
            run=self.folder,
            source=self.source,
            denoiser=self.denoiser,
            engine=self.engine,
            ema=self.ema,
            settings=self.drawn_settings(),
            metrics=self.metrics,
            trackers=self.trackers,
            stop=lambda: self.signals.number,
            say=self.progress.say,
            epoch_of=self.cadence.epoch,
            appraisal=self.appraisal,
            beside=self.task.beside,
            others=tuple(part.engine for part in self.parts.values() if part.engine is not self.engine),
        )

    def drawn_settings(self) -> SampleSettings:
        """What is drawn at a checkpoint: every prompt, or the first ones, one a rank."""
        settings = self.sample_settings
        num = len(settings.prompts) if self.config.sample_all else self.world.size
        return dataclasses.replace(settings, prompts=settings.prompts[:num])

    def _after_save(self, step: int) -> None:
        self.checkpoints.let_change()
        self.duties.do(step, self.last_loss)
        self._heed(step)

    def _evaluate(self, step: int, saved: bool) -> bool:
        """The evaluation of this step if it is due; whether it was. An unsaved step is not the place to stop: the next one saves."""
        if not self.cadence.evaluates(step):
            return False
        self.checkpoints.let_change()
        self.duties.evaluate(step)
        if saved:
            self._heed(step)
        return True

    def _heed(self, step: int) -> None:
        # Asked to stop while drawing: after the last step there is no next one to notice it.
        stop = max(self.world.exchange(self.signals.number))
        if stop:
            self._interrupt(step, stop)

    def newest(self) -> Path:
        return self.folder.checkpoints / runs.step_name(self.position.step)

    def _finish(self) -> None:
        """Everything on disk before anybody leaves; the export is made from the checkpoint, so it is what was saved."""
        self._await_save()

        def write(beat: Callable[[], None]) -> None:
            alive(lambda: export.export(Reader(self.newest()), self.folder.export, self.denoiser), beat)

        on_first(self.world, "exporting", write, self.config.dist_timeout_s)


def set_aside(item: Found, problem: str) -> None:
    """A damaged checkpoint keeps its bytes under another name and no longer counts."""
    target = item.folder.with_name(f"damaged_{item.folder.name}_{os.urandom(2).hex()}")
    os.rename(item.folder, target)
    log.error("set aside as %s (%s)", target, problem)
