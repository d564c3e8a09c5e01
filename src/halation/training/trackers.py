"""Where numbers and pictures go while a run trains: metrics.jsonl, TensorBoard, wandb, trackio, and the person at the terminal."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from halation.errors import InputError

log = logging.getLogger(__name__)

PLAIN_EVERY_S = 30.0


class Tracker(Protocol):
    """A place for scalars and pictures by step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder; a resumed run hides what lies after its checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # A fresh run has nothing to hide, and purging from 0 writes a marker that some readers show as a restart.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        for name, picture in pictures.items():
            self.writer.add_image(name, picture, step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Offline unless WANDB_MODE says otherwise; files under wandb/ where the command was started."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = None if "WANDB_MODE" in os.environ else "offline"
        self.run = wandb.init(
            project="halation", name=name, id=_run_id(folder), resume="allow", mode=mode, config=dict(config)
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        import wandb

        self.run.log({name: wandb.Image(picture) for name, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """trackio's local dashboard."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project="halation", name=name, config=dict(config))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        self.trackio.log({name: self.trackio.Image(picture) for name, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.trackio.finish()


def _run_id(folder: Path) -> str:
    """The same id for the same run folder, so that a resumed run goes on in its own curve."""
    path = folder / ".wandb_id"
    if not path.exists():
        path.write_text(os.urandom(8).hex())
    return path.read_text().strip()


EXTRAS = {"tensorboard": ("tensorboard", "train"), "wandb": ("wandb", "wandb"), "trackio": ("trackio", "trackio")}


def check(names: Sequence[str], asked: bool) -> tuple[str, ...]:
    """The trackers that can be used; one that was asked for and is not installed is an error, a default one is left out."""
    usable = []
    for name in names:
        if name == "none":
            continue
        package, extra = EXTRAS[name]
        spec = importlib.util.find_spec(package)
        # Without an origin it is a mere folder, such as the `wandb/` that wandb's own runs are in.
        if spec is not None and spec.origin is not None:
            usable.append(name)
        elif asked:
            raise InputError(
                f"--report_to {name}, but {package} is not installed",
                "an installed tracker",
                f"pip install 'halation[{extra}]'",
            )
        else:
            log.info(
                "%s is not installed, so only metrics.jsonl is written (pip install 'halation[%s]')", package, extra
            )
    return tuple(usable)


def open_trackers(names: Sequence[str], folder: Path, name: str, config: Mapping[str, Any], step: int) -> list[Tracker]:
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, step),
        "wandb": lambda: Wandb(folder, name, config),
        "trackio": lambda: Trackio(name, config),
    }
    return [makers[tracker]() for tracker in names]


class Progress:
    """What a person sees of a run: a bar on a terminal, a line every 30 s elsewhere, JSON lines for machines, or nothing."""

    def __init__(self, kind: str, total: int, done: int, title: str = "training") -> None:
        self.title = title
        if kind == "auto":
            kind = "rich" if sys.stderr.isatty() else "plain"
        self.kind = kind
        self.total = total
        self.first = done
        self.began = time.monotonic()
        self.told = 0.0
        self.last_told = -1
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
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
            self._task = self._bar.add_task(self.title, total=self.total, completed=self.first, words="")
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
        last = step == self.total and self.last_told != step
        if self.kind == "plain" and (now - self.told >= PLAIN_EVERY_S or last):
            self.told = now
            self.last_told = step
            what = "step" if self.title == "training" else self.title
            parts = [f"{what} {step}/{self.total} {words}".rstrip().replace("  ", ", "), self._left(step)]
            self._line(", ".join(part for part in parts if part))
        elif self.kind == "json" and (now - self.told >= 1.0 or last):
            self.told = now
            self.last_told = step
            self._line(json.dumps({"step": step, "total": self.total, **numbers}))

    def say(self, sentence: str) -> None:
        """An event: a checkpoint, samples, a warning."""
        if self._bar is not None:
            self._bar.console.print(sentence, highlight=False, markup=False)
        elif self.kind == "plain":
            self._line(sentence)
        elif self.kind == "json":
            self._line(json.dumps({"event": sentence}))

    def _left(self, step: int) -> str:
        done = step - self.first
        if done <= 0:
            return ""
        seconds = (time.monotonic() - self.began) / done * (self.total - step)
        return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d} left"

    @staticmethod
    def _line(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
