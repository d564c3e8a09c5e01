"""Progress of all commands: bars on a terminal, plain lines, JSON lines, or nothing.

A display never stops the job: if the terminal or pipe is closed, output is dropped. rich is imported with the first
bar.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REDRAWS_PER_S = 5
PLAIN_EVERY_S = 30.0
JSON_EVERY_S = 1.0
MIN_BAR, MAX_BAR = 8, 40
MIN_WORDS = 16
DELAY_S = 2.0
"""`delayed_progress` shows a bar only for work that takes longer."""
COLUMN_ORDER = ("count", "times", "success", "failed", "speed", "state", "words")


@dataclass(kw_only=True)
class Bar:
    """Counts, times and state of one bar."""

    label: str
    total: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_before: int = 0
    """Images finished before this call: they count as done but not for the rate."""
    state: str = "waiting"
    rate_start: float | None = None
    """When the first image was started; the time to load the model does not count for the rate."""
    end_time: float | None = None

    @property
    def num_finished(self) -> int:
        return self.num_succeeded + self.num_failed

    @property
    def is_drawing(self) -> bool:
        return self.state.startswith("drawing")

    def per_s(self, now: float) -> float | None:
        now, num = self.end_time or now, self.num_finished - self.num_before
        return num / (now - self.rate_start) if num and self.rate_start is not None and now > self.rate_start else None

    def remaining_s(self, now: float) -> float | None:
        if self.end_time is not None or 0 < self.total <= self.num_finished:
            return 0.0
        per_s = self.per_s(now)  # a worker that is still loading has no total
        return (self.total - self.num_finished) / per_s if self.total and per_s else None


def format_speed(per_s: float) -> str:
    """Format a rate per second, or per minute or hour if it would round to 0.0/s."""
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
    """Format as 30:00, 2:30:00 or, from 100 hours, 4d04:30."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def escape_control_characters(text: str) -> str:
    """Escape control characters, so that a prompt cannot control the terminal."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def fit_columns(wanted: Mapping[str, int], label_width: int, width: int) -> dict[str, int]:
    """Return column widths from left to right; a narrow terminal drops the last of `wanted`.

    Widths depend on the plan and the terminal but not on progress, so that columns do not move.
    """
    room = width - label_width - MIN_BAR - 2
    chosen: dict[str, int] = {}
    for name, column_width in wanted.items():
        fitted = min(column_width, max(room - 1, MIN_WORDS)) if name == "words" else column_width
        if fitted + 1 > room:
            break
        room -= fitted + 1
        chosen[name] = fitted
    bar = max(min(MIN_BAR + room, MAX_BAR), 1)
    return {"label": label_width, "bar": bar, **{name: chosen[name] for name in COLUMN_ORDER if name in chosen}}


class SafeStream:
    """A stream that drops output when its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._ignore_errors():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignore_errors():
            self.stream.flush()

    @contextlib.contextmanager
    def _ignore_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # Python flushes again at exit; an error there would change the exit code
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as empty:
                os.dup2(empty.fileno(), self.stream.fileno())
        except (OSError, ValueError):
            pass


