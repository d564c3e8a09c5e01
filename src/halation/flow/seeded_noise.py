"""Random numbers of images and training samples as pure functions of a seed.

No global generator is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_SEED = 2**63 - 1


class TrainingDraw(NamedTuple):
    """What chance decides about one training sample."""

    noise: npt.NDArray[np.float32]
    u_time: float
    u_drop: float


def check_seed(seed: int) -> int:
    """Refuse what torch would silently wrap: `manual_seed(-1)` is accepted there and means 2**64 - 1."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"a seed is a whole number from 0 to {MAX_SEED} (2**63 - 1), not {seed}")
    return seed


def noise_from_seed(seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal float32 noise on the CPU for one image, drawn whole because a shorter draw is not a prefix."""
    generator = torch.Generator(device="cpu").manual_seed(check_seed(seed))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def training_draw(seed: int, position: int, shape: Sequence[int], stream: int = 0) -> TrainingDraw:
    """Noise and the two uniforms of the sample at `position` of the data order, the same on any number of ranks.

    Philox is keyed rather than seeded, so a draw costs microseconds. The uniforms come first: they do not depend on the
    shape. Another `stream` is another draw of the same position; 0 is training's own.
    """
    if position < 0 or stream < 0:
        raise ValueError(f"positions and streams count from 0, not from {min(position, stream)}")
    key = np.array([check_seed(seed), position], dtype=np.uint64)
    # The highest word of the counter: streams begin 2**192 numbers apart.
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    u_time, u_drop = generator.random(2)
    noise = generator.standard_normal(tuple(shape), dtype=np.float32)
    return TrainingDraw(noise, float(u_time), float(u_drop))
