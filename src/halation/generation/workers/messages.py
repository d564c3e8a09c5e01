"""What goes between supervisor and workers: tasks one way, events the other, both as plain JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halation.generation.requests import Request
from halation.specs import Sheet, Spec

EventKind = Literal["ready", "rehearsed", "refused", "said", "step", "drawn", "failed", "dropped", "gone"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A sheet to draw, and which of its pictures are wanted: the others stand there because the sheet's shape is part of the bits."""

    number: int
    requests: tuple[Request, ...]
    sheet_size: int
    micro_batch: int
    wanted: frozenset[int]

    @property
    def sheet(self) -> Sheet:
        specs = [request.spec for request in self.requests]
        fillers = [specs[-1]] * (self.sheet_size - len(specs))
        return Sheet(specs=(*specs, *fillers), num_real=len(specs))

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "requests": [{"name": request.name, "spec": request.spec.as_json()} for request in self.requests],
            "sheet_size": self.sheet_size,
            "micro_batch": self.micro_batch,
            "wanted": sorted(self.wanted),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        requests = tuple(Request(spec=Spec(**row["spec"]), name=row["name"]) for row in value["requests"])
        return cls(**{**value, "requests": requests, "wanted": frozenset(value["wanted"])})

    def id_of(self, index: int) -> str:
        return next(request.spec.id for request in self.requests if request.spec.index == index)

    def alone(self, index: int, number: int) -> Task:
        """The same shape with one picture in every place, to find out which one of a sheet is the guilty one."""
        mine = next(request for request in self.requests if request.spec.index == index)
        return dataclasses.replace(self, number=number, requests=(mine,), wanted=frozenset({index}))


@dataclass(frozen=True, kw_only=True)
class Event:
    """A word from a worker; `gone` is said about it, when its process ended."""

    worker: int
    kind: EventKind
    task: int = -1
    body: dict[str, Any] = field(default_factory=dict)
