"""Samples by a model that Halation trains: planned by index, drawn by all ranks without touching training, published one by one."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import torch

from halation import work_division
from halation.distributed.launcher import is_lost_peer_message
from halation.distributed.world import HeartbeatMonitor, World
from halation.errors import RankFailure
from halation.fault_injection import fault_point
from halation.models.denoiser import (
    MIXED_PRECISION_DTYPES,
    DecodedImages,
    SamplingInputs,
    SamplingModel,
    SolverSettings,
    decode,
)
from halation.sample_specs import SampleBatch, SampleSpec
from halation.sampling.all_rank_sampler import ImageSink, ShareMode, SpecSampler, complete_rows, make_row
from halation.sampling.sample_folder import SampleFolder, SampleRow, SampleWriter

log = logging.getLogger(__name__)

_STORED_AS = {"batch_size": "sheet_size"}
"""Names in files that differ from those in code."""


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
    """What a student was trained for: `objective` and `steps`. Drawn in other numbers of steps it is another model."""

    def as_json(self) -> dict[str, Any]:
        """The settings as checkpoints, exports and samples.json store them."""
        return {_STORED_AS.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def required_keys(cls) -> set[str]:
        """Keys without which stored settings are not complete."""
        return {_STORED_AS.get(each.name, each.name) for each in fields(cls) if each.default is MISSING}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> SampleSettings:
        """The settings that a checkpoint stores; keys of other versions are left out."""
        names = {_STORED_AS.get(each.name, each.name): each.name for each in fields(cls)}
        values = {names[key]: value for key, value in stored.items() if key in names}
        return cls(**values | {"prompts": tuple(values["prompts"])})

    def specs(self) -> list[SampleSpec]:
        return [
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


class DenoiserSampler(SpecSampler):
    """A drawing by one of our own models, in phases: prepare, sample, decode."""

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
        super().__init__(world, sharded=sharded, timeout_s=timeout_s, stop=stop, share_mode=share_mode)
        self.denoiser = denoiser
        self.settings = settings
        self.on_step = on_step
        self.num_steps_done = self.num_steps_total = 0
        self.uses_guidance = settings.guidance_scale != 1.0

    def run(self, sample_folder: SampleFolder, label: str) -> list[SampleRow]:
        """Draw what is missing in the folder; every rank returns the same rows, one a spec, done, failed or open."""
        specs = self.settings.specs()
        batches = work_division.make_batches(specs, self.settings.batch_size)
        todo = self.find_missing(sample_folder, batches)
        log.info(
            "Generating samples: %d of %d images on %d ranks (%s)",
            sum(batches[i].num_real for i in todo),
            len(specs),
            self.world.size,
            label,
        )
        rows = self.draw_batches(batches, todo, SampleWriter(sample_folder, self.settings.sampler), f"sampling {label}")
        return complete_rows(specs, rows, sample_folder)

    def draw_batches(
        self, batches: Sequence[SampleBatch], todo: Sequence[int], sink: ImageSink, label: str
    ) -> list[SampleRow]:
        self.num_steps_done, self.num_steps_total = (
            0,
            work_division.num_rounds(len(todo), self.world.size) * self.settings.steps,
        )
        return super().draw_batches(batches, todo, sink, label)

    @contextlib.contextmanager
    def _preserve_training_state(self) -> Iterator[None]:
        """Evaluation mode inside, every module's own mode again afterwards."""
        modes = [(module, module.training) for module in self.denoiser.module.modules()]
        self.denoiser.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _draw_batch(
        self, batch: SampleBatch | None, template: SampleBatch, sink: ImageSink, monitor: HeartbeatMonitor
    ) -> list[SampleRow]:
        """One batch, or the company a rank without one keeps to the others. Only a sharded forward's error cannot be survived."""
        began = time.perf_counter()
        rows = [make_row(spec, self.world.rank) for spec in batch.real_specs] if batch else []
        inputs = self._run_phase(rows, lambda: self._prepare(batch)) if batch else None
        if inputs is None and not self.sharded:
            return rows
        if inputs is None:
            inputs = self.denoiser.dummy_inputs(template, self.world.device)
        x = self._forward(rows, inputs, monitor)
        if batch is None or x is None or rows[0]["state"] == "failed":
            return rows
        decoded = self._run_phase(rows, lambda: self._decode(x, batch))
        monitor.heartbeat()
        if decoded is None:
            return rows
        for number, row in enumerate(rows):
            row["seconds"] = round((time.perf_counter() - began) / batch.num_real, 3)
            if number in decoded.failures:
                self._mark_failed([row], str(decoded.failures[number]))
        images = {number: decoded.pixels[number] for number in range(len(rows)) if number not in decoded.failures}
        self._run_phase(rows, lambda: sink.put(batch, images, rows))
        monitor.heartbeat()
        return rows

    def _prepare(self, batch: SampleBatch) -> SamplingInputs:
        fault_point("sample.prepare")
        inputs: SamplingInputs = self.denoiser.prepare(batch, self.world.device)
        for spec, truncated in zip(batch.real_specs, inputs.truncated, strict=False):
            if truncated:
                log.warning(
                    "prompt %d is longer than the model reads; its end has no effect: %s", spec.index, spec.prompt[:80]
                )
        return inputs

    def _forward(self, rows: list[SampleRow], inputs: SamplingInputs, monitor: HeartbeatMonitor) -> torch.Tensor | None:
        if not self.sharded:
            latents: torch.Tensor | None = self._run_phase(rows, lambda: self._denoise_or_halve(rows, inputs, monitor))
            return latents
        try:
            return self._denoise(inputs, monitor)
        except Exception as error:
            if isinstance(error, RuntimeError) and is_lost_peer_message(str(error)):
                raise RankFailure(
                    f"a sharded forward of the samples could not be completed: {monitor.explain_failure()}"
                ) from error
            monitor.report_failure(f"{type(error).__name__}: {error}")
            raise RankFailure(
                f"rank {self.world.rank} failed inside a sharded forward while sampling, which no rank can survive:\n{traceback.format_exc()}"
            ) from error

    def _denoise_or_halve(
        self, rows: list[SampleRow], inputs: SamplingInputs, monitor: HeartbeatMonitor
    ) -> torch.Tensor:
        """The whole batch at once or, where memory runs out, half of it after the other; such images are marked."""
        before = self.num_steps_done
        try:
            return self._denoise(inputs, monitor)
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
        halves = [self._denoise_or_halve(rows, half, monitor) for half in inputs.halves()]
        for row in rows:
            row["micro_batch"] = min(row.get("micro_batch", inputs.num_rows), -(-inputs.num_rows // 2))
        return torch.cat(halves)

    def _denoise(self, inputs: SamplingInputs, monitor: HeartbeatMonitor) -> torch.Tensor:
        settings = self.settings
        solver = SolverSettings(
            sampler=settings.sampler,
            use_cfg=self.uses_guidance,
            dtype=MIXED_PRECISION_DTYPES[settings.dtype] or torch.float32,
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
