from __future__ import annotations

import pytest
import torch

from halation.flow.paths import interpolate, shift_times, times_from_uniform, velocity_target


def test_the_path_leads_from_image_to_noise_with_the_target_velocity() -> None:
    """The path starts at the image, ends at the noise and moves with the target velocity."""
    x0, noise = torch.randn(2, 3, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(interpolate(x0, noise, torch.zeros(3)), x0)
    assert torch.equal(interpolate(x0, noise, torch.ones(3)), noise)
    t = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    slope = (interpolate(x0, noise, t + 1e-4) - interpolate(x0, noise, t - 1e-4)) / 2e-4
    assert torch.allclose(slope, velocity_target(x0, noise))


def test_logit_normal_times_have_the_quantiles_of_their_distribution() -> None:
    u = torch.tensor([0.0, 0.15865525393145707, 0.5, 0.8413447460685429, 1.0], dtype=torch.float64)
    one = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    expected = torch.tensor([0.0, 1 - one, 0.5, one, 1.0], dtype=torch.float64)
    assert torch.allclose(times_from_uniform(u, "logit_normal"), expected)


@pytest.mark.parametrize("kind", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_times_rise_with_the_uniform_and_stay_in_the_unit_interval(kind: str, shift: float) -> None:
    t = times_from_uniform(torch.linspace(0, 1, 101, dtype=torch.float64), kind, shift)  # type: ignore[arg-type]
    assert (t.diff() > 0).all()
    assert t[0] == 0
    assert t[-1] == 1


def test_a_shift_moves_times_towards_noise_and_its_inverse_takes_them_back() -> None:
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert (shift_times(t, 3.0)[1:-1] > t[1:-1]).all()
    assert torch.allclose(shift_times(shift_times(t, 3.0), 1 / 3), t)
    assert torch.equal(shift_times(t, 1.0), t)


def test_unknown_kinds_and_shifts_are_refused() -> None:
    with pytest.raises(ValueError, match="uniform, logit_normal"):
        times_from_uniform(torch.zeros(1), "cosine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive"):
        shift_times(torch.zeros(1), 0.0)
