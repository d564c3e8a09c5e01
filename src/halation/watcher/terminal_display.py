"""What a person sees of a watch: one live line on a terminal, a line for each event elsewhere, JSON lines for machines, or nothing."""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import Any

from halation.watcher.checkpoint_scores import CheckpointScore


class WatchDisplay:
    """Tells what is going on; what was said stays, what is being done is shown until it changes."""

    def __init__(self, kind: str) -> None:
        self.kind = ("rich" if sys.stderr.isatty() else "plain") if kind == "auto" else kind
        self._status: Any = None
        self._last_status = ""

    def __enter__(self) -> WatchDisplay:
        if self.kind == "rich":
            from rich.console import Console
            from rich.status import Status

            self._status = Status("", console=Console(stderr=True))
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show_status(self, what: str, details: str = "") -> None:
        """What is going on now; details that change all the time are for a live line alone."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(f"{what}  {details}" if details else what))
        elif what != self._last_status:
            self._emit("doing", what)
        self._last_status = what

    def show_message(self, text: str) -> None:
        self._emit("message", text)

    def show_warning(self, text: str) -> None:
        self._emit("warning", text)

    def show_score(self, text: str, score: CheckpointScore) -> None:
        numbers = {metric: score.value(metric) for metric in score.metrics}
        self._emit("scored", text, step=score.step, checkpoint=score.checkpoint, metrics=numbers)

    def _emit(self, event: str, text: str, **facts: Any) -> None:
        if self._status is not None:
            self._status.console.print(text, highlight=False, markup=False)
        elif self.kind == "plain" or (event == "warning" and self.kind == "none"):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        elif self.kind == "json":
            sys.stderr.write(json.dumps({"event": event, "text": text, **facts}) + "\n")
            sys.stderr.flush()
