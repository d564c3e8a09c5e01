"""A run of `halation generate` for the page: progress, workers, rows, image specs."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halation.gallery import run_file_reader
from halation.gallery.generation_rows import RowIndex, filter_by_words, group_reasons, parse_search_words
from halation.gallery.run_catalog import RunEntry
from halation.gallery.run_file_reader import RunState, read_last_lines, read_record, read_run_state, read_stamp
from halation.generation.ledger import DONE, OUTCOME_COLUMNS, SPEC_COLUMNS, STATES, Indices, count_rows, loaded_guidance
from halation.generation.metadata_and_summary import SUMMARY_FILE, frame_name
from halation.generation.read_only_ledger import LedgerConnection, open_ledger

PROMPT_COLUMNS = ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance_scale")
FLAGS = ("model_path", "num_frames", "scheduler", "raw", "pipeline_args", "batch_size", "dtype", "compile")
EXTRA_FLAGS = ("cfg_truncation_step", "enable_half_frame", "offload", "threads", "fps")
CHANGE_LINE = re.compile(r"(?P<name>\w+): (?P<before>.*) -> (?P<after>.*)", re.DOTALL)
OUTPUT_DIR = "outputs/again"
IMAGE_KEY = re.compile(r"g([0-9]{1,12})(?:\.([0-9]{1,6}))?")
MAX_REASONS = 100
RATE_WINDOW_S = 60.0
READ_PAUSE_FACTOR = 20
"""Pause between reads as a multiple of the reading time, so that polling takes at most 5 % of a core."""
LIST_LEASES_EVERY_S = 2.0
RateHistory = deque[tuple[float, dict[str, int]]]


def shell_command(record: Mapping[str, Any], spec: Mapping[str, Any], micro_batch: int, epoch: int) -> str:
    """Return a shell command that generates an image again.

    It passes the spec on standard input, and all settings that decide the pixels as flags. `micro_batch` is the reduced
    micro-batch size that this image was generated with, or 0. `epoch` is the number of settings changes before it.
    """
    settings = settings_at_epoch(record, epoch)
    fixed = record.get("fixed") or {}
    row = {"image_id": spec["id"]} | {
        name: spec[name] for name in PROMPT_COLUMNS if spec[name] not in (None, "") or name == "prompt"
    }
    args = ["halation", "generate", "--prompts", "-", "--prompts_format", "jsonl"]
    for name in (*FLAGS, *EXTRA_FLAGS):
        args += _flag_args(name, settings.get(name))
    micro_batch_size = micro_batch or settings.get("micro_batch") or fixed.get("micro batch") or 0
    args += _flag_args("micro_batch", micro_batch_size or None) + _flag_args("png", fixed.get("png coder"))
    args += ["--nproc", "1", "--output_dir", OUTPUT_DIR]
    text = json.dumps(row, ensure_ascii=False)
    if not text.isprintable():  # escape invisible characters and those that change the text direction
        text = json.dumps(row)
    return f"printf '%s\\n' {shlex.quote(text)} | {shlex.join(args)}"


def _flag_args(name: str, value: Any) -> list[str]:
    """Arguments of a flag; none for None, an empty string, an empty list or False."""
    if value is None or value is False or value in ("", [], ()):
        return []
    if value is True:
        return [f"--{name}", "True"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def settings_at_epoch(record: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """Undo the settings changes after `epoch`, as far as the record has the old values."""
    settings = dict(record.get("settings") or {})
    changes = record.get("changes") or []
    for change in reversed(changes[epoch:]):
        for line in change.get("changed", ()) if isinstance(change, dict) else ():
            found = CHANGE_LINE.fullmatch(str(line))
            if found and found["name"] in settings:
                try:
                    settings[found["name"]] = json.loads(found["before"])
                except ValueError:  # the recorded value was truncated
                    continue
    return settings


@dataclass(frozen=True, kw_only=True)
class RowQuery:
    """Filter and range of rows."""

    offset: int = 0
    limit: int = 200
    text: str = ""
    """Words that must all occur in the prompt or the id, ignoring case."""
    state: str = ""
    worker: str = ""
    seed: int | None = None


class GenerationRun(RunEntry):
    """A run folder of `halation generate`; rows are read on demand, then only changes."""

    kind = "generate"
    unit = "images"

    def __init__(self, folder: Path, id: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(folder, id, defaults)
        self._ledger = open_ledger(folder)
        self._index: RowIndex | None = None
        self._search_used = False
        self._cached_search: tuple[Any, Any] = (None, None)
        """The last query with the number of its read, and its rows."""
        self._num_reads = 0
        self._ledger_error = ""
        self._counts = dict.fromkeys(("planned", *STATES), 0)
        self._latest_image: dict[str, str] | None = None
        self._rate_history: RateHistory = deque()
        self._needs_read = True
        self._next_read = 0.0
        self._leases: tuple[float, list[Path]] = (0.0, [])
        self._last_call: dict[str, Any] = {"images": 0, "seconds": None}

    # -- reading

    def _refresh(self) -> bool:
        self._needs_read |= self._ledger.poll()
        changed = self._needs_read and time.monotonic() >= self._next_read and self._read_ledger()
        if self._has_changed(SUMMARY_FILE):
            self._last_call = self._read_last_call()
            changed = True
        if self._search_used:
            self._prepare_search()
        return changed

    def _read_state(self) -> RunState:
        is_complete = self._counts["planned"] > 0 and self._counts["open"] == 0
        return read_run_state(self.folder, self._ledger.last_modified, self._list_lease_files(), is_complete)

    def _last_modified(self) -> float:
        return max(super()._last_modified(), self._ledger.last_modified)

    def _list_lease_files(self) -> list[Path]:
        listed_at, paths = self._leases
        if time.monotonic() - listed_at > LIST_LEASES_EVERY_S:
            paths = self._ledger.list_lease_files()
            self._leases = (time.monotonic(), paths)
        return paths

    def _read_ledger(self) -> bool:
        """Update counts and rows from the ledger; keep the old ones if it cannot be read now."""
        began, before = time.monotonic(), self._visible_state()
        try:
            with self._ledger.connect() as connection, _read_snapshot(connection):
                if self._index is not None and not self._index.update(connection):
                    self._index = RowIndex(connection)
                self._counts = self._index.count_states() if self._index is not None else count_rows(connection)
                self._latest_image = self._find_latest_image(connection)
        except sqlite3.Error as error:
            ledger_error = f"cannot be read: the ledger: {error}" if self._ledger.last_modified else ""
            changed, self._ledger_error = self._ledger_error != ledger_error, ledger_error
            return changed
        finally:
            self._next_read = time.monotonic() + READ_PAUSE_FACTOR * (time.monotonic() - began)
        self._needs_read, self._ledger_error = False, ""
        self._num_reads += 1
        self._record_rate()
        return before != self._visible_state()

    def _read_last_call(self) -> dict[str, Any]:
        """Images and seconds of the last call that generated any."""
        summary = run_file_reader.read_json_object(self.folder / SUMMARY_FILE)
        call = {"images": summary.get("drawn_now"), "seconds": summary.get("seconds")}
        return call if all(map(run_file_reader.is_number, call.values())) else {"images": 0, "seconds": None}

    def _visible_state(self) -> object:
        return (
            self._ledger_error,
            self._counts,
            self._latest_image,
            self._index.count_by_worker() if self._index is not None else None,
        )

    def _find_latest_image(self, connection: LedgerConnection) -> dict[str, str] | None:
        """The latest image, approximately: rows are generated roughly in order."""
        if self._index is not None:
            last = self._index.last_done
        else:
            last = connection.find_last_done(below=self._counts["planned"] - self._counts["open"] + 64)
        rows = list(connection.select_rows([last], "sha256")) if last >= 0 else []
        return {"key": f"g{rows[0][0]}", "v": _image_version(rows[0][1])} if rows else None

    def _record_rate(self) -> None:
        now = time.monotonic()
        done = {"": self._counts["done"]}
        if self._index is not None:
            done |= {f"worker {name}": numbers[0] for name, numbers in self._index.count_by_worker().items()}
        self._rate_history.append((now, done))
        while len(self._rate_history) > 2 and now - self._rate_history[0][0] > RATE_WINDOW_S:
            self._rate_history.popleft()

    def _rate(self, key: str = "") -> float | None:
        """Recent images per second; None unless the run is running and has two readings."""
        known = [(at, done[key]) for at, done in self._rate_history if key in done]
        if self._state.status != "running" or len(known) < 2:
            return None
        seconds = time.monotonic() - known[0][0]
        return max(0, known[-1][1] - known[0][1]) / seconds if seconds > 1.0 else None

    def _load_index(self) -> RowIndex:
        """Return the row index, and read it on first use. Raises sqlite3.Error on failure."""
        if self._index is None:
            with self._ledger.connect() as connection, _read_snapshot(connection):
                self._index = RowIndex(connection)
            self._counts = self._index.count_states()
            self._record_rate()
        return self._index

    # -- responses

    def _build_summary(self) -> dict[str, Any]:
        rate, counts, log_files = self._rate(), self._counts, self._log_files()
        # Earlier versions recorded no time of all calls, but if there was only one, its summary has it.
        was_one_call = 0 < self._last_call["images"] == counts["done"]
        return {
            "reason": self._state.reason or self._config_error or self._ledger_error,
            "started": self._state.since or self._start_time(log_files[-1] if log_files else None),
            "title": self._build_title(),
            "done": counts["done"],
            "planned": counts["planned"],
            "failed": counts["failed"],
            "rate": rate,
            "left_s": counts["open"] / rate if rate else None,
            "last": self._latest_image,
            "seconds": self._state.time_s or (self._last_call["seconds"] if was_one_call else None),
        }

    def _build_title(self) -> str:
        settings = self._record.get("settings", {})
        width, height, num_frames = (settings.get(name) for name in ("width", "height", "num_frames"))
        words = [
            self._model_name(),
            f"{width}x{height}" if width and height else "",
            f"{num_frames} frames" if num_frames else "",
        ]
        return ", ".join(word for word in words if word and word != "1 frames")

    def _model_name(self) -> str:
        return str(self._record.get("fixed", {}).get("model name") or "a model")

    def detail(self) -> dict[str, Any]:
        with self._lock:
            try:
                index: RowIndex | None = self._load_index()
                reasons = self._failure_reasons()
            except sqlite3.Error:
                index, reasons = None, []
            summary = self.summary()
            return {
                "summary": summary,
                "counts": dict(self._counts),
                "workers": [
                    {"name": name, "done": done, "failed": failed, "per_s": self._rate(f"worker {name}")}
                    for name, (done, failed) in (index.count_by_worker() if index is not None else {}).items()
                ],
                "rate": summary["rate"],
                "left_s": summary["left_s"],
                "last_call": self._last_call,
                "reasons": reasons,
                "seeds": [int(index.seeds.min()), int(index.seeds.max())] if index is not None and len(index) else [],
                "size": index.count_by_size() if index is not None else [],
                "model": self._model_name(),
                "video": index is not None and index.num_frames > 1,
            }

    def _failure_reasons(self) -> list[list[Any]]:
        with self._ledger.connect() as connection:
            counts: Counter[str] = Counter()
            for reason, number in connection.count_failure_reasons():
                counts[(reason.strip().splitlines() or ["no reason given"])[0]] += number
        return [[reason, number] for reason, number in group_reasons(counts).most_common(MAX_REASONS)]

    def search(self, query: RowQuery) -> dict[str, Any]:
        """Return one page of rows, by index."""
        try:
            indices = self._find_rows(query)
            page = indices[query.offset : query.offset + query.limit].tolist()
            with self._lock, self._ledger.connect() as connection:
                columns = "id, prompt, seed, state, width, height, worker, reason, sha256, num_frames"
                rows = sorted(connection.select_rows(page, columns))
        except sqlite3.Error:
            return {"total": 0, "rows": []}
        return {"total": len(indices), "rows": [_row_json(row) for row in rows]}

    def _find_rows(self, query: RowQuery) -> Indices:
        """Return all rows of a query. The text search may be slow and runs without the lock."""
        filters, words = replace(query, offset=0, limit=0), parse_search_words(query.text)
        with self._lock:
            self._search_used = True
            index, read_at = self._load_index(), self._num_reads
            if self._cached_search[0] == (filters, read_at):
                return self._cached_search[1]
            if words:
                self._prepare_search()
            candidates, texts = index.filter_rows(query.state, query.worker or None, query.seed), index.texts
        found = filter_by_words(candidates, texts, words)
        with self._lock:
            self._cached_search = ((filters, read_at), found)
        return found

    def _prepare_search(self) -> None:
        """Read the texts of all rows once, between polls, so that searches do not wait for it."""
        if self._index is not None and len(self._index.texts) < len(self._index):
            with contextlib.suppress(sqlite3.Error), self._ledger.connect() as connection:
                self._index.read_texts(connection)

    # -- one image

    def image(self, key: str) -> Path | None:
        """File of an image or video frame: `g7` is the first frame of row 7, `g7.2` the third."""
        found = self._read_row(key, ("name", "num_frames", "state"))
        if not found or found["state"] != DONE or not found["name"]:
            return None
        name, num_frames, frame = found["name"], found["num_frames"], int(key.partition(".")[2] or 0)
        if frame >= num_frames:
            return None
        return self._find_inside(self.folder / (f"{name}.png" if num_frames == 1 else frame_name(name, frame)))

    def spec(self, key: str) -> dict[str, Any] | None:
        """Spec and outcome of an image, and the command to generate it again; None if unknown."""
        found = self._read_row(key, ("name", "state", "epoch", *SPEC_COLUMNS, *OUTCOME_COLUMNS))
        if not found:
            return None
        spec = {"index": found["picture"]} | {name: found[name] for name in SPEC_COLUMNS}
        spec["guidance_scale"] = loaded_guidance(found["guidance_scale"])
        outcome = {
            "state": STATES[found["state"]],
            **{name: found[name] for name in OUTCOME_COLUMNS},
            "epoch": found["epoch"],
        }
        ending = "png" if found["num_frames"] == 1 else "mp4"
        with self._lock:
            record = self._record or read_record(self.folder)
        return {
            "spec": spec,
            "outcome": outcome,
            "file": f"{found['name']}.{ending}" if found["name"] else "",
            "command": shell_command(record, spec, found["micro_batch"], found["epoch"]) if found["steps"] else "",
        }

    def _read_row(self, key: str, columns: tuple[str, ...]) -> dict[str, Any]:
        match = IMAGE_KEY.fullmatch(key)
        if match is None:
            return {}
        try:
            with self._lock, self._ledger.connect() as connection:
                rows = list(connection.select_rows([int(match[1])], ", ".join(columns)))
        except sqlite3.Error:
            return {}
        return dict(zip(("picture", *columns), rows[0], strict=True)) if rows else {}

    # -- logs

    def log(self, num_lines: int) -> list[str]:
        paths = self._log_files()
        return read_last_lines(paths[0], num_lines, self.folder) if paths else []

    def _log_files(self) -> list[Path]:
        """The log files of all commands that share the folder, the newest first."""
        paths = [self.folder / "logs" / "generate.log", *(self.folder / "logs").glob("*/generate.log")]
        stamps = sorted(((stamp.mtime_ns, path) for path in paths if (stamp := read_stamp(path))), reverse=True)
        return [path for _, path in stamps]


@contextlib.contextmanager
def _read_snapshot(connection: LedgerConnection) -> Iterator[None]:
    """Read transaction, so that all reads see the same snapshot."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _row_json(row: tuple[Any, ...]) -> dict[str, Any]:
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
        "v": _image_version(sha256),
        "frames": num_frames,
    }


def _image_version(sha256: str) -> str:
    return sha256[:12]
