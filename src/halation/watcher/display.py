"""What a person sees of a watch: one live line on a terminal, a line for each event elsewhere, JSON lines for machines, or nothing."""

from __future__ import annotations

import json
import sys
from types import TracebackType
from typing import Any

from halation.watcher.checkpoint_scores import Verdict


class Spectator:
    """Tells what is going on; what was said stays, what is being done is shown until it changes."""

    def __init__(self, kind: str) -> None:
        self.kind = ("rich" if sys.stderr.isatty() else "plain") if kind == "auto" else kind
        self._status: Any = None
        self._doing = ""

    def __enter__(self) -> Spectator:
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

    def doing(self, what: str, details: str = "") -> None:
        """What is going on now; details that change all the time are for a live line alone."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(f"{what}  {details}" if details else what))
        elif what != self._doing:
            self._line("doing", what)
        self._doing = what

    def say(self, text: str) -> None:
        self._line("message", text)

    def warn(self, text: str) -> None:
        self._line("warning", text)

    def scored(self, text: str, verdict: Verdict) -> None:
        numbers = {metric: verdict.value(metric) for metric in verdict.metrics}
        self._line("scored", text, step=verdict.step, checkpoint=verdict.checkpoint, metrics=numbers)

    def _line(self, event: str, text: str, **facts: Any) -> None:
        if self._status is not None:
            self._status.console.print(text, highlight=False, markup=False)
        elif self.kind == "plain" or (event == "warning" and self.kind == "none"):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        elif self.kind == "json":
            sys.stderr.write(json.dumps({"event": event, "text": text, **facts}) + "\n")
            sys.stderr.flush()
