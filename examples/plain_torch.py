"""Samples on every rank of a plain PyTorch training loop, with the EMA of the weights.

python examples/plain_torch.py
torchrun --standalone --nproc_per_node 2 examples/plain_torch.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from tiny_flow import PROMPTS, Scenes, TinyFlow, arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from halation import RankSampler


@contextlib.contextmanager
def changed_places(model: nn.Module, average: AveragedModel) -> Iterator[None]:
    """Load the EMA into the model while samples are generated."""
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average.module.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(own)


def main(out: str, num_steps: int, every: int) -> None:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyFlow()
    spread = DistributedDataParallel(model) if several else model
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scenes = Scenes(num_steps * 16)
    batches = DataLoader(scenes, batch_size=8, sampler=DistributedSampler(scenes) if several else None)

    sampler = RankSampler(
        model.draw,  # the model, not the DDP wrapper: ranks sample independently
        PROMPTS,
        out,
        seed=42,
        model=spread,
        weights=lambda: changed_places(model, average),
        every=every,
    )
    sampler(0)
    for step, batch in zip(range(1, num_steps + 1), batches, strict=False):
        loss = spread(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        sampler(step, loss=loss.item())  # on every rank
    if not several or dist.get_rank() == 0:
        print(f"images are in {sampler.run.samples}; to look at them: halation gallery {out}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(**arguments("runs/plain_torch"))
