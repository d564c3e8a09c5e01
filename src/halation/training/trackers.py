"""Where numbers and images of a training go besides its folder: TensorBoard, wandb, trackio."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from halation.errors import InputError

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A place for scalars and images by step."""

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in the run's folder; a resumed run hides what lies after its checkpoint."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # A fresh run has nothing to hide, and purging from 0 writes a marker that some readers show as a restart.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        for name, image in images.items():
            self.writer.add_image(name, image, step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """Offline unless WANDB_MODE says otherwise; files under wandb/ where the command was started."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = None if "WANDB_MODE" in os.environ else "offline"
        self.run = wandb.init(
            project="halation", name=name, id=_run_id(folder), resume="allow", mode=mode, config=dict(config)
        )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        import wandb

        self.run.log({name: wandb.Image(image) for name, image in images.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class TrackioTracker:
    """trackio's local dashboard."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project="halation", name=name, config=dict(config))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def log_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self.trackio.log({name: self.trackio.Image(image) for name, image in images.items()}, step=step)

    def close(self) -> None:
        self.trackio.finish()


def _run_id(folder: Path) -> str:
    """The same id for the same run folder, so that a resumed run goes on in its own curve."""
    path = folder / ".wandb_id"
    if not path.exists():
        path.write_text(os.urandom(8).hex())
    return path.read_text().strip()


TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard", "train"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}


def select_trackers(names: Sequence[str], required: bool) -> tuple[str, ...]:
    """The trackers that can be used; one that was asked for and is not installed is an error, a default one is left out."""
    usable = []
    for name in names:
        if name == "none":
            continue
        package, extra = TRACKER_PACKAGES[name]
        spec = importlib.util.find_spec(package)
        # Without an origin it is a mere folder, such as the `wandb/` that wandb's own runs are in.
        if spec is not None and spec.origin is not None:
            usable.append(name)
        elif required:
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
    factories: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(folder, step),
        "wandb": lambda: WandbTracker(folder, name, config),
        "trackio": lambda: TrackioTracker(name, config),
    }
    return [factories[tracker]() for tracker in names]
