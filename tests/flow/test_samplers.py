from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halation.flow.samplers import SAMPLERS, num_forwards, schedule

MEAN, SPREAD = 1.5, 0.4


def gaussian_velocity(x: Tensor, t: Tensor) -> Tensor:
    """E[noise - x0 | x] where x0 ~ N(MEAN, SPREAD^2)."""
    variance = (1 - t) ** 2 * SPREAD**2 + t**2
    centred = x - (1 - t) * MEAN
    return t * centred / variance - (MEAN + (1 - t) * SPREAD**2 * centred / variance)


def gaussian_answer(noise: Tensor) -> Tensor:
    """The exact flow map: quantiles go to quantiles, so noise z lands on MEAN + SPREAD z."""
    return MEAN + SPREAD * noise


def error(name: str, num_steps: int, shift: float) -> float:
    noise = torch.linspace(-2.5, 2.5, 41, dtype=torch.float64)
    *_, x = SAMPLERS[name](gaussian_velocity, noise, schedule(num_steps, shift))
    return float((x - gaussian_answer(noise)).abs().max())


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("multistep", 2)])
@pytest.mark.parametrize("shift", [1.0, 2.0])
def test_the_error_on_a_gaussian_falls_with_the_solver_s_order(name: str, order: int, shift: float) -> None:
    coarse, fine = error(name, 80, shift), error(name, 160, shift)
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.2)


def test_multistep_is_nearer_than_euler_for_the_same_forwards() -> None:
    for num_steps in (10, 20, 50):
        assert error("multistep", num_steps, 1.0) < error("euler", num_steps, 1.0) / 2


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_a_sampler_yields_once_a_step_and_makes_exactly_the_promised_forwards(name: str, num_steps: int) -> None:
    times = schedule(num_steps)
    asked: list[float] = []

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        asked.append(float(t))
        return torch.zeros_like(x)

    states = list(SAMPLERS[name](velocity, torch.ones(2), times))
    assert len(states) == num_steps
    assert len(asked) == num_forwards(name, num_steps)
    assert min(asked) > 0, "the velocity at t = 0 is never needed"
    assert set(asked) <= set(times.tolist())


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_straight_path_is_followed_exactly_by_any_number_of_steps(name: str) -> None:
    x0, noise = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 0.25], dtype=torch.float64)
    for num_steps in (1, 2, 5):
        *_, x = SAMPLERS[name](lambda x, t: noise - x0, noise, schedule(num_steps, 3.0))
        assert torch.allclose(x, x0, atol=1e-12)


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_step_lands_on_the_predicted_image(name: str) -> None:
    noise = torch.tensor([0.3], dtype=torch.float64)
    (x,) = SAMPLERS[name](gaussian_velocity, noise, schedule(1))
    assert torch.allclose(x, torch.tensor([MEAN], dtype=torch.float64)), "at t = 1 the best guess is the mean"


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_state_keeps_its_dtype_and_the_start_is_not_written_to(name: str) -> None:
    noise = torch.ones(3)
    for x in SAMPLERS[name](lambda x, t: x * float(t), noise, schedule(4)):
        assert x.dtype == torch.float32
    assert torch.equal(noise, torch.ones(3))


def test_a_schedule_runs_from_one_to_zero_in_float64() -> None:
    for shift in (1.0, 3.0):
        times = schedule(10, shift)
        assert times.dtype == torch.float64
        assert times[0] == 1
        assert times[-1] == 0
        assert (times.diff() < 0).all()


def test_bad_names_and_step_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        schedule(0)
    with pytest.raises(ValueError, match="euler, heun, multistep"):
        num_forwards("ddim", 3)
