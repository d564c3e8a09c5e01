"""What goes between supervisor and workers: tasks one way, events the other, both as plain JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halation.generation.image_requests import ImageRequest
from halation.sample_specs import SampleBatch, SampleSpec

EventKind = Literal["ready", "rehearsed", "refused", "said", "step", "drawn", "failed", "dropped", "gone"]


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """A batch to draw, and which of its images are wanted: the others stand there because the batch's shape is part of the bits."""

    number: int
    requests: tuple[ImageRequest, ...]
    batch_size: int
    micro_batch: int
    wanted: frozenset[int]

    @property
    def batch(self) -> SampleBatch:
        specs = [request.spec for request in self.requests]
        fillers = [specs[-1]] * (self.batch_size - len(specs))
        return SampleBatch(specs=(*specs, *fillers), num_real=len(specs))

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "requests": [{"name": request.name, "spec": request.spec.as_json()} for request in self.requests],
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "wanted": sorted(self.wanted),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BatchTask:
        requests = tuple(ImageRequest(spec=SampleSpec(**row["spec"]), name=row["name"]) for row in value["requests"])
        return cls(**{**value, "requests": requests, "wanted": frozenset(value["wanted"])})

    def image_id(self, index: int) -> str:
        return next(request.spec.id for request in self.requests if request.spec.index == index)

    def with_single_image(self, index: int, number: int) -> BatchTask:
        """The same shape with one image in every place, to find out which one of a batch is the guilty one."""
        kept_request = next(request for request in self.requests if request.spec.index == index)
        return dataclasses.replace(self, number=number, requests=(kept_request,), wanted=frozenset({index}))


@dataclass(frozen=True, kw_only=True)
class WorkerEvent:
    """A word from a worker; `gone` is said about it, when its process ended."""

    worker: int
    kind: EventKind
    task: int = -1
    body: dict[str, Any] = field(default_factory=dict)
