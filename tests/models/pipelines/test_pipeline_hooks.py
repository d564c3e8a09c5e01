"""Options inside a pipeline: truncated guidance, half of the frames, other schedulers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from halation.errors import InputError
from halation.models.pipelines.load import repeated_blocks
from halation.models.pipelines.pipeline_model import PipelineModel
from support import tiny_models
from support.tiny_models import PROMPTS, drawn, opened, plain, reopened, specs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver
GUIDED = [family for family in (*tiny_models.FAMILIES, "pixart_sigma", "stable_diffusion_xl") if family != "flux"]


def reopen(family: str, **options: Any) -> PipelineModel:
    return reopened(tiny_models.built(family), **options)


@contextmanager
def rows_in_blocks(model: PipelineModel) -> Iterator[list[tuple[int, ...]]]:
    """The shape of what reaches the first block of each denoiser, call by call."""
    seen: list[tuple[int, ...]] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(tuple(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).shape))

    names = ("transformer", "transformer_2", "unet")
    modules = [module for name in names if (module := getattr(model._pipe, name, None)) is not None]
    handles = [repeated_blocks(module)[0].register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# Guidance cut short


@pytest.mark.parametrize("family", GUIDED)
def test_truncation_really_saves_the_unconditional_rows(family: str) -> None:
    wanted = specs(*PROMPTS[:2], steps=4)
    with rows_in_blocks(opened(family)) as whole:
        drawn(opened(family), wanted)
    model = reopen(family, cfg_truncation_step=1)
    with rows_in_blocks(model) as cut:
        images = drawn(model, wanted)
    calls = len(model._pipe.scheduler.timesteps)
    first_step = calls - 3  # PNDM makes one call more than steps, in its first step
    assert sum(shape[0] for shape in whole) == 4 * calls
    assert sum(shape[0] for shape in cut) == 4 * first_step + 2 * 3
    assert any(not np.array_equal(a, b) for a, b in zip(images, drawn(opened(family), wanted), strict=True))


@pytest.mark.parametrize("family", GUIDED)
def test_truncation_at_or_after_the_last_step_changes_nothing(family: str) -> None:
    wanted = specs(*PROMPTS[:2])
    reference = drawn(opened(family), wanted)
    for step in (3, 100):
        np.testing.assert_array_equal(drawn(reopen(family, cfg_truncation_step=step), wanted), reference)


@pytest.mark.parametrize("family", GUIDED)
def test_truncation_from_the_first_step_is_drawing_without_guidance(family: str) -> None:
    ours = drawn(reopen(family, cfg_truncation_step=0), specs(*PROMPTS[:2]))
    without = drawn(opened(family), specs(*PROMPTS[:2], guidance_scale=1.0))
    np.testing.assert_allclose(np.asarray(ours, int), np.asarray(without, int), atol=1)


def test_truncation_is_what_switching_guidance_off_by_callback_gives() -> None:
    """The callback that halves the embeddings, as documented by diffusers, on Stable Diffusion 3."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built("sd3")), use_safetensors=True)

    def switch_off(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == 1:
            pipe._guidance_scale = 1.0
            return {name: value.chunk(2)[1] if "embeds" in name else value for name, value in tensors.items()}
        return tensors

    names = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
    pipe._callback_tensor_inputs = names
    wanted = specs(*PROMPTS[:2], steps=4)
    reference = plain(pipe, wanted, callback_on_step_end=switch_off, callback_on_step_end_tensor_inputs=names)
    np.testing.assert_array_equal(drawn(reopen("sd3", cfg_truncation_step=2), wanted), reference)


def test_flux_with_true_guidance_can_be_truncated_and_takes_negative_prompts() -> None:
    """FLUX with a true guidance scale can be truncated and takes a negative prompt."""
    arguments = {"true_cfg_scale": 3.0}
    wanted = specs(*PROMPTS[:2], negative_prompt="blue")
    model = reopen("flux", arguments=arguments)
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built("flux")), use_safetensors=True)
    np.testing.assert_array_equal(drawn(model, wanted), plain(pipe, wanted, **arguments))
    cut = reopen("flux", arguments=arguments, cfg_truncation_step=1)
    with rows_in_blocks(cut) as seen:
        drawn(cut, wanted)
    assert len(seen) == 2 + 1 + 1


def test_truncation_is_refused_where_there_is_no_unconditional_branch() -> None:
    with pytest.raises(InputError, match=r"distilled[\s\S]*true_cfg_scale"):
        reopen("flux", cfg_truncation_step=2)
    with pytest.raises(InputError, match="no unconditional branch"):
        reopen("hunyuan", cfg_truncation_step=2).check(specs("a", guidance_scale=1.0)[0])
    with pytest.raises(InputError, match=r"AuraFlowPipeline[\s\S]*HunyuanDiT, PixArt"):
        reopen("aura_flow", cfg_truncation_step=2)
    with pytest.raises(InputError, match="a step of at least 0"):
        reopen("hunyuan", cfg_truncation_step=-1)


def test_truncation_counts_steps_and_not_calls_of_a_second_order_scheduler() -> None:
    model = reopen("hunyuan", scheduler="heun", cfg_truncation_step=2)
    with rows_in_blocks(model) as seen:
        drawn(model, specs("a dog", steps=4))
    assert [shape[0] for shape in seen] == [2] * 4 + [1] * 3


