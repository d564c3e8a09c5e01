"""Who draws what: pure functions of integers, and the only place in Halation that divides work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from halation.specs import Sheet, Spec


def cut(specs: Sequence[Spec], sheet_size: int) -> tuple[Sheet, ...]:
    """Group specs by shape, then cut each group into sheets of `sheet_size` by index, the last padded with its own last spec.

    The world size is no argument: the same specs make the same sheets on one GPU and on eight.
    """
    if sheet_size < 1:
        raise ValueError(f"a sheet holds at least one spec, not {sheet_size}")
    groups: dict[tuple[int, ...], list[Spec]] = {}
    for spec in sorted(specs, key=lambda spec: spec.index):
        groups.setdefault(spec.shape, []).append(spec)
    sheets = []
    for group in groups.values():
        for start in range(0, len(group), sheet_size):
            real = group[start : start + sheet_size]
            fillers = [real[-1]] * (sheet_size - len(real))
            sheets.append(Sheet(specs=(*real, *fillers), num_real=len(real)))
    return tuple(sheets)


class Sheets:
    """The sheets of rows that are known by their index only, numbered by their first index, so that they follow the file."""

    def __init__(self, groups: Sequence[npt.NDArray[np.int64]], sheet_size: int) -> None:
        if sheet_size < 1:
            raise ValueError(f"a sheet holds at least one spec, not {sheet_size}")
        if any(len(group) > 1 and not (np.diff(group) > 0).all() for group in groups):
            raise ValueError("the indices of a group are not ascending")
        empty = np.zeros(0, dtype=np.int64)
        ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
        cuts = [np.arange(end - len(group), end, sheet_size) for group, end in zip(groups, ends, strict=True)]
        starts = np.concatenate([empty, *cuts])
        stops = np.concatenate(
            [empty, *[np.minimum(cut + sheet_size, end) for cut, end in zip(cuts, ends, strict=True)]]
        )
        self._indices = np.concatenate([empty, *groups])
        order = np.argsort(self._indices[starts])
        self._starts, self._stops = starts[order], stops[order]
        ascending = np.argsort(self._indices)
        self._ascending = self._indices[ascending]
        self._numbers = np.repeat(np.argsort(order), stops - starts)[ascending]
        if (np.diff(self._ascending) == 0).any():
            raise ValueError("an index stands in two groups")

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, number: int) -> npt.NDArray[np.int64]:
        """The indices on a sheet, ascending; fewer than the sheet's size where the rest are fillers."""
        return self._indices[self._starts[number] : self._stops[number]]

    def first_rows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first index on each of these sheets."""
        rows: npt.NDArray[np.int64] = self._indices[self._starts[numbers]]
        return rows

    def containing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of the sheets these rows stand on, ascending, each once."""
        places = np.searchsorted(self._ascending, indices)
        if not np.isin(indices, self._ascending).all():
            raise ValueError("a row that stands on no sheet")
        return np.unique(self._numbers[places])


def sheets_of(groups: Sequence[npt.NDArray[np.int64]], sheet_size: int) -> Sheets:
    """Cut groups of rows of one shape, given by their ascending indices, as `cut` cuts their specs."""
    return Sheets(groups, sheet_size)


def turns(num_sheets: int, num_workers: int, worker: int) -> range:
    """The sheets a worker begins with, round-robin: worker r of W has r, r + W, r + 2W ..."""
    return range(worker, num_sheets, num_workers)


def rounds(num_sheets: int, world_size: int) -> int:
    """How many sheets every rank draws, fillers included, so that all ranks make the same number of forwards."""
    return -(-num_sheets // world_size)


def sheet_for(round_index: int, rank: int, world_size: int, num_sheets: int) -> int | None:
    """The sheet `rank` draws in this round (round-robin), or None where it draws a filler to keep the others company."""
    sheet = round_index * world_size + rank
    return sheet if sheet < num_sheets else None


def share(total: int, world_size: int, rank: int) -> range:
    """Contiguous shares by ceiling division: 6 on 4 ranks are 2, 2, 2, 0."""
    size = -(-total // world_size)
    return range(min(rank * size, total), min((rank + 1) * size, total))


def sheet_in_share(round_index: int, rank: int, world_size: int, num_sheets: int) -> int | None:
    """The sheet `rank` draws in this round where shares are contiguous, in as many rounds as round-robin takes, or None for a filler."""
    mine = share(num_sheets, world_size, rank)
    return mine[round_index] if round_index < len(mine) else None


def place_in_shares(index: int, total: int, world_size: int) -> tuple[int, int]:
    """(rank, number) of an index in the contiguous shares: whose share it is in, and its number there, from 0."""
    if not 0 <= index < total:
        raise ValueError(f"{index} is none of {total}")
    return divmod(index, -(-total // world_size))


def slowest(left: Sequence[int]) -> int | None:
    """Whom to help: the rank with the most sheets that nobody has begun, the first of equals, or None where all have begun."""
    most = max(left, default=0)
    return left.index(most) if most > 0 else None


def micro_batches(total: int, world_size: int, most: int) -> tuple[int, int]:
    """(number, size) of the micro-batches in which every rank takes its share of `total` rows, at most `most` rows at once.

    The same on all ranks, whose last rows may be fillers: the number of forwards and their shape must not depend on the rank.
    """
    size = -(-total // world_size)
    number = -(-size // most)
    return number, -(-size // number)
