"""What all tests share: an environment in which CPUs repeat themselves, a pool of ranks, and a training of a second."""

from __future__ import annotations

import os

# Before anything imports torch. Some machines report AMX they cannot use; two threads add up in another order than one.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from halation.distributed.launcher import num_gpus
from halation.training.config import TrainConfig
from support import rank_functions
from support.rank_pool import RankPool

# A machine that pauses for a second while an example is drawn says nothing about the law.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Started in the background or by nohup, this process ignores signals, and so would the commands it sends them to.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Three ranks that live as long as the session; see RankPool.run."""
    preload = ["support.rank_functions", "halation.training.session", "halation.sampling.command"]
    if not num_gpus():  # diffusers and what it imports may touch the GPU, which a forked rank could then not use
        preload.append("halation.models.pipelines.training.denoiser")
    with RankPool(3, preload=preload) as pool:
        yield pool


@pytest.fixture(scope="session")
def small_config() -> Callable[..., TrainConfig]:
    """`small_config(folder, **changes)`: a TrainConfig whose run takes about a second."""
    return rank_functions.small_config
