"""Batches of a distillation: teacher targets read from their cache, or noise for a student that is trained on its own images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation.data.dataset_protocol import ImageBatch, ImageDataset, load_images
from halation.data.prompt_dataset import PromptDataset
from halation.distillation.teacher_targets import TargetPlan, TeacherTargets
from halation.flow.paths import times_from_uniform
from halation.flow.seeded_noise import training_draw
from halation.models.denoiser import Condition, Denoiser
from halation.training.batch_preparation import encode_conditions, pack_batch, to_model_space

MIN_RENOISE_TIME, MAX_RENOISE_TIME = 0.02, 0.98
"""Times at which images of a student are looked at: at the very ends nothing is to be told there."""
_RENOISE_STREAM = 1


@dataclass(frozen=True)
class TeacherTargetTransform:
    """Turns a host batch into teacher targets that a teacher gave on its items: of each item one, chosen by its position."""

    denoiser: Denoiser
    targets: TeacherTargets
    plan: TargetPlan
    _: KW_ONLY
    size: tuple[int, int]
    """Of the images, in pixels."""
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        uniforms = [training_draw(self.plan.seed, int(position), ()).u_time for position in batch["positions"]]
        state_indices = [int(u * self.targets.num_states) for u in uniforms]
        state, t, target = self.targets.read(batch["indices"], state_indices)
        dropped = self.plan.dropout_mask(batch["indices"])
        condition = encode_conditions(self.denoiser, batch, dropped, self.size, from_prompts=not self.plan.has_images)
        tensors = {"t": t, "extra/state": state, "extra/target": target}
        return pack_batch(batch["step"], tensors, condition, self.num_real, self.pin)


@dataclass(frozen=True)
class NoiseTransform:
    """Turns a host batch into what a student draws from, where nothing but captions is learned from: noise to begin with, and
    times with noise to look at its images."""

    denoiser: Denoiser
    _: KW_ONLY
    seed: int
    dropout: float
    time_shift: float
    """That of the family: what is decided at much noise is looked at there."""
    size: tuple[int, int]
    from_prompts: bool
    """As in `encode_conditions`."""
    num_real: int
    pin: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shape = self.denoiser.sample_shape(*self.size)
        positions = [int(position) for position in batch["positions"]]
        draws = [training_draw(self.seed, place, shape) for place in positions]
        renoise_draws = [training_draw(self.seed, place, shape, _RENOISE_STREAM) for place in positions]
        u_time = torch.tensor([d.u_time for d in draws], dtype=torch.float64)
        dropped = torch.tensor([d.u_drop < self.dropout for d in draws])
        tensors = {
            "noise": torch.from_numpy(np.stack([d.noise for d in draws])),
            "t": times_from_uniform(u_time, "uniform", self.time_shift)
            .clamp(MIN_RENOISE_TIME, MAX_RENOISE_TIME)
            .float(),
            "extra/renoise": torch.from_numpy(np.stack([d.noise for d in renoise_draws])),
        }
        condition = encode_conditions(self.denoiser, batch, dropped, self.size, from_prompts=self.from_prompts)
        return pack_batch(batch["step"], tensors, condition, self.num_real, self.pin)


class TeacherInputs:
    """The items of a source as a teacher is told of them: conditions and images on a device, by number."""

    def __init__(
        self,
        denoiser: Denoiser,
        source: ImageDataset,
        device: torch.device,
        dropout_mask: Callable[[Sequence[int]], Tensor],
    ) -> None:
        self._denoiser = denoiser
        self._source = source
        self._device = device
        self._dropout_mask = dropout_mask
        self._last_read: tuple[list[int], ImageBatch] | None = None

    def __len__(self) -> int:
        return self._source.num_train

    def condition(self, items: Sequence[int]) -> Condition:
        size = (self._source.height, self._source.width)
        from_prompts = isinstance(self._source, PromptDataset)
        batch = self._read(items)._asdict()
        condition = encode_conditions(self._denoiser, batch, self._dropout_mask(items), size, from_prompts=from_prompts)
        return {name: value.to(self._device) for name, value in condition.items()}

    @torch.no_grad()
    def x0(self, items: Sequence[int]) -> Tensor:
        """What the model learns of these images."""
        return to_model_space(self._denoiser.space, torch.from_numpy(self._read(items).pixels).to(self._device))

    def prompt(self, item: int) -> str:
        """For messages."""
        image = self._source.train(item)
        return image.caption or f"image {item}"

    def _read(self, items: Sequence[int]) -> ImageBatch:
        """Kept until other items are asked for: an image may take long to make."""
        wanted = [int(item) for item in items]
        if self._last_read is None or self._last_read[0] != wanted:
            read: Callable[[Sequence[int]], ImageBatch] | None = getattr(self._source, "read", None)
            self._last_read = wanted, load_images(self._source, "train", wanted) if read is None else read(wanted)
        return self._last_read[1]
