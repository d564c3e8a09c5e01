"""Sampling on all ranks: batches are assigned in rounds and sampled by a denoiser.

No collective is in progress while ranks sample (unless the model is sharded and every forward is one). A slow sampler
therefore cannot cause a timeout, and a rank that fails reports it to the others instead of leaving them at a barrier.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from halation import work_division
from halation.distributed import rng
from halation.distributed.launcher import is_lost_peer_message
from halation.distributed.world import HeartbeatMonitor, World
from halation.errors import InputError, RankFailure, format_count, shorten
from halation.fault_injection import fault_point
from halation.models.denoiser import (
    DecodedImages,
    Denoiser,
    SamplingInputs,
    SamplingModel,
    SolverSettings,
    decode,
    needs_cfg,
)
from halation.models.dtypes import DTYPES
from halation.prompt_files import ROW_SETTINGS
from halation.sample_specs import SampleBatch, SampleSpec
from halation.sampling.sample_folder import SampleFolder, SampleRow, SampleWriter, is_drawn

log = logging.getLogger(__name__)

ShareMode = Literal["round", "contiguous"]


class BatchClaims:
    """Yields batches for this rank while any is left in its own share or in another rank's.

    Each share has a counter in the store that assigns every batch but the first to the rank that claims it first. The
    first batch always belongs to the owner of the share, so every rank samples, however late it starts.
    """

    def __init__(self, world: World, name: str, num_batches: int) -> None:
        self.world = world
        self.prefix = f"claims/{name}"
        self.can_steal = True
        self.shares = [work_division.rank_range(num_batches, world.size, rank) for rank in range(world.size)]

    def __iter__(self) -> Iterator[int]:
        rank = self.world.rank
        yield from self.shares[rank][:1]
        while (batch := self._claim(rank)) is not None:
            yield batch
        while self.can_steal and (owner := work_division.most_loaded_rank(self._count_unclaimed())) is not None:
            batch = self._claim(owner)
            if batch is not None:  # else another rank was faster
                yield batch

    def stop_stealing(self) -> None:
        """Stop taking batches of other ranks; a rank whose images fail fast would take them all."""
        self.can_steal = False

    def close(self) -> None:
        """Claim all remaining batches, so that no rank gets one."""
        for owner, share in enumerate(self.shares):
            self._add_to_counter(owner, len(share))

    def _claim(self, owner: int) -> int | None:
        share = self.shares[owner]
        number = self._add_to_counter(owner, 1) if len(share) > 1 else 1
        return share[number] if number < len(share) else None

    def _count_unclaimed(self) -> list[int]:
        return [
            len(share) - 1 - self._add_to_counter(owner, 0) if len(share) > 1 else 0
            for owner, share in enumerate(self.shares)
        ]

    def _add_to_counter(self, owner: int, increment: int) -> int:
        number: int = self.world.store.add(f"{self.prefix}/{owner}", increment)
        return number


class ImageSink(Protocol):
    """Receives the images of a batch; an error that it raises fails only that batch."""

    def put(self, batch: SampleBatch, images: Mapping[int, np.ndarray], rows: Sequence[SampleRow]) -> None:
        """Receive images by their index in the batch; an index without an image has failed."""

    def finish(self) -> None: ...


class BatchDrawer(Protocol):
    """Samples batches on one rank."""

    def draw_batch(
        self, batch: SampleBatch | None, template: SampleBatch, sink: ImageSink, monitor: HeartbeatMonitor
    ) -> list[SampleRow]:
        """Sample one batch.

        A rank without one runs a dummy batch of the shape of `template`, so that collectives match.
        """

    def preserve_training_state(self) -> AbstractContextManager[None]:
        """Return a context for sampling that leaves the training state unchanged."""


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks that sample batches together.

    Batches are assigned round-robin or in contiguous shares. With contiguous shares, unless every forward is a
    collective, a rank that is done takes over batches that others have not started.
    """

    world: World
    sharded: bool
    timeout_s: float
    stop: Callable[[], int]
    share_mode: ShareMode = "round"

    def draw_batches(
        self, drawer: BatchDrawer, batches: Sequence[SampleBatch], todo: Sequence[int], sink: ImageSink, label: str
    ) -> list[SampleRow]:
        """Sample these batches, the same list on every rank.

        Every rank returns the rows of all images that were sampled or failed.
        """
        rows: list[SampleRow] = []
        with (
            HeartbeatMonitor(self.world, label, self.timeout_s) as monitor,
            rng.fork_rng(),
            drawer.preserve_training_state(),
        ):
            try:
                can_claim = self.share_mode == "contiguous" and not self.sharded
                todo_batches = [batches[number] for number in todo]
                turns = self._iter_claims(todo_batches, label, rows) if can_claim else self._iter_rounds(todo_batches)
                for batch, template in turns:
                    monitor.check_peers()
                    with rng.preserve_torch_settings():
                        rows.extend(drawer.draw_batch(batch, template, sink, monitor))
            finally:
                sink.finish()
            rows_by_rank = monitor.gather_results(rows)
        return [row for rank_rows in rows_by_rank for row in rank_rows]

    def _iter_rounds(self, batches: Sequence[SampleBatch]) -> Iterator[tuple[SampleBatch | None, SampleBatch]]:
        """Yield the batches of this rank, in rounds, each with a template of its forwards.

        A sharded rank without a batch yields None and runs a dummy batch, so that collectives match. For the same
        reason the batches of a round then have the same number of steps and the same guidance.
        """
        assign = work_division.round_robin_batch if self.share_mode == "round" else work_division.contiguous_batch
        keys = [_forward_key(batch) for batch in batches]
        for group in work_division.group_equal(keys) if self.sharded else [range(len(batches))]:
            for turn in range(work_division.num_rounds(len(group), self.world.size)):
                if self._should_stop():
                    return
                place = assign(turn, self.world.rank, self.world.size, len(group))
                if place is None and not self.sharded:
                    return
                yield None if place is None else batches[group[place]], batches[group[0]]

    def _iter_claims(
        self, batches: Sequence[SampleBatch], label: str, rows: Sequence[SampleRow]
    ) -> Iterator[tuple[SampleBatch, SampleBatch]]:
        """Yield the batches of this rank's share, then of others while none of `rows` failed."""
        claims = BatchClaims(self.world, label, len(batches))
        for batch_index in claims:
            if self._should_stop():
                claims.close()
                return
            yield batches[batch_index], batches[batch_index]
            if any(row["state"] == "failed" for row in rows):
                claims.stop_stealing()

    def _should_stop(self) -> bool:
        """Return True if sampling must stop before the next batch; sharded ranks decide together."""
        if not self.sharded:
            return self.stop() != 0
        return any(self.world.all_gather_object(self.stop()))


