"""Few steps: the times that a pipeline visits, and latents equal to the pipeline's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from halation.errors import InputError
from halation.flow.paths import DDPMPath
from halation.flow.samplers import schedule
from halation.flow.seeded_noise import noise_from_seed
from halation.models.denoiser import SolverSettings
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.pipelines.family_quirks import get_family
from halation.models.pipelines.schedulers import few_step_scheduler, sampling_times, time_shift_for_tokens
from halation.models.pipelines.training.denoiser import PipelineDenoiser
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.sample_specs import SampleBatch
from support import tiny_models
from support.tiny_models import specs

FAMILIES = ["hunyuan", "pixart", "sd3", "flux", "wan", pytest.param("pixart_sigma", marks=pytest.mark.slow)]
HEIGHT, WIDTH = 32, 48
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' DPM-Solver


def asked(denoiser: PipelineDenoiser) -> list[float]:
    """The times at which the transformer is asked from now on, as its pipeline says them."""
    seen: list[float] = []

    def note(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        per_unit = 1 if denoiser.name == "FLUX" else 1000
        seen.append(float(timestep.flatten()[0]) / per_unit)

    denoiser.module.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@torch.no_grad()
def stepped(denoiser: PipelineDenoiser, batch: SampleBatch, times: tuple[float, ...]) -> Tensor:
    """By hand, from the noise of the seeds."""
    shape = denoiser.sample_shape(HEIGHT, WIDTH)
    x = torch.stack([noise_from_seed(spec.seed, shape) for spec in batch.specs])
    condition = denoiser.encode_prompts([spec.prompt for spec in batch.specs])
    denoiser.set_guidance(1.0)
    for time, following in itertools.pairwise(times):
        t, s = (torch.full((len(x),), value) for value in (time, following))
        x = denoiser.noise_path.step(x, denoiser.forward(denoiser.module, x, t, condition), t, s)
    return x


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipelines_own_call_goes_through_the_times_and_our_steps_end_where_it_does(family: str) -> None:
    denoiser = open_student(
        tiny_models.built(family),
        StudentConfig(),
        init="teacher",
        seed=0,
        dtype="fp32",
        weights_dtype="fp32",
        lora=None,
        height=HEIGHT,
        width=WIDTH,
    )
    assert isinstance(denoiser, PipelineDenoiser)
    assert denoiser.student is not None
    seen, teacher = asked(denoiser), denoiser.scheduler
    for num_steps in (1, 2, 4, 8):
        denoiser._pipe.scheduler = teacher
        dataclasses.replace(denoiser.student, few_steps=num_steps).set_scheduler(denoiser._pipe, HEIGHT, WIDTH)
        times = denoiser.times(num_steps, HEIGHT, WIDTH, 1.0)
        assert (len(times), times[0], times[-1]) == (num_steps + 1, 1.0, 0.0)
        given = {"height": HEIGHT, "width": WIDTH, "steps": num_steps, "guidance_scale": 1.0}
        batch = SampleBatch(specs=tuple(specs("a red cat", "two dogs", **given)), num_real=2)
        inputs = denoiser.prepare(batch, "cpu")
        seen.clear()
        latents = denoiser.sample(inputs, SolverSettings(), lambda: None)
        if isinstance(denoiser.noise_path, DDPMPath):
            levels = denoiser.noise_path.timestep_index(torch.tensor(times[:-1])).tolist()
            assert (
                [round(1000 * time) for time in seen]
                == levels
                == [1000 * k // num_steps - 1 for k in range(num_steps, 0, -1)]
            )
        else:
            torch.testing.assert_close(seen, list(times[:-1]), rtol=0, atol=1e-6)
            shift = time_shift_for_tokens(teacher, (HEIGHT // 16) * (WIDTH // 16))
            torch.testing.assert_close(times, tuple(schedule(num_steps, shift).tolist()), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            latents, stepped(denoiser, batch, times), rtol=1e-4, atol=1e-4 * float(latents.std())
        )


@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
@pytest.mark.parametrize("pipeline", ["StableDiffusion3Pipeline", "WanPipeline", "FluxPipeline"])
def test_few_steps_of_a_flow_are_equal_steps_of_shifted_time(pipeline: str, shift: float) -> None:
    family = get_family(pipeline)
    for num_steps in range(1, 9):
        scheduler = few_step_scheduler(
            diffusers.FlowMatchEulerDiscreteScheduler(shift=shift), family, num_steps, num_tokens=64
        )
        times = sampling_times(scheduler, family, num_steps, num_tokens=64)
        torch.testing.assert_close(times, tuple(schedule(num_steps, shift).tolist()), rtol=0, atol=1e-6)
        again = type(scheduler).from_config(scheduler.config)
        assert sampling_times(again, family, num_steps, num_tokens=64) == times, (
            "what an export says is all there is to it"
        )


@pytest.mark.parametrize(("levels", "refused"), [(1000, {3, 6, 7}), (960, {7}), (500, {3, 6, 7, 8})])
def test_steps_that_do_not_divide_a_table_are_refused_and_others_are_exact(levels: int, refused: set[int]) -> None:
    """Steps that do not divide the table are refused; others land at the next evaluated time."""
    family, table = get_family("HunyuanDiTPipeline"), diffusers.DDPMScheduler(num_train_timesteps=levels)
    for num_steps in range(1, 9):
        if num_steps in refused:
            even = ", ".join(str(number) for number in range(1, 9) if number not in refused)
            with pytest.raises(InputError, match=f"--student_steps {num_steps} for a table of {levels}") as refusal:
                few_step_scheduler(table, family, num_steps, num_tokens=64)
            assert refusal.value.action == f"use one of {even}"
            continue
        scheduler = few_step_scheduler(table, family, num_steps, num_tokens=64)
        scheduler.set_timesteps(num_steps)
        looked = scheduler.timesteps.tolist()
        assert [level - levels // num_steps for level in looked] == [*looked[1:], -1], "DDIM's own next level"


def test_the_times_of_a_teacher_are_those_of_its_own_scheduler_but_for_the_first() -> None:
    unipc = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    times = sampling_times(unipc, get_family("WanPipeline"), 5, num_tokens=64)
    torch.testing.assert_close(times, tuple(schedule(5, 3.0).tolist()), rtol=0, atol=2e-3)
    assert times != tuple(schedule(5, 3.0).tolist())
    ddpm = diffusers.DDPMScheduler(steps_offset=1)
    assert sampling_times(ddpm, get_family("HunyuanDiTPipeline"), 4, num_tokens=64) == (
        1.0,
        0.5015,
        0.2515,
        0.0015,
        0.0,
    )
    flux = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    small, large = (sampling_times(flux, get_family("FluxPipeline"), 4, num_tokens=num) for num in (256, 4096))
    assert small[1:-1] < large[1:-1], "larger images stay in noise for longer"
    torch.testing.assert_close(large, tuple(schedule(4, time_shift_for_tokens(flux, 4096)).tolist()), rtol=0, atol=1e-6)


def test_a_dit_goes_through_its_schedule(denoiser: DiTDenoiser) -> None:
    assert denoiser.times(4, 16, 16, 1.0) == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert denoiser.times(2, 16, 16, 3.0) == (1.0, 0.75, 0.0)
