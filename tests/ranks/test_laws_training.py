"""Laws of ranks in training: equal weights, one global batch, one decision on bad numbers."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halation.models.autoencoder import PixelSpace
from halation.training import command as job
from halation.training.config import TrainConfig
from halation.training.session import TrainingSession
from support import rank_functions, run_readers
from support.rank_pool import RankPool, RanksFailed

pytestmark = pytest.mark.ranks

NUDGED = "time.0.bias"


class Watched(TrainingSession):
    """Remembers a digest of all parameters after each step."""

    def __init__(self, world: Any, config: TrainConfig) -> None:
        super().__init__(world, config)
        self.digests: list[str] = []

    def _log(self, report: Any, *arguments: Any) -> None:
        super()._log(report, *arguments)
        content = b"".join(p.detach().numpy().tobytes() for _, p in self.engine.named_parameters())
        self.digests.append(hashlib.sha256(content).hexdigest())


class Nudged(TrainingSession):
    """Moves one parameter of one rank by the smallest possible amount after the second step."""

    def _log(self, report: Any, *arguments: Any) -> None:
        super()._log(report, *arguments)
        if report.step == 2 and self.world.rank == self.world.size - 1:
            with torch.no_grad():
                values = dict(self.engine.named_parameters())[NUDGED].view(-1)
                values[0] = torch.nextafter(values[0], torch.tensor(math.inf))


class PoisonedSpace(PixelSpace):
    """Pixels that come out as NaN at one batch, as an overflowing autoencoder's would."""

    calls_left = 0

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        values = super().encode(pixels)
        return values * math.nan if self.calls_left == 0 else values


def digests(world: Any, config: TrainConfig) -> list[str]:
    with job.open_run_on_rank_zero(config, world), Watched(world, config) as session:
        session.prepare()
        session.run()
        return session.digests


def train_nudged(world: Any, config: TrainConfig) -> None:
    with job.open_run_on_rank_zero(config, world), Nudged(world, config) as session:
        session.prepare()
        session.run()


def train_poisoned(world: Any, config: TrainConfig, culprit: int, step: int) -> int:
    """One rank sees NaN at one step; returns how many steps were skipped."""
    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        if world.rank == culprit:
            session.denoiser.space = PoisonedSpace()
            session.denoiser.space.calls_left = step
        session.run()
        return session.train_state.skipped


def train_scaled(world: Any, config: TrainConfig, scale: float) -> tuple[float, int]:
    """A training in fp16 that starts from a given loss scale; the scale and the number of skipped steps at its end."""
    with job.open_run_on_rank_zero(config, world), TrainingSession(world, config) as session:
        session.prepare()
        session.train_state.loss_scale = scale
        session.run()
        return session.train_state.loss_scale, session.train_state.skipped


def small(folder: Path, **changes: Any) -> TrainConfig:
    settings = {"n_steps": 3, "lr": 1e-3, "sample": False, "validation_images": 0}
    return rank_functions.small_config(folder, **settings | changes)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_hold_equal_weights_after_every_step(ranks: RankPool, tmp_path: Path, size: int) -> None:
    seen = ranks.run(size, digests, small(tmp_path, engine="ddp"))
    assert len(set(seen[0])) == 3, "every step changes the weights"
    assert all(other == seen[0] for other in seen)


@pytest.mark.faults
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_with_other_weights_is_found_at_the_next_save_and_named(
    ranks: RankPool, tmp_path: Path, size: int
) -> None:
    """A rank whose weights diverged is found at the next save and named with the tensor."""
    with pytest.raises(RanksFailed) as caught:
        ranks.run(size, train_nudged, small(tmp_path, engine="ddp", ckpt_every=1, n_steps=2))
    assert sorted(caught.value.troubles) == list(range(size))
    for trouble in caught.value.troubles.values():
        assert trouble.kind == "RankFailure"
        assert f"ranks disagree at step 2: rank {size - 1} differs from rank 0" in trouble.message
        assert f"first in {NUDGED};" in trouble.message
    assert not (tmp_path / "checkpoints/step_0000002").exists(), "weights that disagree are not saved"


