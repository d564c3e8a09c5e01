"""Assigns specs to batches and batches to ranks or workers, as pure functions of integers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from halation.sample_specs import SampleBatch, SampleSpec


def make_batches(specs: Sequence[SampleSpec], batch_size: int, *, by_guidance: bool = False) -> tuple[SampleBatch, ...]:
    """Group specs by shape (and guidance), then cut each group into batches of `batch_size` by index.

    The last batch of a group is padded with its last spec. Batches do not depend on the world size: the same specs make
    the same batches on one GPU and on eight.
    """
    if batch_size < 1:
        raise ValueError(f"a batch holds at least one spec, not {batch_size}")
    groups: dict[tuple[float | None, ...], list[SampleSpec]] = {}
    for spec in sorted(specs, key=lambda spec: spec.index):
        key: tuple[float | None, ...] = (*spec.shape, spec.guidance_scale) if by_guidance else spec.shape
        groups.setdefault(key, []).append(spec)
    batches = []
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            real_specs = group[start : start + batch_size]
            fillers = [real_specs[-1]] * (batch_size - len(real_specs))
            batches.append(SampleBatch(specs=(*real_specs, *fillers), num_real=len(real_specs)))
    return tuple(batches)


def group_equal(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the positions of equal keys, group by group, in the order in which the keys first appear."""
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())


class BatchPlan:
    """The batches of rows that are known only by index, numbered by their first index."""

    def __init__(self, groups: Sequence[npt.NDArray[np.int64]], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch holds at least one spec, not {batch_size}")
        if any(len(group) > 1 and not (np.diff(group) > 0).all() for group in groups):
            raise ValueError("the indices of a group are not ascending")
        empty = np.zeros(0, dtype=np.int64)
        ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
        cuts = [np.arange(end - len(group), end, batch_size) for group, end in zip(groups, ends, strict=True)]
        starts = np.concatenate([empty, *cuts])
        stops = np.concatenate(
            [empty, *[np.minimum(cut + batch_size, end) for cut, end in zip(cuts, ends, strict=True)]]
        )
        self._indices = np.concatenate([empty, *groups])
        order = np.argsort(self._indices[starts])
        self._starts, self._stops = starts[order], stops[order]
        ascending = np.argsort(self._indices)
        self._sorted_indices = self._indices[ascending]
        self._batch_numbers = np.repeat(np.argsort(order), stops - starts)[ascending]
        if (np.diff(self._sorted_indices) == 0).any():
            raise ValueError("an index is in two groups")

    def __len__(self) -> int:
        return len(self._starts)

    def rows(self, number: int) -> npt.NDArray[np.int64]:
        """Return the indices in a batch, ascending, without padding entries."""
        return self._indices[self._starts[number] : self._stops[number]]

    def first_rows(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first index of each of these batches."""
        rows: npt.NDArray[np.int64] = self._indices[self._starts[numbers]]
        return rows

    def find_batches(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of the batches with these rows, ascending, without duplicates."""
        positions = np.searchsorted(self._sorted_indices, indices)
        if not np.isin(indices, self._sorted_indices).all():
            raise ValueError("a row is in no batch")
        return np.unique(self._batch_numbers[positions])


def plan_batches(groups: Sequence[npt.NDArray[np.int64]], batch_size: int) -> BatchPlan:
    """Cut groups of rows of one shape (ascending indices) into batches like `make_batches`."""
    return BatchPlan(groups, batch_size)


def initial_batches(num_batches: int, num_workers: int, worker: int) -> range:
    """Return a worker's initial batches, round-robin: worker r of W has r, r + W, r + 2W, etc."""
    return range(worker, num_batches, num_workers)


def num_rounds(num_batches: int, world_size: int) -> int:
    """Return the number of batches per rank, padding included; it is the same on all ranks."""
    return -(-num_batches // world_size)


def round_robin_batch(round_index: int, rank: int, world_size: int, num_batches: int) -> int | None:
    """Return the batch of `rank` in this round (round-robin), or None for a padding batch."""
    batch = round_index * world_size + rank
    return batch if batch < num_batches else None


def rank_range(total: int, world_size: int, rank: int) -> range:
    """Return the contiguous share of a rank, by ceiling division: 6 on 4 ranks are 2, 2, 2, 0."""
    size = -(-total // world_size)
    return range(min(rank * size, total), min((rank + 1) * size, total))


def contiguous_batch(round_index: int, rank: int, world_size: int, num_batches: int) -> int | None:
    """Return the batch of `rank` in this round (contiguous), or None for a padding batch.

    The number of rounds is the same as for round-robin.
    """
    assigned = rank_range(num_batches, world_size, rank)
    return assigned[round_index] if round_index < len(assigned) else None


def rank_and_offset(index: int, total: int, world_size: int) -> tuple[int, int]:
    """Return (rank, offset): the rank whose contiguous share has the index, and its offset."""
    if not 0 <= index < total:
        raise ValueError(f"{index} is out of range for {total}")
    return divmod(index, -(-total // world_size))


def most_loaded_rank(num_unstarted: Sequence[int]) -> int | None:
    """Return the (first) rank with the most unstarted batches, or None if there are none."""
    most = max(num_unstarted, default=0)
    return num_unstarted.index(most) if most > 0 else None


def micro_batch_layout(total: int, world_size: int, max_size: int) -> tuple[int, int]:
    """Return (number, size) of the micro-batches that each rank runs for `total` rows.

    A micro-batch has at most `max_size` rows. The result is the same on all ranks, whose last rows may be padding
    entries: the number of forwards and their shape must not depend on the rank.
    """
    size = -(-total // world_size)
    number = -(-size // max_size)
    return number, -(-size // number)
