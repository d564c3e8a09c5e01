"""Each setting that a pipeline accepts changes its pixels, and each one that it ignores is refused."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from halation.errors import InputError
from halation.models.pipelines.call_settings import (
    NOT_LITERAL,
    REQUIRED,
    CallSettings,
    check_text_only,
    read_call_arguments,
    read_call_settings,
)
from halation.models.pipelines.pipeline_model import PipelineModel, open_pipeline
from halation.sample_specs import SampleSpec
from support import tiny_models
from support.tiny_models import drawn, specs

FAMILIES = [*tiny_models.FAMILIES, *tiny_models.MORE_FAMILIES, *tiny_models.SIGNATURE_FAMILIES]
WITHOUT_GUIDANCE = ("flux_schnell",)
WITHOUT_NEGATIVE_PROMPT = ("latent_consistency", "sana_sprint")
WITH_TRUE_CFG = ("flux", "flux_schnell")
"""These read a negative prompt with --pipeline_args true_cfg_scale=4 alone."""
OF_TWO_STEPS = ("sana_sprint",)
NEGATIVE = "two blue dogs, day"
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # diffusers' DPM-Solver
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),  # Mochi, in float32
]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A tiny pipeline, what is known of it before it is loaded, and a spec that it draws."""

    settings: CallSettings
    model: PipelineModel
    spec: SampleSpec

    def image(self, **changes: Any) -> np.ndarray[Any, Any]:
        wanted = replace(self.spec, **changes)
        self.model.check(wanted)
        return drawn(self.model, [wanted])[0]


@functools.cache
def opened(family: str) -> Opened:
    folder = tiny_models.built(family)
    settings = read_call_settings(folder)
    side = max(32, settings.size_multiple)
    guidance = None if family in WITHOUT_GUIDANCE else 4.0
    steps = 2 if family in OF_TWO_STEPS else 3
    spec = specs("a red cat", height=side, width=side, steps=steps, guidance_scale=guidance)[0]
    model = open_pipeline(folder, dtype="fp32", device="cpu")
    return Opened(settings=settings, model=model, spec=spec)


