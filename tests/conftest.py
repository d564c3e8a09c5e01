"""What all tests share: an environment in which CPUs repeat themselves, a pool of ranks, and a training of a second."""

from __future__ import annotations

import os

# Before anything imports torch. Some machines report AMX they cannot use; two threads add up in another order than one.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from halation.distributed.launcher import num_gpus
from halation.training.config import TrainConfig
from support import rank_functions
from support.rank_pool import RankPool

MAX_RACY_TESTS = 3

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
    preload = []
    if not num_gpus():  # what these modules import may touch the GPU, which a forked rank could then not use
        preload = ["support.rank_functions", "halation.training.session", "halation.sampling.command"]
        preload.append("halation.models.pipelines.training.denoiser")
    with RankPool(3, preload=preload) as pool:
        yield pool


@pytest.fixture(scope="session")
def small_config() -> Callable[..., TrainConfig]:
    """`small_config(folder, **changes)`: a TrainConfig whose run takes about a second."""
    return rank_functions.small_config


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that use the rank pool, so that they run serially, and repeat those of racy.txt once."""
    racy = racy_tests(Path(__file__).with_name("racy.txt").read_text(encoding="utf-8"))
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
        if item.nodeid in racy:
            item.add_marker(pytest.mark.flaky(reruns=1))


def racy_tests(text: str) -> dict[str, str]:
    """Node ids and reasons of the lines of racy.txt; at most three, each with a reason."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    tests = {test.strip(): reason.strip() for test, _, reason in (line.partition(" # ") for line in lines)}
    if len(tests) > MAX_RACY_TESTS or not all(tests.values()):
        raise pytest.UsageError(f"tests/racy.txt: at most {MAX_RACY_TESTS} tests, each with a reason behind ' # '")
    return tests