class ProgressDisplay:
    """Base class of all displays: their kind, stream and event lines; a context manager.

    Thread-safe. Not for signal handlers: one could interrupt a write and start another.
    """

    is_transient = False
    """True if the bars are removed at the end."""

    def __init__(self, kind: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        stream = stream or sys.stderr
        if kind == "auto":
            kind = "rich" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self.kind = kind
        self.clock = clock
        self.start_time = clock()
        self.lock = threading.RLock()
        self._stream = SafeStream(stream)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.kind == "rich":
            from rich.console import Console
            from rich.live import Live

            # rich draws in its own thread and reads the counts without `self.lock`: a count that is one image behind
            # is harmless, while waiting for `self.lock` inside rich's lock could deadlock.
            console = Console(file=cast("TextIO", self._stream), highlight=False, markup=False, emoji=False)
            self._live = Live(
                console=console,
                get_renderable=lambda: self.render(console.width, console.height),
                refresh_per_second=REDRAWS_PER_S,
                vertical_overflow="crop",
                transient=self.is_transient,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Show the last state and release the terminal."""
        if self._live is not None:
            self._live.stop()

    def show_line(self, text: str, json_object: Mapping[str, Any]) -> None:
        """Print a permanent line: above the bars, as plain text, or as JSON."""
        with self.lock:
            if self._live is not None:
                self._live.console.print(escape_control_characters(text))
            elif self.kind in ("plain", "json"):
                line = json.dumps(json_object) if self.kind == "json" else escape_control_characters(text)
                self._stream.write(line + "\n")
                self._stream.flush()

    def render(self, width: int, height: int) -> RenderableType:
        """Return the current content for a terminal of this size."""
        raise NotImplementedError

    def render_bars(self, bars: Sequence[Bar], wanted: Mapping[str, int], width: int, height: int) -> RenderableType:
        """Render the bars that fit, always the last one; one line sums up the others."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self.clock()
        widths = fit_columns(wanted, max(len(bar.label) for bar in bars), width)

        def render_grid(bars: Sequence[Bar]) -> RenderableType:
            grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
            for name, width in widths.items():
                left = name in ("label", "bar", "state", "words")
                grid.add_column(width=width, no_wrap=True, overflow="crop", justify="left" if left else "right")
            for bar in bars:
                elapsed_s, per_s = (bar.end_time or now) - self.start_time, bar.per_s(now)
                is_blocked = bar.state and not bar.is_drawing and bar.num_finished < bar.total
                cells = {
                    "label": Text(bar.label, style="bold" if bar is last else ""),
                    "bar": Text(bar.state, style="yellow")
                    if "state" in wanted.keys() - widths and is_blocked
                    else ProgressBar(total=max(bar.total, 1), completed=bar.num_finished, width=widths["bar"]),
                    "count": f"{bar.num_finished}/{max(bar.total, bar.num_finished)}",
                    "times": f"{format_clock(elapsed_s)}<{format_clock(bar.remaining_s(now))}",
                    "success": Text(f"success: {bar.num_succeeded}", style="green"),
                    "failed": Text(f"failed: {bar.num_failed}", style="bold red" if bar.num_failed else "dim"),
                    "speed": "" if per_s is None else format_speed(per_s),
                    "state": Text(bar.state, style="dim"),
                    "words": bar.state,
                }
                grid.add_row(*(cells[name] for name in widths))
            return grid

        *others, last = bars
        room = max(height - 2, 0)  # minus the last bar and the cursor line
        num_shown = len(others) if len(others) <= room else max(room - 1, 0)
        shown, hidden = others[:num_shown], others[num_shown:]
        parts = [render_grid(shown)] if shown else []
        if hidden:
            counts = f"{sum(bar.num_finished for bar in hidden)}/{sum(bar.total for bar in hidden)}"
            text = f"and {len(hidden)} more: {counts}, failed: {sum(bar.num_failed for bar in hidden)}"
            num_gone = sum(bar.state.startswith("gone") for bar in hidden)
            parts.append(Text((text + (f", {num_gone} gone" if num_gone else ""))[: width - 1], style="dim"))
        return Group(*parts, render_grid([last]))


class StepProgress(ProgressDisplay):
    """Progress of a job that counts steps: a bar, a line every 30 s, or JSON every second."""

    def __init__(self, kind: str, total: int, done: int, title: str = "training") -> None:
        super().__init__(kind)
        since = self.start_time
        self.bar = Bar(label=title, total=total, num_succeeded=done, num_before=done, state="", rate_start=since)
        self._words_width = 0
        self._report_time = -PLAIN_EVERY_S
        self._reported_step = -1

    def update(self, step: int, words: str, numbers: Mapping[str, float], total: int | None = None) -> None:
        bar, now = self.bar, self.clock()
        bar.num_succeeded, bar.state, bar.total = step, words, total or bar.total
        self._words_width = max(self._words_width, len(words))
        is_due = now - self._report_time >= (JSON_EVERY_S if self.kind == "json" else PLAIN_EVERY_S)
        is_last = step == bar.total and self._reported_step != step
        if self.kind in ("plain", "json") and (is_due or is_last):
            self._report_time, self._reported_step = now, step
            what = "step" if bar.label == "training" else bar.label
            line = f"{what} {step}/{bar.total} {words}".rstrip().replace("  ", ", ")
            left_s = bar.remaining_s(now) if step > bar.num_before else None
            if left_s is not None:
                line += f", {int(left_s // 3600)}:{int(left_s // 60 % 60):02d}:{int(left_s % 60):02d} left"
            self.show_line(line, {"step": step, "total": bar.total, **numbers})

    def print_line(self, text: str) -> None:
        """Print an event: a checkpoint, samples, a warning."""
        self.show_line(text, {"event": text})

    def render(self, width: int, height: int) -> RenderableType:
        wanted = {"count": 2 * len(str(self.bar.total)) + 1, "times": 15, "words": self._words_width}
        return self.render_bars([self.bar], wanted, width, height)


@contextlib.contextmanager
def delayed_progress(
    kind: str, title: str, unit: str, heartbeat: Callable[[], None], rank_and_size: tuple[int, int] = (0, 1)
) -> Iterator[Callable[[int, int], None]]:
    """Yield `update(done, total)`, which sends heartbeats; rank 0 shows a bar after DELAY_S."""
    rank, size = rank_and_size
    words = f"{unit}, rank 0 of {size}" if size > 1 else unit
    start_time = time.monotonic()
    with contextlib.ExitStack() as stack:
        bar: StepProgress | None = None

        def update(done: int, total: int) -> None:
            nonlocal bar
            heartbeat()
            if bar is None and rank == 0 and time.monotonic() - start_time > DELAY_S:
                bar = stack.enter_context(StepProgress(kind, total, done, title))
            if bar is not None:
                bar.update(done, words, {})

        yield update


class WatchProgress(ProgressDisplay):
    """Progress of `halation watch`: one live line for the current activity, and event lines."""

    is_transient = True
    _status, _details = "", ""

    def show_status(self, status: str, details: str = "") -> None:
        """Show the current activity; `details` change often and appear only in the live line."""
        if self.kind != "rich" and status != self._status:
            self.show_event("doing", status)
        self._status, self._details = status, details

    def show_event(self, event: str, text: str, **facts: Any) -> None:
        """Print an event: a message, a warning (also printed by the kind `none`) or a score."""
        if event == "warning" and self.kind == "none":
            self._stream.write(f"{escape_control_characters(text)}\n")
        self.show_line(text, {"event": event, "text": text, **facts})

    def render(self, width: int, height: int) -> RenderableType:
        from rich.spinner import Spinner
        from rich.text import Text

        text = escape_control_characters(f"{self._status}  {self._details}".rstrip())[: max(width - 3, 1)]
        spinner = Spinner("dots", Text(text), style="status.spinner")
        spinner.start_time = self.start_time
        return spinner


class GenerationProgress(ProgressDisplay):
    """Progress of `halation generate`: a bar for each worker and one for the total.

    `num_done` and `num_failed` count images of earlier calls. JSON goes to standard output, all else to standard error.
    """

    def __init__(
        self,
        kind: str,
        workers: Sequence[str],
        num_planned: int,
        num_done: int,
        num_failed: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(kind, stream or (sys.stdout if kind == "json" else None), clock)
        self.workers = {worker: Bar(label=worker) for worker in workers}
        self.num_planned = num_planned
        self.num_before = (num_done, num_failed)
        self.num_elsewhere = (0, 0)
        self._drawing_start: float | None = None
        self._num_reported = -1
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._report_regularly, name="progress", daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        if self.kind in ("plain", "json"):
            num_done, num_failed = self.num_before
            failed = f", {num_failed} failed before" if num_failed else ""
            text = f"{num_done} of {self.num_planned} images are done{failed}; generating on {', '.join(self.workers)}"
            self.show_line(text, self._json_object("start"))
            self._thread.start()
        return self

    def finish(self) -> None:
        """Show the last state and release the terminal."""
        if self._finished.is_set():
            return
        self._finished.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self.lock:
            now = self.clock()
            for bar in self.workers.values():
                bar.end_time = bar.end_time or now
                if bar.is_drawing:  # this state stays on the screen
                    bar.state = "finished" if bar.num_finished >= bar.total else "stopped"
            if self.kind != "rich":
                text = self._format_counts(f"in {format_duration(now - self.start_time)}")
                self.show_line(text, self._json_object("end"))
        super().finish()

    def overall(self) -> Bar:
        """Return the bar for the total, with images of earlier calls and of other commands."""
        bars = list(self.workers.values())
        return Bar(
            label="all",
            total=self.num_planned,
            num_succeeded=self.num_before[0] + self.num_elsewhere[0] + sum(bar.num_succeeded for bar in bars),
            num_failed=self.num_before[1] + self.num_elsewhere[1] + sum(bar.num_failed for bar in bars),
            num_before=sum(self.num_before),
            state="",
            rate_start=self._drawing_start,
        )

    def set_state(self, worker: str, text: str) -> None:
        """Set a worker's state text; a new state is an event unless it starts with "drawing"."""
        text = escape_control_characters(text)
        with self.lock:
            bar = self._start_bar(worker, self.clock() if text.startswith("drawing") else None)
            is_event = text != bar.state and not text.startswith("drawing")
            bar.state, bar.end_time = text, self.clock() if text == "finished" else None
        # On a terminal the worker's bar shows the state; only the loss of a worker gets a permanent line.
        if is_event and (self.kind != "rich" or text.startswith("gone")):
            self.show_line(f"{worker}: {text}", self._json_object("worker", worker=worker, text=text))

    def set_step(self, worker: str, steps_done: int, steps_total: int) -> None:
        """Set how many steps of its batch a worker has done."""
        with self.lock:
            bar = self._start_bar(worker, self.clock())
            bar.state, bar.end_time = f"drawing {steps_done} of {steps_total} steps", None

    def add_images(self, worker: str, success: int, failed: int) -> None:
        """Add finished and failed images to a worker's counts."""
        with self.lock:
            # A model without steps reports no start: its first image counts from the start of generation, or of this
            # display if no worker has started.
            bar = self._start_bar(worker, self.start_time if self._drawing_start is None else self._drawing_start)
            bar.num_succeeded += success
            bar.num_failed += failed

    def set_assigned(self, worker: str, num: int) -> None:
        """Set the total of a worker's bar."""
        with self.lock:
            self._start_bar(worker, None).total = num

    def set_other_process_counts(self, success: int, failed: int) -> None:
        """Set the images done and failed since the start by other commands that share the folder."""
        self.num_elsewhere = (success, failed)

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        self.show_line(text, self._json_object("message", text=escape_control_characters(text)))

    def render(self, width: int, height: int) -> RenderableType:
        digits = len(str(self.num_planned))
        wanted = {
            "count": 2 * digits + 1,
            "failed": len("failed: ") + min(digits, 4),
            "times": 15,
            "success": len("success: ") + digits,
            "state": 23,
            "speed": 9,
        }
        return self.render_bars([*list(self.workers.values()), self.overall()], wanted, width, height)

    def _start_bar(self, worker: str, drawing_start: float | None) -> Bar:
        """Return a worker's bar, created if it joined late; the first start of generation is kept."""
        bar = self.workers.setdefault(worker, Bar(label=worker))
        if bar.rate_start is None:
            bar.rate_start = drawing_start
        if self._drawing_start is None:
            self._drawing_start = bar.rate_start
        return bar

    def _report_regularly(self) -> None:
        while not self._finished.wait(JSON_EVERY_S if self.kind == "json" else PLAIN_EVERY_S):
            with self.lock:
                bar = self.overall()
                if self.kind == "plain" or bar.num_finished != self._num_reported:
                    self._num_reported = bar.num_finished
                    left_s = bar.remaining_s(self.clock())
                    text = self._format_counts("" if left_s is None else f"{format_duration(left_s)} left")
                    self.show_line(text, self._json_object("progress"))

    def _format_counts(self, when: str) -> str:
        bar = self.overall()
        per_s = bar.per_s(self.clock())
        speed = "" if per_s is None else format_speed(per_s)
        parts = [f"{bar.num_succeeded} of {bar.total} images", f"{bar.num_failed} failed", speed, when]
        by_worker = ", ".join(f"{worker}: {each.num_finished}" for worker, each in self.workers.items())
        return ", ".join(part for part in parts if part) + (f" ({by_worker})" if by_worker else "")

    def _json_object(self, event: str, **facts: str) -> dict[str, Any]:
        with self.lock:
            bar, now = self.overall(), self.clock()
            per_s, left_s = bar.per_s(now), bar.remaining_s(now)
            return {
                "event": event,
                **facts,
                "time_s": round(now - self.start_time, 3),
                "planned": bar.total,
                "done": bar.num_succeeded,
                "failed": bar.num_failed,
                "per_s": None if per_s is None else round(per_s, 3),
                "left_s": None if left_s is None else round(left_s, 3),
                "workers": {
                    each.label: {
                        "success": each.num_succeeded,
                        "failed": each.num_failed,
                        "share": each.total,
                        "state": each.state,
                    }
                    for each in self.workers.values()
                },
            }
