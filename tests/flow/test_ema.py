from __future__ import annotations

import pytest
import torch
from torch import nn

from halation.flow.ema import Ema


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype)),
        "bias": nn.Parameter(torch.randn(3, generator=generator).to(dtype), requires_grad=False),
    }


def move(held: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in held.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def test_the_average_follows_the_formula_with_a_warmed_up_decay() -> None:
    held = parameters()
    ema = Ema(held, decay=0.5)
    expected = held["weight"].detach().double().clone()
    for step in range(20):
        move(held, step)
        decay = min(0.5, (1 + step) / (10 + step))
        assert ema.current_decay() == pytest.approx(decay)
        ema.update()
        expected = decay * expected + (1 - decay) * held["weight"].detach().double()
    assert ema.num_updates == 20
    assert torch.allclose(ema.tensors()["weight"].double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_twice_restores_every_bit_of_parameters_and_averages(dtype: torch.dtype) -> None:
    held = parameters(dtype)
    ema = Ema(held, decay=0.9)
    for step in range(3):
        move(held, step)
        ema.update()
    before = {name: parameter.detach().clone() for name, parameter in held.items()}
    averages = {name: average.clone() for name, average in ema.tensors().items()}
    addresses = {name: parameter.data_ptr() for name, parameter in held.items()}
    with ema.swap_during():
        for name, parameter in held.items():
            assert torch.equal(parameter, averages[name].to(dtype))
            assert not torch.equal(parameter, before[name])
            assert parameter.data_ptr() == addresses[name]
    for name, parameter in held.items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(ema.tensors()[name], averages[name])
    assert held["weight"].requires_grad
    assert not held["bias"].requires_grad


def test_an_error_while_swapped_still_brings_the_parameters_back() -> None:
    held = parameters()
    ema = Ema(held, decay=0.9)
    move(held, 1)
    before = held["weight"].detach().clone()
    with pytest.raises(KeyError), ema.swap_during():
        raise KeyError
    assert torch.equal(held["weight"], before)


def test_a_module_sees_the_swapped_weights_and_its_gradient_stays() -> None:
    layer = nn.utils.skip_init(nn.Linear, 2, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    ema = Ema(layer.named_parameters(), decay=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        layer.weight.fill_(5.0)
    assert layer(torch.ones(1, 2)).item() == 10
    with ema.swap_during():
        assert layer(torch.ones(1, 2)).item() == 2
    assert torch.equal(layer.weight.grad, torch.ones(1, 2))


def test_nothing_is_updated_saved_or_loaded_while_swapped() -> None:
    ema = Ema(parameters(), decay=0.9)
    with ema.swap_during():
        for action in (ema.update, ema.tensors, lambda: ema.load_tensors({}, 0)):
            with pytest.raises(RuntimeError, match="swap back"):
                action()


def test_saved_averages_go_on_exactly_where_they_stopped() -> None:
    straight, held = parameters(), parameters()
    first, second = Ema(straight, decay=0.99), Ema(held, decay=0.99)
    for step in range(4):
        move(straight, step)
        first.update()
    for step in range(2):
        move(held, step)
        second.update()
    resumed = Ema(held, decay=0.99)
    resumed.load_tensors({name: tensor.clone() for name, tensor in second.tensors().items()}, second.num_updates)
    for step in range(2, 4):
        move(held, step)
        resumed.update()
    for name, average in first.tensors().items():
        assert torch.equal(average, resumed.tensors()[name])


def test_averages_of_another_model_are_refused() -> None:
    ema = Ema(parameters())
    with pytest.raises(ValueError, match="another model"):
        ema.load_tensors({"weight": torch.zeros(5, 3)}, 1)
    with pytest.raises(ValueError, match="weight is"):
        ema.load_tensors({"weight": torch.zeros(5, 1), "bias": torch.zeros(3)}, 1)
    with pytest.raises(ValueError, match="decay"):
        Ema(parameters(), decay=1.0)
