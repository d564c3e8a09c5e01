"""Batches of a distillation: teacher targets read from their cache, or noise for a student that is trained on its own images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation.data.dataset import Pictures
from halation.data.process_pool import Stack, draw
from halation.data.prompt_dataset import Prompts
from halation.distillation.targets import Lessons, Plan
from halation.flow.noise import training_draw
from halation.flow.paths import times_from_uniform
from halation.models.denoiser import Condition, Denoiser
from halation.training.batches import conditioned, finished, learned

LEAST_NOISE, MOST_NOISE = 0.02, 0.98
"""Times at which pictures of a student are looked at: at the very ends nothing is to be told there."""
_RENOISE_STREAM = 1


@dataclass(frozen=True)
class LessonPreparer:
    """Turns a host batch into lessons that a teacher gave on its items: of each item one, chosen by its position."""

    denoiser: Denoiser
    lessons: Lessons
    plan: Plan
    _: KW_ONLY
    size: tuple[int, int]
    """Of the pictures, in pixels."""
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        uniforms = [training_draw(self.plan.seed, int(position), ()).u_time for position in batch["positions"]]
        which = [int(u * self.lessons.num_states) for u in uniforms]
        state, t, target = self.lessons.read(batch["indices"], which)
        dropped = self.plan.dropped(batch["indices"])
        condition = conditioned(self.denoiser, batch, dropped, self.size, drawn=not self.plan.pictures)
        tensors = {"t": t, "extra/state": state, "extra/target": target}
        return finished(batch["step"], tensors, condition, self.num_real, self.pin)


@dataclass(frozen=True)
class NoisePreparer:
    """Turns a host batch into what a student draws from, where nothing but captions is learned from: noise to begin with, and
    times with noise to look at its pictures."""

    denoiser: Denoiser
    _: KW_ONLY
    seed: int
    dropout: float
    time_shift: float
    """That of the family: what is decided at much noise is looked at there."""
    size: tuple[int, int]
    drawn: bool
    """As in `conditioned`."""
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shape = self.denoiser.sample_shape(*self.size)
        places = [int(position) for position in batch["positions"]]
        draws = [training_draw(self.seed, place, shape) for place in places]
        others = [training_draw(self.seed, place, shape, _RENOISE_STREAM) for place in places]
        u_time = torch.tensor([d.u_time for d in draws], dtype=torch.float64)
        dropped = torch.tensor([d.u_drop < self.dropout for d in draws])
        tensors = {
            "noise": torch.from_numpy(np.stack([d.noise for d in draws])),
            "t": times_from_uniform(u_time, "uniform", self.time_shift).clamp(LEAST_NOISE, MOST_NOISE).float(),
            "extra/renoise": torch.from_numpy(np.stack([d.noise for d in others])),
        }
        condition = conditioned(self.denoiser, batch, dropped, self.size, drawn=self.drawn)
        return finished(batch["step"], tensors, condition, self.num_real, self.pin)


class Items:
    """The items of a source as a teacher is told of them: conditions and pictures on a device, by number."""

    def __init__(
        self,
        denoiser: Denoiser,
        source: Pictures,
        device: torch.device,
        dropped: Callable[[Sequence[int]], Tensor],
    ) -> None:
        self._denoiser = denoiser
        self._source = source
        self._device = device
        self._dropped = dropped
        self._last: tuple[list[int], Stack] | None = None

    def __len__(self) -> int:
        return self._source.num_train

    def condition(self, items: Sequence[int]) -> Condition:
        size = (self._source.height, self._source.width)
        drawn = isinstance(self._source, Prompts)
        batch = self._read(items)._asdict()
        found = conditioned(self._denoiser, batch, self._dropped(items), size, drawn=drawn)
        return {name: value.to(self._device) for name, value in found.items()}

    @torch.no_grad()
    def x0(self, items: Sequence[int]) -> Tensor:
        """What the model learns of these pictures."""
        return learned(self._denoiser, torch.from_numpy(self._read(items).pixels).to(self._device))

    def prompt(self, item: int) -> str:
        """For messages."""
        picture = self._source.train(item)
        return picture.caption or f"picture {item}"

    def _read(self, items: Sequence[int]) -> Stack:
        """Kept until other items are asked for: a picture may take long to make."""
        wanted = [int(item) for item in items]
        if self._last is None or self._last[0] != wanted:
            read: Callable[[Sequence[int]], Stack] | None = getattr(self._source, "read", None)
            self._last = wanted, draw(self._source, "train", wanted) if read is None else read(wanted)
        return self._last[1]
