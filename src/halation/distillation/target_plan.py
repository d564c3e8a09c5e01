"""Which lessons a teacher gives on an item, and what they are: from the item's number and the seed alone, nothing is kept here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation.data.dataset import JSON
from halation.errors import InputError
from halation.flow.noise import TrainingDraw, training_draw
from halation.flow.paths import Discrete, Path, TimeKind, times_from_uniform
from halation.flow.trajectories import segments, solve, spread, starts_and_others

STREAM = 2
"""The first stream of an item's draws: those before are training's, at positions."""

Condition = dict[str, Tensor]
Predict = Callable[[Tensor, Tensor, Condition], Tensor]
"""The teacher: states, times (one a row) and conditions to answers, guided, in float32."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which lessons an item has."""

    objective: str
    """`velocity`: what the teacher answers at a state. `trajectory`: the answer that leads from it to where the teacher's way is at the
    end of the segment."""
    pictures: bool
    """Whether items are pictures with noise in them, or prompts that the teacher draws from noise."""
    times: tuple[float, ...]
    """From 1 to 0: the ends of the segments for `trajectory`, what the teacher goes through for `velocity`."""
    teacher_steps: int
    """Steps of the teacher from 1 to 0."""
    num_states: int
    """Lessons of an item, at most: a way has no more states than steps."""
    sample_shape: tuple[int, ...]
    seed: int
    time_sampling: TimeKind = "uniform"
    time_shift: float = 1.0
    """Times of `velocity` on pictures."""
    caption_dropout: float = 0.0
    """Share of items that both teacher and student see without their caption."""
    exact: bool = False
    """Kept in float32 and not in half precision."""

    def __post_init__(self) -> None:
        if self.objective not in ("velocity", "trajectory"):
            raise ValueError(f"lessons are for velocity or trajectory, not {self.objective!r}")
        if self.num_states < 1 or self.teacher_steps < 1:
            raise ValueError(f"{self.num_states} states of {self.teacher_steps} steps; expected one at least")
        num_segments = len(self.times) - 1
        if self.objective == "trajectory" and self.num_states < num_segments:
            raise InputError(
                f"--teacher_states {self.num_states} with --student_steps {num_segments}",
                "at least one state for each of the student's steps",
                f"use --teacher_states {2 * num_segments}",
            )

    @property
    def is_way(self) -> bool:
        """Whether the teacher goes step by step; noised pictures it only looks at."""
        return self.objective == "trajectory" or not self.pictures

    @cached_property
    def segments(self) -> list[list[float]]:
        return segments(self.times, self.teacher_steps)

    @property
    def num_steps(self) -> int:
        """How often the teacher is asked for a batch of items."""
        return sum(len(piece) - 1 for piece in self.segments) if self.is_way else self.num_states

    def kept(self, item: int) -> list[int]:
        """Which steps of an item's way are lessons, by number."""
        u = self.draw(item, 0, ()).u_time
        if self.objective == "trajectory":
            return starts_and_others(self.segments, self.num_states, u)
        return spread(self.num_steps, self.num_states, u)

    def draw(self, item: int, number: int, shape: Sequence[int] | None = None) -> TrainingDraw:
        """What chance decides about an item, by number, apart from what it decides about positions in training."""
        return training_draw(self.seed, item, self.sample_shape if shape is None else shape, STREAM + number)

    def dropped(self, items: Sequence[int]) -> Tensor:
        """Which items have no caption: decided here and not in training, because the teacher has answered to one or to none."""
        return torch.tensor([self.draw(int(item), 0, ()).u_drop < self.caption_dropout for item in items])

    def as_json(self) -> dict[str, JSON]:
        """Everything that decides a lesson besides teacher, path and items, for a fingerprint."""
        way: dict[str, Any] = {"times": list(self.times), "teacher_steps": self.teacher_steps}
        looked: dict[str, Any] = {"time_sampling": self.time_sampling, "time_shift": self.time_shift}
        return {
            "objective": self.objective,
            "pictures": self.pictures,
            "num_states": self.num_states,
            "sample_shape": list(self.sample_shape),
            "seed": self.seed,
            "caption_dropout": self.caption_dropout,
            "dtype": "float32" if self.exact else "float16",
            **(way if self.is_way else looked),
        }


def is_steep(path: Path) -> bool:
    """Whether a small error of an answer is a large one of what is drawn: from much noise, where the noise is predicted."""
    return isinstance(path, Discrete) and path.prediction == "epsilon"


