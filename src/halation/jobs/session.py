"""One rank's training session: the parts of a run put together, the loop over them, and what is due at its dates."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from halation import plan, runs
from halation.config.fields import as_json
from halation.config.train import TrainConfig
from halation.data import latents
from halation.data.base import Pictures
from halation.data.loader import Batches
from halation.data.order import Order
from halation.data.sources import check_pictures, open_pictures
from halation.data.streets import DRIVING_PROMPTS
from halation.errors import HalationError, InputError, Interrupted
from halation.flow.ema import Ema
from halation.jobs import logs
from halation.jobs.models import load_denoiser
from halation.models.autoencoder import LatentSpace, PixelSpace, Space
from halation.models.denoiser import DiTDenoiser, new_dit
from halation.models.dit import SIZES
from halation.pictures import read_png
from halation.training import batches, heldout, memory, state, trackers
from halation.training.cadence import Cadence
from halation.training.loop import Position, StepReport, StepSettings, autocast, train_steps
from halation.training.objectives import flow_matching
from halation.training.sampling import Drawing, Place, Row, SampleSettings, is_drawn, publish_index
from halation.training.speed import matrix_rate, memory_gb
from halation.world import launch, rng
from halation.world.checkpoint import Checkpoints, Found, Reader, newest_good
from halation.world.engines import adamw, spread
from halation.world.ranks import Vigil, World, check_ranks_agree, join, on_first
from halation.world.signals import StopSignals, exit_code

log = logging.getLogger(__name__)

MEMORY_CACHE_BYTES = 2 * 2**30
NUM_DEFAULT_PROMPTS = 8


def joined(gpu_ids: Sequence[int], oversubscribe: bool, timeout_s: float, threads: int) -> World:
    """Join the world on this rank's device, with a fixed number of CPU threads."""
    torch.set_num_threads(threads)
    place = os.environ.get(launch.DEVICE)
    if place is None:
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "0"))) or local + 1
        places = launch.devices(max(count, local + 1), gpu_ids, oversubscribe)
        place = places[local]
    return join(torch.device(place), timeout_s)


