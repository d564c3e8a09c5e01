"""In-memory index of a generation's rows: filters, counts and search for millions of rows."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from halation.generation.ledger import DONE, FAILED, OPEN, STATES, Indices, RowState, count_planned
from halation.generation.read_only_ledger import LedgerConnection
from halation.input_files import MAX_TABLE_ROWS

ABSENT = -1
MAX_SIZES = 20
MAX_SEARCH_WORDS = 16
"""For a pasted prompt, its longest words are enough to find it."""
WILDCARD = "…"
"""Replaces variable parts; the page matches it with any characters when it searches the rows of a reason."""
VARIABLE_PART = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|[^\s/]{0,200}/\S*[^\s:;,.)]|\d+(?:\.\d+)?)""")


class RowIndex:
    """State, worker, seed and size of every row; an update reads only unfinished rows."""

    def __init__(self, connection: LedgerConnection) -> None:
        self.facts = connection.read_facts()
        self.worker_names: list[str] = []
        """Names of the workers, by their number in `workers`."""
        self.states: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self.workers: npt.NDArray[np.int16] = np.zeros(0, np.int16)
        self.seeds: Indices = np.zeros(0, np.int64)
        self.sizes: Indices = np.zeros(0, np.int64)
        self.num_frames = 1
        self.texts: list[str] = []
        """Prompt and id of the first rows, or of all rows, for searching."""
        self.last_done = -1
        self._worker_numbers: dict[str, int] = {}
        self._add_rows(connection, 0)

    def __len__(self) -> int:
        return len(self.states)

    def _add_rows(self, connection: LedgerConnection, first: int) -> None:
        """Add the new rows from `first` on."""
        rows = connection.read_rows(first)
        if not rows:
            return
        image, state, seed, size, worker, num_frames = zip(*rows, strict=True)
        indices = np.array(image, np.int64)
        num_rows = int(indices.max()) + 1
        if indices.min() < 0 or num_rows > MAX_TABLE_ROWS or not {OPEN, DONE, FAILED}.issuperset(state):
            raise sqlite3.DatabaseError("invalid row index or state")
        self.states = _extend_column(self.states, num_rows, ABSENT)
        self.workers = _extend_column(self.workers, num_rows, 0)
        self.seeds = _extend_column(self.seeds, num_rows, 0)
        self.sizes = _extend_column(self.sizes, num_rows, 0)
        self.states[indices] = state
        self.seeds[indices] = seed
        self.sizes[indices] = size
        for name in dict.fromkeys(worker):
            self._register_worker(name)
        self.workers[indices] = [self._worker_numbers[name] for name in worker]
        self.num_frames = max(num_frames)
        done = np.flatnonzero(self.states == DONE)
        self.last_done = int(done[-1]) if len(done) else -1

    def _register_worker(self, worker: str) -> int:
        if worker not in self._worker_numbers:
            self._worker_numbers[worker] = len(self.worker_names)
            self.worker_names.append(worker)
        return self._worker_numbers[worker]

    def update(self, connection: LedgerConnection) -> bool:
        """Update changed rows; return False if the plan changed and all rows must be read again."""
        num_planned = count_planned(connection)
        if connection.read_facts() != self.facts or num_planned < len(self):
            return False
        self._update_states(connection)
        if num_planned > len(self):
            self._add_rows(connection, len(self))
        return True

    def _update_states(self, connection: LedgerConnection) -> None:
        """Update states from the ledger's index of unfinished rows; all other rows are done."""
        unfinished = connection.read_unfinished()
        states = np.where(self.states == ABSENT, ABSENT, DONE).astype(np.int8)
        if unfinished:
            pairs = np.array(unfinished, np.int64)
            pairs = pairs[pairs[:, 0] < len(self)]
            states[pairs[:, 0]] = pairs[:, 1]
        newly_done = np.flatnonzero((states == DONE) & (self.states != DONE))
        self.states = states
        # A row that failed again may have failed on another worker.
        changed_rows = [*newly_done.tolist(), *np.flatnonzero(states == FAILED).tolist()]
        for index, worker, seed, size in connection.select_rows(changed_rows, "worker, seed, (width << 20) | height"):
            self.workers[index], self.seeds[index], self.sizes[index] = self._register_worker(worker), seed, size
        if len(newly_done):
            self.last_done = int(newly_done[-1])
        elif self.last_done >= 0 and states[self.last_done] != DONE:
            done = np.flatnonzero(states == DONE)
            self.last_done = int(done[-1]) if len(done) else -1

    def read_texts(self, connection: LedgerConnection) -> None:
        """Read the texts of rows that have none yet."""
        for image, text in connection.iter_texts(len(self.texts)):
            self.texts += [""] * (image - len(self.texts))
            self.texts.append(text.casefold())

    # -- queries

    def filter_rows(self, state: str, worker: str | None, seed: int | None) -> Indices:
        """Indices of the rows that match all filters."""
        mask = self.states != ABSENT if not state else self.states == STATES.index(cast(RowState, state))
        if worker is not None:
            mask = mask & (self.workers == self._worker_numbers.get(worker, -1)) & (self.states != OPEN)
        if seed is not None:
            mask = mask & (self.seeds == seed if -(2**63) <= seed < 2**63 else False)
        return np.flatnonzero(mask).astype(np.int64)

    def count_states(self) -> dict[str, int]:
        numbers = [int(np.count_nonzero(self.states == state)) for state in range(len(STATES))]
        return {"planned": sum(numbers), **dict(zip(STATES, numbers, strict=True))}

    def count_by_worker(self) -> dict[str, tuple[int, int]]:
        """Number of done and failed rows of each worker that has any."""
        num_names = len(self.worker_names)
        done = np.bincount(self.workers[self.states == DONE], minlength=num_names)
        failed = np.bincount(self.workers[self.states == FAILED], minlength=num_names)
        found = {
            name: (int(done[n]), int(failed[n])) for n, name in enumerate(self.worker_names) if done[n] or failed[n]
        }
        return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))

    def count_by_size(self) -> list[list[int]]:
        """Width, height and number of rows, most common first."""
        sizes = Counter(dict(zip(*map(np.ndarray.tolist, np.unique(self.sizes, return_counts=True)), strict=True)))
        return [[size >> 20, size & 0xFFFFF, count] for size, count in sizes.most_common(MAX_SIZES) if size]