# Video and its two experts


@pytest.mark.parametrize("num_frames", [5, 9])
def test_a_video_is_the_pipelines_own(num_frames: int) -> None:
    wanted = specs(*PROMPTS[:2], num_frames=num_frames)
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built("wan")), use_safetensors=True)
    ours = drawn(opened("wan"), wanted)
    assert ours[0].shape == (num_frames, 32, 32, 3)
    np.testing.assert_array_equal(ours, plain(pipe, wanted))


@pytest.mark.parametrize("scheduler", ["", "dpm++", "flow_euler", "flow_heun"])
@pytest.mark.parametrize(("num_frames", "latent"), [(9, 3), (13, 4), (5, 2)])
def test_the_high_noise_expert_draws_half_the_latent_frames(scheduler: str, num_frames: int, latent: int) -> None:
    model = reopen("wan", scheduler=scheduler, half_frame=True)
    entered: dict[str, list[torch.Tensor]] = {"transformer": [], "transformer_2": []}
    for name, seen in entered.items():
        getattr(model._pipe, name).register_forward_pre_hook(
            lambda _module, _args, kwargs, seen=seen: seen.append(kwargs["hidden_states"].clone()), with_kwargs=True
        )
    wanted = specs("a dog", num_frames=num_frames, steps=6)
    model.check(wanted[0])
    (video,) = drawn(model, wanted)
    assert video.shape == (num_frames, 32, 32, 3)
    assert {tensor.shape[2] for tensor in entered["transformer"]} == {(latent + 1) // 2}
    assert {tensor.shape[2] for tensor in entered["transformer_2"]} == {latent}
    handed_over = entered["transformer_2"][0]
    for frame in range(1, latent, 2):
        assert torch.equal(handed_over[:, :, frame], handed_over[:, :, frame - 1])
    assert not np.array_equal(video, drawn(opened("wan"), wanted)[0])


def test_half_frame_doubles_at_the_end_where_every_step_is_the_high_noise_experts() -> None:
    (video,) = drawn(reopen("wan", half_frame=True), specs("a dog", num_frames=9, steps=1))
    assert video.shape == (9, 32, 32, 3)


def test_half_frame_changes_nothing_for_one_frame_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for family in ("wan", "sd3"):
        model = reopen(family, half_frame=True)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="halation"):
            for _ in range(2):
                model.check(specs("a dog")[0])
        assert [record.getMessage() for record in caplog.records] == [
            "--enable_half_frame has no effect with one frame"
        ]
        np.testing.assert_array_equal(drawn(model, specs("a dog")), drawn(opened(family), specs("a dog")))


def test_half_frame_is_refused_without_two_experts(tmp_path: Any) -> None:
    model = reopened(tiny_models.wan(tmp_path / "one", two_experts=False), half_frame=True)
    with pytest.raises(InputError, match="two experts"):
        model.check(specs("a dog", num_frames=5)[0])


# Schedulers


@pytest.mark.parametrize(
    ("family", "short", "class_name"),
    [
        ("hunyuan", "euler", "EulerDiscreteScheduler"),
        ("hunyuan", "euler_a", "EulerAncestralDiscreteScheduler"),
        ("hunyuan", "ddim", "DDIMScheduler"),
        ("hunyuan", "unipc", "UniPCMultistepScheduler"),
        ("pixart", "heun", "HeunDiscreteScheduler"),
        ("pixart", "DDPMScheduler", "DDPMScheduler"),
        ("stable_diffusion", "dpm++", "DPMSolverMultistepScheduler"),
        ("sd3", "heun", "FlowMatchHeunDiscreteScheduler"),
        ("wan", "euler", "FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_another_scheduler_draws_as_it_does_in_the_pipeline(family: str, short: str, class_name: str) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tiny_models.built(family)), use_safetensors=True)
    shift = {"shift": 3.0} if family == "wan" else {}
    pipe.scheduler = getattr(diffusers, class_name).from_config(pipe.scheduler.config, **shift)
    wanted = specs(*PROMPTS[:2], steps=4)
    model = reopen(family, scheduler=short)
    calls: list[int] = []
    ours = model.draw(wanted, lambda: calls.append(1)).collect()
    assert len(calls) == 4
    assert model.facts["scheduler"] == class_name
    assert model.facts["options"] == {"scheduler": "E2"}
    np.testing.assert_array_equal(ours, plain(pipe, wanted))
    assert not np.array_equal(ours, drawn(opened(family), wanted))


@pytest.mark.parametrize("family", ["flux", "sd3", "wan", "sana"])
def test_every_scheduler_said_to_fit_a_flow_model_draws_with_it(family: str) -> None:
    with pytest.raises(InputError) as refusal:
        reopen(family, scheduler="ddim")
    names = refusal.value.expected.split("a class name: ")[1].split(", ")
    assert len(names) >= 3
    for name in names:
        model = reopen(family, scheduler=name)
        first, again = (drawn(model, specs("a dog", steps=4))[0] for _ in range(2))
        np.testing.assert_array_equal(first, again)


def test_a_scheduler_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(InputError, match=r"flow_euler does not work[\s\S]*DDIMScheduler") as refusal:
        reopen("hunyuan", scheduler="flow_euler")
    assert "dpm++" in refusal.value.expected
    with pytest.raises(InputError, match="does not work with"):
        reopen("hunyuan", scheduler="os.system")
