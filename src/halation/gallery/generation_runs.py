"""A run of `halation generate` as a page sees it: how far it is, who draws, pages of its rows, and one picture with all that made it."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halation.gallery import reproduce_command
from halation.gallery.generation_rows import OUTCOME, SHARED_FOLDER, SPEC, STATES, SharedTables, file_of, tables_of
from halation.gallery.row_index import Indices, RowIndex, counts_in, selected, with_words, words_of
from halation.gallery.run_files import State, damage_of, first_line, last_lines, read_record, stamp_of, state_of
from halation.runs.folder import CONFIG_FILE
from halation.runs.lock import ENDED_FILE, OWNER_FILE

GAP = "…"
"""Stands for whatever differs; a page takes it for any letters when it looks for the rows of a reason."""
PART = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|[^\s/]{0,200}/\S*[^\s:;,.)]|\d+(?:\.\d+)?)""")
KEY = re.compile(r"g([0-9]{1,12})(?:\.([0-9]{1,6}))?")
MAX_REASONS = 100
RECENT_S = 60.0
REST = 20
"""After reading for a second, rest for twenty: whatever the size of a run, watching it costs a twentieth of a core."""
LEASES_EVERY_S = 2.0
Pace = deque[tuple[float, dict[str, int]]]


def grouped(counts: Mapping[str, int]) -> Counter[str]:
    """Counts of texts, with those that differ only in paths, numbers and quoted words taken together."""
    groups: dict[tuple[str, ...], tuple[list[str], int]] = {}
    for text, number in counts.items():
        pieces = PART.split(text)
        fixed = tuple(pieces[::2])
        known, before = groups.get(fixed, (pieces, 0))
        same = [piece if piece == other else GAP for piece, other in zip(pieces, known, strict=True)]
        groups[fixed] = (same, before + number)
    return Counter({"".join(pieces): number for pieces, number in groups.values()})


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which rows to show."""

    offset: int = 0
    limit: int = 200
    q: str = ""
    """Words that must all occur in the prompt or the id, in any case."""
    state: str = ""
    worker: str = ""
    seed: int | None = None


class GenerationRun:
    """One folder of `halation generate`. Its rows are read when somebody looks at them, and from then on only what changed."""

    kind = "generate"

    def __init__(
        self, folder: Path, id: str, *, differs: Callable[[Mapping[str, Any]], list[str]] | None = None
    ) -> None:
        """`differs` gives the names of settings that are not the default."""
        self.folder = folder
        self.id = id
        self.name = folder.name
        self.parent: str | None = None
        self.version = 0
        self._differs = differs
        self._lock = threading.RLock()
        self._tables = tables_of(folder)
        self._index: RowIndex | None = None
        self._searched = False
        self._found: tuple[Any, Any] = (None, None)
        """The last question with the reading it was of, and its rows."""
        self._num_read = 0
        self._record: dict[str, Any] = {}
        self._damage = self._unreadable = ""
        self._counts = dict.fromkeys(("planned", *STATES), 0)
        self._last: dict[str, str] | None = None
        self._state = State(word="stopped")
        self._pace: Pace = deque()
        self._stamps: object = None
        self._behind = True
        self._next_read = 0.0
        self._leases: tuple[float, list[Path]] = (0.0, [])
        self._started: float | None = None

    # -- looking

    def refresh(self) -> bool:
        with self._lock:
            changed = self._look_at_record()
            self._behind |= self._tables.look()
            if self._behind and time.monotonic() >= self._next_read:
                changed |= self._read()
            if self._searched:
                self._prepare_search()
            changed |= self._look_at_state()
            self.version += changed
            return changed

    def _look_at_record(self) -> bool:
        stamps = [stamp_of(self.folder / name) for name in (CONFIG_FILE, ENDED_FILE, OWNER_FILE)]
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        self._record = read_record(self.folder)
        self._damage = damage_of(self.folder / CONFIG_FILE)
        return True

    def _look_at_state(self) -> bool:
        before = self._state
        done = self._counts["planned"] > 0 and self._counts["open"] == 0
        self._state = state_of(self.folder, self._tables.changed, self._sharing(), done)
        return before != self._state

    def _sharing(self) -> list[Path]:
        """Files that commands which share the folder keep touching."""
        looked_at, paths = self._leases
        folder = self.folder / SHARED_FOLDER / "leases"
        if isinstance(self._tables, SharedTables) and time.monotonic() - looked_at > LEASES_EVERY_S:
            with contextlib.suppress(OSError):
                paths = [folder / name for name in os.listdir(folder) if name.endswith(".card")]
            self._leases = (time.monotonic(), paths)
        return paths

    def _read(self) -> bool:
        """Bring what is known up to date; a ledger that cannot be read now leaves it as it is."""
        began, before = time.monotonic(), self._shown()
        try:
            with self._tables.reading() as connection, _transaction(connection):
                if self._index is not None and not self._index.update(connection):
                    self._index = RowIndex(connection)
                self._counts = self._index.counts() if self._index is not None else counts_in(connection)
                self._last = self._newest(connection)
        except sqlite3.Error as error:
            unreadable = f"cannot be read: the ledger: {error}" if self._tables.changed else ""
            changed, self._unreadable = self._unreadable != unreadable, unreadable
            return changed
        finally:
            self._next_read = time.monotonic() + REST * (time.monotonic() - began)
        self._behind, self._unreadable = False, ""
        self._num_read += 1
        self._note_pace()
        return before != self._shown()

    def _shown(self) -> object:
        return self._unreadable, self._counts, self._last, self._index.by_worker() if self._index is not None else None

    def _newest(self, connection: sqlite3.Connection) -> dict[str, str] | None:
        """The picture that shows what is being drawn; rows are drawn about in their order."""
        if self._index is not None:
            rows = list(selected(connection, [self._index.last_done], "sha256")) if self._index.last_done >= 0 else []
        else:
            num_settled = self._counts["planned"] - self._counts["open"]
            query = "SELECT picture, sha256 FROM pictures WHERE picture < ? AND state = 1 ORDER BY picture DESC LIMIT 1"
            rows = connection.execute(query, (num_settled + 64,)).fetchall()
        return {"key": f"g{rows[0][0]}", "v": _short(rows[0][1])} if rows else None

    def _note_pace(self) -> None:
        now = time.monotonic()
        done = {"": self._counts["done"]}
        if self._index is not None:
            done |= {f"worker {name}": numbers[0] for name, numbers in self._index.by_worker().items()}
        self._pace.append((now, done))
        while len(self._pace) > 2 and now - self._pace[0][0] > RECENT_S:
            self._pace.popleft()

    def _rate(self, key: str = "") -> float | None:
        """Pictures a second lately; None unless it is running and was seen drawing."""
        known = [(at, done[key]) for at, done in self._pace if key in done]
        if self._state.word != "running" or len(known) < 2:
            return None
        seconds = time.monotonic() - known[0][0]
        return max(0, known[-1][1] - known[0][1]) / seconds if seconds > 1.0 else None

    def _loaded(self) -> RowIndex:
        """The rows; read now if nobody looked at them yet. Raises sqlite3.Error where that cannot be done."""
        if self._index is None:
            with self._tables.reading() as connection, _transaction(connection):
                self._index = RowIndex(connection)
            self._counts = self._index.counts()
            self._note_pace()
        return self._index

    # -- what a page shows

    def summary(self) -> dict[str, Any]:
        with self._lock:
            rate, counts = self._rate(), self._counts
            return {
                "id": self.id,
                "name": self.name,
                "kind": self.kind,
                "state": self._state.word,
                "reason": self._state.reason or self._damage or self._unreadable,
                "started": self._state.since or self._first_logged(),
                "changed": max(self._tables.changed, *(stamp.mtime for stamp in self._mtimes()), 0.0),
                "title": self._title(),
                "done": counts["done"],
                "planned": counts["planned"],
                "unit": "pictures",
                "failed": counts["failed"],
                "rate": rate,
                "left_s": counts["open"] / rate if rate else None,
                "last": self._last,
                "spark": [],
                "loss": None,
                "version": self.version,
                "parent": self.parent,
            }

    def _mtimes(self) -> list[Any]:
        return [stamp for stamp in self._stamps if stamp is not None] if isinstance(self._stamps, list) else []

    def _title(self) -> str:
        settings = self._record.get("settings", {})
        width, height, num_frames = (settings.get(name) for name in ("width", "height", "num_frames"))
        words = [
            self._model(),
            f"{width}x{height}" if width and height else "",
            f"{num_frames} frames" if num_frames else "",
        ]
        return ", ".join(word for word in words if word and word != "1 frames")

    def _model(self) -> str:
        return str(self._record.get("fixed", {}).get("model name") or "a model")

    def _first_logged(self) -> float | None:
        """When its first command began to speak; remembered, for a log's beginning stays."""
        paths = self._logs() if self._started is None else []
        if paths:
            with contextlib.suppress(ValueError, OverflowError):
                first = first_line(paths[-1], self.folder)
                self._started = time.mktime(time.strptime(first[:19], "%Y-%m-%d %H:%M:%S"))
        return self._started

    def detail(self) -> dict[str, Any]:
        with self._lock:
            try:
                index: RowIndex | None = self._loaded()
                reasons = self._reasons()
            except sqlite3.Error:
                index, reasons = None, []
            summary = self.summary()
            return {
                "summary": summary,
                "counts": dict(self._counts),
                "workers": [
                    {"name": name, "done": done, "failed": failed, "per_s": self._rate(f"worker {name}")}
                    for name, (done, failed) in (index.by_worker() if index is not None else {}).items()
                ],
                "rate": summary["rate"],
                "left_s": summary["left_s"],
                "reasons": reasons,
                "seeds": _span(index.seeds) if index is not None else [],
                "size": index.by_size() if index is not None else [],
                "model": self._model(),
                "video": index is not None and index.num_frames > 1,
            }

    def _reasons(self) -> list[list[Any]]:
        with self._tables.reading() as connection:
            query = "SELECT reason, COUNT(*) FROM pictures WHERE state != 1 AND state = 2 GROUP BY reason"
            counts: Counter[str] = Counter()
            for reason, number in connection.execute(query):
                counts[(reason.strip().splitlines() or ["no reason given"])[0]] += number
        return [[reason, number] for reason, number in grouped(counts).most_common(MAX_REASONS)]

    def search(self, query: Query) -> dict[str, Any]:
        """A page of rows, by index."""
        try:
            indices = self._matching(query)
            page = indices[query.offset : query.offset + query.limit].tolist()
            with self._lock, self._tables.reading() as connection:
                columns = "id, prompt, seed, state, width, height, worker, reason, sha256, num_frames"
                rows = sorted(selected(connection, page, columns))
        except sqlite3.Error:
            return {"total": 0, "rows": []}
        return {"total": len(indices), "rows": [_row(row) for row in rows]}

    def _matching(self, query: Query) -> Indices:
        """All rows a query is of. Words are looked for while others may ask: of many rows it takes a while."""
        asked, words = replace(query, offset=0, limit=0), words_of(query.q)
        with self._lock:
            self._searched = True
            index, read_at = self._loaded(), self._num_read
            if self._found[0] == (asked, read_at):
                return self._found[1]
            if words:
                self._prepare_search()
            chosen, texts = index.chosen(query.state, query.worker or None, query.seed), index.texts
        found = with_words(chosen, texts, words)
        with self._lock:
            self._found = ((asked, read_at), found)
        return found

    def _prepare_search(self) -> None:
        """The words of all rows, read once; between two looks, so that the first search need not wait for it."""
        if self._index is not None and len(self._index.texts) < len(self._index):
            with contextlib.suppress(sqlite3.Error), self._tables.reading() as connection:
                self._index.read_texts(connection)

    # -- one picture

    def picture(self, key: str) -> Path | None:
        """A picture, or a frame of a video: `g7` is the first one of row 7, `g7.2` the third."""
        found = self._row_of(key, ("name", "num_frames", "state"))
        if not found or STATES[found["state"]] != "done" or not found["name"]:
            return None
        frame = int(key.partition(".")[2] or 0)
        if frame >= found["num_frames"]:
            return None
        path = self.folder / file_of(found["name"], found["num_frames"], frame)
        try:
            whole = path.resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return None
        return whole if whole.is_relative_to(self.folder.resolve()) and whole.is_file() else None

    def spec(self, key: str) -> dict[str, Any] | None:
        """All that decided a picture, what became of it, and how to draw it again; None for a key that is nobody's."""
        found = self._row_of(key, ("picture", "name", "state", "epoch", *SPEC, *OUTCOME))
        if not found:
            return None
        spec = {"index": found["picture"]} | {name: found[name] for name in SPEC}
        outcome = {"state": STATES[found["state"]], **{name: found[name] for name in OUTCOME}, "epoch": found["epoch"]}
        ending = "png" if found["num_frames"] == 1 else "mp4"
        with self._lock:
            record = self._record or read_record(self.folder)
        return {
            "spec": spec,
            "outcome": outcome,
            "file": f"{found['name']}.{ending}" if found["name"] else "",
            "command": reproduce_command.command(record, spec, found["micro_batch"], found["epoch"])
            if found["steps"]
            else "",
        }

    def _row_of(self, key: str, columns: tuple[str, ...]) -> dict[str, Any]:
        form = KEY.fullmatch(key)
        if form is None:
            return {}
        try:
            with self._lock, self._tables.reading() as connection:
                query = f"SELECT {', '.join(columns)} FROM pictures WHERE picture = ?"
                row = connection.execute(query, (int(form[1]),)).fetchone()
        except sqlite3.Error:
            return {}
        return dict(zip(columns, row, strict=True)) if row is not None else {}

    # -- the rest

    def log(self, num_lines: int) -> list[str]:
        paths = self._logs()
        return last_lines(paths[0], num_lines, self.folder) if paths else []

    def _logs(self) -> list[Path]:
        """The log, or those of all commands that share the folder, the newest first."""
        paths = [self.folder / "logs" / "generate.log", *(self.folder / "logs").glob("*/generate.log")]
        stamps = sorted(((stamp.mtime_ns, path) for path in paths if (stamp := stamp_of(path))), reverse=True)
        return [path for _, path in stamps]

    def config(self) -> dict[str, Any]:
        record = read_record(self.folder)
        shown = {name: record[name] for name in ("settings", "fixed", "changes")}
        return shown | ({"differs": self._differs(shown["settings"])} if self._differs else {})


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is read belongs to one moment."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _row(row: tuple[Any, ...]) -> dict[str, Any]:
    index, id, prompt, seed, state, width, height, worker, reason, sha256, num_frames = row
    return {
        "key": f"g{index}",
        "index": index,
        "id": id,
        "prompt": prompt,
        "seed": seed,
        "state": STATES[state],
        "w": width,
        "h": height,
        "worker": worker,
        "reason": reason,
        "v": _short(sha256),
        "frames": num_frames,
    }


def _span(seeds: Any) -> list[int]:
    return [int(seeds.min()), int(seeds.max())] if len(seeds) else []


def _short(sha256: str) -> str:
    return sha256[:12]