def filter_by_words(indices: Indices, texts: Sequence[str], words: Sequence[str]) -> Indices:
    """Rows whose texts contain all words; texts are append-only, so this needs no lock."""
    if not words:
        return indices
    found = [index for index in indices.tolist() if index < len(texts)]
    for word in words:
        found = [index for index in found if word in texts[index]]
    return np.array(found, np.int64)


def parse_search_words(text: str) -> list[str]:
    """Split a query into words: the longest first, which are the most selective.

    Words that are part of another word are dropped.
    """
    words: list[str] = []
    for word in sorted(dict.fromkeys(text.casefold().split()), key=len, reverse=True):
        if len(words) < MAX_SEARCH_WORDS and not any(word in longer for longer in words):
            words.append(word)
    return words


def group_reasons(counts: Mapping[str, int]) -> Counter[str]:
    """Merge the counts of texts that differ only in paths, numbers and quoted words."""
    groups: dict[tuple[str, ...], tuple[list[str], int]] = {}
    for text, number in counts.items():
        pieces = VARIABLE_PART.split(text)
        fixed = tuple(pieces[::2])
        known, before = groups.get(fixed, (pieces, 0))
        same = [piece if piece == other else WILDCARD for piece, other in zip(pieces, known, strict=True)]
        groups[fixed] = (same, before + number)
    return Counter({"".join(pieces): number for pieces, number in groups.values()})


def _extend_column(column: Any, num_rows: int, filler: int) -> Any:
    return np.concatenate([column, np.full(num_rows - len(column), filler, column.dtype)])
