"""Bars on a terminal: one line a worker and one for the whole, laid out for the width and height there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from halation.progress_board import Board, Lane, clock_face, speed

if TYPE_CHECKING:
    from rich.console import RenderableType

REDRAWS_PER_S = 5
MIN_BAR, MAX_BAR = 8, 40
WHOLE = "all"
# Where a terminal is too narrow for every column, the last of these goes first.
BY_IMPORTANCE = ("count", "failed", "times", "state", "success", "speed")
LEFT_TO_RIGHT = ("count", "times", "success", "failed", "speed", "state")


class Bars:
    """For a terminal: rich redraws the bars a few times a second in a thread of its own.

    It reads the board without its lock: a line that is a picture behind harms nobody, while waiting for a lock inside rich's
    own lock could wait for ever.
    """

    def __init__(self, board: Board, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._board = board
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._renderable,
            refresh_per_second=REDRAWS_PER_S,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        self._live.start()

    def event(self, worker: str, text: str) -> None:
        """A state stands in the worker's own line; only that a worker went away is worth a line that stays."""
        if text.startswith("gone"):
            self.say(f"{worker}: {text}")

    def say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text))

    def finish(self) -> None:
        self._live.stop()

    def _renderable(self) -> RenderableType:
        size = self._console.size
        return table(self._board, size.width, size.height)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table: how far its bar is, and the texts of its columns."""

    label: str
    position: int
    total: int
    failed: int
    cells: dict[str, str]


def table(board: Board, width: int, height: int) -> RenderableType:
    """The bars as they fit into `width` x `height`.

    Which columns there are follows from the plan and the terminal, never from how far the work is, so that nothing jumps.
    """
    from rich.console import Group
    from rich.text import Text

    lanes = list(board.lanes.items())
    num_shown = num_lanes_shown(len(lanes), height)
    shown, hidden = lanes[:num_shown], lanes[num_shown:]
    label_width = max(len(label) for label in (WHOLE, *board.lanes))
    widths = layout(board.planned, label_width, width)
    parts: list[RenderableType] = [_grid([_lane_line(board, *lane) for lane in shown], widths)] if shown else []
    if hidden:
        parts.append(Text(_more(hidden)[: width - 1], style="dim"))
    return Group(*parts, _grid([_whole_line(board)], widths))


def num_lanes_shown(num_lanes: int, height: int) -> int:
    """All lanes where they fit with the line for the whole and one to spare, else as many as leave a line to say so."""
    room = max(height - 2, 0)
    return num_lanes if num_lanes <= room else max(room - 1, 0)


def layout(planned: int, label_width: int, width: int) -> dict[str, int]:
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
    for column in BY_IMPORTANCE:
        if wanted[column] + 1 > room:
            break
        room -= wanted[column] + 1
        chosen.add(column)
    bar = max(min(MIN_BAR + room, MAX_BAR), 1)
    return {"label": label_width, "bar": bar, **{name: wanted[name] for name in LEFT_TO_RIGHT if name in chosen}}


def _grid(lines: Sequence[Line], widths: dict[str, int]) -> RenderableType:
    from rich.table import Table

    grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for column, width in widths.items():
        left = column in ("label", "bar", "state")
        grid.add_column(width=width, no_wrap=True, overflow="crop", justify="left" if left else "right")
    for line in lines:
        grid.add_row(*(_cell(line, column, widths) for column in widths))
    return grid


def _cell(line: Line, column: str, widths: dict[str, int]) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    state = line.cells["state"]
    words_in_bar = "state" not in widths and state and not state.startswith("drawing") and line.position < line.total
    if column == "label":
        return Text(line.label, style="bold" if line.label == WHOLE else "")
    if column == "bar" and not words_in_bar:
        return ProgressBar(total=max(line.total, 1), completed=line.position, width=widths["bar"])
    style = {"bar": "yellow", "state": "dim", "failed": "bold red" if line.failed else "dim", "success": "green"}
    return Text(state if column == "bar" else line.cells[column], style=style.get(column, ""))


def _lane_line(board: Board, label: str, lane: Lane) -> Line:
    elapsed_s = (lane.ended or board.clock()) - board.began
    return Line(
        label=label,
        position=lane.position,
        total=max(lane.share, lane.position),
        failed=lane.failed,
        cells={
            "count": f"{lane.position}/{max(lane.share, lane.position)}",
            "times": f"{clock_face(elapsed_s)}<{clock_face(board.lane_left_s(lane))}",
            "success": f"success: {lane.success}",
            "failed": f"failed: {lane.failed}",
            "speed": _speed(board.lane_per_s(lane)),
            "state": lane.state,
        },
    )


def _whole_line(board: Board) -> Line:
    position = board.done + board.failed
    return Line(
        label=WHOLE,
        position=position,
        total=max(board.planned, position),
        failed=board.failed,
        cells={
            "count": f"{position}/{board.planned}",
            "times": f"{clock_face(board.elapsed_s)}<{clock_face(board.left_s())}",
            "success": f"success: {board.done}",
            "failed": f"failed: {board.failed}",
            "speed": _speed(board.per_s()),
            "state": "",
        },
    )


def _speed(per_s: float | None) -> str:
    return "" if per_s is None else speed(per_s)


def _more(lanes: Sequence[tuple[str, Lane]]) -> str:
    done, share = sum(lane.position for _, lane in lanes), sum(lane.share for _, lane in lanes)
    failed = sum(lane.failed for _, lane in lanes)
    gone = sum(lane.state.startswith("gone") for _, lane in lanes)
    return f"and {len(lanes)} more: {done}/{share}, failed: {failed}" + (f", {gone} gone" if gone else "")
