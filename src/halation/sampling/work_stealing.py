"""Contiguous shares of sheets for ranks that draw apart: each its own, then what the slowest have not begun."""

from __future__ import annotations

from collections.abc import Iterator

from halation import plan
from halation.distributed.world import World


class Claims:
    """Sheets for this rank, one after the other, for as long as any is left in its own share or in another's.

    Each share has a counter in the store, which hands out every sheet but the first to whoever asks first. The first is its
    owner's without asking: however late a rank begins, it draws.
    """

    def __init__(self, world: World, name: str, num_sheets: int) -> None:
        self.world = world
        self.prefix = f"claims/{name}"
        self.helps = True
        self.shares = [plan.share(num_sheets, world.size, rank) for rank in range(world.size)]

    def __iter__(self) -> Iterator[int]:
        rank = self.world.rank
        yield from self.shares[rank][:1]
        while (sheet := self._claim(rank)) is not None:
            yield sheet
        while self.helps and (owner := plan.slowest(self._left())) is not None:
            sheet = self._claim(owner)
            if sheet is not None:  # else somebody was faster
                yield sheet

    def keep_to_own(self) -> None:
        """Help nobody from now on: a rank whose pictures fail at once would take everybody's."""
        self.helps = False

    def close(self) -> None:
        """Leave nothing to claim, to anybody."""
        for owner, share in enumerate(self.shares):
            self._counted(owner, len(share))

    def _claim(self, owner: int) -> int | None:
        share = self.shares[owner]
        number = self._counted(owner, 1) if len(share) > 1 else 1
        return share[number] if number < len(share) else None

    def _left(self) -> list[int]:
        return [
            len(share) - 1 - self._counted(owner, 0) if len(share) > 1 else 0 for owner, share in enumerate(self.shares)
        ]

    def _counted(self, owner: int, more: int) -> int:
        number: int = self.world.store.add(f"{self.prefix}/{owner}", more)
        return number