def weights(plan: Plan, path: Path) -> Callable[[Tensor], Tensor] | None:
    """How much lessons of a trajectory count, by their times, 1 on the average; None where all count the same.

    Where noise is predicted, a lesson counts by how far its error moves the end of the student's step: from pure noise many times as
    far as from little. Not by the square, which is the error of the states that steps end at: later steps make good some of what
    early ones miss, and would be learned badly. Of velocities no step moves an end much farther than another, and all count the same.
    """
    if plan.objective != "trajectory" or not is_steep(path):
        return None
    ends = torch.tensor(sorted(plan.times))

    def leverage(t: Tensor) -> Tensor:
        following = torch.searchsorted(ends.to(t.device), t - 1e-6) - 1  # the end of the segment that `t` is in
        return path.leverage(t, ends.to(t.device)[following])

    starts = torch.tensor([piece[0] for piece in plan.segments])
    others = torch.tensor([time for piece in plan.segments for time in piece[1:-1]])
    share = min(1.0, (plan.num_states - len(starts)) / max(1, len(others)))  # of the others that are lessons
    total = leverage(starts).sum() + share * leverage(others).sum()
    mean = float(total) / (len(starts) + share * len(others))
    return lambda t: leverage(t) / mean


@torch.no_grad()
def taught(
    plan: Plan,
    path: Path,
    predict: Predict,
    items: Sequence[int],
    condition: Condition,
    *,
    device: torch.device,
    x0: Tensor | None = None,
) -> dict[str, Tensor]:
    """The lessons of these items in float32: `state` and `target` (items, lessons, ...), and `t` (items, lessons).

    `predict` is called `plan.num_steps` times with a row for each item, whatever the items are.
    """
    if (x0 is not None) != plan.pictures:
        raise ValueError("pictures are given exactly where the plan has them")
    if plan.is_way:
        return _along_ways(plan, path, predict, items, condition, device, x0)
    assert x0 is not None
    lessons = []
    for number in range(plan.num_states):
        draws = [plan.draw(int(item), number) for item in items]
        # One from each of as many stretches as there are states, so that every picture is seen at little and at much noise.
        u = torch.tensor([(number + draw.u_time) / plan.num_states for draw in draws], dtype=torch.float64)
        t = times_from_uniform(u, plan.time_sampling, plan.time_shift).float().to(device)
        state = path.noised(x0, _noise(draws, device), t)
        lessons.append({"state": state, "t": t, "target": predict(state, t, condition)})
    return {name: torch.stack([lesson[name] for lesson in lessons], dim=1) for name in ("state", "t", "target")}


def _noise(draws: Sequence[TrainingDraw], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack([draw.noise for draw in draws])).to(device)


def _along_ways(
    plan: Plan,
    path: Path,
    predict: Predict,
    items: Sequence[int],
    condition: Condition,
    device: torch.device,
    x0: Tensor | None,
) -> dict[str, Tensor]:
    """From noise the teacher goes on and on; from a picture every segment begins anew, with that much noise in the picture."""
    kept = np.array([plan.kept(int(item)) for item in items])
    lessons = {
        "state": torch.zeros(*kept.shape, *plan.sample_shape, device=device),
        "t": torch.zeros(*kept.shape, device=device),
        "target": torch.zeros(*kept.shape, *plan.sample_shape, device=device),
    }
    x, number = _noise([plan.draw(int(item), 0) for item in items], device), 0
    for place, times in enumerate(plan.segments):
        if x0 is not None and place > 0:
            noise = _noise([plan.draw(int(item), place) for item in items], device)
            x = path.noised(x0, noise, torch.full((len(items),), times[0], device=device))
        visited: list[tuple[Tensor, Tensor]] = []
        for step in solve(path, lambda x, t: predict(x, t, condition), x, times):
            rows, slots = (torch.from_numpy(places).to(device) for places in np.nonzero(kept == number))
            lessons["state"][rows, slots] = step.x[rows]
            lessons["t"][rows, slots] = step.t[rows]
            lessons["target"][rows, slots] = step.answer[rows].float()
            visited.append((rows, slots))
            x, number = step.end, number + 1
        if plan.objective == "trajectory":
            rows, slots = (torch.cat(places) for places in zip(*visited, strict=True))
            t = lessons["t"][rows, slots]
            end = torch.full_like(t, times[-1])
            lessons["target"][rows, slots] = path.leading(lessons["state"][rows, slots], t, x[rows], end)
    return lessons
