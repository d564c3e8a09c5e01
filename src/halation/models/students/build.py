"""Builds students: models of the teacher's family that are smaller or need fewer steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from halation.errors import InputError
from halation.models.denoiser import Denoiser
from halation.models.dit.denoiser import DiTDenoiser
from halation.models.dit.network import DiT
from halation.models.students.architecture_from_teacher import dit_config
from halation.models.students.config import StudentConfig
from halation.models.students.shrink import ShrinkPlan, shrink_weights

if TYPE_CHECKING:
    from halation.models.pipelines.training.lora import LoraSettings

StudentInit = Literal["teacher", "random"]


def open_student(
    teacher: str | Path | DiTDenoiser,
    shape: StudentConfig,
    *,
    init: StudentInit,
    seed: int,
    dtype: str,
    weights_dtype: str,
    lora: LoraSettings | None,
    height: int,
    width: int,
    few_steps: int = 0,
    stays_on_cpu: bool = True,
) -> Denoiser:
    """Build a student on the CPU, of the pipeline in a folder or of a loaded DiT.

    The teacher is not changed. `few_steps` is the number of sampling steps of the student, with a first-order solver
    (the sampler `euler` of a DiT); 0 means that it is sampled like the teacher. Adapters (`lora`) are added to the
    teacher's weights.
    """
    if isinstance(few_steps, bool):
        raise TypeError("few_steps is a number of steps, not a flag")
    if lora is not None and init == "random":
        raise InputError(
            "--lora_rank with --student_init random",
            "adapters on the teacher's weights",
            "leave one of the two out",
        )
    if isinstance(teacher, DiTDenoiser):
        if lora is not None:
            raise InputError(
                "--lora_rank with a DiT of Halation as teacher",
                "a diffusers pipeline: only pipelines support adapters",
                "leave --lora_rank out: all weights of a DiT student are trained",
            )
        teacher.sample_shape(height, width)
        return _open_dit_student(teacher, shape, init, seed)
    # Imported here because diffusers takes seconds to import, and a DiT does not need it.
    from halation.models.pipelines.training.denoiser import PipelineDenoiser
    from halation.models.students.pipeline_student import PipelineStudent

    student = PipelineStudent.from_teacher(Path(teacher), shape, few_steps=few_steps, init=init, seed=seed)
    if lora is not None and not student.is_copy:
        said = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(shape).items() if value is not None)
        raise InputError(
            f"--lora_rank with a student of another architecture ({said})",
            "the teacher's architecture, since adapters are added to its weights",
            "leave --lora_rank or --student_config out",
        )
    return PipelineDenoiser.open(
        Path(teacher),
        dtype=dtype,
        weights_dtype=weights_dtype,
        lora=lora,
        height=height,
        width=width,
        seed=seed,
        stays_on_cpu=stays_on_cpu,
        student=student,
    )


def _open_dit_student(teacher: DiTDenoiser, shape: StudentConfig, init: StudentInit, seed: int) -> DiTDenoiser:
    config, layers = dit_config(teacher.config, shape)
    student = DiTDenoiser(
        config=config, space=teacher.space, tokenizer=teacher.tokenizer, class_names=teacher.class_names
    ).init_weights(seed)
    if init == "teacher":
        assert isinstance(student.module, DiT)
        weights = shrink_weights(teacher.module, student.module, ShrinkPlan.for_dits(teacher.config, config, layers))
        student.module.load_state_dict(weights)
    return student
