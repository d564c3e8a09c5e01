"""What a person sees while images are drawn: a bar a worker and one for the whole, plain lines, JSON lines, or nothing.

It counts what it is told and knows no worker, ledger or file. One process draws; nothing it does may stop the drawing of images,
so a terminal or a pipe that goes away only makes it silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, cast

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAWS_PER_S = 5
MIN_BAR, MAX_BAR = 8, 40
TOTAL_LABEL = "all"
# Where a terminal is too narrow for every column, the last of these goes first.
COLUMNS_BY_PRIORITY = ("count", "failed", "times", "state", "success", "speed")
COLUMN_ORDER = ("count", "times", "success", "failed", "speed", "state")
ProgressKind = Literal["auto", "rich", "plain", "json", "none"]
PLAIN_EVERY_S = 30.0
JSON_EVERY_S = 1.0


@dataclass(kw_only=True)
class WorkerProgress:
    """One worker's part: the images it should reach, what came of those it drew, and what it is doing."""

    num_assigned: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    state: str = "waiting"
    start_time: float | None = None
    end_time: float | None = None

    @property
    def num_finished(self) -> int:
        return self.num_succeeded + self.num_failed

    @property
    def is_drawing(self) -> bool:
        return self.state.startswith("drawing")


class ProgressState:
    """The counts of one call, and the rates and times that follow from them."""

    def __init__(
        self, workers: Sequence[str], num_planned: int, num_done: int, num_failed: int, clock: Callable[[], float]
    ) -> None:
        self.workers = {worker: WorkerProgress() for worker in workers}
        self.num_planned = num_planned
        self.num_done_before = num_done
        self.num_failed_before = num_failed
        self.num_done_elsewhere = 0
        self.num_failed_elsewhere = 0
        self.clock = clock
        self.start_time = clock()
        self.drawing_start_time: float | None = None
        self.lock = threading.RLock()

    def get_worker(self, worker: str) -> WorkerProgress:
        return self.workers.setdefault(worker, WorkerProgress())

    def start_drawing(self, worker: WorkerProgress) -> None:
        """Rates count from here: loading a model says nothing about how fast it draws."""
        if worker.start_time is None:
            worker.start_time = self.clock()
        if self.drawing_start_time is None:
            self.drawing_start_time = worker.start_time

    @property
    def num_finished_now(self) -> int:
        elsewhere = self.num_done_elsewhere + self.num_failed_elsewhere
        return elsewhere + sum(worker.num_finished for worker in self.workers.values())

    @property
    def num_done(self) -> int:
        return (
            self.num_done_before
            + self.num_done_elsewhere
            + sum(worker.num_succeeded for worker in self.workers.values())
        )

    @property
    def num_failed(self) -> int:
        return (
            self.num_failed_before
            + self.num_failed_elsewhere
            + sum(worker.num_failed for worker in self.workers.values())
        )

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.start_time

    def images_per_s(self) -> float | None:
        return _rate(self.num_finished_now, self.drawing_start_time, self.clock())

    def remaining_s(self) -> float | None:
        return _remaining_s(self.num_planned - self.num_done - self.num_failed, self.images_per_s())

    def worker_images_per_s(self, worker: WorkerProgress) -> float | None:
        return _rate(worker.num_finished, worker.start_time, worker.end_time or self.clock())

    def worker_remaining_s(self, worker: WorkerProgress) -> float | None:
        if worker.end_time is not None:
            return 0.0
        if not worker.num_assigned:  # it loads, and has not been given anything to be done with
            return None
        return _remaining_s(worker.num_assigned - worker.num_finished, self.worker_images_per_s(worker))


def _rate(num: int, since: float | None, now: float) -> float | None:
    return num / (now - since) if num and since is not None and now > since else None


def _remaining_s(num: int, per_s: float | None) -> float | None:
    if num <= 0:
        return 0.0
    return num / per_s if per_s else None


def format_speed(per_s: float) -> str:
    """Images a second; slow ones by the minute, because 0.0/s tells nobody anything."""
    if per_s >= 0.1:
        return f"{per_s:.1f}/s" if per_s < 100 else f"{per_s:.0f}/s"
    return f"{per_s * 60:.1f}/min" if per_s * 60 >= 0.1 else f"{per_s * 3600:.1f}/h"


def format_duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.1f} days"


def format_clock(seconds: float | None) -> str:
    """30:00, 2:30:00, or 4d02:30 where a clock has no more room."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def escape_control_characters(text: str) -> str:
    """Text with its control characters spelled out: a prompt must not be able to steer a terminal."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


