"""Who draws what where several commands share a folder: ranges of sheets, claimed by lease, with no engine and no clock in common.

A lease is a name in `leases/` that only one process can create; it is a hard link to its owner's card, so touching the card keeps
all of an owner's leases alive at once. One that was not touched for `lease_s` is taken over. Should its owner only have slept, a
sheet is drawn twice, to the same bits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halation.faults import fault_point
from halation.generation.shared_folder.ledger import SharedLedger, link_once
from halation.plan import Sheets

log = logging.getLogger(__name__)

MAX_RANGES = 4096
"""At the end others wait for the last range, so ranges are short; a claim takes milliseconds, so they can be."""
POLL_S = 1.0


class Ranges:
    """Sheets cut into at most 4096 ranges by number: a function of the plan alone, so that all processes mean the same ones."""

    def __init__(self, sheets: Sheets) -> None:
        self.num_sheets = len(sheets)
        self.size = max(1, math.ceil(self.num_sheets / MAX_RANGES))
        rows = [sheets.rows(sheet) for sheet in range(self.num_sheets)]
        lengths = [len(row) for row in rows]
        self._range_of_row = np.zeros(sum(lengths), dtype=np.int64)
        if rows:
            self._range_of_row[np.concatenate(rows)] = np.repeat(np.arange(self.num_sheets) // self.size, lengths)

    def __len__(self) -> int:
        return -(-self.num_sheets // self.size)

    def sheets(self, number: int) -> range:
        return range(number * self.size, min((number + 1) * self.size, self.num_sheets))

    def name(self, number: int) -> str:
        """By its first and last sheet: a later command with a longer plan may cut other ranges."""
        sheets = self.sheets(number)
        return f"{sheets.start:07d}-{sheets.stop - 1:07d}.json"

    def unfinished(self, ledger: SharedLedger) -> list[int]:
        """Ranges with a row left to draw."""
        return self.of_rows(ledger.unfinished())

    def of_rows(self, rows: npt.ArrayLike) -> list[int]:
        """The ranges these rows are in, ascending, each once."""
        numbers = self._range_of_row[np.asarray(rows, dtype=np.int64)]
        found: list[int] = np.flatnonzero(np.bincount(numbers, minlength=len(self))).tolist()
        return found


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A lease as it was found: whose it is, when it was last touched, and how long a silence its owner asked others to bear."""

    token: str
    touched: float
    lease_s: float


