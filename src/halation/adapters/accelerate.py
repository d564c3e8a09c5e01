"""A sampler for a training loop that Hugging Face accelerate distributes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halation.sampling.user_training_loop_sampler import Draw, RankSampler


def rank_sampler(
    accelerator: Accelerator,
    model: nn.Module,
    draw: Draw,
    prompts: Sequence[str],
    out: str | os.PathLike[str],
    seed: int = 0,
    **options: Any,
) -> RankSampler:
    """A `RankSampler` for a model that `accelerator.prepare` returned; `options` are RankSampler's own.

    `draw` must use `accelerator.unwrap_model(model)`. Call the sampler where `accelerator.sync_gradients` is true,
    with the number of updates as the step.
    """
    # With its wrapper, so that a draw which calls that one by mistake is refused instead of waiting for other ranks.
    if not isinstance(model, DistributedDataParallel):
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    return RankSampler(draw, prompts, out, seed, model=[model], **options)
