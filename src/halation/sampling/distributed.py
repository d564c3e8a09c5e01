"""Sheets of specs drawn by all ranks of a world, round by round; how one sheet is drawn is a subclass's, never this file's.

No collective is open while ranks draw (unless the model is sharded, where every forward is one), so a slow sampler cannot run
into a timeout, and a rank that fails tells the others in a word instead of leaving them at a barrier.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np

from halation import plan
from halation.distributed.world import Vigil, World
from halation.sampling.files import Place, Row, is_drawn
from halation.sampling.work_stealing import Claims
from halation.specs import Sheet, Spec

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the pictures of a sheet go; what it raises costs that sheet and nothing else."""

    def put(self, sheet: Sheet, pictures: Mapping[int, np.ndarray], rows: Sequence[Row]) -> None:
        """Take what was drawn, by its place on the sheet; a place without a picture has failed."""

    def finish(self) -> None: ...


Shares = Literal["round", "contiguous"]


class Rounds(ABC):
    """One drawing of a list of specs by all ranks of a world.

    Sheets go round the ranks, or are shared out contiguously; then, unless every forward is a collective, a rank that is done takes
    over what others have not begun.
    """

    def __init__(
        self,
        world: World,
        *,
        sharded: bool,
        timeout_s: float,
        stop: Callable[[], int],
        shares: Shares = "round",
    ) -> None:
        self.world = world
        self.sharded = sharded
        self.timeout_s = timeout_s
        self.stop = stop
        self.shares = shares

    @abstractmethod
    def _draw(self, sheet: Sheet | None, shape: Sheet, sink: Sink, vigil: Vigil) -> list[Row]:
        """One sheet, or the company that a rank without one keeps to the others, of the sheet `shape`'s shape."""

    @abstractmethod
    def _invisible(self) -> AbstractContextManager[None]:
        """What stands around the drawing, so that whoever trains does not notice it."""

    def missing(self, place: Place, sheets: Sequence[Sheet]) -> list[int]:
        """The sheets of which a picture is not there, the same list on every rank."""
        found: list[int] = self.world.from_first(self._missing(place, sheets) if self.world.first else None)
        return found

    def draw_sheets(self, sheets: Sequence[Sheet], todo: Sequence[int], sink: Sink, label: str) -> list[Row]:
        """Draw these sheets, the same list on every rank; every rank returns the rows of all pictures that were drawn or failed."""
        rows: list[Row] = []
        with Vigil(self.world, label, self.timeout_s) as vigil, self._invisible():
            try:
                apart = self.shares == "contiguous" and not self.sharded
                turns = self._claimed(len(todo), label, rows) if apart else self._turns(len(todo))
                for mine in turns:
                    rows.extend(self._draw(None if mine is None else sheets[todo[mine]], sheets[0], sink, vigil))
            finally:
                sink.finish()
            words = vigil.finish(rows)
        rows = [row for word in words for row in word]
        self._pass_on([row for row in rows if row["state"] == "failed" and row["rank"] != self.world.rank])
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

    def _phase(self, rows: list[Row], action: Callable[[], Any]) -> Any:
        """Run one phase of one sheet; an error costs this sheet's pictures and nothing else."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a picture dies of, the others are drawn
            log.debug("while sampling:\n%s", traceback.format_exc())
            self._failed(rows, f"{type(error).__name__}: {error}")
            return None

    def _pass_on(self, rows: Sequence[Row]) -> None:
        """What failed on other ranks, into this rank's log."""
        for row in rows:
            log.error("Error during sampling on GPU %d: %s", row["rank"], row["reason"])

    def _failed(self, rows: list[Row], reason: str) -> None:
        log.error("Error during sampling on GPU %d: %s", self.world.rank, reason)
        for row in rows:
            row |= {"state": "failed", "reason": reason}


def row_of(spec: Spec, rank: int) -> Row:
    return {
        "index": spec.index,
        "prompt": spec.prompt,
        "seed": spec.seed,
        "rank": rank,
        "seconds": 0.0,
        "state": "done",
        "reason": "",
    }


def complete(specs: Sequence[Spec], rows: Sequence[Row], place: Place) -> list[Row]:
    """One row a spec, in order: what was drawn now, what was there already, and what is still open."""
    by_index = {row["index"]: row for row in rows}
    result = []
    for spec in specs:
        row = by_index.get(spec.index) or row_of(spec, -1) | {"state": "done" if is_drawn(place, spec) else "open"}
        result.append(row | {"file": place.picture(spec).name})
    return result
