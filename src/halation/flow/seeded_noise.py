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
    """The random numbers of one training sample."""

    noise: npt.NDArray[np.float32]
    u_time: float
    u_drop: float


def check_seed(seed: int) -> int:
    """Reject seeds that torch would silently wrap: `manual_seed(-1)` means 2**64 - 1."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"a seed is an integer from 0 to {MAX_SEED} (2**63 - 1), not {seed}")
    return seed


def noise_from_seed(seed: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal float32 noise for one image, on the CPU.

    It is generated in one call: in torch, a smaller tensor is not a prefix of a larger one.
    """
    generator = torch.Generator(device="cpu").manual_seed(check_seed(seed))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def training_draw(seed: int, position: int, shape: Sequence[int], stream: int = 0) -> TrainingDraw:
    """Return the noise and two uniform numbers of the sample at `position` of the data order.

    They do not depend on the number of ranks. Philox is keyed rather than seeded, so this takes microseconds. The
    uniform numbers come first, so they do not depend on the shape. Each `stream` gives other numbers for the same
    position; training uses 0.
    """
    if position < 0 or stream < 0:
        raise ValueError(f"positions and streams count from 0, not from {min(position, stream)}")
    key = np.array([check_seed(seed), position], dtype=np.uint64)
    # The highest word of the counter: streams start 2**192 numbers apart.
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    u_time, u_drop = generator.random(2)
    noise = generator.standard_normal(tuple(shape), dtype=np.float32)
    return TrainingDraw(noise, float(u_time), float(u_drop))
