"""Specs (everything that decides one image) and the batches they are sampled in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """Everything that decides one image.

    Equal specs give equal bytes with the same model on the same device type.
    """

    index: int
    id: str
    prompt: str
    seed: int
    height: int
    width: int
    steps: int
    guidance_scale: float | None
    """None if the model takes no guidance scale, or the pipeline's own default decides."""
    negative_prompt: str = ""
    num_frames: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The values that all specs of a batch have in common."""
        return (self.height, self.width, self.num_frames, self.steps)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """A full batch of specs of one shape.

    Specs from `num_real` on are padding entries: they are sampled and discarded.
    """

    specs: tuple[SampleSpec, ...]
    num_real: int

    @property
    def real_specs(self) -> tuple[SampleSpec, ...]:
        return self.specs[: self.num_real]