class RichProgress:
    """For a terminal: rich redraws the bars a few times a second in a thread of its own.

    It reads the board without its lock: a line that is an image behind harms nobody, while waiting for a lock inside rich's
    own lock could wait for ever.
    """

    def __init__(self, state: ProgressState, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._state = state
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REDRAWS_PER_S,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        self._live.start()

    def show_event(self, worker: str, text: str) -> None:
        """A state stands in the worker's own line; only that a worker went away is worth a line that stays."""
        if text.startswith("gone"):
            self.print_line(f"{worker}: {text}")

    def print_line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text))

    def finish(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        size = self._console.size
        return render_table(self._state, size.width, size.height)


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """One line of the table: how far its bar is, and the texts of its columns."""

    label: str
    num_finished: int
    total: int
    num_failed: int
    cells: dict[str, str]


def render_table(state: ProgressState, width: int, height: int) -> RenderableType:
    """The bars as they fit into `width` x `height`.

    Which columns there are follows from the plan and the terminal, never from how far the work is, so that nothing jumps.
    """
    from rich.console import Group
    from rich.text import Text

    workers = list(state.workers.items())
    num_shown = num_workers_shown(len(workers), height)
    shown, hidden = workers[:num_shown], workers[num_shown:]
    label_width = max(len(label) for label in (TOTAL_LABEL, *state.workers))
    widths = column_widths(state.num_planned, label_width, width)
    parts: list[RenderableType] = (
        [_render_grid([_worker_row(state, *worker) for worker in shown], widths)] if shown else []
    )
    if hidden:
        parts.append(Text(_hidden_workers_text(hidden)[: width - 1], style="dim"))
    return Group(*parts, _render_grid([_total_row(state)], widths))


def num_workers_shown(num_workers: int, height: int) -> int:
    """All lanes where they fit with the line for the whole and one to spare, else as many as leave a line to say so."""
    room = max(height - 2, 0)
    return num_workers if num_workers <= room else max(room - 1, 0)


def column_widths(planned: int, label_width: int, width: int) -> dict[str, int]:
    """The width of each column from left to right; the less important ones are left out of a narrow terminal."""
    digits = len(str(planned))
    wanted = {
        "count": 2 * digits + 1,
        "failed": len("failed: ") + min(digits, 4),
        "times": 15,
        "state": 23,
        "success": len("success: ") + digits,
        "speed": 9,
    }
    room = width - 1 - label_width - 1 - MIN_BAR
    chosen = set()
    for column in COLUMNS_BY_PRIORITY:
        if wanted[column] + 1 > room:
            break
        room -= wanted[column] + 1
        chosen.add(column)
    bar = max(min(MIN_BAR + room, MAX_BAR), 1)
    return {"label": label_width, "bar": bar, **{name: wanted[name] for name in COLUMN_ORDER if name in chosen}}


def _render_grid(lines: Sequence[ProgressRow], widths: dict[str, int]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for column, width in widths.items():
        left = column in ("label", "bar", "state")
        grid.add_column(width=width, no_wrap=True, overflow="crop", justify="left" if left else "right")
    for line in lines:
        grid.add_row(*(_render_cell(line, column, widths) for column in widths))
    return grid


def _render_cell(line: ProgressRow, column: str, widths: dict[str, int]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    state = line.cells["state"]
    words_in_bar = (
        "state" not in widths and state and not state.startswith("drawing") and line.num_finished < line.total
    )
    if column == "label":
        return Text(line.label, style="bold" if line.label == TOTAL_LABEL else "")
    if column == "bar" and not words_in_bar:
        return ProgressBar(total=max(line.total, 1), completed=line.num_finished, width=widths["bar"])
    style = {"bar": "yellow", "state": "dim", "failed": "bold red" if line.num_failed else "dim", "success": "green"}
    return Text(state if column == "bar" else line.cells[column], style=style.get(column, ""))


def _worker_row(state: ProgressState, label: str, worker: WorkerProgress) -> ProgressRow:
    elapsed_s = (worker.end_time or state.clock()) - state.start_time
    return ProgressRow(
        label=label,
        num_finished=worker.num_finished,
        total=max(worker.num_assigned, worker.num_finished),
        num_failed=worker.num_failed,
        cells={
            "count": f"{worker.num_finished}/{max(worker.num_assigned, worker.num_finished)}",
            "times": f"{format_clock(elapsed_s)}<{format_clock(state.worker_remaining_s(worker))}",
            "success": f"success: {worker.num_succeeded}",
            "failed": f"failed: {worker.num_failed}",
            "speed": _speed_text(state.worker_images_per_s(worker)),
            "state": worker.state,
        },
    )


def _total_row(state: ProgressState) -> ProgressRow:
    position = state.num_done + state.num_failed
    return ProgressRow(
        label=TOTAL_LABEL,
        num_finished=position,
        total=max(state.num_planned, position),
        num_failed=state.num_failed,
        cells={
            "count": f"{position}/{state.num_planned}",
            "times": f"{format_clock(state.elapsed_s)}<{format_clock(state.remaining_s())}",
            "success": f"success: {state.num_done}",
            "failed": f"failed: {state.num_failed}",
            "speed": _speed_text(state.images_per_s()),
            "state": "",
        },
    )


def _speed_text(per_s: float | None) -> str:
    return "" if per_s is None else format_speed(per_s)


def _hidden_workers_text(workers: Sequence[tuple[str, WorkerProgress]]) -> str:
    done, num_assigned = sum(lane.num_finished for _, lane in workers), sum(lane.num_assigned for _, lane in workers)
    failed = sum(worker.num_failed for _, worker in workers)
    gone = sum(lane.state.startswith("gone") for _, lane in workers)
    return f"and {len(workers)} more: {done}/{num_assigned}, failed: {failed}" + (f", {gone} gone" if gone else "")


class ProgressDisplay(Protocol):
    """Where the board is shown."""

    def start(self) -> None: ...
    def show_event(self, worker: str, text: str) -> None: ...
    def print_line(self, text: str) -> None: ...
    def finish(self) -> None: ...


class GenerationProgress:
    """The progress of one call of `halation generate`, as the supervisor tells it; a context manager.

    Any thread may call it, a signal handler may not: it could interrupt the very write that it starts again.
    """

    def __init__(
        self,
        kind: ProgressKind,
        workers: Sequence[str],
        num_planned: int,
        num_done: int,
        num_failed: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_done` and `num_failed` are what earlier calls left; JSON goes to standard output unless told, all else to standard error."""
        stream = stream or (sys.stdout if kind == "json" else sys.stderr)
        if kind == "auto":
            kind = "rich" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self.kind = kind
        self.progress_state = ProgressState(workers, num_planned, num_done, num_failed, clock)
        self._display = _make_display(kind, self.progress_state, SafeStream(stream))
        self._finished = False

    def __enter__(self) -> GenerationProgress:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def set_state(self, worker: str, text: str) -> None:
        """What a worker is doing, in words; an event, unless it is only the next step of drawing."""
        with self.progress_state.lock:
            worker_progress = self.progress_state.get_worker(worker)
            changed, worker_progress.state = text != worker_progress.state, text
            if worker_progress.is_drawing:
                self.progress_state.start_drawing(worker_progress)
            worker_progress.end_time = self.progress_state.clock() if text == "finished" else None
            is_event = changed and not worker_progress.is_drawing
        if is_event:
            self._display.show_event(worker, escape_control_characters(text))

    def set_step(self, worker: str, steps_done: int, steps_total: int) -> None:
        """A worker is so far with its batch."""
        with self.progress_state.lock:
            worker_progress = self.progress_state.get_worker(worker)
            self.progress_state.start_drawing(worker_progress)
            worker_progress.state = f"drawing {steps_done} of {steps_total} steps"
            worker_progress.end_time = None

    def add_images(self, worker: str, success: int, failed: int) -> None:
        """So many more images of this worker are there, or were given up."""
        with self.progress_state.lock:
            worker_progress = self.progress_state.get_worker(worker)
            if (
                worker_progress.start_time is None
            ):  # a model without steps: its first image took since the others began, or the call
                worker_progress.start_time = (
                    self.progress_state.start_time
                    if self.progress_state.drawing_start_time is None
                    else self.progress_state.drawing_start_time
                )
                self.progress_state.drawing_start_time = worker_progress.start_time
            worker_progress.num_succeeded += success
            worker_progress.num_failed += failed

    def set_other_process_counts(self, success: int, failed: int) -> None:
        """Commands that share the folder have drawn so many in all since this one began, or given them up."""
        with self.progress_state.lock:
            self.progress_state.num_done_elsewhere = success
            self.progress_state.num_failed_elsewhere = failed

    def set_assigned(self, worker: str, num: int) -> None:
        """This worker's bar should now reach `num` images."""
        with self.progress_state.lock:
            self.progress_state.get_worker(worker).num_assigned = num

    def print_line(self, text: str) -> None:
        """A line above the bars."""
        self._display.print_line(escape_control_characters(text))

    def finish(self) -> None:
        """Show the last state and let go of the terminal."""
        if self._finished:
            return
        self._finished = True
        with self.progress_state.lock:
            for worker_progress in self.progress_state.workers.values():
                if worker_progress.end_time is None:
                    worker_progress.end_time = self.progress_state.clock()
                if worker_progress.is_drawing:  # nobody draws any more, and what is shown now stays on the screen
                    worker_progress.state = (
                        "finished" if worker_progress.num_finished >= worker_progress.num_assigned else "stopped"
                    )
        self._display.finish()


def _make_display(kind: ProgressKind, state: ProgressState, stream: SafeStream) -> ProgressDisplay:
    if kind == "rich":
        return RichProgress(state, cast("TextIO", stream))
    if kind == "plain":
        return PlainProgress(state, stream)
    return JsonProgress(state, stream) if kind == "json" else NoProgress()


class SafeStream:
    """A stream whose reader may go away: what can no longer be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except BrokenPipeError:
            self._redirect_to_devnull()
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._redirect_to_devnull()
        except (OSError, ValueError):
            pass

    def _redirect_to_devnull(self) -> None:
        """Python flushes at exit once more and would turn that failure into an exit code of its own."""
        with contextlib.suppress(OSError, ValueError):
            empty = os.open(os.devnull, os.O_WRONLY)
            os.dup2(empty, self.stream.fileno())
            os.close(empty)

    def write_line(self, text: str) -> None:
        self.write(text + "\n")
        self.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:
        return self.stream.encoding or "utf-8"


class Ticker:
    """Calls a function every so often until it is stopped."""

    def __init__(self, interval_s: float, call: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._call = call
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._call()


class NoProgress:
    """Shows nothing."""

    def start(self) -> None: ...
    def show_event(self, worker: str, text: str) -> None: ...
    def print_line(self, text: str) -> None: ...
    def finish(self) -> None: ...


class PlainProgress:
    """For files and pipes that a person reads: a line at the start, every 30 s, at each event and at the end."""

    def __init__(self, state: ProgressState, stream: SafeStream) -> None:
        self._state = state
        self._stream = stream
        self._ticker = Ticker(PLAIN_EVERY_S, self._report)

    def start(self) -> None:
        state = self._state
        words = f"{state.num_done} of {state.num_planned} images are there" + (
            f", {state.num_failed} failed before" if state.num_failed else ""
        )
        self._stream.write_line(f"{words}; drawing with {', '.join(state.workers)}")
        self._ticker.start()

    def show_event(self, worker: str, text: str) -> None:
        self.print_line(f"{worker}: {text}")

    def print_line(self, text: str) -> None:
        with self._state.lock:
            self._stream.write_line(text)

    def finish(self) -> None:
        self._ticker.stop()
        self._stream.write_line(self._summary_line(f"in {format_duration(self._state.elapsed_s)}"))

    def _report(self) -> None:
        with self._state.lock:
            left_s = self._state.remaining_s()
            self._stream.write_line(self._summary_line("" if left_s is None else f"{format_duration(left_s)} left"))

    def _summary_line(self, when: str) -> str:
        state = self._state
        per_s = state.images_per_s()
        counts = [f"{state.num_done} of {state.num_planned} images", f"{state.num_failed} failed"]
        parts = [*counts, "" if per_s is None else format_speed(per_s), when]
        counts_by_worker = ", ".join(f"{worker}: {progress.num_finished}" for worker, progress in state.workers.items())
        return ", ".join(part for part in parts if part) + (f" ({counts_by_worker})" if counts_by_worker else "")


class JsonProgress:
    """For machines: one JSON object a line, progress at most once a second and only when something moved."""

    def __init__(self, state: ProgressState, stream: SafeStream) -> None:
        self._state = state
        self._stream = stream
        self._last_reported = -1
        self._ticker = Ticker(JSON_EVERY_S, self._report)

    def start(self) -> None:
        self._write_event("start")
        self._ticker.start()

    def show_event(self, worker: str, text: str) -> None:
        self._write_event("worker", worker=worker, text=text)

    def print_line(self, text: str) -> None:
        self._write_event("message", text=text)

    def finish(self) -> None:
        self._ticker.stop()
        self._write_event("end")

    def _report(self) -> None:
        with self._state.lock:
            if self._last_reported != self._state.num_finished_now:
                self._last_reported = self._state.num_finished_now
                self._write_event("progress")

    def _write_event(self, event: str, **more: str) -> None:
        state = self._state
        with state.lock:
            value: dict[str, Any] = {
                "event": event,
                **more,
                "time_s": round(state.elapsed_s, 3),
                "planned": state.num_planned,
                "done": state.num_done,
                "failed": state.num_failed,
                "per_s": _round_or_none(state.images_per_s()),
                "left_s": _round_or_none(state.remaining_s()),
                "workers": {
                    worker: {
                        "success": progress.num_succeeded,
                        "failed": progress.num_failed,
                        "share": progress.num_assigned,
                        "state": progress.state,
                    }
                    for worker, progress in state.workers.items()
                },
            }
            self._stream.write_line(json.dumps(value, ensure_ascii=True))


def _round_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
