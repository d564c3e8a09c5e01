"""Settings of `halation ctl`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from halation.config.fields import free
from halation.errors import InputError

Action = Literal["sample", "save", "stop"]


@dataclass(frozen=True, kw_only=True)
class CtlConfig:
    """Ask a running training to sample, save or stop at its next step, without a signal and from any machine that sees its folder."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = dataclasses.field(
        metadata={"change": "free", "positional": True}
    )
    """Folder of the run."""
    action: Annotated[Action, tyro.conf.Positional] = dataclasses.field(metadata={"change": "free"})
    """sample: draw the prompts now; save: a checkpoint now; stop: save and end, the same command goes on later."""
    wait_s: float = free(30.0)
    """Seconds to wait for the run to take it; 0 does not wait."""


def check_words(words: Sequence[str]) -> None:
    """Refuse the two words in the wrong order, which would be told of as an action that is none."""
    if len(words) < 2 or words[0] not in get_args(Action):
        return
    action, run = words[:2]
    if run not in get_args(Action) and not run.startswith("-"):
        raise InputError(f"`{action}` before {run}", "the run first", f"halation ctl {run} {action}")
