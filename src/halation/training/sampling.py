"""Samples from all ranks: planned by index, drawn without touching training, published one by one, and reported by everybody.

No collective is open while ranks draw (unless the engine is sharded, where every forward is one), so a slow sampler cannot run
into a timeout, and a rank that fails tells the others in a word instead of leaving them at a barrier.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from halation import plan
from halation.errors import RankFailure
from halation.faults import fault_point
from halation.models import draw
from halation.models.base import Denoiser, Inputs, Solver
from halation.specs import Sheet, Spec
from halation.training.claims import Claims
from halation.training.loop import AUTOCAST
from halation.training.sample_files import Place, Row, Writer, is_drawn
from halation.world.launch import about_peers
from halation.world.ranks import Vigil, World

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


class Sink(Protocol):
    """Where the pictures of a sheet go; what it raises costs that sheet and nothing else."""

    def put(self, sheet: Sheet, pictures: Mapping[int, np.ndarray], rows: Sequence[Row]) -> None:
        """Take what was drawn, by its place on the sheet; a place without a picture has failed."""

    def finish(self) -> None: ...


Shares = Literal["round", "contiguous"]


class Drawing:
    """One drawing of a list of specs by all ranks of a world.

    Sheets go round the ranks, or are shared out contiguously; then, unless every forward is a collective, a rank that is done takes
    over what others have not begun.
    """

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
        self.world = world
        self.denoiser = denoiser
        self.settings = settings
        self.sharded = sharded
        self.timeout_s = timeout_s
        self.stop = stop
        self.on_step = on_step
        self.shares = shares
        self.done = self.total = 0
        self.pair = settings.guidance_scale != 1.0

    def run(self, place: Place, label: str) -> list[Row]:
        """Draw what is missing in the folder; every rank returns the same rows, one a spec, done, failed or open."""
        specs = self.settings.specs()
        sheets = plan.cut(specs, self.settings.sheet_size)
        todo = self.world.from_first(self._missing(place, sheets) if self.world.first else None)
        log.info(
            "Generating samples: %d of %d pictures on %d ranks (%s)",
            sum(sheets[i].num_real for i in todo),
            len(specs),
            self.world.size,
            label,
        )
        rows = self.draw_sheets(sheets, todo, Writer(place, self.settings.sampler), f"sampling {label}")
        return _complete(specs, rows, place)

    def draw_sheets(self, sheets: Sequence[Sheet], todo: Sequence[int], sink: Sink, label: str) -> list[Row]:
        """Draw these sheets, the same list on every rank; every rank returns the rows of all pictures that were drawn or failed."""
        self.done, self.total = 0, plan.rounds(len(todo), self.world.size) * self.settings.steps
        rows: list[Row] = []
        with Vigil(self.world, label, self.timeout_s) as vigil, _invisible(self.denoiser):
            try:
                apart = self.shares == "contiguous" and not self.sharded
                turns = self._claimed(len(todo), label, rows) if apart else self._turns(len(todo))
                for mine in turns:
                    rows.extend(self._draw(None if mine is None else sheets[todo[mine]], sheets[0], sink, vigil))
            finally:
                sink.finish()
            words = vigil.finish(rows)
        rows = [row for word in words for row in word]
        for row in rows:
            if row["state"] == "failed" and row["rank"] != self.world.rank:
                log.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])
        return rows

    def _turns(self, num_sheets: int) -> Iterator[int | None]:
        """The sheets of this rank, in rounds; sharded ranks take a filler where they have none, to keep the others company."""
        division = plan.sheet_for if self.shares == "round" else plan.sheet_in_share
        for turn in range(plan.rounds(num_sheets, self.world.size)):
            if self._stopping():
                return
            mine = division(turn, self.world.rank, self.world.size, num_sheets)
            if mine is None and not self.sharded:
                return
            yield mine

    def _claimed(self, num_sheets: int, label: str, rows: Sequence[Row]) -> Iterator[int]:
        """The sheets of this rank's share, and of others' for as long as everything it drew (`rows`) went well."""
        claims = Claims(self.world, label, num_sheets)
        for mine in claims:
            if self._stopping():
                claims.close()
                return
            yield mine
            if any(row["state"] == "failed" for row in rows):
                claims.keep_to_own()

    def _missing(self, place: Place, sheets: Sequence[Sheet]) -> list[int]:
        with contextlib.suppress(OSError):  # a disk that cannot be written costs the samples, not the training
            place.folder.mkdir(parents=True, exist_ok=True)
        return [number for number, sheet in enumerate(sheets) if not all(is_drawn(place, spec) for spec in sheet.real)]

    def _stopping(self) -> bool:
        """Between sheets a person's wish to stop is granted; sharded ranks must all grant it at once."""
        if not self.sharded:
            return self.stop() != 0
        return any(self.world.exchange(self.stop()))

    def _draw(self, sheet: Sheet | None, shape: Sheet, sink: Sink, vigil: Vigil) -> list[Row]:
        """One sheet, or the company a rank without one keeps to the others. Only a sharded forward's error cannot be survived."""
        began = time.perf_counter()
        rows = [_row(spec, self.world.rank) for spec in sheet.real] if sheet else []
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

    def _decode(self, x: torch.Tensor, sheet: Sheet) -> draw.Decoded:
        fault_point("sample.decode")
        return draw.decode(self.denoiser, x, sheet)

    def _phase(self, rows: list[Row], action: Callable[[], Any]) -> Any:
        """Run one phase of one sheet; an error costs this sheet's pictures and nothing else."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a picture dies of, the others are drawn
            log.debug("while sampling:\n%s", traceback.format_exc())
            self._failed(rows, f"{type(error).__name__}: {error}")
            return None

    def _failed(self, rows: list[Row], reason: str) -> None:
        log.error("Error during sampling on GPU %d: %s", self.world.rank, reason)
        for row in rows:
            row |= {"state": "failed", "reason": reason}


def _row(spec: Spec, rank: int) -> Row:
    return {
        "index": spec.index,
        "prompt": spec.prompt,
        "seed": spec.seed,
        "rank": rank,
        "seconds": 0.0,
        "state": "done",
        "reason": "",
    }


def _complete(specs: Sequence[Spec], rows: Sequence[Row], place: Place) -> list[Row]:
    """One row a spec, in order: what was drawn now, what was there already, and what is still open."""
    by_index = {row["index"]: row for row in rows}
    result = []
    for spec in specs:
        row = by_index.get(spec.index) or _row(spec, -1) | {"state": "done" if is_drawn(place, spec) else "open"}
        result.append(row | {"file": place.picture(spec).name})
    return result


@contextlib.contextmanager
def _invisible(denoiser: Denoiser) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode again afterwards."""
    modes = [(module, module.training) for module in denoiser.module.modules()]
    denoiser.module.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
