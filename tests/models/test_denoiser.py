from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from halation.errors import InputError
from halation.flow.samplers import SAMPLERS, num_forwards
from halation.models.denoiser import (
    NonFiniteRowsError,
    SamplingError,
    SolverSettings,
    decode,
    needs_cfg,
    sample_batch,
)
from halation.models.dit.denoiser import DiTDenoiser
from halation.sample_specs import SampleBatch, SampleSpec

Make = Callable[..., DiTDenoiser]
BASE = SampleSpec(index=0, id="a", prompt="a red car", seed=1, height=16, width=16, steps=3, guidance_scale=3.0)


def batch(*specs: SampleSpec) -> SampleBatch:
    return SampleBatch(specs=specs, num_real=len(specs))


def changed(**values: object) -> SampleSpec:
    return dataclasses.replace(BASE, **values)  # type: ignore[arg-type]


def count_forwards(denoiser: DiTDenoiser, run: Callable[[], object]) -> list[int]:
    batches: list[int] = []
    handle = denoiser.module.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0])))
    try:
        run()
    finally:
        handle.remove()
    return batches


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a green tree"},
        {"seed": 2},
        {"steps": 4},
        {"guidance_scale": 4.0},
        {"negative_prompt": "a green tree"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_prompt_seed_steps_guidance_and_negative_prompt_each_change_the_image(
    denoiser: DiTDenoiser, change: dict[str, object]
) -> None:
    before = sample_batch(denoiser, batch(BASE)).pixels_or_raise()
    assert np.array_equal(before, sample_batch(denoiser, batch(BASE)).pixels_or_raise())
    assert not np.array_equal(before, sample_batch(denoiser, batch(changed(**change))).pixels_or_raise())


def test_samplers_draw_different_images_and_truncated_guidance_another_one(denoiser: DiTDenoiser) -> None:
    pixels = [sample_batch(denoiser, batch(BASE), SolverSettings(sampler=name)).pixels_or_raise() for name in SAMPLERS]
    pixels.append(sample_batch(denoiser, batch(BASE), SolverSettings(truncate_from=1)).pixels_or_raise())
    pixels.append(sample_batch(denoiser, batch(BASE), SolverSettings(shift=3.0)).pixels_or_raise())
    assert len({image.tobytes() for image in pixels}) == len(pixels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_image_does_not_depend_on_its_neighbours_or_its_place_on_the_batch(
    denoiser: DiTDenoiser, dtype: torch.dtype
) -> None:
    others = [changed(prompt="x" * 400, seed=9, guidance_scale=7.0), changed(prompt="", seed=5, guidance_scale=1.0)]
    expected = sample_batch(denoiser, batch(BASE, BASE, BASE), SolverSettings(dtype=dtype)).pixels_or_raise()[0]
    for place in range(3):
        specs = [*others[:place], BASE, *others[place:]]
        assert np.array_equal(
            sample_batch(denoiser, batch(*specs), SolverSettings(dtype=dtype)).pixels_or_raise()[place], expected
        )


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("pair", [False, True])
def test_fillers_make_exactly_the_forwards_of_a_real_batch(denoiser: DiTDenoiser, name: str, pair: bool) -> None:
    real = denoiser.prepare(batch(BASE, changed(guidance_scale=1.0)), "cpu")
    company = denoiser.dummy_inputs(batch(BASE, BASE), "cpu")
    runs = [
        count_forwards(
            denoiser, lambda inputs=inputs: list(denoiser.denoise(inputs, SolverSettings(sampler=name, use_cfg=pair)))
        )
        for inputs in (real, company)
    ]
    assert runs[0] == runs[1] == [4 if pair else 2] * num_forwards(name, 3)
    for field in ("noise", "scales"):
        assert getattr(real, field).shape == getattr(company, field).shape
        assert getattr(real, field).dtype == getattr(company, field).dtype
    for name_, tensor in real.condition.items():
        assert tensor.shape == company.condition[name_].shape
        assert tensor.dtype == company.condition[name_].dtype


def test_preparing_and_decoding_never_run_the_module(denoiser: DiTDenoiser) -> None:
    def both() -> None:
        decode(denoiser.space, denoiser.prepare(batch(BASE), "cpu").noise, batch(BASE))

    assert count_forwards(denoiser, both) == []


def test_a_guidance_scale_of_one_is_the_conditional_image_in_any_plan(
    denoiser: DiTDenoiser,
) -> None:
    """The plan decides about guidance; a scale of 1 is the conditional image either way."""
    plain = changed(guidance_scale=1.0)
    assert not needs_cfg([plain, plain])
    assert needs_cfg([plain, BASE])
    assert needs_cfg([changed(guidance_scale=0.0)])
    alone, paired = (
        sample_batch(denoiser, batch(plain), SolverSettings(use_cfg=pair)).pixels_or_raise() for pair in (False, True)
    )
    assert np.abs(alone.astype(int) - paired.astype(int)).max() <= 1


def test_a_generator_of_steps_leaves_grad_mode_autocast_and_generators_alone(denoiser: DiTDenoiser) -> None:
    state = torch.get_rng_state()
    states: list[Tensor] = []
    for x in denoiser.denoise(denoiser.prepare(batch(BASE), "cpu"), SolverSettings(dtype=torch.bfloat16)):
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert x.dtype == torch.float32
        assert not x.requires_grad
        assert not x.is_inference()
        states.append(x)
    assert len(states) == BASE.steps
    assert torch.equal(torch.get_rng_state(), state)


def test_drawing_leaves_weights_gradients_and_modes_alone(make_denoiser: Make) -> None:
    denoiser = make_denoiser(seed=2)
    denoiser.module.train()
    before = {name: tensor.clone() for name, tensor in denoiser.module.state_dict().items()}
    sample_batch(denoiser, batch(BASE))
    assert denoiser.module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in denoiser.module.state_dict().items())
    assert all(parameter.grad is None for parameter in denoiser.module.parameters())


def test_on_step_counts_the_steps_and_images_are_uint8_rows(denoiser: DiTDenoiser) -> None:
    steps: list[int] = []
    decoded = sample_batch(denoiser, batch(BASE, BASE), on_step=lambda: steps.append(len(steps)))
    assert steps == [0, 1, 2]
    assert decoded.pixels.shape == (2, 16, 16, 3)
    assert decoded.pixels.dtype == np.uint8
    assert decoded.failures == {}


def test_a_nan_costs_its_own_image_and_names_its_prompt(
    denoiser: DiTDenoiser,
) -> None:
    """A NaN costs its own image, names its prompt and leaves the other images unchanged."""
    specs = batch(BASE, changed(index=7, prompt="the bad one " * 20), BASE)
    x = denoiser.prepare(specs, "cpu").noise
    whole = decode(denoiser.space, x, specs).pixels
    broken = x.clone()
    broken[1, 0, 3, 3] = float("nan")
    decoded = decode(denoiser.space, broken, specs)
    assert list(decoded.failures) == [1]
    assert np.array_equal(decoded.pixels[[0, 2]], whole[[0, 2]])
    with pytest.raises(SamplingError, match=r"image 7 \(prompt 'the bad one .*\.\.\.', seed 1\).*not finite"):
        decoded.pixels_or_raise()


class OverflowingSpace:
    """Pixels, but an image with a value above 100 cannot be decoded."""

    downsampling_factor, channels = 1, 3

    def decode(self, x: Tensor) -> Tensor:
        rows = tuple(row for row in range(len(x)) if x[row].max() > 100)
        if rows:
            raise NonFiniteRowsError("too large", rows)
        return torch.zeros(len(x), 16, 16, 3, dtype=torch.uint8)


def test_a_image_whose_decoding_is_not_finite_fails_alone(make_denoiser: Make) -> None:
    denoiser = make_denoiser()
    denoiser.space = OverflowingSpace()  # type: ignore[assignment]
    x = torch.zeros(3, 3, 16, 16)
    x[2] = 1000.0
    decoded = decode(denoiser.space, x, batch(BASE, BASE, BASE))
    assert list(decoded.failures) == [2]
    assert "in float32 too" in str(decoded.failures[2])


def test_bad_input_fails_in_prepare(make_denoiser: Make, denoiser: DiTDenoiser) -> None:
    with pytest.raises(InputError, match="32 x 16"):
        denoiser.prepare(batch(changed(height=32)), "cpu")
    with pytest.raises(ValueError, match="seed"):
        denoiser.prepare(batch(changed(seed=-1)), "cpu")
    with pytest.raises(ValueError, match="one shape"):
        denoiser.prepare(batch(BASE, changed(steps=5)), "cpu")
    with pytest.raises(InputError, match="class-conditional"):
        make_denoiser(classes=True).prepare(batch(changed(prompt="zebra")), "cpu")


def test_prompts_that_did_not_fit_are_marked(denoiser: DiTDenoiser) -> None:
    inputs = denoiser.prepare(batch(BASE, changed(prompt="car " * 100)), "cpu")
    assert inputs.truncated == (False, True)


def test_classes_are_drawn_by_name_and_differ(make_denoiser: Make) -> None:
    denoiser = make_denoiser(classes=True)
    cat, dog = (changed(prompt=name) for name in ("cat", "dog"))
    pixels = sample_batch(denoiser, batch(cat, dog)).pixels_or_raise()
    assert not np.array_equal(pixels[0], pixels[1])
