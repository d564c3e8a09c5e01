"""Laws of the paths' steps: the meaning of an output, its step, and the output for a step."""

from __future__ import annotations

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halation.flow.paths import PREDICTION_TYPES, DDPMPath, NoisePath, RectifiedFlowPath

NUM = 1000


def table(prediction: str, num: int = NUM) -> DDPMPath:
    betas = torch.linspace(0.00085**0.5, 0.02**0.5, num, dtype=torch.float64) ** 2
    return DDPMPath((1 - betas).cumprod(0), prediction)


PATHS: dict[str, NoisePath] = {"straight": RectifiedFlowPath(), **{name: table(name) for name in PREDICTION_TYPES}}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


def draws(num: int, seed: int = 0) -> tuple[Tensor, ...]:
    return torch.randn(3, num, 2, 3, 3, generator=torch.Generator().manual_seed(seed)).unbind()


def of(timesteps: Tensor) -> Tensor:
    """The middle of the times that are one timestep."""
    return ((timesteps.double() + 0.5) / NUM).float()


@every_path
@given(
    seed=st.integers(0, 1000),
    pairs=st.lists(
        st.tuples(st.integers(0, NUM - 1), st.integers(-1, NUM - 2))
        .map(lambda pair: (max(pair), min(pair)))
        .filter(lambda pair: pair[0] - pair[1] > 5),
        min_size=1,
        max_size=4,
    ),
)
def test_the_leading_answer_is_right_for_any_times_of_the_other_rows(
    path: NoisePath, seed: int, pairs: list[tuple[int, int]]
) -> None:
    """The answer that leads to a given point gets there for any times of the other rows."""
    x, end, _ = draws(len(pairs), seed)
    t = of(torch.tensor([first for first, _ in pairs]))
    last = torch.tensor([last for _, last in pairs])
    s = torch.where(last < 0, 0.0, of(last))
    landed = path.step(x, path.output_leading_to(x, t, end, s), t, s)
    # Where little signal is left, the image behind a predicted noise is found by dividing by that little.
    assert torch.allclose(landed, end, atol=3e-4)


@every_path
def test_the_true_answer_stands_for_image_and_noise_and_steps_along_the_path(path: NoisePath) -> None:
    x0, noise, _ = draws(5)
    t, s = torch.tensor([1.0, 0.9, 0.5, 0.3, 0.1]), torch.tensor([0.99, 0.0, 0.2, 0.3, 0.002])
    x = path.add_noise(x0, noise, t)
    answer = path.target(x0, noise, t)
    for found, true in zip(path.predict_x0_and_noise(x, answer, t), (x0, noise), strict=True):
        assert torch.allclose(found, true, atol=2e-5)
    stepped = path.step(x, answer, t, s)
    expected = path.add_noise(x0, noise, s)
    expected[1] = x0[1]
    assert torch.allclose(stepped, expected, atol=2e-5)


@every_path
def test_a_step_to_zero_is_the_image_to_the_bit(path: NoisePath) -> None:
    x, answer, _ = draws(3)
    t = torch.tensor([1.0, 0.4, 0.01])
    assert torch.equal(path.step(x, answer, t, torch.zeros(3)), path.predict_x0_and_noise(x, answer, t)[0])


@every_path
def test_a_row_s_step_does_not_depend_on_the_other_rows(path: NoisePath) -> None:
    x, answer, _ = draws(4)
    t, s = torch.tensor([1.0, 0.7, 0.5, 0.2]), torch.tensor([0.5, 0.0, 0.49, 0.1])
    together = path.step(x, answer, t, s), path.output_leading_to(x, t, answer, s)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(path.step(x[one], answer[one], t[one], s[one]), together[0][one])
        assert torch.equal(path.output_leading_to(x[one], t[one], answer[one], s[one]), together[1][one])


@pytest.mark.parametrize("prediction", PREDICTION_TYPES)
@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_steps_by_a_table_are_those_of_diffusers_ddim(prediction: str, num_steps: int) -> None:
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
    )
    path = DDPMPath(scheduler.alphas_cumprod, prediction)
    scheduler.set_timesteps(num_steps)
    times = torch.cat([of(scheduler.timesteps), torch.zeros(1)])
    ours = theirs = draws(2)[0]
    for number, timestep in enumerate(scheduler.timesteps):
        answer = torch.sin(3 * ours) + number
        assert path.timestep_index(times[number : number + 1]) == timestep
        ours = path.step(ours, answer, times[number].repeat(2), times[number + 1].repeat(2))
        theirs = scheduler.step(answer, timestep, theirs, return_dict=False)[0]
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_straight_steps_are_those_of_diffusers_flow_matching_euler(shift: float) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(5)
    ours = theirs = draws(2)[0]
    for number, timestep in enumerate(scheduler.timesteps):
        answer = torch.cos(2 * ours)
        t, s = (scheduler.sigmas[at].repeat(2) for at in (number, number + 1))
        ours = RectifiedFlowPath().step(ours, answer, t, s)
        theirs = scheduler.step(answer, timestep, theirs, return_dict=False)[0]
        assert torch.equal(ours, theirs)


@every_path
def test_leverage_is_how_far_an_error_of_the_answer_moves_the_end_of_a_step(path: NoisePath) -> None:
    x, answer, _ = draws(4)
    t, s = torch.tensor([1.0, 1.0, 0.6, 0.3]), torch.tensor([0.75, 0.0, 0.31, 0.0])
    moved = path.step(x, answer + 1, t, s) - path.step(x, answer, t, s)
    expected = moved.abs().flatten(1).mean(1)
    torch.testing.assert_close(path.step_sensitivity(t, s), expected, rtol=1e-4, atol=1e-4)
    if path is PATHS["epsilon"]:
        assert expected[1] > 10, "an image in one step from pure noise"
