from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from halation.flow.seeded_noise import MAX_SEED, noise_from_seed, training_draw


def test_a_spec_s_noise_is_a_function_of_its_seed_alone() -> None:
    first = noise_from_seed(7, (3, 8, 8))
    torch.rand(5)
    assert torch.equal(first, noise_from_seed(7, (3, 8, 8)))
    assert not torch.equal(first, noise_from_seed(8, (3, 8, 8)))
    assert first.dtype == torch.float32
    assert first.device.type == "cpu"


def test_noise_from_seed_is_the_plain_draw_of_a_torch_generator() -> None:
    expected = torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(42))
    assert torch.equal(noise_from_seed(42, (4, 2, 2)), expected)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1])
def test_seeds_that_torch_would_wrap_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="from 0 to"):
        noise_from_seed(seed, (1,))
    with pytest.raises(ValueError, match="from 0 to"):
        training_draw(seed, 0, (1,))


def test_the_largest_seed_and_far_positions_are_accepted() -> None:
    assert noise_from_seed(MAX_SEED, (2,)).isfinite().all()
    assert np.isfinite(training_draw(MAX_SEED, 2**40, (2,)).noise).all()


def test_training_noise_depends_on_seed_and_position_and_uniforms_on_no_shape() -> None:
    """Training noise depends on seed and position; its uniforms do not depend on the shape."""
    draw = training_draw(1, 2, (3, 4, 4))
    again = training_draw(1, 2, (3, 4, 4))
    assert np.array_equal(draw.noise, again.noise)
    assert draw[1:] == again[1:] == training_draw(1, 2, (5,))[1:]
    for other in (training_draw(2, 1, (3, 4, 4)), training_draw(1, 3, (3, 4, 4)), training_draw(2, 2, (3, 4, 4))):
        assert not np.array_equal(draw.noise, other.noise)
        assert draw.u_time != other.u_time


def test_training_draws_are_standard_normal_and_uniform_over_positions() -> None:
    draws = [training_draw(0, position, (4,)) for position in range(4000)]
    noise = np.stack([draw.noise for draw in draws])
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.06
    for uniforms in ([draw.u_time for draw in draws], [draw.u_drop for draw in draws]):
        counts, _ = np.histogram(uniforms, bins=10, range=(0, 1))
        assert counts.sum() == 4000
        assert counts.min() > 320
    assert abs(np.corrcoef([draw.u_time for draw in draws], [draw.u_drop for draw in draws])[0, 1]) < 0.06


def test_no_global_generator_moves() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    noise_from_seed(3, (8,))
    training_draw(3, 3, (8,))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_streams_are_other_draws_of_the_same_position() -> None:
    draws = [training_draw(5, 9, (4, 64), stream) for stream in (0, 1, 2, 2**40)]
    assert np.array_equal(draws[0].noise, training_draw(5, 9, (4, 64)).noise)
    assert len({draw.u_time for draw in draws}) == len({draw.u_drop for draw in draws}) == 4
    correlations = np.corrcoef([draw.noise.ravel() for draw in draws])
    assert np.abs(correlations - np.eye(4)).max() < 0.25


@pytest.mark.parametrize(("position", "stream"), [(-1, 0), (0, -1)])
def test_a_negative_position_or_stream_is_refused(position: int, stream: int) -> None:
    with pytest.raises(ValueError, match="count from 0"):
        training_draw(0, position, (1,), stream)
