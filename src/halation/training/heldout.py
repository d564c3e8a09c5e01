"""The held-out loss: fixed pictures, fixed times, fixed noise; it compares runs and checkpoints where the training loss cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from halation import plan
from halation.data.dataset import Pictures
from halation.distributed.world import World
from halation.flow.noise import training_draw
from halation.models.denoiser import Denoiser
from halation.training.loop import Objective, Rows, autocast

NUM_BINS = 8
SHEET = 32
NOISE_SEED = 0x48414C41  # its own stream: the same noise for every run, whatever the run's seed


def heldout_loss(
    world: World,
    denoiser: Denoiser,
    source: Pictures,
    objective: Objective,
    *,
    num_pictures: int,
    dtype: str,
    beat: Callable[[], None],
) -> dict[int, list[float]]:
    """This rank's losses by row: picture `row // NUM_BINS` at the middle of time bin `row % NUM_BINS`.

    Rows are cut into sheets of one size and dealt round-robin, so that every rank makes the same number of forwards and
    no number depends on how many ranks there are.
    """
    num_rows = num_pictures * NUM_BINS
    num_sheets = -(-num_rows // SHEET)
    losses: dict[int, list[float]] = {}
    for turn in range(plan.rounds(num_sheets, world.size)):
        sheet = plan.sheet_for(turn, world.rank, world.size, num_sheets)
        rows = np.arange(SHEET) + (sheet or 0) * SHEET
        batch = _rows(denoiser, source, np.minimum(rows, num_rows - 1), world.device)
        with torch.no_grad(), autocast(world.device, dtype):
            values = objective(denoiser.module, batch)
        beat()
        if sheet is not None:
            losses[sheet] = values.double().tolist()[: max(0, num_rows - sheet * SHEET)]
    return losses


def _rows(denoiser: Denoiser, source: Pictures, rows: np.ndarray, device: torch.device) -> Rows:
    numbers = [int(row) // NUM_BINS for row in rows]
    decoded = {number: source.heldout(number) for number in dict.fromkeys(numbers)}  # once, not once for each bin
    pictures = [decoded[number] for number in numbers]
    samples = torch.from_numpy(np.stack([picture.pixels for picture in pictures])).to(device)
    x0 = samples.float() if samples.is_floating_point() else _encoded(denoiser, samples)
    noise = np.stack([training_draw(NOISE_SEED, int(row), tuple(x0.shape[1:])).noise for row in rows])
    condition = denoiser.encode_captions(
        [picture.caption for picture in pictures], [picture.label for picture in pictures]
    )
    originals = torch.tensor([picture.original for picture in pictures], dtype=torch.int64)
    condition = denoiser.placed(condition, originals, source.height, source.width)
    return Rows(
        x0=x0,
        noise=torch.from_numpy(noise).to(device),
        t=torch.from_numpy(((rows % NUM_BINS) + 0.5) / NUM_BINS).float().to(device),
        condition={name: value.to(device) for name, value in condition.items()},
        weight=torch.ones(len(rows), device=device),
    )


def _encoded(denoiser: Denoiser, samples: torch.Tensor) -> torch.Tensor:
    """A few at a time where they are large: an autoencoder takes more memory for a picture than the model does."""
    size = max(1, min(SHEET, SHEET * 256**2 // (samples.shape[1] * samples.shape[2])))
    return torch.cat([denoiser.to_model(piece) for piece in samples.split(size)])


def summary(words: list[dict[str, Any]], num_pictures: int) -> dict[str, float]:
    """Mean loss in each bin and over all, from every rank's rows put back in order."""
    by_sheet = {int(sheet): values for word in words for sheet, values in word.items()}
    rows = np.array([value for sheet in sorted(by_sheet) for value in by_sheet[sheet]])
    assert len(rows) == num_pictures * NUM_BINS, "a held-out row is missing"
    bins = rows.reshape(num_pictures, NUM_BINS).mean(0)
    named = {f"heldout_loss_t{(index + 0.5) / NUM_BINS:.2f}": float(value) for index, value in enumerate(bins)}
    return {"heldout_loss": float(rows.mean()), **named}
