"""Settings of `halation doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Show devices, versions, backends, free memory and disk, what each extra lacks, and whether ranks can talk."""

    nproc: int | None = None
    """Ranks of the communication check; all GPUs by default, two on a machine without any."""

    json: bool = False
    """Print one JSON object instead of a table."""

    output_dir: Path = Path(".")
    """The folder whose disk is looked at: where runs will be written."""

    timeout_s: float = 10.0
    """How long a rank of the communication check may wait for the others."""
