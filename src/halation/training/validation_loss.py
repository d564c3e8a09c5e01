"""The validation loss: fixed images, fixed times, fixed noise; it compares runs and checkpoints where the training loss cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from halation import work_division
from halation.data.dataset_protocol import ImageDataset
from halation.distributed.world import World
from halation.flow.seeded_noise import training_draw
from halation.models.denoiser import Denoiser, ImageSpace
from halation.training.loop import MicroBatch, Objective, mixed_precision

NUM_BINS = 8
BATCH_SIZE = 32
NOISE_SEED = 0x48414C41  # its own stream: the same noise for every run, whatever the run's seed


def compute_validation_losses(
    world: World,
    denoiser: Denoiser,
    source: ImageDataset,
    objective: Objective,
    *,
    num_images: int,
    dtype: str,
    heartbeat: Callable[[], None],
) -> dict[int, list[float]]:
    """This rank's losses by row: image `row // NUM_BINS` at the middle of time bin `row % NUM_BINS`.

    Rows are cut into batches of one size and dealt round-robin, so that every rank makes the same number of forwards and
    no number depends on how many ranks there are.
    """
    num_rows = num_images * NUM_BINS
    num_batches = -(-num_rows // BATCH_SIZE)
    losses: dict[int, list[float]] = {}
    for round_index in range(work_division.num_rounds(num_batches, world.size)):
        batch = work_division.round_robin_batch(round_index, world.rank, world.size, num_batches)
        rows = np.arange(BATCH_SIZE) + (batch or 0) * BATCH_SIZE
        inputs = _make_micro_batch(denoiser, source, np.minimum(rows, num_rows - 1), world.device)
        with torch.no_grad(), mixed_precision(world.device, dtype):
            values = objective(denoiser.module, inputs)
        heartbeat()
        if batch is not None:
            losses[batch] = values.double().tolist()[: max(0, num_rows - batch * BATCH_SIZE)]
    return losses


def _make_micro_batch(denoiser: Denoiser, source: ImageDataset, rows: np.ndarray, device: torch.device) -> MicroBatch:
    image_indices = [int(row) // NUM_BINS for row in rows]
    decoded = {
        number: source.validation(number) for number in dict.fromkeys(image_indices)
    }  # once, not once for each bin
    images = [decoded[number] for number in image_indices]
    samples = torch.from_numpy(np.stack([image.pixels for image in images])).to(device)
    x0 = samples.float() if samples.is_floating_point() else _encode_images(denoiser.space, samples)
    noise = np.stack([training_draw(NOISE_SEED, int(row), tuple(x0.shape[1:])).noise for row in rows])
    condition = denoiser.encode_captions([image.caption for image in images], [image.label for image in images])
    originals = torch.tensor([image.original_size for image in images], dtype=torch.int64)
    condition = denoiser.add_size_condition(condition, originals, source.height, source.width)
    return MicroBatch(
        x0=x0,
        noise=torch.from_numpy(noise).to(device),
        t=torch.from_numpy(((rows % NUM_BINS) + 0.5) / NUM_BINS).float().to(device),
        condition={name: value.to(device) for name, value in condition.items()},
        weight=torch.ones(len(rows), device=device),
    )


def _encode_images(space: ImageSpace, samples: torch.Tensor) -> torch.Tensor:
    """A few at a time where they are large: an autoencoder takes more memory for an image than the model does."""
    size = max(1, min(BATCH_SIZE, BATCH_SIZE * 256**2 // (samples.shape[1] * samples.shape[2])))
    return torch.cat([space.encode(piece) for piece in samples.split(size)])


def summarize_losses(rank_losses: list[dict[str, Any]], num_images: int) -> dict[str, float]:
    """Mean loss in each bin and over all, from every rank's rows put back in order."""
    by_batch = {int(batch): values for losses in rank_losses for batch, values in losses.items()}
    rows = np.array([value for batch in sorted(by_batch) for value in by_batch[batch]])
    assert len(rows) == num_images * NUM_BINS, "a validation row is missing"
    bins = rows.reshape(num_images, NUM_BINS).mean(0)
    bin_losses = {f"heldout_loss_t{(index + 0.5) / NUM_BINS:.2f}": float(value) for index, value in enumerate(bins)}
    return {"heldout_loss": float(rows.mean()), **bin_losses}
