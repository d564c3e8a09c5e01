"""The laws of drawing with diffusers pipelines, for each family on a tiny real one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support import tiny_models
from support.tiny_models import PROMPTS, drawn, opened, plain, plain_pipe, specs

FAMILIES = [*tiny_models.FAMILIES, *tiny_models.MORE_FAMILIES]
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


@pytest.mark.parametrize("family", FAMILIES)
def test_our_images_are_the_pipelines_own(family: str) -> None:
    for negative in ("", "blue") if family != "flux" else ("",):
        wanted = specs(*PROMPTS, negative_prompt=negative)
        ours = drawn(opened(family), wanted)
        batches = (
            [[spec] for spec in wanted] if family == "aura_flow" else [wanted]
        )  # an unknown family is drawn one by one
        references = [image for batch in batches for image in plain(plain_pipe(family), batch)]
        for image, reference in zip(ours, references, strict=True):
            assert image.shape == (1, 32, 32, 3)
            assert image.dtype == np.uint8
            np.testing.assert_array_equal(image, reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_seed_steps_guidance_and_negative_prompt_each_change_the_image(family: str) -> None:
    model = opened(family)
    first = drawn(model, specs("a red cat"))[0].astype(int)
    assert 10 < first.std() < 120
    changes = {
        "prompt": specs("a blue dog at night"),
        "seed": specs("a red cat", seed=8),
        "steps": specs("a red cat", steps=5),
        "guidance": specs("a red cat", guidance_scale=1.5),
        "negative prompt": specs("a red cat", negative_prompt="two blue dogs, day"),
    }
    for name, wanted in changes.items():
        if family == "flux" and name == "negative prompt":
            continue
        difference = np.abs(drawn(model, wanted)[0].astype(int) - first)
        assert difference.max() >= 3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_and_position_do_not_matter(family: str) -> None:
    model = opened(family)
    mine = specs("a red cat")[0]
    short, long = specs("a", "dog", seed=50), specs(", ".join(PROMPTS * 2), " ".join(PROMPTS[::-1]), seed=60)
    reference = drawn(model, [mine, *short])[0]
    np.testing.assert_array_equal(reference, drawn(model, [mine, *long])[0])
    np.testing.assert_array_equal(reference, drawn(model, [long[0], short[1], mine])[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_step_is_reported_once(family: str) -> None:
    for steps in (1, 4) if family != "pixart" else (2, 4):  # PixArt-Alpha cannot make one step with its own scheduler
        calls: list[int] = []
        opened(family).draw(specs("a dog", steps=steps), lambda: calls.append(1)).collect()  # noqa: B023
        assert len(calls) == steps


def test_a_neighbours_negative_prompt_does_not_matter_where_none_means_zeros() -> None:
    """SDXL encodes an empty negative prompt, but puts zeros where a call has no negative prompt at all."""
    model = opened("stable_diffusion_xl")
    mine, other = specs("a red cat", "a dog")
    reference = drawn(model, [mine, other])
    beside = replace(other, negative_prompt="blue, night")
    np.testing.assert_array_equal(drawn(model, [mine, beside])[0], reference[0])
    changed = drawn(model, [beside, mine])
    np.testing.assert_array_equal(changed[1], reference[0])
    np.testing.assert_array_equal(changed[0], plain(plain_pipe("stable_diffusion_xl"), [beside, beside])[0])
    assert not np.array_equal(changed[0], reference[1])
