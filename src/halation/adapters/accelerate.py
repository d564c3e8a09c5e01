"""`RankSampler` for training loops that use Hugging Face accelerate."""

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
    """Create a `RankSampler` for a model from `accelerator.prepare`; `options` are passed on.

    `draw` must use `accelerator.unwrap_model(model)`. Call the sampler when `accelerator.sync_gradients` is True, with
    the number of optimizer steps as the step.
    """
    # Keep the DDP wrapper, so that a `draw` that calls it by mistake raises instead of waiting for other ranks.
    if not isinstance(model, DistributedDataParallel):
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    return RankSampler(draw, prompts, out, seed, model=[model], **options)
