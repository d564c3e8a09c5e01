"""From positions in the data's order to rows on the device; all randomness is a function of (seed, position)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halation import work_division
from halation.flow.guidance import drop_conditions
from halation.flow.paths import times_from_uniform
from halation.flow.seeded_noise import training_draw
from halation.models.denoiser import Condition, Denoiser, ImageSpace, PromptEncoder, null_condition
from halation.training.loop import MicroBatch


def positions(
    start_step: int, start: int, n_steps: int, global_batch: int, num_ranks: int, rank: int, max_rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(step, positions) of this rank for each step to come; behind its share, rows that only fill a micro-batch up."""
    num_micro_batches, rows = work_division.micro_batch_layout(global_batch, num_ranks, max_rows)
    share = work_division.rank_range(global_batch, num_ranks, rank)
    padded = np.zeros(num_micro_batches * rows, np.int64)
    padded[: len(share)] = np.arange(share.start, share.stop)
    for step in range(start_step, n_steps):
        yield step, padded + (start + (step - start_step) * global_batch)


@dataclass(frozen=True)
class BatchTransform:
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
        condition = encode_conditions(self.denoiser, batch, dropped, (height, width))
        return pack_batch(batch["step"], tensors, condition, self.num_real, self.pin)

    def _sizes(self, pixels: np.ndarray) -> tuple[int, int, tuple[int, ...]]:
        """Height and width of a batch's images, and the shape of the tensor behind one; latents have that shape already."""
        if pixels.dtype == np.uint8:
            height, width = pixels.shape[1:3]
            return height, width, self.denoiser.sample_shape(height, width)
        factor = self.denoiser.space.downsampling_factor
        return pixels.shape[2] * factor, pixels.shape[3] * factor, pixels.shape[1:]


def encode_conditions(
    encoder: PromptEncoder,
    batch: Mapping[str, Any],
    dropped: Tensor,
    size: tuple[int, int],
    *,
    from_prompts: bool = False,
) -> Condition:
    """The conditions of a batch's captions on the CPU, with none in the rows that are `dropped`.

    What is `from_prompts` from prompts is told what the family says when it draws; of an image it says what file it was cut from.
    """
    captions: list[str] = batch["captions"]
    if from_prompts:
        return drop_conditions(encoder.encode_prompts(captions), null_condition(encoder, len(captions)), dropped)
    condition = encoder.encode_captions(captions, batch["labels"].tolist())
    condition = drop_conditions(condition, null_condition(encoder, len(captions)), dropped)
    return encoder.add_size_condition(condition, torch.from_numpy(batch["originals"]), *size)


def pack_batch(step: int, tensors: dict[str, Tensor], condition: Condition, num_real: int, pin: bool) -> dict[str, Any]:
    """With conditions and weights, pinned where the device is a GPU."""
    tensors = {
        **tensors,
        "weight": (torch.arange(len(tensors["t"])) < num_real).float(),
        **{f"condition/{name}": value for name, value in condition.items()},
    }
    if pin:
        tensors = {name: value.pin_memory() for name, value in tensors.items()}
    return {"step": step, "tensors": tensors}


def to_model_space(space: ImageSpace, pixels: Tensor) -> Tensor:
    """Pixels as the model learns them; latents are that already."""
    return pixels.float() if pixels.is_floating_point() else space.encode(pixels)


def to_micro_batches(space: ImageSpace, batch: dict[str, Any], rows: int, device: torch.device) -> Sequence[MicroBatch]:
    """The batch as micro-batches of `rows` rows on the device; pixels become what the model learns.

    Where a batch has no pixels, or no noise, `x0` or `noise` have rows without numbers in them.
    """
    tensors = {name: value.to(device, non_blocking=True) for name, value in batch["tensors"].items()}
    result = []
    for start in range(0, len(tensors["t"]), rows):
        chunk = {name: value[start : start + rows] for name, value in tensors.items()}
        empty = torch.empty(len(chunk["t"]), 0, device=device)
        with torch.no_grad():
            x0 = to_model_space(space, chunk["pixels"]) if "pixels" in chunk else empty
        result.append(
            MicroBatch(
                x0=x0,
                noise=chunk.get("noise", empty),
                t=chunk["t"],
                condition=_select_prefix(chunk, "condition/"),
                weight=chunk["weight"],
                step=batch["step"],
                extra={name: value.float() for name, value in _select_prefix(chunk, "extra/").items()},
            )
        )
    return result


def _select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def dummy_batch(denoiser: Denoiser, rows: int, size: tuple[int, int], device: torch.device) -> MicroBatch:
    """Rows for images of this height and width that stand for nothing, for the pass before the first step."""
    originals = torch.tensor([size] * rows, dtype=torch.int64)
    null = denoiser.add_size_condition(null_condition(denoiser, rows), originals, *size)
    condition = {name: value.to(device) for name, value in null.items()}
    zeros = torch.zeros((rows, *denoiser.sample_shape(*size)), device=device)
    return MicroBatch(
        x0=zeros,
        noise=zeros + 0.5,
        t=torch.full((rows,), 0.5, device=device),
        condition=condition,
        weight=torch.ones(rows, device=device),
    )
