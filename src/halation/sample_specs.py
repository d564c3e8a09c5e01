"""Specs, everything that decides one image, and the batches in which they are drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Everything that decides one image; two equal specs give equal bytes from one model on one device type."""

    index: int
    id: str
    prompt: str
    seed: int
    height: int
    width: int
    steps: int
    guidance_scale: float
    negative_prompt: str = ""
    num_frames: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What must be equal for two specs to stand in one batch."""
        return (self.height, self.width, self.num_frames, self.steps)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """A full row of specs of one shape; those from `num_real` on are fillers that are drawn and thrown away."""

    specs: tuple[SampleSpec, ...]
    num_real: int

    @property
    def real_specs(self) -> tuple[SampleSpec, ...]:
        return self.specs[: self.num_real]