def difference(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> int:
    return int(np.abs(first.astype(int) - second.astype(int)).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_accepted_setting_changes_the_pixels(family: str) -> None:
    found = opened(family)
    first = found.image()
    assert first.std() > 10
    changes: dict[str, dict[str, Any]] = {"prompt": {"prompt": "a blue dog at night"}, "seed": {"seed": 8}}
    if family not in OF_TWO_STEPS:
        changes["steps"] = {"steps": 5}
    if family not in WITHOUT_GUIDANCE:
        changes["guidance"] = {"guidance_scale": 1.5}
    if family not in (*WITHOUT_NEGATIVE_PROMPT, *WITH_TRUE_CFG):
        changes["negative prompt"] = {"negative_prompt": NEGATIVE}
    for name, change in changes.items():
        found.settings.check(Given(**change), found.spec.guidance_scale, {})
        assert difference(found.image(**change), first) >= 3, name
    tall = found.image(height=2 * found.spec.height)
    assert tall.shape[1:3] == (2 * found.spec.height, found.spec.width)


@pytest.mark.parametrize(
    ("family", "num_frames"), [("wan", 5), ("ltx", 9), ("mochi", 7), ("latte", 3), ("cogvideox", 9)]
)
def test_the_number_of_frames_reaches_every_video_model(family: str, num_frames: int) -> None:
    found = opened(family)
    assert len(found.image()) == 1, "one frame unless more are asked for"
    assert len(found.image(num_frames=num_frames)) == num_frames


@dataclass(frozen=True, kw_only=True)
class Given:
    """Settings as a command or a row gives them."""

    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    prompt: str = ""
    seed: int = 0
    steps: int = 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_ignored_setting_is_refused_and_is_ignored(family: str) -> None:
    found = opened(family)
    settings, model = found.settings, found.model
    if family in WITHOUT_GUIDANCE:
        with pytest.raises(InputError, match=r"--guidance_scale 7\.5 with .*, which would ignore it"):
            settings.check(Given(guidance_scale=7.5), 7.5, {})
        assert settings.guidance.default is None, "and a default is not recorded"
        assert difference(found.image(guidance_scale=7.5), found.image()) == 0
    else:
        settings.check(Given(guidance_scale=7.5), 7.5, {})
        assert settings.guidance.default is not None
    if family in (*WITHOUT_NEGATIVE_PROMPT, *WITH_TRUE_CFG):
        with pytest.raises(InputError, match="would ignore it"):
            settings.check(Given(negative_prompt=NEGATIVE), 4.0, {})
        with pytest.raises(InputError, match="would ignore it"):
            model.check(replace(found.spec, negative_prompt=NEGATIVE))
        return
    off = settings.guidance.threshold
    with pytest.raises(InputError, match=f"at {settings.guidance.argument} {off:g}, which would ignore it"):
        settings.check(Given(negative_prompt=NEGATIVE), off, {})
    assert difference(found.image(guidance_scale=off, negative_prompt=NEGATIVE), found.image(guidance_scale=off)) == 0


@pytest.mark.parametrize("family", WITH_TRUE_CFG)
def test_a_negative_prompt_is_read_with_the_argument_that_the_refusal_names(family: str) -> None:
    folder, arguments = tiny_models.built(family), {"true_cfg_scale": 4.0}
    found = opened(family)
    with pytest.raises(InputError) as caught:
        found.settings.check(Given(negative_prompt=NEGATIVE), None, {})
    assert "--pipeline_args true_cfg_scale=4.0" in caught.value.action
    found.settings.check(Given(negative_prompt=NEGATIVE), None, arguments)
    model = open_pipeline(folder, dtype="fp32", device="cpu", arguments=arguments)
    images = [drawn(model, [replace(found.spec, negative_prompt=text)])[0] for text in (NEGATIVE, "a house")]
    assert difference(*images) >= 3


def own_arguments(family: str, spec: SampleSpec) -> Mapping[str, Any]:
    """What the documentation of diffusers passes to a family beyond prompt, size, steps and generator."""
    arguments: dict[str, Any] = {}
    if family not in WITHOUT_GUIDANCE:
        arguments["true_cfg_scale" if family == "qwen_image" else "guidance_scale"] = spec.guidance_scale
    if family not in (*WITHOUT_NEGATIVE_PROMPT, *WITH_TRUE_CFG):
        arguments["negative_prompt"] = spec.negative_prompt
    if family in ("wan", "ltx", "cogvideox", "mochi"):
        arguments["num_frames"] = 1
    if family == "latte":
        arguments["video_length"] = 1
    if family.startswith(("hunyuan", "pixart", "sana")):
        arguments["use_resolution_binning"] = False
    return arguments


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_is_the_one_of_the_plain_pipeline(family: str) -> None:
    found = opened(family)
    taken = family not in (*WITHOUT_NEGATIVE_PROMPT, *WITH_TRUE_CFG)
    spec = replace(found.spec, negative_prompt=NEGATIVE if taken else "")
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built(family)), use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    output = pipe(
        prompt=spec.prompt,
        generator=torch.Generator("cpu").manual_seed(spec.seed),
        num_inference_steps=spec.steps,
        height=spec.height,
        width=spec.width,
        output_type="pil",
        **own_arguments(family, spec),
    )[0][0]
    frames = output if isinstance(output, list) else [output]
    np.testing.assert_array_equal(drawn(found.model, [spec])[0], np.stack([np.asarray(frame) for frame in frames]))


# -- what is known before loading


@pytest.mark.parametrize("family", FAMILIES)
def test_the_signature_that_is_read_from_the_source_is_that_of_the_class(family: str) -> None:
    index = json.loads((tiny_models.built(family) / "model_index.json").read_text())
    parameters = inspect.signature(getattr(diffusers, index["_class_name"]).__call__).parameters
    arguments = read_call_arguments(index["_class_name"])
    assert [*arguments] == [name for name in parameters if name not in ("self", "kwargs")]
    for name, default in arguments.items():
        if default is REQUIRED:
            assert parameters[name].default is inspect.Parameter.empty
        elif default is not NOT_LITERAL:
            assert parameters[name].default == default


SIZES = {
    "flux": (1024, 1024), "flux_schnell": (1024, 1024), "wan": (480, 832), "sana": (1024, 1024), "chroma": (1024, 1024),
    "aura_flow": (1024, 1024), "qwen_image": (1024, 1024), "z_image": (1024, 1024), "ltx": (512, 704),
    "bria": (1024, 1024), "sana_sprint": (1024, 1024), "mochi": (480, 848),
    "latte": (512, 512),
}  # fmt: skip
"""Sizes that the tiny models take from their classes, as diffusers documents them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_size_is_the_one_a_call_without_a_size_draws(family: str) -> None:
    found = opened(family)
    if family in SIZES:
        assert found.settings.size == SIZES[family]
        return
    arguments = {} if not family.startswith(("hunyuan", "pixart")) else {"use_resolution_binning": False}
    if "num_frames" in read_call_arguments(found.settings.class_name):
        arguments["num_frames"] = 1
    output = found.model._pipe(prompt="a cat", num_inference_steps=2, output_type="pt", **arguments)[0]
    assert tuple(output.shape[-2:]) == found.settings.size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_size_that_the_model_cannot_draw_is_answered_with_the_nearest_two(family: str) -> None:
    found = opened(family)
    multiple = found.settings.size_multiple
    assert multiple == found.model._checker.size_multiple >= 8
    with pytest.raises(InputError) as caught:
        found.settings.check(Given(height=5 * multiple + 1, width=2 * multiple), None, {})
    assert caught.value.found.startswith(f"--height {5 * multiple + 1} --width {2 * multiple} with ")
    assert f"multiples of {multiple}" in caught.value.expected
    nearest = re.findall(r"--height (\d+) --width (\d+)", caught.value.action)
    assert [(int(height), int(width)) for height, width in nearest] == [
        (5 * multiple, 2 * multiple), (6 * multiple, 2 * multiple)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("class_name", "words"),
    [
        ("StableDiffusionImg2ImgPipeline", "needs image"),
        ("KandinskyPriorPipeline", "takes no"),
        ("DiTPipeline", "generates from class labels"),
        ("StableAudioPipeline", "takes no"),
        ("NoSuchPipeline", "which diffusers .* does not have"),
    ],
)
def test_a_pipeline_that_does_not_draw_from_text_is_refused_by_its_name(class_name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_text_only(class_name)


def test_a_class_whose_packages_are_missing_is_answered_with_them(tmp_path: Path) -> None:
    if not hasattr(diffusers.KolorsPipeline, "_backends"):
        pytest.skip("its packages are installed")
    with pytest.raises(InputError, match="KolorsPipeline needs sentencepiece") as caught:
        check_text_only("KolorsPipeline")
    assert caught.value.action == "pip install sentencepiece"


@pytest.mark.parametrize(
    ("index", "words"),
    [({"is_distilled": True}, "is_distilled is true"), ({}, "")],
)
def test_a_distilled_flux2_klein_takes_no_guidance_scale(tmp_path: Path, index: dict[str, Any], words: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "Flux2KleinPipeline", **index}))
    guidance = read_call_settings(tmp_path).guidance
    assert (guidance.default, bool(guidance.argument)) == ((None, False) if words else (4.0, True))
    assert words in guidance.why_unused
