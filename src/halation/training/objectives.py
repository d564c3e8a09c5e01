"""What a model is trained to do: a module and rows in, one loss a row out."""

from __future__ import annotations

from torch import Tensor, nn

from halation.models.denoiser import TrainedModule
from halation.training.loop import MicroBatch, Objective


def denoising_objective(denoiser: TrainedModule) -> Objective:
    """Squared error of what the family's module is asked for (a velocity, the noise, v) on the family's path from image to noise."""
    path = denoiser.noise_path

    def losses(module: nn.Module, rows: MicroBatch) -> Tensor:
        x = path.add_noise(rows.x0, rows.noise, rows.t)
        prediction = denoiser.forward(module, x, rows.t, rows.condition)
        return (prediction.float() - path.target(rows.x0, rows.noise, rows.t)).square().flatten(1).mean(1)

    return losses
