"""LoRA starts at the base model and trains nothing else; bad settings are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halation.errors import InputError
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.pipelines.training.lora import LoraSettings, inject_lora
from support import tiny_models


def opened(lora: LoraSettings | None, dtype: str = "fp32", seed: int = 0, family: str = "hunyuan") -> PipelineDenoiser:
    return PipelineDenoiser.open(
        tiny_models.built(family), dtype=dtype, weights_dtype="fp32", lora=lora, height=32, width=32, seed=seed
    )


def inputs(denoiser: PipelineDenoiser) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, *denoiser.sample_shape(32, 32), generator=generator)
    condition = {
        name: torch.randn(row.shape, generator=generator) if row.is_floating_point() else ~row
        for name, row in denoiser.family.zero_condition().items()
    }
    return x, torch.tensor([0.4]), condition


def test_training_begins_at_the_base_and_reaches_the_adapters_alone() -> None:
    before = torch.random.get_rng_state()
    base, adapted = opened(None), opened(LoraSettings(rank=3, alpha=6.0))
    assert torch.equal(before, torch.random.get_rng_state())
    x, t, condition = inputs(base)
    first = adapted.forward(adapted.module, x, t, condition)
    assert torch.equal(first, base.forward(base.module, x, t, condition))
    first.square().mean().backward()
    trained = {name for name, weight in adapted.module.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * 2 * 8  # two blocks, two attentions of four layers, down and up
    assert all("lora_" in name for name in trained)
    reached = {name for name, weight in adapted.module.named_parameters() if weight.grad is not None}
    assert reached == trained


def test_the_seed_decides_the_first_adapters() -> None:
    weights = [dict(opened(LoraSettings(rank=2), seed=seed).module.named_parameters()) for seed in (1, 1, 2)]
    name = "blocks.0.attn1.to_q.lora_A.default.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_the_base_lies_in_the_dtype_of_the_forward_and_the_adapters_in_float32() -> None:
    denoiser = opened(LoraSettings(rank=2), dtype="bf16")
    dtypes = {weight.requires_grad: weight.dtype for weight in denoiser.module.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    x, t, condition = inputs(denoiser)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        denoiser.forward(denoiser.module, x, t, condition).float().square().mean().backward()
    denoiser.forward(denoiser.module, x, t, condition).float().square().mean().backward()


def test_targets_are_endings_of_names() -> None:
    denoiser = opened(LoraSettings(rank=2, targets=("ff.net.2", "blocks.0.attn1.to_q")))
    trained = {name for name, weight in denoiser.module.named_parameters() if weight.requires_grad}
    layers = {name.split(".lora_")[0] for name in trained}
    assert layers == {"blocks.0.ff.net.2", "blocks.1.ff.net.2", "blocks.0.attn1.to_q"}


def test_a_target_that_matches_nothing_is_refused_with_some_that_exist() -> None:
    with pytest.raises(InputError, match="no linear layer") as caught:
        opened(LoraSettings(rank=2, targets=("attn1.to_quer",)))
    assert "attn1.to_q" in caught.value.expected
    with pytest.raises(InputError) as caught:
        opened(LoraSettings(rank=2, targets=("nope",)))
    assert "such as to_q, to_k, to_v" in caught.value.expected  # the layers people usually mean
    with pytest.raises(InputError, match="no linear layer"):
        inject_lora(
            nn.Sequential(nn.Conv2d(1, 1, 1)), LoraSettings(rank=1), ("0",), 0
        )  # a convolution is no linear layer


@pytest.mark.parametrize(("settings", "flag"), [({"rank": 0}, "lora_rank"), ({"rank": 2, "alpha": -1.0}, "lora_alpha")])
def test_ranks_and_scales_that_make_no_sense_are_refused(settings: dict[str, float], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        LoraSettings(**settings)  # type: ignore[arg-type]


def test_settings_survive_json() -> None:
    lora = LoraSettings(rank=4, alpha=8.0, targets=("to_q",))
    assert LoraSettings.from_json(lora.as_json()) == lora
    assert lora.scale == 2.0
    assert LoraSettings(rank=4).scale == 1.0
