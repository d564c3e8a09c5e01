"""A small real denoiser whose zero-initialised layers are filled.

Zeros would hide parts that are not connected.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halation.models.dit.denoiser import DiTDenoiser, create_dit

CAPTIONS = ["a red car at night", "a green tree by day", "two houses and a sign"]


def awaken(denoiser: DiTDenoiser, seed: int = 0) -> DiTDenoiser:
    """Small random numbers wherever initialisation left zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in denoiser.module.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return denoiser


@pytest.fixture(scope="session")
def make_denoiser() -> Callable[..., DiTDenoiser]:
    def make(*, seed: int = 0, awake: bool = True, classes: bool = False, **settings: int) -> DiTDenoiser:
        names = ("cat", "dog", "7") if classes else ()
        size = {"height": 16, "width": 16, "patch_size": 4, **settings}
        denoiser = create_dit("tiny", captions=CAPTIONS, class_names=names, **size).init_weights(seed)
        return awaken(denoiser) if awake else denoiser

    return make


@pytest.fixture(scope="session")
def denoiser(make_denoiser: Callable[..., DiTDenoiser]) -> DiTDenoiser:
    return make_denoiser()
