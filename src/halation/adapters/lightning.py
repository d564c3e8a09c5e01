"""A Lightning callback that samples on every rank after optimizer steps."""

from __future__ import annotations

from typing import Any

from halation.errors import InputError
from halation.sampling.user_training_loop_sampler import RankSampler

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    except ImportError:
        raise InputError("lightning is not installed", "Lightning's Trainer", "pip install lightning") from None


class LightningSamplerCallback(Callback):
    """Samples between optimizer steps: `Trainer(callbacks=[SamplerCallback(sampler)])`.

    `sampler(trainer.global_step)` is called before the first step and after every step; the sampler's `every` decides
    which of these calls sample. If the sampler has no model, the LightningModule is used.
    """

    def __init__(self, sampler: RankSampler) -> None:
        self.sampler = sampler
        self._last_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.sampler.use(pl_module)
        if trainer.global_step != self._last_step:  # not after a batch that only accumulates gradients
            self._last_step = trainer.global_step
            self.sampler(self._last_step)


SamplerCallback = LightningSamplerCallback
"""The name to import."""
