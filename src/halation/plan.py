"""Who draws what: pure functions of integers, and the only place in Halation that divides work."""

from __future__ import annotations

from collections.abc import Sequence

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


def micro_batches(total: int, world_size: int, most: int) -> tuple[int, int]:
    """(number, size) of the micro-batches in which every rank takes its share of `total` rows, at most `most` rows at once.

    The same on all ranks, whose last rows may be fillers: the number of forwards and their shape must not depend on the rank.
    """
    size = -(-total // world_size)
    number = -(-size // most)
    return number, -(-size // number)
