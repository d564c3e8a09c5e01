"""What a person sees while pictures are drawn: a bar a worker and one for the whole, plain lines, JSON lines, or nothing.

It counts what it is told and knows no worker, ledger or file. One process draws; nothing it does may stop the drawing of pictures,
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
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO, cast

from halation.progress_board import Board, in_words, printable, speed

Kind = Literal["auto", "rich", "plain", "json", "none"]

PLAIN_EVERY_S = 30.0
JSON_EVERY_S = 1.0


class Surface(Protocol):
    """Where the board is shown."""

    def start(self) -> None: ...
    def event(self, worker: str, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def finish(self) -> None: ...


class Progress:
    """The progress of one call of `halation generate`, as the supervisor tells it; a context manager.

    Any thread may call it, a signal handler may not: it could interrupt the very write that it starts again.
    """

    def __init__(
        self,
        kind: Kind,
        workers: Sequence[str],
        planned: int,
        done: int,
        failed: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done` and `failed` are what earlier calls left; JSON goes to standard output unless told, all else to standard error."""
        stream = stream or (sys.stdout if kind == "json" else sys.stderr)
        if kind == "auto":
            kind = "rich" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self.kind = kind
        self.board = Board(workers, planned, done, failed, clock)
        self._surface = _surface(kind, self.board, Quiet(stream))
        self._finished = False

    def __enter__(self) -> Progress:
        self._surface.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def state(self, worker: str, text: str) -> None:
        """What a worker is doing, in words; an event, unless it is only the next step of drawing."""
        with self.board.lock:
            lane = self.board.lane(worker)
            changed, lane.state = text != lane.state, text
            if lane.drawing:
                self.board.begin_drawing(lane)
            lane.ended = self.board.clock() if text == "finished" else None
            event = changed and not lane.drawing
        if event:
            self._surface.event(worker, printable(text))

    def step(self, worker: str, steps_done: int, steps_total: int) -> None:
        """A worker is so far with its sheet."""
        with self.board.lock:
            lane = self.board.lane(worker)
            self.board.begin_drawing(lane)
            lane.state = f"drawing {steps_done} of {steps_total} steps"
            lane.ended = None

    def picture(self, worker: str, success: int, failed: int) -> None:
        """So many more pictures of this worker are there, or were given up."""
        with self.board.lock:
            lane = self.board.lane(worker)
            if (
                lane.began is None
            ):  # a painter without steps: its first picture took since the others began, or the call
                lane.began = self.board.began if self.board.drawing_since is None else self.board.drawing_since
                self.board.drawing_since = lane.began
            lane.success += success
            lane.failed += failed

    def elsewhere(self, success: int, failed: int) -> None:
        """Commands that share the folder have drawn so many in all since this one began, or given them up."""
        with self.board.lock:
            self.board.done_elsewhere = success
            self.board.failed_elsewhere = failed

    def give(self, worker: str, num: int) -> None:
        """This worker's bar should now reach `num` pictures."""
        with self.board.lock:
            self.board.lane(worker).share = num

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._surface.say(printable(text))

    def finish(self) -> None:
        """Show the last state and let go of the terminal."""
        if self._finished:
            return
        self._finished = True
        with self.board.lock:
            for lane in self.board.lanes.values():
                if lane.ended is None:
                    lane.ended = self.board.clock()
                if lane.drawing:  # nobody draws any more, and what is shown now stays on the screen
                    lane.state = "finished" if lane.position >= lane.share else "stopped"
        self._surface.finish()


def _surface(kind: Kind, board: Board, stream: Quiet) -> Surface:
    if kind == "rich":
        from halation.progress_bars import Bars

        return Bars(board, cast("TextIO", stream))
    if kind == "plain":
        return Lines(board, stream)
    return Objects(board, stream) if kind == "json" else Nothing()


class Quiet:
    """A stream whose reader may go away: what can no longer be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except BrokenPipeError:
            self._let_go()
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
            self._let_go()
        except (OSError, ValueError):
            pass

    def _let_go(self) -> None:
        """Python flushes at exit once more and would turn that failure into an exit code of its own."""
        with contextlib.suppress(OSError, ValueError):
            empty = os.open(os.devnull, os.O_WRONLY)
            os.dup2(empty, self.stream.fileno())
            os.close(empty)

    def line(self, text: str) -> None:
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

    def __init__(self, every_s: float, call: Callable[[], None]) -> None:
        self._every_s = every_s
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
        while not self._stopped.wait(self._every_s):
            self._call()


class Nothing:
    """Shows nothing."""

    def start(self) -> None: ...
    def event(self, worker: str, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def finish(self) -> None: ...


class Lines:
    """For files and pipes that a person reads: a line at the start, every 30 s, at each event and at the end."""

    def __init__(self, board: Board, stream: Quiet) -> None:
        self._board = board
        self._stream = stream
        self._ticker = Ticker(PLAIN_EVERY_S, self._tell)

    def start(self) -> None:
        board = self._board
        words = f"{board.done} of {board.planned} pictures are there" + (
            f", {board.failed} failed before" if board.failed else ""
        )
        self._stream.line(f"{words}; drawing with {', '.join(board.lanes)}")
        self._ticker.start()

    def event(self, worker: str, text: str) -> None:
        self.say(f"{worker}: {text}")

    def say(self, text: str) -> None:
        with self._board.lock:
            self._stream.line(text)

    def finish(self) -> None:
        self._ticker.stop()
        self._stream.line(self._sentence(f"in {in_words(self._board.elapsed_s)}"))

    def _tell(self) -> None:
        with self._board.lock:
            left_s = self._board.left_s()
            self._stream.line(self._sentence("" if left_s is None else f"{in_words(left_s)} left"))

    def _sentence(self, when: str) -> str:
        board = self._board
        per_s = board.per_s()
        counts = [f"{board.done} of {board.planned} pictures", f"{board.failed} failed"]
        parts = [*counts, "" if per_s is None else speed(per_s), when]
        lanes = ", ".join(f"{worker}: {lane.position}" for worker, lane in board.lanes.items())
        return ", ".join(part for part in parts if part) + (f" ({lanes})" if lanes else "")


class Objects:
    """For machines: one JSON object a line, progress at most once a second and only when something moved."""

    def __init__(self, board: Board, stream: Quiet) -> None:
        self._board = board
        self._stream = stream
        self._told = -1
        self._ticker = Ticker(JSON_EVERY_S, self._tell)

    def start(self) -> None:
        self._line("start")
        self._ticker.start()

    def event(self, worker: str, text: str) -> None:
        self._line("worker", worker=worker, text=text)

    def say(self, text: str) -> None:
        self._line("message", text=text)

    def finish(self) -> None:
        self._ticker.stop()
        self._line("end")

    def _tell(self) -> None:
        with self._board.lock:
            if self._told != self._board.drawn_now:
                self._told = self._board.drawn_now
                self._line("progress")

    def _line(self, event: str, **more: str) -> None:
        board = self._board
        with board.lock:
            value: dict[str, Any] = {
                "event": event,
                **more,
                "time_s": round(board.elapsed_s, 3),
                "planned": board.planned,
                "done": board.done,
                "failed": board.failed,
                "per_s": _rounded(board.per_s()),
                "left_s": _rounded(board.left_s()),
                "workers": {
                    worker: {"success": lane.success, "failed": lane.failed, "share": lane.share, "state": lane.state}
                    for worker, lane in board.lanes.items()
                },
            }
            self._stream.line(json.dumps(value, ensure_ascii=True))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
