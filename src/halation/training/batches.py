"""From positions in the data's order to rows on the device; all randomness is a function of (seed, position)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation import plan
from halation.data.base import Pictures
from halation.data.prompt_list import Prompts
from halation.data.workers import Stack, draw
from halation.flow.guidance import drop
from halation.flow.noise import training_draw
from halation.flow.paths import times_from_uniform
from halation.models.base import Condition, Denoiser
from halation.training.lessons import Lessons, Plan
from halation.training.loop import Rows

LEAST_NOISE, MOST_NOISE = 0.02, 0.98
"""Times at which pictures of a student are looked at: at the very ends nothing is to be told there."""
_RENOISE_STREAM = 1


def positions(
    start_step: int, start: int, n_steps: int, global_batch: int, size: int, rank: int, most: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(step, positions) of this rank for each step to come; behind its share, rows that only fill a micro-batch up."""
    number, rows = plan.micro_batches(global_batch, size, most)
    share = plan.share(global_batch, size, rank)
    padded = np.zeros(number * rows, np.int64)
    padded[: len(share)] = np.arange(share.start, share.stop)
    for step in range(start_step, n_steps):
        yield step, padded + (start + (step - start_step) * global_batch)


@dataclass(frozen=True)
class Preparer:
    """Turns a host batch into tensors: noise, times, dropped captions. Runs in the loader's threads, ahead of the step."""

    denoiser: Denoiser
    _: KW_ONLY
    seed: int
    dropout: float
    time_sampling: str
    time_shift: float
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        height, width, shape = self._sizes(batch["pixels"])
        draws = [training_draw(self.seed, int(position), shape) for position in batch["positions"]]
        dropped = torch.tensor([d.u_drop < self.dropout for d in draws])
        u_time = torch.tensor([d.u_time for d in draws], dtype=torch.float64)
        tensors = {
            "pixels": torch.from_numpy(batch["pixels"]),
            "noise": torch.from_numpy(np.stack([d.noise for d in draws])),
            "t": times_from_uniform(u_time, self.time_sampling, self.time_shift).float(),  # type: ignore[arg-type]
        }
        condition = conditioned(self.denoiser, batch, dropped, (height, width))
        return _finished(batch["step"], tensors, condition, self.num_real, self.pin)

    def _sizes(self, pixels: np.ndarray) -> tuple[int, int, tuple[int, ...]]:
        """Height and width of a batch's pictures, and the shape of the tensor behind one; latents have that shape already."""
        if pixels.dtype == np.uint8:
            height, width = pixels.shape[1:3]
            return height, width, self.denoiser.sample_shape(height, width)
        factor = self.denoiser.downsample
        return pixels.shape[2] * factor, pixels.shape[3] * factor, pixels.shape[1:]


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
        return _finished(batch["step"], tensors, condition, self.num_real, self.pin)


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
        return _finished(batch["step"], tensors, condition, self.num_real, self.pin)


def conditioned(
    denoiser: Denoiser, batch: Mapping[str, Any], dropped: Tensor, size: tuple[int, int], *, drawn: bool = False
) -> Condition:
    """The conditions of a batch's captions on the CPU, with none in the rows that are `dropped`.

    What is `drawn` from prompts is told what the family says when it draws; of a picture it says what file it was cut from.
    """
    captions: list[str] = batch["captions"]
    if drawn:
        return drop(denoiser.encode_prompts(captions), denoiser.null_condition(len(captions)), dropped)
    condition = denoiser.encode_captions(captions, batch["labels"].tolist())
    condition = drop(condition, denoiser.null_condition(len(captions)), dropped)
    return denoiser.placed(condition, torch.from_numpy(batch["originals"]), *size)


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
        return _learned(self._denoiser, torch.from_numpy(self._read(items).pixels).to(self._device))

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


def _finished(step: int, tensors: dict[str, Tensor], condition: Condition, num_real: int, pin: bool) -> dict[str, Any]:
    """With conditions and weights, pinned where the device is a GPU."""
    tensors = {
        **tensors,
        "weight": (torch.arange(len(tensors["t"])) < num_real).float(),
        **{f"condition/{name}": value for name, value in condition.items()},
    }
    if pin:
        tensors = {name: value.pin_memory() for name, value in tensors.items()}
    return {"step": step, "tensors": tensors}


def _learned(denoiser: Denoiser, pixels: Tensor) -> Tensor:
    """Pixels as the model learns them; latents are that already."""
    return pixels.float() if pixels.is_floating_point() else denoiser.to_model(pixels)


def on_device(denoiser: Denoiser, batch: dict[str, Any], rows: int, device: torch.device) -> Sequence[Rows]:
    """The batch as micro-batches of `rows` rows on the device; pixels become what the model learns.

    Where a batch has no pixels, or no noise, `x0` or `noise` have rows without numbers in them.
    """
    tensors = {name: value.to(device, non_blocking=True) for name, value in batch["tensors"].items()}
    result = []
    for start in range(0, len(tensors["t"]), rows):
        cut = {name: value[start : start + rows] for name, value in tensors.items()}
        nothing = torch.empty(len(cut["t"]), 0, device=device)
        with torch.no_grad():
            x0 = _learned(denoiser, cut["pixels"]) if "pixels" in cut else nothing
        result.append(
            Rows(
                x0=x0,
                noise=cut.get("noise", nothing),
                t=cut["t"],
                condition=_named(cut, "condition/"),
                weight=cut["weight"],
                step=batch["step"],
                extra={name: value.float() for name, value in _named(cut, "extra/").items()},
            )
        )
    return result


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def idle(denoiser: Denoiser, rows: int, size: tuple[int, int], device: torch.device) -> Rows:
    """Rows for pictures of this height and width that stand for nothing, for the pass before the first step."""
    originals = torch.tensor([size] * rows, dtype=torch.int64)
    null = denoiser.placed(denoiser.null_condition(rows), originals, *size)
    condition = {name: value.to(device) for name, value in null.items()}
    zeros = torch.zeros((rows, *denoiser.sample_shape(*size)), device=device)
    return Rows(
        x0=zeros,
        noise=zeros + 0.5,
        t=torch.full((rows,), 0.5, device=device),
        condition=condition,
        weight=torch.ones(rows, device=device),
    )