def _forward_key(batch: SampleBatch) -> tuple[int, float | None]:
    """Batches with the same key make the same number of forwards."""
    return batch.specs[0].steps, batch.specs[0].guidance_scale


def find_missing_batches(world: World, sample_folder: SampleFolder, batches: Sequence[SampleBatch]) -> list[int]:
    """Return the batches with a missing image, the same list on every rank."""
    missing: list[int] = []
    if world.is_rank_zero:
        with contextlib.suppress(OSError):  # a disk error must fail the samples, not the training
            sample_folder.create()
        for number, batch in enumerate(batches):
            if not all(is_drawn(sample_folder, spec) for spec in batch.real_specs):
                missing.append(number)
    found: list[int] = world.broadcast_from_rank_zero(missing if world.is_rank_zero else None)
    return found


def run_phase(
    rows: list[SampleRow], action: Callable[[], Any], mark_failed: Callable[[list[SampleRow], str], None]
) -> Any:
    """Run one phase of one batch; an error fails only the images of this batch."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - after any error, the other batches are still sampled
        log.debug("while sampling:\n%s", traceback.format_exc())
        mark_failed(rows, f"{type(error).__name__}: {error}")
        return None


def make_row(spec: SampleSpec, rank: int) -> SampleRow:
    return {
        "index": spec.index,
        "prompt": spec.prompt,
        "seed": spec.seed,
        "rank": rank,
        "seconds": 0.0,
        "state": "done",
        "reason": "",
    }


def complete_rows(
    specs: Sequence[SampleSpec], rows: Sequence[SampleRow], sample_folder: SampleFolder
) -> list[SampleRow]:
    """Return one row per spec, in order: sampled now, already there, or still open."""
    by_index = {row["index"]: row for row in rows}
    result = []
    for spec in specs:
        row = by_index.get(spec.index) or make_row(spec, -1) | {
            "state": "done" if is_drawn(sample_folder, spec) else "open"
        }
        result.append(row | {"file": sample_folder.image_path(spec).name})
    return result


_STORED_AS = {"batch_size": "sheet_size"}
"""Fields whose names in files differ from those in code."""


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Everything besides the weights that decides a folder of samples."""

    prompts: tuple[str, ...]
    height: int
    width: int
    steps: int
    seed: int
    same_seed: bool
    sampler: str
    guidance_scale: float
    batch_size: int
    dtype: str
    time_shift: float = 1.0
    threads: int = 1
    compile: bool = False
    deterministic: bool = False
    distilled: dict[str, Any] | None = None
    """`objective` and `steps` of a student, which was trained for that number of steps only."""
    rows: tuple[dict[str, Any], ...] = ()
    """For each prompt its own height, width, steps, guidance scale, negative prompt and seed; empty if none has any."""

    def as_json(self) -> dict[str, Any]:
        """Return the settings as stored in checkpoints, exports and samples.json."""
        values = {_STORED_AS.get(name, name): value for name, value in asdict(self).items()}
        if not self.rows:  # as in files of earlier versions
            del values["rows"]
        return values

    @classmethod
    def required_keys(cls) -> set[str]:
        """Return the keys that stored settings must have."""
        return {_STORED_AS.get(each.name, each.name) for each in fields(cls) if each.default is MISSING}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SampleSettings:
        """Read the settings of a checkpoint; keys of other versions are ignored."""
        names = {_STORED_AS.get(each.name, each.name): each.name for each in fields(cls)}
        values = {names[key]: value for key, value in stored.items() if key in names}
        return cls(**values | {"prompts": tuple(values["prompts"]), "rows": tuple(values.get("rows", ()))})

    def specs(self) -> list[SampleSpec]:
        specs = [
            SampleSpec(
                index=index,
                id=f"sample_{index:02d}",
                prompt=prompt,
                seed=self.seed if self.same_seed else self.seed + index,
                height=self.height,
                width=self.width,
                steps=self.steps,
                guidance_scale=self.guidance_scale,
            )
            for index, prompt in enumerate(self.prompts)
        ]
        own = (*self.rows, *({},) * len(specs))
        return [replace(spec, **row) for spec, row in zip(specs, own, strict=False)]

    def texts(self) -> list[str]:
        """Every text that is encoded for the samples."""
        return [text for spec in self.specs() for text in (spec.prompt, spec.negative_prompt)]

    def check_rows(self, model: Denoiser) -> None:
        """Raise InputError for a row that the model cannot sample, or with a value that would have no effect."""
        for spec, row in zip(self.specs(), self.rows, strict=False):
            try:
                self._check_row(spec, row, model)
                model.check_spec(spec)
            except InputError as error:
                found = f"prompt {spec.index + 1} ({shorten(spec.prompt, 60)!r}): {error.found}"
                raise InputError(found, error.expected, error.action) from error

    def _check_row(self, spec: SampleSpec, row: Mapping[str, Any], model: Denoiser) -> None:
        if self.distilled is not None and (unused := row.keys() & {"steps", "guidance_scale", "negative_prompt"}):
            raise InputError(
                f"{', '.join(sorted(unused))} in its row, with a model that was distilled",
                "the steps and the guidance that it was distilled with",
                "leave the column out",
            )
        if "guidance_scale" in row and model.guidance_kind == "none":
            raise InputError(f"guidance_scale in its row, with {model.name}", "a model with guidance", "leave it out")
        guidance = spec.guidance_scale or 0.0
        if spec.negative_prompt and (model.guidance_kind != "pair" or guidance <= 1):
            raise InputError(
                f"negative_prompt in its row, with {model.name} at guidance {guidance:g}",
                "a model that reads it, and guidance above 1",
                "leave it out, or set guidance_scale",
            )


