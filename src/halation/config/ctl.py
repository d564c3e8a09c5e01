"""Settings of `halation ctl`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config.fields import free


@dataclass(frozen=True, kw_only=True)
class CtlConfig:
    """Ask a running training to sample, save or stop at its next step, without a signal and from any machine that sees its folder."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = dataclasses.field(
        metadata={"change": "free", "positional": True}
    )
    """Folder of the run."""
    action: Annotated[Literal["sample", "save", "stop"], tyro.conf.Positional] = dataclasses.field(
        metadata={"change": "free"}
    )
    """sample: draw the prompts now; save: a checkpoint now; stop: save and end, the same command goes on later."""
    wait_s: float = free(30.0)
    """Seconds to wait for the run to take it; 0 does not wait."""
