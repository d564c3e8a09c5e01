"""The trajectory of teacher targets is the trajectory by which the pipeline samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halation.data.prompt_dataset import PromptDataset
from halation.distillation.objectives import TeacherInputs
from halation.distillation.teacher import Teacher
from halation.distillation.teacher_targets import TargetPlan
from halation.flow.samplers import solve
from halation.flow.seeded_noise import noise_from_seed
from halation.models.denoiser import PIPELINE_SCHEDULER, SolverSettings
from halation.models.students.build import open_student
from halation.models.students.config import StudentConfig
from halation.sample_specs import SampleBatch, SampleSpec
from support import tiny_models

CPU = torch.device("cpu")
TEXTS = ("a red car", "a tram at night")
SIDE = 64
NUM_STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hunyuan", "pixart", "sd3", "flux", "wan"])
def test_from_a_prompt_and_its_noise_a_teacher_s_few_steps_are_those_of_its_pipeline(
    tmp_path: Path, family: str
) -> None:
    student = open_student(
        tiny_models.built(family),
        StudentConfig.read(""),
        init="teacher",
        seed=0,
        dtype="fp32",
        weights_dtype="fp32",
        lora=None,
        height=SIDE,
        width=SIDE,
        few_steps=NUM_STEPS,
    )
    guidance = 3.0
    specs = [
        SampleSpec(
            index=index, id=str(index), prompt=text, negative_prompt="", seed=7 + index,
            height=SIDE, width=SIDE, steps=NUM_STEPS, guidance_scale=guidance,
        )
        for index, text in enumerate(TEXTS)
    ]  # fmt: skip
    inputs = student.prepare(SampleBatch(specs=tuple(specs), num_real=2), CPU)
    drawn = student.sample(inputs, SolverSettings(sampler=PIPELINE_SCHEDULER), lambda: None)

    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    shape, times = student.sample_shape(SIDE, SIDE), student.times(NUM_STEPS, SIDE, SIDE, 1.0)
    plan = TargetPlan(
        objective="trajectory",
        has_images=False,
        times=times,
        teacher_steps=NUM_STEPS,
        num_states=NUM_STEPS,
        sample_shape=shape,
        seed=0,
    )
    assert [piece[0] for piece in plan.segments] == list(times[:-1])
    teacher = Teacher(student, guidance=guidance, device=CPU, dtype=torch.float32)
    items = TeacherInputs(student, PromptDataset(tmp_path / "prompts.txt", SIDE, SIDE), CPU, plan.dropout_mask)
    condition = items.condition([0, 1])
    x = torch.stack([noise_from_seed(spec.seed, shape) for spec in specs])
    for piece in plan.segments:
        for step in solve(teacher.noise_path, lambda x, t: teacher.predict(x, t, condition), x, piece):
            x = step.end
    assert torch.allclose(x, drawn, rtol=1e-4, atol=1e-4)
