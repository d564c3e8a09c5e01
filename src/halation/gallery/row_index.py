"""What is kept in memory of a generation's rows: a few numbers each, and their words once somebody searches; the rest stays in the ledger."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halation.gallery.generation_rows import MAX_PLANNED, STATES

OPEN, DONE, FAILED = range(len(STATES))
ABSENT = -1
NUM_AT_ONCE = 500
"""Row numbers in one question to SQLite."""
MAX_SIZES = 20
MAX_WORDS = 16
"""Of a whole prompt that somebody pasted, the longest words are enough to find it."""
Indices = npt.NDArray[np.int64]


class RowIndex:
    """State, worker, seed and size of every row. It is brought up to date by reading what is unfinished, never what is done."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.facts = facts(connection)
        self.names: list[str] = []
        """Workers, by their number in `workers`."""
        self.states: npt.NDArray[np.int8] = np.zeros(0, np.int8)
        self.workers: npt.NDArray[np.int16] = np.zeros(0, np.int16)
        self.seeds: Indices = np.zeros(0, np.int64)
        self.sizes: Indices = np.zeros(0, np.int64)
        self.num_frames = 1
        self.texts: list[str] = []
        """Prompt and id of the first rows, or of all, for searching."""
        self.last_done = -1
        self._numbers: dict[str, int] = {}
        self._add(connection, 0)

    def __len__(self) -> int:
        return len(self.states)

    def _add(self, connection: sqlite3.Connection, first: int) -> None:
        """Rows from `first` on, which are new."""
        query = (
            "SELECT picture, state, seed, (width << 20) | height, worker, num_frames FROM pictures WHERE picture >= ?"
        )
        rows = connection.execute(query, (first,)).fetchall()
        if not rows:
            return
        picture, state, seed, size, worker, num_frames = zip(*rows, strict=True)
        places = np.array(picture, np.int64)
        num_rows = int(places.max()) + 1
        if places.min() < 0 or num_rows > MAX_PLANNED or not {OPEN, DONE, FAILED}.issuperset(state):
            raise sqlite3.DatabaseError("rows that no plan has")
        self.states = _grown(self.states, num_rows, ABSENT)
        self.workers = _grown(self.workers, num_rows, 0)
        self.seeds = _grown(self.seeds, num_rows, 0)
        self.sizes = _grown(self.sizes, num_rows, 0)
        self.states[places] = state
        self.seeds[places] = seed
        self.sizes[places] = size
        for name in dict.fromkeys(worker):
            self._number(name)
        self.workers[places] = [self._numbers[name] for name in worker]
        self.num_frames = max(num_frames)
        done = np.flatnonzero(self.states == DONE)
        self.last_done = int(done[-1]) if len(done) else -1

    def _number(self, worker: str) -> int:
        if worker not in self._numbers:
            self._numbers[worker] = len(self.names)
            self.names.append(worker)
        return self._numbers[worker]

    def update(self, connection: sqlite3.Connection) -> bool:
        """Take over what changed; False where the plan is another one, so that all must be read anew."""
        (num_planned,) = connection.execute("SELECT COALESCE(MAX(picture) + 1, 0) FROM pictures").fetchone()
        if facts(connection) != self.facts or num_planned < len(self):
            return False
        self._settle(connection)
        if num_planned > len(self):
            self._add(connection, len(self))
        return True

    def _settle(self, connection: sqlite3.Connection) -> None:
        """What is not unfinished any more is done: the ledger's own index lists the unfinished, so done rows cost nothing."""
        rest = connection.execute("SELECT picture, state FROM pictures WHERE state != 1").fetchall()
        states = np.where(self.states == ABSENT, ABSENT, DONE).astype(np.int8)
        if rest:
            pairs = np.array(rest, np.int64)
            pairs = pairs[pairs[:, 0] < len(self)]
            states[pairs[:, 0]] = pairs[:, 1]
        drawn = np.flatnonzero((states == DONE) & (self.states != DONE))
        self.states = states
        # A row that failed again may have failed elsewhere.
        told = [*drawn.tolist(), *np.flatnonzero(states == FAILED).tolist()]
        for index, worker, seed, size in selected(connection, told, "worker, seed, (width << 20) | height"):
            self.workers[index], self.seeds[index], self.sizes[index] = self._number(worker), seed, size
        if len(drawn):
            self.last_done = int(drawn[-1])
        elif self.last_done >= 0 and states[self.last_done] != DONE:
            done = np.flatnonzero(states == DONE)
            self.last_done = int(done[-1]) if len(done) else -1

    def read_texts(self, connection: sqlite3.Connection) -> None:
        """The words of rows that have none yet."""
        query = "SELECT picture, prompt || char(10) || id FROM pictures WHERE picture >= ? ORDER BY picture"
        for picture, text in connection.execute(query, (len(self.texts),)):
            self.texts += [""] * (picture - len(self.texts))
            self.texts.append(text.casefold())

    # -- questions

    def chosen(self, state: str, worker: str | None, seed: int | None) -> Indices:
        """Rows by index for which all of this is true."""
        chosen = self.states != ABSENT if not state else self.states == STATES.index(state)
        if worker is not None:
            chosen = chosen & (self.workers == self._numbers.get(worker, -1)) & (self.states != OPEN)
        if seed is not None:
            chosen = chosen & (self.seeds == seed if -(2**63) <= seed < 2**63 else False)
        return np.flatnonzero(chosen).astype(np.int64)

    def counts(self) -> dict[str, int]:
        numbers = [int(np.count_nonzero(self.states == state)) for state in range(len(STATES))]
        return {"planned": sum(numbers), **dict(zip(STATES, numbers, strict=True))}

    def by_worker(self) -> dict[str, tuple[int, int]]:
        """Done and failed rows of each worker that has any."""
        num_names = len(self.names)
        done = np.bincount(self.workers[self.states == DONE], minlength=num_names)
        failed = np.bincount(self.workers[self.states == FAILED], minlength=num_names)
        found = {name: (int(done[n]), int(failed[n])) for n, name in enumerate(self.names) if done[n] or failed[n]}
        return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))

    def by_size(self) -> list[list[int]]:
        """Width, height and number of rows, the commonest first."""
        sizes = Counter(dict(zip(*map(np.ndarray.tolist, np.unique(self.sizes, return_counts=True)), strict=True)))
        return [[size >> 20, size & 0xFFFFF, count] for size, count in sizes.most_common(MAX_SIZES) if size]