class Session:
    """Everything one rank needs, built in the order in which it can fail."""

    def __init__(self, world: World, config: TrainConfig) -> None:
        self.world = world
        self.config = config
        self.folder = runs.Run(config.output_dir)
        self.echo = logs.set_up(self.folder.logs, world.rank)
        self.cleanup = contextlib.ExitStack()
        rng.begin(config.seed, world.rank)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.height, self.width = config.image_size
        self.space: Space = LatentSpace.load(config.vae) if config.vae else PixelSpace()
        self.source = self._open_source()
        self.denoiser = self._new_denoiser().to(world.device)
        self.shape = self.denoiser.sample_shape(self.height, self.width)
        self._check_prompts()
        module = self.denoiser.module
        module.train()
        if config.activation_checkpointing:
            module.checkpointing = True  # type: ignore[assignment]
        if config.compile:
            for unit in self.denoiser.shard_units():
                unit.compile(dynamic=False)
        self.engine = spread(config.engine, world, module, self.denoiser.shard_units())
        self.optimizer = adamw(self.engine, config.lr, config.betas, config.weight_decay)
        self.ema = Ema(dict(self.engine.named_parameters()), config.ema_decay)
        self.position = Position(loss_scale=2.0**16 if config.dtype == "fp16" else 1.0)
        self.checkpoints = Checkpoints(
            world, self.folder.checkpoints, keep_last=config.keep_last, sharded=self.engine.sharded
        )
        self.global_batch = self._global_batch()
        self.cadence = Cadence(
            n_steps=config.n_steps,
            ckpt_every=config.ckpt_every,
            ckpt_latest_every=config.ckpt_latest_every,
            num_pictures=self.source.num_train,
            global_batch=self.global_batch,
        )
        self.metrics = runs.Metrics(self.folder.metrics)
        self.trackers: list[trackers.Tracker] = []
        self.drawings = itertools.count()
        self.last_loss = 0.0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.checkpoints.wait()
        self.cleanup.close()
        for tracker in self.trackers:
            tracker.close()

    # -- building

    def _open_source(self) -> Pictures:
        config, world = self.config, self.world
        cache = Path(config.cache_dir) if config.cache_dir else self.folder.folder / "cache"

        def look(beat: Any) -> dict[str, Any]:
            source = open_pictures(config.data, self.height, self.width, config.heldout_pictures)
            check_pictures(source, cache, lambda _done, _total: beat())
            return source.fingerprint

        fingerprint = on_first(world, "reading the data", look, config.dist_timeout_s)
        source = open_pictures(config.data, self.height, self.width, config.heldout_pictures)
        check_pictures(source, cache)  # remembered by now
        if world.first:
            runs.confirm(self.folder, {"data fingerprint": fingerprint}, config.accept_changes)
        kind = config.cache if config.cache != "auto" else ("latents" if config.vae else "memory")
        if kind == "latents" and not config.vae:
            raise InputError(
                "--cache latents without --vae",
                "an autoencoder that makes latents",
                "give --vae FOLDER or use --cache pixels",
            )
        return self._cached(source, kind, cache) if kind in ("pixels", "latents") else source

    def _cached(self, source: Pictures, kind: str, folder: Path) -> Pictures:
        """Encode once, on all ranks, into memory-mapped shards."""
        fingerprint: dict[str, Any] = {
            "source": source.fingerprint,
            "kind": kind,
            "space": self.space.fingerprint() if kind == "latents" else "pixels",
        }
        encode = None
        if kind == "latents":
            self.space.to(self.world.device)

            def encode(pixels: list[Any]) -> Any:
                import numpy as np

                with torch.no_grad():
                    batch = torch.from_numpy(np.stack(pixels)).to(self.world.device)
                    return self.space.encode(batch).half().cpu().numpy()

        with Vigil(self.world, "caching the data", self.config.dist_timeout_s) as vigil:
            error = ""
            try:
                latents.build(
                    source,
                    folder / kind,
                    encode,
                    fingerprint=fingerprint,
                    part=(self.world.rank, self.world.size),
                    num_workers=self.config.num_workers,
                    on_progress=lambda _done, _total: vigil.beat(),
                )
            except HalationError as problem:
                error = str(problem)
            words = vigil.finish(error)
        if any(words):
            failure = HalationError(next(word for word in words if word))
            failure.exit_code = InputError.exit_code
            raise failure
        return latents.open(folder / kind, fingerprint, verify=self.world.local_rank == 0)

    def _new_denoiser(self) -> DiTDenoiser:
        config = self.config
        if config.model not in SIZES:
            if not Path(config.model).is_dir():
                raise InputError(
                    f"--model {config.model}",
                    f"one of {', '.join(SIZES)}, or the folder of an export or checkpoint",
                    "check the name or path",
                )
            return load_denoiser(Path(config.model), raw=False)
        denoiser = new_dit(
            config.model,
            height=self.height,
            width=self.width,
            captions=() if self.source.class_names else self.source.captions(),
            class_names=self.source.class_names,
            space=self.space,
            patch_size=config.patch_size or None,
            num_register_tokens=config.num_register_tokens,
        )
        return denoiser.initialise(config.seed)

    def _check_prompts(self) -> None:
        config = self.config
        self.prompts = config.sample_prompts or default_prompts(self.source, config.data)
        if self.source.class_names:
            self.denoiser.encode_prompts(self.prompts)  # an unknown class is refused now, not at the first checkpoint

    def _global_batch(self) -> int:
        """Pictures a step, decided when the run began: other ranks share them out anew, so the loss goes on as it was."""
        config, world = self.config, self.world

        def recall(_beat: Any) -> int:
            record = runs.read_record(self.folder)
            known = record["fixed"].get("global batch")
            size = int(known or config.batch_size * world.size * config.accumulate)
            runs.confirm(self.folder, {"global batch": size}, config.accept_changes)
            return size

        return int(on_first(world, "the global batch", recall, config.dist_timeout_s))

    # -- running

    def run(self) -> None:
        """Resume if there is something to resume, train to the last step, save, sample and export."""
        world, config = self.world, self.config
        fresh = not self._resume()
        self._warm_up()
        if world.first:
            names = trackers.check(config.report_to, asked=config.report_to != TrainConfig.report_to)
            name = config.run_name or self.folder.folder.resolve().name
            self.trackers = trackers.open_trackers(names, self.folder.folder, name, as_json(config), self.position.step)
        kind = config.progress if world.first else "none"
        with StopSignals() as signals, trackers.Progress(kind, config.n_steps, self.position.step) as progress:
            self.echo.say = progress.say
            self.progress = progress
            self.signals = signals
            self._announce(fresh)
            try:
                if not fresh:
                    self._duties(self.position.step)
                self._train()
            finally:
                self.echo.say = None
            self._finish()

    def _train(self) -> None:
        config, world = self.config, self.world
        number, rows = plan.micro_batches(self.global_batch, world.size, config.batch_size)
        log.info(
            "global batch %d: %d micro-batches of %d rows on each of %d ranks",
            self.global_batch,
            number,
            rows,
            world.size,
        )
        prepare = batches.Preparer(
            self.denoiser,
            self.shape,
            seed=config.seed,
            dropout=config.caption_dropout,
            time_sampling=config.time_sampling,
            time_shift=config.time_shift,
            num_real=len(plan.share(self.global_batch, world.size, world.rank)),
            pin=world.device.type == "cuda",
        )
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
        loader = Batches(
            self.source,
            Order(config.seed, self.source.num_train),
            coming,
            num_threads=2 if world.device.type == "cuda" else 1,
            num_workers=config.num_workers,
            memory_bytes=memory_bytes,
            transform=prepare,
        )
        self.cleanup.callback(loader.close)
        steps = train_steps(
            world,
            self.engine,
            self.optimizer,
            self.ema,
            flow_matching,
            (batches.on_device(self.denoiser, batch, rows, world.device) for batch in loader),
            self._step_settings(),
            self.position,
            stop=lambda: self.signals.number,
            save_failed=lambda: self.checkpoints.error is not None,
        )
        window = _Window()
        for report in steps:
            window.add(report, self.global_batch)
            self._log(report, window)
            if report.save_failed:
                self.checkpoints.raise_error()
                raise HalationError("another rank could not save its part of a checkpoint; its log says why")
            due = self.cadence.due(report.step)
            if due or report.stop:
                self._save(due or "latest")
                window.reset()
            if report.stop:
                self._interrupt(report.step, report.stop)
            if due:
                self._duties(report.step)
                window.reset()

    def _step_settings(self) -> StepSettings:
        config = self.config
        return StepSettings(
            global_batch=self.global_batch,
            lr=config.lr,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            grad_clip=config.grad_clip,
            dtype=config.dtype,
            nan_policy=config.nan_policy,
        )

    def _warm_up(self) -> None:
        """One pass that is thrown away: it settles DDP's buckets, compiles, and finds a batch that does not fit before it costs anything."""
        _, rows = plan.micro_batches(self.global_batch, self.world.size, self.config.batch_size)
        self._refuse_hopeless(rows)
        try:
            with autocast(self.world.device, self.config.dtype):
                losses = flow_matching(
                    self.engine.trained, batches.idle(self.denoiser, rows, self.shape, self.world.device)
                )
            self.engine.settle(losses.float().sum())
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
                raise
            raise InputError(
                f"a batch of {rows} pictures does not fit into the memory of {self.world.device}",
                "a batch that fits",
                memory.advice(max(1, rows // 2), 2 * self.config.accumulate),
            ) from error

    def _refuse_hopeless(self, rows: int) -> None:
        config, module = self.config, self.denoiser.config
        cost = memory.PictureCost(
            flops=self.denoiser.flops_per_picture(),
            hidden=module.hidden,
            depth=module.depth,
            num_values=math.prod(self.shape),
            dtype=config.dtype,
            checkpointing=config.activation_checkpointing,
        )
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
        free = min(self.world.exchange(memory.free_bytes(self.world.device, sharing)))
        error = memory.refuse_batch(rows, config.accumulate, cost, self.world.device, free)
        if error:
            raise error

    def _announce(self, fresh: bool) -> None:
        if not self.world.first:
            return
        num = sum(parameter.numel() for parameter in self.denoiser.module.parameters())
        ranks = (
            f"{self.world.size} rank{'s' if self.world.size > 1 else ''} ({self.engine.name}, {self.world.device.type})"
        )
        how = "training" if fresh else f"going on from step {self.position.step}:"
        log.warning(
            "%s %s on %s: %.1f M parameters, %d pictures, global batch %d, %s",
            how, self.config.model, self.source.name, num / 1e6, self.source.num_train, self.global_batch, ranks,
        )  # fmt: skip

    def _log(self, report: StepReport, window: _Window) -> None:
        if report.skipped:
            log.warning("step %d was skipped: the gradient was not finite", report.step)
        self.last_loss = report.loss if self.last_loss == 0.0 else 0.9 * self.last_loss + 0.1 * report.loss
        if not self.world.first:
            return
        rate = window.pictures_per_s()
        numbers = {"loss": report.loss, "lr": report.lr, "pictures_per_s": round(rate, 2)}
        self.progress.update(report.step, f"loss {self.last_loss:.4f}  {rate:.0f} pictures/s", numbers)
        if report.step % self.config.log_every and report.step not in (1, self.config.n_steps):
            return
        flops = 3 * self.denoiser.flops_per_picture() * rate / self.world.size
        values = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "pictures_per_s": round(rate, 3),
            "mfu": round(flops / self.peak, 4),
            "memory_gb": round(memory_gb(self.world.device), 3),
            "data_s": round(report.data_s, 5),
            "epoch": round(self.position.pictures / self.source.num_train, 4),
        }
        self.metrics.append({"step": report.step, "time_s": round(time.monotonic() - self.began, 3), **values})
        for tracker in self.trackers:
            tracker.scalars(report.step, {f"train/{name}": value for name, value in values.items()})

    # -- saving and what follows

    def _save(self, kind: str) -> None:
        check_ranks_agree(self.world, self.engine.parameters_agree(), f"at step {self.position.step}")
        whole = state.state(
            self.position, self.ema, self.denoiser.describe(), dataclasses.asdict(self._sample_settings())
        )
        mine = {"rng": rng.capture(self.world.device)}
        self.checkpoints.save(self.position.step, kind, state.parts(self.engine, self.ema, self.optimizer), whole, mine)
        log.info("checkpoint %d (%s): training waited %.3f s", self.position.step, kind, self.checkpoints.blocked_s)

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
            return False
        if step > self.config.n_steps:
            raise InputError(
                f"--n_steps {self.config.n_steps}, but the run is at step {step}",
                "more steps than were done",
                f"--n_steps {step} or more",
            )
        reader = Reader(Path(place))
        self.position = state.restore(reader, self.engine, self.ema, self.optimizer)
        mine = reader.rank_state(self.world.rank)
        if mine:
            rng.restore(mine["rng"], self.world.device)
        if self.world.first:
            self.metrics.rewind(step)
            self.began -= max((row.get("time_s", 0.0) for row in self.metrics.lines()), default=0.0)
            for samples in self.folder.samples.glob("step_*"):
                if samples.name > runs.step_name(step):  # will be drawn again, from weights trained again
                    shutil.rmtree(samples, ignore_errors=True)
        return True

    def _await_save(self) -> None:
        """Until all ranks know the last save to be whole. Nobody leaves earlier: who stays behind a leaver is soon ended too."""
        with Vigil(self.world, f"saving step {self.position.step}", self.config.dist_timeout_s) as vigil:
            self.checkpoints.wait(vigil.beat)
            self.checkpoints.raise_error()
            vigil.finish("")

    def _interrupt(self, step: int, stop: int) -> None:
        self._await_save()
        raise Interrupted(
            f"asked to stop (signal {stop}): saved at step {step}; the same command goes on from there", exit_code(stop)
        )

    def _sample_settings(self) -> SampleSettings:
        config = self.config
        return SampleSettings(
            prompts=self.prompts,
            height=self.height,
            width=self.width,
            steps=config.sample_steps,
            seed=config.sample_seed,
            same_seed=config.same_seed,
            sampler=config.sampler,
            guidance_scale=config.guidance_scale,
            sheet_size=config.sample_batch_size,
            dtype=config.dtype,
            time_shift=config.time_shift,
            threads=config.threads,
            compile=config.compile,
            deterministic=config.deterministic,
        )

    def _duties(self, step: int) -> None:
        """Held-out loss and samples of a saved step, with the EMA in the model's place; done again where a kill left them open."""
        wanted = self.world.from_first(self._open_duties(step) if self.world.first else None)
        with self.ema.swapped():
            if "heldout" in wanted:
                self._heldout(step)
            drawn = self._draw(step, "") if "samples" in wanted else None
            self.engine.at_rest()
        if "raw" in wanted:
            raw = self._draw(step, "_raw")
            self.engine.at_rest()
        if drawn is not None and self.world.first:
            self._publish(step, drawn, raw if "raw" in wanted else None)
        stop = max(
            self.world.exchange(self.signals.number)
        )  # asked while drawing: there may be no next step to notice it
        if stop:
            self._interrupt(step, stop)

    def _open_duties(self, step: int) -> list[str]:
        wanted = []
        known = any(row.get("metric") == "heldout_loss" and row["step"] == step for row in self.metrics.lines())
        if self._num_heldout() and not known:
            wanted.append("heldout")
        if not (self.config.sample and self.prompts):
            return wanted
        folder = self.folder.samples_at(step)
        if self._recorded(folder) not in (None, self._settings_json()):
            shutil.rmtree(folder, ignore_errors=True)  # drawn another way before this start; the names would hide it
        specs = self._sample_settings().specs()
        suffixes = ["", "_raw"] if self.config.sample_raw else [""]
        done = (folder / "samples.json").exists() and all(
            is_drawn(Place(folder=folder, suffix=s), spec) for s in suffixes for spec in specs
        )
        return wanted if done else [*wanted, "samples", *(["raw"] if self.config.sample_raw else [])]

    def _settings_json(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self._sample_settings())))
        return settings

    @staticmethod
    def _recorded(folder: Path) -> Any:
        try:
            return json.loads((folder / "samples.json").read_bytes()).get("settings")
        except (OSError, ValueError, AttributeError):
            return None

    def _num_heldout(self) -> int:
        return min(self.config.heldout_pictures, self.source.num_heldout)

    def _heldout(self, step: int) -> None:
        with Vigil(self.world, f"held-out loss at step {step}", self.config.dist_timeout_s) as vigil:
            losses = heldout.heldout_loss(
                self.world,
                self.denoiser,
                self.source,
                flow_matching,
                num_pictures=self._num_heldout(),
                dtype=self.config.dtype,
                beat=vigil.beat,
            )
            words = vigil.finish(losses)
        values = heldout.summary(words, self._num_heldout())
        if self.world.first:
            bins = {name: value for name, value in values.items() if name != "heldout_loss"}
            self.metrics.append({"step": step, "metric": "heldout_loss", "value": values["heldout_loss"], "bins": bins})
            for tracker in self.trackers:
                tracker.scalars(step, {f"heldout/{name}": value for name, value in values.items()})

    def _draw(self, step: int, suffix: str) -> list[Row]:
        began = time.perf_counter()
        drawing = Drawing(
            self.world,
            self.denoiser,
            self._sample_settings(),
            sharded=self.engine.sharded,
            timeout_s=self.config.sample_timeout_s or self.config.dist_timeout_s,
            stop=lambda: self.signals.number,
        )
        rows = drawing.run(
            Place(folder=self.folder.samples_at(step), suffix=suffix), f"step {step}{suffix} #{next(self.drawings)}"
        )
        failed = sum(row["state"] == "failed" for row in rows)
        log.info(
            "samples of step %d%s: %d done, %d failed, %.2f s",
            step,
            suffix,
            len(rows) - failed,
            failed,
            time.perf_counter() - began,
        )
        return rows

    def _publish(self, step: int, rows: list[Row], raw: list[Row] | None) -> None:
        place = Place(folder=self.folder.samples_at(step))
        others = [(Place(folder=place.folder, suffix="_raw"), raw)] if raw else []
        try:
            publish_index(
                place, rows, {"step": step, "loss": self.last_loss, "settings": self._settings_json()}, others
            )
        except OSError as error:
            log.error("cannot write to directory %s: %s; training goes on", place.folder, error.strerror or error)
            return
        pictures = {}
        for where, drawn in [(place, rows), *others]:
            for row in drawn:
                if row["state"] == "done":
                    pictures[f"samples{where.suffix}/{row['index']:02d} {row['prompt'][:60]}"] = read_png(
                        where.folder / row["file"]
                    )[0]
        for tracker in self.trackers:
            tracker.pictures(step, pictures)
        failed = [row for row in rows if row["state"] != "done"]
        self.progress.say(
            f"samples of step {step}: {place.folder / 'grid.png'}" + (f" ({len(failed)} failed)" if failed else "")
        )

    def newest(self) -> Path:
        return self.folder.checkpoints / runs.step_name(self.position.step)

    def _finish(self) -> None:
        """Everything on disk before anybody leaves; the export is made from the checkpoint, so it is what was saved."""
        if not self.newest().exists() and self.checkpoints.pending is None:
            self._save("kept")
        self._await_save()

        def write(_beat: Any) -> None:
            state.export(Reader(self.newest()), self.folder.export)

        on_first(self.world, "exporting", write, self.config.dist_timeout_s)


