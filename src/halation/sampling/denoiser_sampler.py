"""Samples by a model that Halation trains: planned by index, drawn by all ranks without touching training, published one by one."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halation import plan
from halation.distributed.launcher import about_peers
from halation.distributed.world import Vigil, World
from halation.errors import RankFailure
from halation.faults import fault_point
from halation.models import sampling
from halation.models.denoiser import AUTOCAST, Denoiser, Inputs, Solver
from halation.sampling.distributed import Rounds, Shares, Sink, complete, row_of
from halation.sampling.files import Place, Row, Writer
from halation.specs import Sheet, Spec

log = logging.getLogger(__name__)


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
    sheet_size: int
    dtype: str
    time_shift: float = 1.0
    threads: int = 1
    compile: bool = False
    deterministic: bool = False
    distilled: dict[str, Any] | None = None
    """What a student was trained for: `objective` and `steps`. Drawn in other numbers of steps it is another model."""

    def specs(self) -> list[Spec]:
        return [
            Spec(
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


class Drawing(Rounds):
    """A drawing by one of our own models, in phases: prepare, sample, decode."""

    def __init__(
        self,
        world: World,
        denoiser: Denoiser,
        settings: SampleSettings,
        *,
        sharded: bool,
        timeout_s: float,
        stop: Callable[[], int],
        on_step: Callable[[int, int], None] | None = None,
        shares: Shares = "round",
    ) -> None:
        super().__init__(world, sharded=sharded, timeout_s=timeout_s, stop=stop, shares=shares)
        self.denoiser = denoiser
        self.settings = settings
        self.on_step = on_step
        self.done = self.total = 0
        self.pair = settings.guidance_scale != 1.0

    def run(self, place: Place, label: str) -> list[Row]:
        """Draw what is missing in the folder; every rank returns the same rows, one a spec, done, failed or open."""
        specs = self.settings.specs()
        sheets = plan.cut(specs, self.settings.sheet_size)
        todo = self.missing(place, sheets)
        log.info(
            "Generating samples: %d of %d pictures on %d ranks (%s)",
            sum(sheets[i].num_real for i in todo),
            len(specs),
            self.world.size,
            label,
        )
        rows = self.draw_sheets(sheets, todo, Writer(place, self.settings.sampler), f"sampling {label}")
        return complete(specs, rows, place)

    def draw_sheets(self, sheets: Sequence[Sheet], todo: Sequence[int], sink: Sink, label: str) -> list[Row]:
        self.done, self.total = 0, plan.rounds(len(todo), self.world.size) * self.settings.steps
        return super().draw_sheets(sheets, todo, sink, label)

    @contextlib.contextmanager
    def _invisible(self) -> Iterator[None]:
        """Evaluation mode inside, every module's own mode again afterwards."""
        modes = [(module, module.training) for module in self.denoiser.module.modules()]
        self.denoiser.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _draw(self, sheet: Sheet | None, shape: Sheet, sink: Sink, vigil: Vigil) -> list[Row]:
        """One sheet, or the company a rank without one keeps to the others. Only a sharded forward's error cannot be survived."""
        began = time.perf_counter()
        rows = [row_of(spec, self.world.rank) for spec in sheet.real] if sheet else []
        inputs = self._phase(rows, lambda: self._prepare(sheet)) if sheet else None
        if inputs is None and not self.sharded:
            return rows
        if inputs is None:
            inputs = self.denoiser.filler(shape, self.world.device)
        x = self._forward(rows, inputs, vigil)
        if sheet is None or x is None or rows[0]["state"] == "failed":
            return rows
        decoded = self._phase(rows, lambda: self._decode(x, sheet))
        vigil.beat()
        if decoded is None:
            return rows
        for number, row in enumerate(rows):
            row["seconds"] = round((time.perf_counter() - began) / sheet.num_real, 3)
            if number in decoded.failures:
                self._failed([row], str(decoded.failures[number]))
        pictures = {number: decoded.pixels[number] for number in range(len(rows)) if number not in decoded.failures}
        self._phase(rows, lambda: sink.put(sheet, pictures, rows))
        vigil.beat()
        return rows

    def _prepare(self, sheet: Sheet) -> Inputs:
        fault_point("sample.prepare")
        inputs: Inputs = self.denoiser.prepare(sheet, self.world.device)
        for spec, truncated in zip(sheet.real, inputs.truncated, strict=False):
            if truncated:
                log.warning(
                    "prompt %d is longer than the model reads; its end has no effect: %s", spec.index, spec.prompt[:80]
                )
        return inputs

    def _forward(self, rows: list[Row], inputs: Inputs, vigil: Vigil) -> torch.Tensor | None:
        if not self.sharded:
            drawn: torch.Tensor | None = self._phase(rows, lambda: self._fitting(rows, inputs, vigil))
            return drawn
        try:
            return self._denoise(inputs, vigil)
        except Exception as error:
            if isinstance(error, RuntimeError) and about_peers(str(error)):
                raise RankFailure(
                    f"a sharded forward of the samples could not be completed: {vigil.blame()}"
                ) from error
            vigil.fail(f"{type(error).__name__}: {error}")
            raise RankFailure(
                f"rank {self.world.rank} failed inside a sharded forward while sampling, which no rank can survive:\n{traceback.format_exc()}"
            ) from error

    def _fitting(self, rows: list[Row], inputs: Inputs, vigil: Vigil) -> torch.Tensor:
        """The whole sheet at once or, where memory runs out, half of it after the other; such pictures are marked."""
        before = self.done
        try:
            return self._denoise(inputs, vigil)
        except torch.OutOfMemoryError:
            if inputs.num_rows == 1:
                raise
        self.done = before
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning(
            "out of memory while sampling %d pictures at once on GPU %d: trying half",
            inputs.num_rows,
            self.world.rank,
        )
        pieces = [self._fitting(rows, half, vigil) for half in inputs.halves()]
        for row in rows:
            row["micro_batch"] = min(row.get("micro_batch", inputs.num_rows), -(-inputs.num_rows // 2))
        return torch.cat(pieces)

    def _denoise(self, inputs: Inputs, vigil: Vigil) -> torch.Tensor:
        settings = self.settings
        solver = Solver(
            sampler=settings.sampler,
            pair=self.pair,
            dtype=AUTOCAST[settings.dtype] or torch.float32,
            shift=settings.time_shift,
        )

        def on_step() -> None:
            fault_point("sample.forward")
            vigil.beat()
            self.done += 1
            if self.on_step is not None:
                self.on_step(min(self.done, self.total), self.total)

        return self.denoiser.sample(inputs, solver, on_step)

    def _decode(self, x: torch.Tensor, sheet: Sheet) -> sampling.Decoded:
        fault_point("sample.decode")
        return sampling.decode(self.denoiser, x, sheet)
