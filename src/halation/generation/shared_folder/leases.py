"""Leases on ranges of batches, for commands that share only a folder.

A lease is a file in `leases/` that only one process can create. It is a hard link to its owner's owner file
(`.{process}.card`), so touching the owner file keeps all leases of that owner alive. A lease that was not touched for
`lease_s` is taken over. If its owner was only suspended, a batch is generated twice, with the same bits.
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

from halation.fault_injection import fault_point
from halation.generation.shared_folder.shared_ledger import LEASES_FOLDER, OWNER_FILE_SUFFIX, SharedLedger
from halation.runs.lock import is_alive
from halation.runs.run_folder import link_once
from halation.work_division import BatchPlan

log = logging.getLogger(__name__)

MAX_RANGES = 4096
"""Many short ranges: at the end, processes wait for the last range, and a claim takes only milliseconds."""
POLL_S = 1.0


class BatchRanges:
    """Splits the batches into at most 4096 ranges.

    The split depends only on the plan, so that it is the same in all processes.
    """

    def __init__(self, batches: BatchPlan) -> None:
        self.num_batches = len(batches)
        self.size = max(1, math.ceil(self.num_batches / MAX_RANGES))
        rows = [batches.rows(batch) for batch in range(self.num_batches)]
        lengths = [len(row) for row in rows]
        self._range_of_row = np.zeros(sum(lengths), dtype=np.int64)
        if rows:
            self._range_of_row[np.concatenate(rows)] = np.repeat(np.arange(self.num_batches) // self.size, lengths)

    def __len__(self) -> int:
        return -(-self.num_batches // self.size)

    def batches(self, number: int) -> range:
        return range(number * self.size, min((number + 1) * self.size, self.num_batches))

    def lease_name(self, number: int) -> str:
        """Return a name made of the first and last batch of the range.

        A later command with a longer plan may split the batches into other ranges.
        """
        batches = self.batches(number)
        return f"{batches.start:07d}-{batches.stop - 1:07d}.json"

    def unfinished_ranges(self, ledger: SharedLedger) -> list[int]:
        """Return the ranges with unfinished rows."""
        return self.find_ranges(ledger.unfinished_indices())

    def find_ranges(self, rows: npt.ArrayLike) -> list[int]:
        """Return the ranges that contain these rows, ascending and unique."""
        numbers = self._range_of_row[np.asarray(rows, dtype=np.int64)]
        found: list[int] = np.flatnonzero(np.bincount(numbers, minlength=len(self))).tolist()
        return found


@dataclass(frozen=True, kw_only=True)
class LeaseInfo:
    """The content of a lease: owner token, time of the last touch, seconds until it expires."""

    token: str
    touched_at: float
    lease_s: float


class Leases:
    """The leases of one process, which calls `release` when it ends."""

    def __init__(
        self,
        ledger: SharedLedger,
        ranges: BatchRanges,
        *,
        lease_s: float,
        num_batches_wanted: int,
        on_refresh: Callable[[], None] = lambda: None,
        print_line: Callable[[str], None] = log.info,
    ) -> None:
        """Create the owner file of this process.

        `num_batches_wanted` is the number of batches that keeps the workers busy. `on_refresh` is called when outcomes
        of other processes were read.
        """
        self.ledger = ledger
        self.ranges = ranges
        self.lease_s = lease_s
        self.num_batches_wanted = num_batches_wanted
        self.on_refresh = on_refresh
        self.print_line = print_line
        self.process = ledger.process
        self.held_ranges: set[int] = set()
        self.num_taken_over = 0
        self.folder = ledger.folder / LEASES_FOLDER
        self._owner_file = self.folder / f".{self.process.name}{OWNER_FILE_SUFFIX}"
        self._write_owner_file()
        self._touched_at = time.monotonic()
        self._next_poll_at = 0.0
        self._is_waiting = False
        # Processes start at different ranges, so that they rarely compete for the same one.
        self._first_range = zlib.crc32(self.process.token.encode()) % max(1, len(ranges))

    # -- called by the supervisor

    def heartbeat(self) -> None:
        """Four times per `lease_s`, touch the owner file and drop finished or lost ranges."""
        if time.monotonic() - self._touched_at < self.lease_s / 4:
            return
        self._touch()
        self._refresh()
        for number in sorted(self.held_ranges):
            if self._read_owner(self._lease_path(number)) != self.process.token:
                self.held_ranges.discard(number)
                log.warning(
                    "another process took over batches %s: this process sent no heartbeat in time",
                    self._lease_path(number).stem,
                )
        self._release_finished()

    def next_batches(self) -> Sequence[int] | None:
        """Claim ranges and return their batches; empty while others hold the rest, None if done."""
        if time.monotonic() < self._next_poll_at and self.ledger.unfinished_indices().size:
            return ()
        self._refresh()
        left = self._release_finished()
        if not left:
            self._remove_stale_leases()
            return None
        claimed = self._claim_ranges([number for number in left if number not in self.held_ranges])
        if claimed:
            # The previous owner of a range may have finished some of its batches.
            self._refresh()
        else:
            self._schedule_poll(len(left))
        return [batch for number in claimed for batch in self.ranges.batches(number)]

    def _schedule_poll(self, num_left: int) -> None:
        """Poll again later: all remaining ranges are claimed, here or by other processes."""
        self._next_poll_at = time.monotonic() + min(POLL_S, self.lease_s / 4)
        if not self.held_ranges and not self._is_waiting:
            self._is_waiting = True
            self.print_line(
                f"waiting: other processes generate the last {num_left} of {len(self.ranges)} ranges of batches; "
                f"a range without a heartbeat for {self.lease_s:g} s is taken over"
            )

    def release(self) -> None:
        """Release all leases and remove the owner file."""
        for number in sorted(self.held_ranges):
            self._release_range(number)
        with contextlib.suppress(OSError):
            self._owner_file.unlink()

    # -- the files

    def _refresh(self) -> None:
        if self.ledger.refresh():
            self.on_refresh()

    def _release_finished(self) -> list[int]:
        """Release the finished ranges, whose outcomes are on disk; return the unfinished ranges."""
        left = self.ranges.unfinished_ranges(self.ledger)
        for number in sorted(self.held_ranges.difference(left)):
            self._release_range(number)
        return left

    def _remove_stale_leases(self) -> None:
        """Remove leases that dead processes left on finished ranges; called when nothing is left."""
        failed = [row.request.spec.index for row in self.ledger.failed_rows()]
        kept_names = {self.ranges.lease_name(number) for number in self.ranges.find_ranges(failed)}
        self.folder.mkdir(exist_ok=True)
        self._remove_dead_owner_files()
        for name in {self.ranges.lease_name(number) for number in range(len(self.ranges))}.intersection(
            os.listdir(self.folder)
        ):
            if name not in kept_names:
                (self.folder / name).unlink(missing_ok=True)

    def _remove_dead_owner_files(self) -> None:
        """Remove owner files of dead processes of this machine."""
        for path in self.folder.glob(f".*{OWNER_FILE_SUFFIX}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                owner = json.loads(path.read_bytes())
                if owner["host"] == self.process.host and not is_alive(int(owner["pid"])):
                    path.unlink()

    def _release_range(self, number: int) -> None:
        path = self._lease_path(number)
        self.held_ranges.discard(number)
        if self._read_owner(path) == self.process.token:
            fault_point("lease.unlink")
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _claim_ranges(self, free: list[int]) -> list[int]:
        claimed: list[int] = []
        now: float | None = None
        for number in sorted(free, key=lambda number: (number - self._first_range) % len(self.ranges)):
            if len(claimed) * self.ranges.size >= self.num_batches_wanted:
                break
            path = self._lease_path(number)
            fault_point("lease.link")
            if not self._link_owner_file(path):
                now = now or self._touch()
                if not self._take_over(path, now):
                    continue
            fault_point("lease.linked")
            self.held_ranges.add(number)
            claimed.append(number)
        return claimed

    def _take_over(self, path: Path, now: float) -> bool:
        """Rename an expired lease away and create it again; return True on success.

        `now` is the time of the file system, because the clocks of machines may differ.
        """
        lease = read_lease(path)
        silent_s = now - lease.touched_at
        if silent_s <= (lease.lease_s or self.lease_s) and lease.token != self.process.token:
            return False
        moved_path = path.with_name(f".{path.name}.{self.process.name}.tmp")
        try:
            fault_point("lease.rename")
            os.rename(path, moved_path)
            fault_point("lease.renamed")
        except FileNotFoundError:
            return False
        try:
            if self._read_owner(moved_path) != lease.token:  # another process was faster: put its new lease back
                link_once(moved_path, path)
                return False
        finally:
            moved_path.unlink(missing_ok=True)
        if not self._link_owner_file(path):
            return False
        # Our own token means that the reply to creating this lease was lost: not a takeover.
        if lease.token != self.process.token:
            self.num_taken_over += 1
            log.warning("taking over batches %s: no heartbeat of their owner for %.0f s", path.stem, silent_s)
        return True

    def _lease_path(self, number: int) -> Path:
        return self.folder / self.ranges.lease_name(number)

    def _touch(self) -> float:
        """Keep the leases of this process alive; return the time of the file system."""
        self._touched_at = time.monotonic()
        if not self._owner_file.exists():
            self._restore_owner_file()
        with open(self._owner_file, "rb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime

    def _link_owner_file(self, path: Path) -> bool:
        try:
            return link_once(self._owner_file, path)
        except FileNotFoundError:
            self._restore_owner_file()
            return link_once(self._owner_file, path)

    def _restore_owner_file(self) -> None:
        """Write the owner file again after another process or a user removed it, and claim again.

        Existing leases link to the old owner file, which is no longer touched, so they are given up and expire.
        """
        self._write_owner_file()
        for number in sorted(self.held_ranges):
            if not link_once(self._owner_file, self._lease_path(number)):
                self.held_ranges.discard(number)

    def _write_owner_file(self) -> None:
        self.folder.mkdir(exist_ok=True)  # not parents: without the ledger folder, the command must end
        process = self.process
        owner = {"host": process.host, "pid": process.pid, "token": process.token, "lease_s": self.lease_s}
        self._owner_file.write_text(json.dumps(owner))

    def _read_owner(self, path: Path) -> str:
        return read_lease(path).token


def read_lease(path: Path) -> LeaseInfo:
    """Read a lease; the file is opened because NFS may answer a stat from its cache."""
    try:
        with open(path, "rb") as file:
            touched_at = os.fstat(file.fileno()).st_mtime
            values = json.loads(file.read())
            return LeaseInfo(token=str(values["token"]), touched_at=touched_at, lease_s=float(values["lease_s"]))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return LeaseInfo(token="", touched_at=math.inf, lease_s=0.0)
    except (ValueError, KeyError, TypeError, RecursionError):  # invalid content: it expires
        return LeaseInfo(token="?", touched_at=touched_at, lease_s=0.0)