class _Window:
    """Throughput since the last pause, so that a save or a sampling does not look like slow training."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.began = time.perf_counter()
        self.pictures = 0
        self.recent: list[tuple[float, int]] = []

    def add(self, report: StepReport, pictures: int) -> None:
        self.pictures += pictures
        self.recent = [*self.recent[-49:], (time.perf_counter(), self.pictures)]

    def pictures_per_s(self) -> float:
        then, before = self.recent[0] if len(self.recent) > 1 else (self.began, 0)
        now, pictures = self.recent[-1]
        return (pictures - before) / max(now - then, 1e-9)


def set_aside(item: Found, problem: str) -> None:
    """A damaged checkpoint keeps its bytes under another name and no longer counts."""
    target = item.folder.with_name(f"damaged_{item.folder.name}_{os.urandom(2).hex()}")
    os.rename(item.folder, target)
    log.error("set aside as %s (%s)", target, problem)


def default_prompts(source: Pictures, data: str) -> tuple[str, ...]:
    """The driving prompts, class names, or the first different captions of a folder."""
    if data == "streets":
        return tuple(DRIVING_PROMPTS)
    if source.class_names:
        return source.class_names[:NUM_DEFAULT_PROMPTS]
    return tuple(itertools.islice(dict.fromkeys(source.captions()), NUM_DEFAULT_PROMPTS))