class DenoiserSampler:
    """Samples with a denoiser on all ranks, each batch in phases: prepare, sample, decode."""

    def __init__(
        self,
        world: World,
        denoiser: SamplingModel,
        settings: SampleSettings,
        *,
        sharded: bool,
        timeout_s: float,
        stop: Callable[[], int],
        on_step: Callable[[int, int], None] | None = None,
        share_mode: ShareMode = "round",
    ) -> None:
        self.world = world
        self.ranks = RankGroup(world=world, sharded=sharded, timeout_s=timeout_s, stop=stop, share_mode=share_mode)
        self.denoiser = denoiser
        self.settings = settings
        self.on_step = on_step
        self.num_steps_done = self.num_steps_total = 0

    def run(self, sample_folder: SampleFolder, label: str) -> list[SampleRow]:
        """Sample what is missing in the folder.

        Every rank returns the same rows, one per spec: done, failed or open.
        """
        specs = self.settings.specs()
        batches = work_division.make_batches(specs, self.settings.batch_size, by_guidance=True)
        todo = find_missing_batches(self.world, sample_folder, batches)
        log.info(
            "Generating samples: %d of %s on %s (%s)",
            sum(batches[i].num_real for i in todo),
            format_count(len(specs), "image"),
            format_count(self.world.size, "rank"),
            label,
        )
        rows = self.draw_batches(batches, todo, SampleWriter(sample_folder, self.settings.sampler), f"sampling {label}")
        rows = complete_rows(specs, rows, sample_folder)
        if not self.settings.rows:
            return rows
        names = [name for name in ROW_SETTINGS if name != "seed"]
        return [row | {name: getattr(spec, name) for name in names} for spec, row in zip(specs, rows, strict=True)]

    def draw_batches(
        self, batches: Sequence[SampleBatch], todo: Sequence[int], sink: ImageSink, label: str
    ) -> list[SampleRow]:
        """Sample these batches, the same list on every rank; return the rows of all images."""
        self.num_steps_done = 0
        groups = work_division.group_equal([_forward_key(batches[number]) for number in todo])
        self.num_steps_total = sum(
            work_division.num_rounds(len(group), self.world.size) * batches[todo[group[0]]].specs[0].steps
            for group in groups
        )
        rows = self.ranks.draw_batches(self, batches, todo, sink, label)
        for row in rows:
            if row["state"] == "failed" and row["rank"] != self.world.rank:
                log.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])
        return rows

    @contextlib.contextmanager
    def preserve_training_state(self) -> Iterator[None]:
        """Set evaluation mode, and restore the mode of every module afterwards."""
        modes = [(module, module.training) for module in self.denoiser.module.modules()]
        self.denoiser.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def draw_batch(
        self, batch: SampleBatch | None, template: SampleBatch, sink: ImageSink, monitor: HeartbeatMonitor
    ) -> list[SampleRow]:
        """Sample one batch; only an error inside a sharded forward ends the rank.

        Any other error fails the images of this batch.
        """
        began = time.perf_counter()
        rows = [make_row(spec, self.world.rank) for spec in batch.real_specs] if batch else []
        inputs = run_phase(rows, lambda: self._prepare(batch), self._mark_failed) if batch else None
        if inputs is None and not self.ranks.sharded:
            return rows
        if inputs is None:
            inputs = self.denoiser.dummy_inputs(template, self.world.device)
        x = self._forward(rows, inputs, monitor, needs_cfg((batch or template).specs))
        if batch is None or x is None or rows[0]["state"] == "failed":
            return rows
        decoded = run_phase(rows, lambda: self._decode(x, batch), self._mark_failed)
        monitor.heartbeat()
        if decoded is None:
            return rows
        for number, row in enumerate(rows):
            row["seconds"] = round((time.perf_counter() - began) / batch.num_real, 3)
            if number in decoded.failures:
                self._mark_failed([row], str(decoded.failures[number]))
        images = {number: decoded.pixels[number] for number in range(len(rows)) if number not in decoded.failures}
        run_phase(rows, lambda: sink.put(batch, images, rows), self._mark_failed)
        monitor.heartbeat()
        return rows

    def _prepare(self, batch: SampleBatch) -> SamplingInputs:
        fault_point("sample.prepare")
        inputs: SamplingInputs = self.denoiser.prepare(batch, self.world.device)
        for spec, truncated in zip(batch.real_specs, inputs.truncated, strict=False):
            if truncated:
                log.warning(
                    "prompt %d is longer than the model reads; its end is cut off: %s", spec.index, spec.prompt[:80]
                )
        return inputs

    def _forward(
        self, rows: list[SampleRow], inputs: SamplingInputs, monitor: HeartbeatMonitor, use_cfg: bool
    ) -> torch.Tensor | None:
        if not self.ranks.sharded:
            latents: torch.Tensor | None = run_phase(
                rows, lambda: self._denoise_or_halve(rows, inputs, monitor, use_cfg), self._mark_failed
            )
            return latents
        try:
            return self._denoise(inputs, monitor, use_cfg)
        except Exception as error:
            if isinstance(error, RuntimeError) and is_lost_peer_message(str(error)):
                raise RankFailure(
                    f"a sharded forward of the samples could not be completed: {monitor.explain_failure()}"
                ) from error
            monitor.report_failure(f"{type(error).__name__}: {error}")
            raise RankFailure(
                f"rank {self.world.rank} failed inside a sharded forward while sampling; no rank can continue:\n"
                f"{traceback.format_exc()}"
            ) from error

    def _denoise_or_halve(
        self, rows: list[SampleRow], inputs: SamplingInputs, monitor: HeartbeatMonitor, use_cfg: bool
    ) -> torch.Tensor:
        """Sample the whole batch, or in halves if memory runs out; such rows have `micro_batch`."""
        before = self.num_steps_done
        try:
            return self._denoise(inputs, monitor, use_cfg)
        except torch.OutOfMemoryError:
            if inputs.num_rows == 1:
                raise
        self.num_steps_done = before
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning(
            "out of memory while sampling %d images at once on GPU %d: trying half",
            inputs.num_rows,
            self.world.rank,
        )
        halves = [self._denoise_or_halve(rows, half, monitor, use_cfg) for half in inputs.halves()]
        for row in rows:
            row["micro_batch"] = min(row.get("micro_batch", inputs.num_rows), -(-inputs.num_rows // 2))
        return torch.cat(halves)

    def _denoise(self, inputs: SamplingInputs, monitor: HeartbeatMonitor, use_cfg: bool) -> torch.Tensor:
        settings = self.settings
        solver = SolverSettings(
            sampler=settings.sampler,
            use_cfg=use_cfg,
            dtype=DTYPES[settings.dtype],
            shift=settings.time_shift,
        )

        def on_step() -> None:
            fault_point("sample.forward")
            monitor.heartbeat()
            self.num_steps_done += 1
            if self.on_step is not None:
                self.on_step(min(self.num_steps_done, self.num_steps_total), self.num_steps_total)

        return self.denoiser.sample(inputs, solver, on_step)

    def _decode(self, x: torch.Tensor, batch: SampleBatch) -> DecodedImages:
        fault_point("sample.decode")
        return decode(self.denoiser.space, x, batch)

    def _mark_failed(self, rows: list[SampleRow], reason: str) -> None:
        log.error("Error during sampling on GPU %d: %s", self.world.rank, reason)
        for row in rows:
            row |= {"state": "failed", "reason": reason}
