"""The training loop: learning rate, loss scale, and when non-finite numbers end it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halation.flow.ema import Ema
from halation.training.build_components import build_engine
from halation.training.loop import MODEL, MicroBatch, StepReport, StepSettings, TrainedNetwork, TrainState, train_steps
from support.rank_pool import RankPool, RanksFailed


def settings(**changes: Any) -> StepSettings:
    known = {"global_batch": 2, "lr": 0.1, "warmup_steps": 0, "decay_steps": 0, "grad_clip": 0.0, "dtype": "fp32"}
    return StepSettings(**known | {"nan_policy": "skip"} | changes)


@given(st.floats(1e-6, 1.0), st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
def test_the_learning_rate_stays_between_zero_and_what_was_asked(lr: float, warmup: int, decay: int, step: int) -> None:
    assert 0 <= settings(lr=lr, warmup_steps=warmup, decay_steps=decay).lr_at(step) <= lr * (1 + 1e-12)


@given(st.integers(1, 50), st.integers(1, 50))
def test_the_learning_rate_rises_by_equal_steps_then_falls_along_a_cosine_to_zero(warmup: int, decay: int) -> None:
    schedule = settings(warmup_steps=warmup, decay_steps=decay)
    rates = [schedule.lr_at(step) for step in range(warmup + decay + 3)]
    assert rates[:warmup] == pytest.approx([0.1 * (step + 1) / warmup for step in range(warmup)])
    assert rates[warmup] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert rates[warmup + decay :] == pytest.approx([0.0] * 3, abs=1e-12)
    if decay % 2 == 0:
        assert rates[warmup + decay // 2] == pytest.approx(0.05)


def test_without_decay_the_learning_rate_stays() -> None:
    assert {settings(warmup_steps=3).lr_at(step) for step in (3, 4, 10_000)} == {0.1}


def steps(
    world: Any, scales: list[float], dtype: str, policy: str, scale: float
) -> tuple[list[StepReport], TrainState]:
    """Steps of a single weight whose loss is multiplied, step by step, by the given numbers."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    engine = build_engine("auto", world, module, [])
    engine.prepare_optimizer(0.1, (0.9, 0.999), 0.0)
    ema = Ema(engine.master_weights(), 0.9)
    position = TrainState(loss_scale=scale)

    def objective(module: torch.nn.Module, rows: MicroBatch) -> torch.Tensor:
        output: torch.Tensor = module(rows.x0)
        return output.float().square().flatten() * rows.t

    def rows(factor: float) -> list[MicroBatch]:
        ones = torch.ones(2, 1)
        return [MicroBatch(x0=ones, noise=ones, t=torch.full((2,), factor), condition={}, weight=torch.ones(2))]

    chosen = settings(dtype=dtype, nan_policy=policy)
    batches = (rows(factor) for factor in scales)
    reports = list(
        train_steps(
            world,
            {MODEL: TrainedNetwork(engine=engine, ema=ema, objective=objective)},
            batches,
            chosen,
            position,
            stop=lambda: 0,
            save_failed=lambda: False,
        )
    )
    assert torch.isfinite(module.weight).all()
    assert ema.num_updates == sum(not report.skipped for report in reports)
    return reports, position


@pytest.mark.ranks
def test_an_overflow_halves_the_loss_scale_and_skips_the_step(ranks: RankPool) -> None:
    """An overflow halves the loss scale and skips the step; a finite step does neither."""
    # fp16 ends at 65504: the gradient of the second step is 2 x 2**16 x 4, the others stay below.
    reports, position = ranks.run(1, steps, [0.25, 4.0, 0.25], "fp16", "stop", 2.0**16)[0]
    assert [report.skipped for report in reports] == [False, True, False]
    assert position.loss_scale == 2.0**15
    assert position.skipped == 1


@pytest.mark.ranks
def test_a_good_step_after_a_skipped_one_starts_the_count_anew(ranks: RankPool) -> None:
    nan = math.nan
    reports, position = ranks.run(1, steps, [*[nan] * 20, 1.0, *[nan] * 20, 1.0], "fp32", "skip", 1.0)[0]
    assert [report.skipped for report in reports] == [*[True] * 20, False, *[True] * 20, False]
    assert position.step == 42
    assert position.num_images == 84


@pytest.mark.ranks
def test_more_than_twenty_bad_steps_in_a_row_stop_the_run_also_where_it_may_skip(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="the loss is not finite at step 21"):
        ranks.run(1, steps, [math.nan] * 30, "fp32", "skip", 1.0)
