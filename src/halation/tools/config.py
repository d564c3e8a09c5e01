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

    It needs no signal, and works from any machine that sees the folder of the run.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = dataclasses.field(
        metadata={"change": "free", "positional": True}
    )
    """Folder of the run."""
    action: Annotated[Action, tyro.conf.Positional] = dataclasses.field(metadata={"change": "free"})
    """sample: draw the prompts now; save: a checkpoint now; stop: save and end, the same command goes on later."""
    wait_s: float = free_setting(30.0, low=0)
    """Seconds to wait for the run to take it; 0 does not wait."""

    @staticmethod
    def check_words(words: Sequence[str]) -> None:
        """Refuse the two words in the wrong order, which would be told of as an action that is none."""
        if len(words) < 2 or words[0] not in get_args(Action):
            return
        action, run = words[:2]
        if run not in get_args(Action) and not run.startswith("-"):
            raise InputError(f"`{action}` before {run}", "the run first", f"halation ctl {run} {action}")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a small model, draw with an embedded one through a kill, score the images, write the page.

    The training has samples from every rank. Needs no network, no GPU and no account. The same command goes on where
    the last one was stopped.
    """

    output_dir: Path = Path("demo_run")
    """Folder for all that is made."""
    n_steps: int = 600
    """Training steps; more make better samples."""
    nproc: int = 0
    """Ranks to train and sample on; 0 is all GPUs, or two ranks without a GPU."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and a line every 30 s elsewhere."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Show devices, versions, backends, free memory and disk, what each extra lacks, and whether ranks can talk."""

    nproc: int | None = setting(None, low=1)
    """Ranks of the communication check; all GPUs by default, two on a machine without any."""

    json: bool = False
    """Print one JSON object instead of a table."""

    output_dir: Path = Path(".")
    """The folder whose disk is looked at: where runs will be written."""

    timeout_s: float = 10.0
    """How long a rank of the communication check may wait for the others."""