def assert_alike(one: Path, other: Path, step: int) -> None:
    """The same training up to rounding: losses and weights."""
    assert run_readers.losses(one) == pytest.approx(run_readers.losses(other), rel=1e-4)
    for part in ("model", "ema"):
        mine, theirs = run_readers.tensors_at(one, step, part), run_readers.tensors_at(other, step, part)
        assert mine.keys() == theirs.keys()
        difference = np.concatenate([(mine[name] - theirs[name]).ravel() for name in mine])
        # Adam turns rounding of a tiny gradient into a visible part of one small step, so all weights are judged
        # together.
        assert np.abs(difference).mean() < 1e-5
        assert np.abs(difference).max() < 1e-3


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"batch_size": 2, "accumulate": 2}),
        (2, {"engine": "ddp"}),
        pytest.param(2, {"engine": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(2, {"engine": "ddp", "batch_size": 1, "accumulate": 2}, marks=pytest.mark.slow),
        (2, {"engine": "fsdp", "batch_size": 1, "accumulate": 2}),
    ],
)
def test_a_global_batch_of_four_is_the_same_step_however_it_is_cut(
    ranks: RankPool, tmp_path: Path, whole_batch: Path, size: int, changes: dict[str, Any]
) -> None:
    ranks.run(size, rank_functions.train, small(tmp_path, **changes))
    assert_alike(tmp_path, whole_batch, 3)


@pytest.fixture(scope="module")
def whole_batch(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole_batch")
    ranks.run(1, rank_functions.train, small(folder, batch_size=4))
    return folder


@pytest.mark.faults
@pytest.mark.parametrize(
    ("engine", "size", "culprit"), [("ddp", 3, 1), pytest.param("fsdp", 2, 1, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_of_them_and_names_it(
    ranks: RankPool, tmp_path: Path, engine: str, size: int, culprit: int
) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(size, train_poisoned, small(tmp_path, engine=engine, ckpt_every=1), culprit, 2)
    assert sorted(caught.value.troubles) == list(range(size))
    for trouble in caught.value.troubles.values():
        assert trouble.kind == "HalationError"
        assert f"the loss is not finite at step 2 on rank {culprit}" in trouble.message
    assert (tmp_path / "checkpoints/step_0000001/COMMIT.json").exists()
    assert not (tmp_path / "checkpoints/step_0000002").exists()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("engine", "size", "culprit"), [pytest.param("ddp", 3, 2, marks=pytest.mark.slow), ("fsdp", 2, 0)]
)
def test_a_skipped_step_leaves_all_ranks_with_equal_and_finite_weights(
    ranks: RankPool, tmp_path: Path, engine: str, size: int, culprit: int
) -> None:
    config = small(tmp_path, engine=engine, ckpt_every=1, n_steps=4, nan_policy="skip")
    assert ranks.run(size, train_poisoned, config, culprit, 2) == [1] * size
    before, after, last = (run_readers.tensors_at(tmp_path, step, "model") for step in (1, 2, 4))
    assert all(np.array_equal(before[name], after[name]) for name in before), "a skipped step changes nothing"
    assert all(np.isfinite(values).all() for values in last.values())
    assert any(not np.array_equal(after[name], last[name]) for name in last), "training went on"
    for rank in range(size):
        assert "step 2 was skipped" in run_readers.rank_log(tmp_path, rank)


@pytest.mark.slow
def test_an_overflow_in_fp16_halves_the_loss_scale_and_skips_the_step(ranks: RankPool, tmp_path: Path) -> None:
    config = small(tmp_path, engine="ddp", dtype="fp16", n_steps=12)
    scale, skipped = ranks.run(2, train_scaled, config, 2.0**30)[0]
    assert 1 <= skipped < 12
    assert scale == 2.0 ** (30 - skipped)
    assert all(np.isfinite(values).all() for values in run_readers.tensors_at(tmp_path, 12, "model").values())
    assert len(set(run_readers.losses(tmp_path).values())) == 12


def test_bf16_trains_close_to_float32_and_keeps_its_weights_in_float32(ranks: RankPool, tmp_path: Path) -> None:
    for dtype in ("bf16", "fp32"):
        ranks.run(2, rank_functions.train, small(tmp_path / dtype, engine="ddp", dtype=dtype))
    exact, rounded = run_readers.losses(tmp_path / "fp32"), run_readers.losses(tmp_path / "bf16")
    assert rounded == pytest.approx(exact, rel=0.02)
    assert rounded != exact
    run_readers.tensors_at(tmp_path / "bf16", 3, "model")  # refuses anything but float32
