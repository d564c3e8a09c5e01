"""Settings of `halation demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a small model with samples from every rank, draw with an embedded one through a kill, score the pictures, write the page.

    Needs no network, no GPU and no account. The same command goes on where the last one was stopped.
    """

    output_dir: Path = Path("demo_run")
    """Folder for all that is made."""
    n_steps: int = 600
    """Training steps; more make better samples."""
    nproc: int = 0
    """Ranks to train and sample on; 0 is all GPUs, or two ranks without a GPU."""
    progress: Literal["auto", "rich", "plain", "json", "none"] = "auto"
    """auto shows a bar on a terminal and a line every 30 s elsewhere."""
