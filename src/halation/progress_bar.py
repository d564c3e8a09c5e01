"""Progress of a job that counts steps: a bar on a terminal, plain lines, JSON lines, or nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

PLAIN_EVERY_S = 30.0


class StepProgress:
    """What a person sees of a run: a bar on a terminal, a line every 30 s elsewhere, JSON lines for machines, or nothing."""

    def __init__(self, kind: str, total: int, done: int, title: str = "training") -> None:
        self.title = title
        if kind == "auto":
            kind = "rich" if sys.stderr.isatty() else "plain"
        self.kind = kind
        self.total = total
        self.first_step = done
        self.start_time = time.monotonic()
        self.last_report_time = 0.0
        self.last_reported_step = -1
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> StepProgress:
        if self.kind == "rich":
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn(f"[bold]{self.title}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[words]}"),
                TimeElapsedColumn(),
                TextColumn("·"),
                TimeRemainingColumn(elapsed_when_finished=False),
                TextColumn("left"),
                console=Console(stderr=True),
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.first_step, words="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, words: str, numbers: Mapping[str, float], total: int | None = None) -> None:
        self.total = total or self.total
        if self._bar is not None:
            self._bar.update(self._task, completed=step, words=words, total=self.total)
            return
        now = time.monotonic()
        is_last = step == self.total and self.last_reported_step != step
        if self.kind == "plain" and (now - self.last_report_time >= PLAIN_EVERY_S or is_last):
            self.last_report_time = now
            self.last_reported_step = step
            what = "step" if self.title == "training" else self.title
            parts = [f"{what} {step}/{self.total} {words}".rstrip().replace("  ", ", "), self._remaining_text(step)]
            self._write_line(", ".join(part for part in parts if part))
        elif self.kind == "json" and (now - self.last_report_time >= 1.0 or is_last):
            self.last_report_time = now
            self.last_reported_step = step
            self._write_line(json.dumps({"step": step, "total": self.total, **numbers}))

    def print_line(self, text: str) -> None:
        """An event: a checkpoint, samples, a warning."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self.kind == "plain":
            self._write_line(text)
        elif self.kind == "json":
            self._write_line(json.dumps({"event": text}))

    def _remaining_text(self, step: int) -> str:
        done = step - self.first_step
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self.start_time) / done * (self.total - step)
        return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d} left"

    @staticmethod
    def _write_line(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