def with_words(indices: Indices, texts: Sequence[str], words: Sequence[str]) -> Indices:
    """Those of the rows in whose texts all words occur; texts are only ever added, so nobody has to hold still for it."""
    if not words:
        return indices
    found = [index for index in indices.tolist() if index < len(texts)]
    for word in words:
        found = [index for index in found if word in texts[index]]
    return np.array(found, np.int64)


def words_of(q: str) -> list[str]:
    """The words to look for: the longest first, which leave the fewest rows, and none that is part of another."""
    words: list[str] = []
    for word in sorted(dict.fromkeys(q.casefold().split()), key=len, reverse=True):
        if len(words) < MAX_WORDS and not any(word in longer for longer in words):
            words.append(word)
    return words


def selected(connection: sqlite3.Connection, indices: Sequence[int], columns: str) -> Iterator[tuple[Any, ...]]:
    """The index and these columns of some rows, in no order."""
    for start in range(0, len(indices), NUM_AT_ONCE):
        some = indices[start : start + NUM_AT_ONCE]
        marks = ", ".join("?" * len(some))
        yield from connection.execute(f"SELECT picture, {columns} FROM pictures WHERE picture IN ({marks})", some)


def counts_in(connection: sqlite3.Connection) -> dict[str, int]:
    """Rows by state, without reading those that are done."""
    (planned,) = connection.execute("SELECT COALESCE(MAX(picture) + 1, 0) FROM pictures").fetchone()
    rest = dict(connection.execute("SELECT state, COUNT(*) FROM pictures WHERE state != 1 GROUP BY state").fetchall())
    opened, failed = rest.get(0, 0), rest.get(2, 0)
    return {"planned": planned, "open": opened, "done": planned - opened - failed, "failed": failed}


def facts(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """What the plan is recognised by."""
    return connection.execute("SELECT key, value FROM facts ORDER BY key").fetchall()


def _grown(column: Any, num_rows: int, filler: int) -> Any:
    return np.concatenate([column, np.full(num_rows - len(column), filler, column.dtype)])
