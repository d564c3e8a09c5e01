"""Samples on every rank of a Lightning Trainer.

python examples/with_lightning.py
torchrun --standalone --nproc_per_node 2 examples/with_lightning.py
"""

from __future__ import annotations

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from tiny_flow import PROMPTS, Scenes, TinyFlow, arguments
from torch import Tensor
from torch.utils.data import DataLoader

from halation import RankSampler
from halation.adapters.lightning import LightningSamplerCallback


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = TinyFlow()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(out: str, num_steps: int, every: int) -> None:
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    seed_everything(0, verbose=False)
    training = Training()
    sampler = RankSampler(training.model.draw, PROMPTS, out, seed=42, every=every)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        max_steps=num_steps,
        callbacks=[LightningSamplerCallback(sampler)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(training, DataLoader(Scenes(num_steps * 16), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(f"images are in {sampler.run.samples}; to look at them: halation gallery {out}")


if __name__ == "__main__":
    main(**arguments("runs/with_lightning"))
