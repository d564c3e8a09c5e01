"""Samples on every rank of a training loop with Hugging Face accelerate.

python examples/with_accelerate.py
torchrun --standalone --nproc_per_node 2 examples/with_accelerate.py     # or accelerate launch
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tiny_flow import PROMPTS, Scenes, TinyFlow, arguments
from torch.utils.data import DataLoader

from halation.adapters.accelerate import rank_sampler


def main(out: str, num_steps: int, every: int) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    plain = TinyFlow()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-3)
    batches = DataLoader(Scenes(num_steps * 16), batch_size=8, shuffle=True)
    model, optimizer, batches = accelerator.prepare(plain, optimizer, batches)

    sampler = rank_sampler(accelerator, model, plain.draw, PROMPTS, out, seed=42, every=every)
    sampler(0)
    for step, batch in zip(range(1, num_steps + 1), batches, strict=False):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        sampler(step, loss=loss.item())  # on every rank
    accelerator.print(f"images are in {sampler.run.samples}; to look at them: halation gallery {out}")
    accelerator.end_training()


if __name__ == "__main__":
    main(**arguments("runs/with_accelerate"))
