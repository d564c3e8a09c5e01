"""Settings of `halation ctl`, `halation demo` and `halation doctor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from halation.config import free_setting, setting
from halation.errors import InputError

Action = Literal["sample", "save", "stop"]


@dataclass(frozen=True, kw_only=True)
class CtlConfig:
    """Ask a running training to sample, save or stop at its next step.

    This needs no signal, and works on any machine that can access the run folder.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = dataclasses.field(
        metadata={"change": "free", "positional": True}
    )
    """Run folder."""
    action: Annotated[Action, tyro.conf.Positional] = dataclasses.field(metadata={"change": "free"})
    """sample: sample the prompts now; save: write a checkpoint now; stop: save and exit (the training's command
    resumes later)."""
    wait_s: float = free_setting(30.0, low=0)
    """Seconds to wait until the run accepts the request; 0 does not wait."""

    @staticmethod
    def check_words(words: Sequence[str]) -> None:
        """Raise if both arguments are in the wrong order, with a better message than the parser's."""
        if len(words) < 2 or words[0] not in get_args(Action):
            return
        action, run = words[:2]
        if run not in get_args(Action) and not run.startswith("-"):
            raise InputError(f"`{action}` before {run}", "the run first", f"halation ctl {run} {action}")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a small model, generate images with a bundled one, score them, export a page.

    All ranks sample during training. The generation is killed and resumed to show that no image is lost. Needs no
    network, no GPU and no account. The same command resumes a stopped demo.
    """

    output_dir: Path = Path("demo_run")
    """Folder for all results."""
    n_steps: int = 600
    """Training steps; more steps give better samples."""
    nproc: int = 0
    """Ranks for training and sampling; 0 is all GPUs, or two ranks without a GPU."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and a line every 30 s elsewhere."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Show devices, versions, backends, memory, disk, missing extras; test communication.

    The communication test runs an all-reduce on several ranks.
    """

    nproc: int | None = setting(None, low=1)
    """Ranks of the communication test; by default one per GPU, or two without a GPU."""

    json: bool = False
    """Print one JSON object instead of a table."""

    output_dir: Path = Path(".")
    """Folder whose disk is checked: where runs will be written."""

    timeout_s: float = 10.0
    """Seconds that a rank of the communication test may wait for the others."""