class Leases:
    """The claims of one process; it calls `release` at its end."""

    def __init__(
        self,
        ledger: SharedLedger,
        ranges: Ranges,
        *,
        lease_s: float,
        num_wanted: int,
        on_refresh: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        """`num_wanted` sheets keep this process's workers busy; `on_refresh` is called when others' outcomes were read."""
        self.ledger = ledger
        self.ranges = ranges
        self.lease_s = lease_s
        self.num_wanted = num_wanted
        self.on_refresh = on_refresh
        self.say = say
        self.process = ledger.process
        self.held: set[int] = set()
        self.num_taken_over = 0
        self.folder = ledger.folder / "leases"
        self.folder.mkdir(exist_ok=True)
        self._card = self.folder / f".{self.process.name}.card"
        self._write_card()
        self._touched = time.monotonic()
        self._look_again = 0.0
        self._waiting = False
        # Apart from each other, so that processes seldom meet; in order from there.
        self._first = zlib.crc32(self.process.token.encode()) % max(1, len(ranges))

    # -- what the supervisor asks

    def beat(self) -> None:
        """Touch the card, and let go of what is finished or was taken over, four times in a lease."""
        if time.monotonic() - self._touched < self.lease_s / 4:
            return
        self._touch()
        self._refresh()
        for number in sorted(self.held):
            if self._owner(self._path(number)) != self.process.token:
                self.held.discard(number)
                log.warning("sheets %s were taken over: this process was silent for too long", self._path(number).stem)
        self._let_go_of_finished()

    def next(self) -> Sequence[int] | None:
        """Sheets of ranges that are claimed now; none while others hold what is left; None where nothing is left."""
        if time.monotonic() < self._look_again and self.ledger.unfinished().size:
            return ()
        self._refresh()
        left = self._let_go_of_finished()
        if not left:
            self._clear()
            return None
        claimed = self._claim_some([number for number in left if number not in self.held])
        if claimed:
            # A range that became free just now may hold what its last owner had finished by then.
            self._refresh()
        else:
            self._wait(len(left))
        return [sheet for number in claimed for sheet in self.ranges.sheets(number)]

    def _wait(self, num_left: int) -> None:
        """All that is left is being drawn, here or elsewhere."""
        self._look_again = time.monotonic() + min(POLL_S, self.lease_s / 4)
        if not self.held and not self._waiting:
            self._waiting = True
            self.say(
                f"waiting: other processes draw the last {num_left} of {len(self.ranges)} ranges of sheets; "
                f"one that is silent for {self.lease_s:g} s is taken over"
            )

    def release(self) -> None:
        """Let go of everything."""
        for number in sorted(self.held):
            self._let_go(number)
        with contextlib.suppress(OSError):
            self._card.unlink()

    # -- the files

    def _refresh(self) -> None:
        if self.ledger.refresh():
            self.on_refresh()

    def _let_go_of_finished(self) -> list[int]:
        """Its outcomes are on disk before its lease is gone; returns the ranges that are not finished."""
        left = self.ranges.unfinished(self.ledger)
        for number in sorted(self.held.difference(left)):
            self._let_go(number)
        return left

    def _clear(self) -> None:
        """Nothing is left: a lease on pictures that are all there is a dead process's, and in nobody's way but the reader's."""
        failed = [row.request.spec.index for row in self.ledger.failures()]
        kept = {self.ranges.name(number) for number in self.ranges.of_rows(failed)}
        for name in {self.ranges.name(number) for number in range(len(self.ranges))}.intersection(
            os.listdir(self.folder)
        ):
            if name not in kept:
                (self.folder / name).unlink(missing_ok=True)

    def _let_go(self, number: int) -> None:
        path = self._path(number)
        self.held.discard(number)
        if self._owner(path) == self.process.token:
            fault_point("lease.unlink")
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _claim_some(self, free: list[int]) -> list[int]:
        claimed: list[int] = []
        now: float | None = None
        for number in sorted(free, key=lambda number: (number - self._first) % len(self.ranges)):
            if len(claimed) * self.ranges.size >= self.num_wanted:
                break
            path = self._path(number)
            fault_point("lease.link")
            if not link_once(self._card, path):
                now = now or self._touch()
                if not self._take_over(path, now):
                    continue
            fault_point("lease.linked")
            self.held.add(number)
            claimed.append(number)
        return claimed

    def _take_over(self, path: Path, now: float) -> bool:
        """Move an expired lease away and create it anew. `now` is the file system's time, so machines' clocks need not agree."""
        seen = look(path)
        silent_s = now - seen.touched
        if silent_s <= (seen.lease_s or self.lease_s) and seen.token != self.process.token:
            return False
        away = path.with_name(f".{path.name}.{self.process.name}.tmp")
        try:
            fault_point("lease.rename")
            os.rename(path, away)
            fault_point("lease.renamed")
        except FileNotFoundError:
            return False
        try:
            if self._owner(away) != seen.token:  # another took it over since we looked: this is its new lease
                link_once(away, path)
                return False
        finally:
            away.unlink(missing_ok=True)
        if not link_once(self._card, path):
            return False
        if seen.token != self.process.token:  # its own name where it holds nothing: the answer to creating it was lost
            self.num_taken_over += 1
            log.warning("sheets %s are taken over: their owner was silent for %.0f s", path.stem, silent_s)
        return True

    def _path(self, number: int) -> Path:
        return self.folder / self.ranges.name(number)

    def _touch(self) -> float:
        """Keep this process's leases alive; returns the time the file system gave."""
        self._touched = time.monotonic()
        if (
            not self._card.exists()
        ):  # swept as a dead process's, while this one slept: its leases are links to another file
            self.held.clear()
            self._write_card()
        with open(self._card, "rb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime

    def _write_card(self) -> None:
        process = self.process
        owner = {"host": process.host, "pid": process.pid, "token": process.token, "lease_s": self.lease_s}
        self._card.write_text(json.dumps(owner))

    def _owner(self, path: Path) -> str:
        return look(path).token


def look(path: Path) -> Seen:
    """What stands there; opened, because NFS may answer from memory what is only asked by name."""
    try:
        with open(path, "rb") as file:
            touched = os.fstat(file.fileno()).st_mtime
            values = json.loads(file.read())
            return Seen(token=str(values["token"]), touched=touched, lease_s=float(values["lease_s"]))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return Seen(token="", touched=math.inf, lease_s=0.0)
    except (ValueError, KeyError, TypeError):  # nobody's: it expires
        return Seen(token="?", touched=touched, lease_s=0.0)
