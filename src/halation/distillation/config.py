"""Settings of `halation distill`: those of `halation train`, and those of the teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import Conflict, free_setting, setting
from halation.training.config import SIZE_CONFLICT, TRACKER_CONFLICTS, TrainConfig

ObjectiveName = Literal["velocity", "trajectory", "dmd"]
TeacherPlacement = Literal["gpu", "fsdp", "layers", "cpu"]
UnusedText = Annotated[str, tyro.conf.Suppress]
UnusedNumber = Annotated[int, tyro.conf.Suppress]
NOT_FOR_STUDENTS = {
    "model": "the student comes from the teacher: --student_config and --student_init",
    "vae": "the teacher's is used",
    "patch_size": "it is in --student_config",
    "num_register_tokens": "the teacher's number is kept",
    "aspect_buckets": "all states of a teacher have one shape",
    "validation_images": "a student is compared with its teacher, not with held-out images",
}


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Distil a teacher into a smaller student, or into one that samples in few steps.

    The same command, run again, resumes from the last checkpoint.
    """

    COMMON = (
        "output_dir teacher_path student_config data_path objective student_steps teacher_guidance teacher_steps "
        "num_epochs n_steps batch_size accumulate lr warmup_steps seed dtype gradient_checkpointing compile engine "
        "nproc gpu_ids ckpt_every keep_last report_to sample_prompts sample_prompts_file sample_steps eval_every "
        "eval_metrics"
    )
    """What --help shows; --help_all shows every setting."""

    # -- teacher and student
    output_dir: Path = free_setting(Path("runs/distill"))
    """Run folder: config, metrics, checkpoints, samples, logs, export."""
    teacher_path: str = free_setting("")
    """The teacher: folder or hub name of a diffusers pipeline (Wan, HunyuanDiT, PixArt, SD3, FLUX), a run, checkpoint
    or export of a DiT of Halation, or a bundled model such as `streets-64`."""
    model_path: str = free_setting("")
    """The same as --teacher_path."""
    student_config: str = free_setting("")
    """JSON file with the student's shape: family, width, depth, heads, ...; null or a missing key means the teacher's
    value. Without a file the student has the teacher's shape."""
    student_init: Literal["teacher", "random"] = setting("teacher")
    """Initial weights: random, or the teacher's, with layers dropped and widths cut if the student is smaller."""
    data_path: Annotated[str, tyro.conf.arg(aliases=["--data"])] = setting("")
    """Prompts (a TXT file with one per line, CSV, JSONL, Parquet), or captioned images: `streets`, a folder, or a CSV
    with a column of images."""
    objective: ObjectiveName = setting("velocity")
    """velocity: the teacher's prediction at every noise level. trajectory: the end points of the teacher's trajectory,
    in --student_steps steps. dmd: the teacher's distribution, in --student_steps steps, with a second network that
    learns the student's."""
    student_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = setting(None, low=1, high=64)
    """Number of sampling steps of the student, for trajectory and dmd; by default 4."""
    teacher_guidance: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = setting(None, low=0)
    """Guidance of the teacher, which is distilled into the student; 1 disables it. By default the guidance scale of the
    teacher's run, or of its family."""
    feature_weight: float = setting(0.0, low=0)
    """Weight of the feature matching loss between the middle of both networks, through a learned projection; for
    velocity."""
    fake_updates: int = setting(5, low=1)
    """dmd: steps of the second network for each step of the student; --n_steps counts both."""
    fake_lr: float = setting(0.0, low=0)
    """dmd: learning rate of the second network; 0 is --lr."""

    # -- teacher targets
    teacher_steps: int = setting(50, low=1)
    """Steps of the teacher's trajectory from noise to an image, for its states and for its samples."""
    teacher_states: int = setting(8, low=1)
    """States kept of each trajectory, or noised states per image, for velocity and trajectory."""
    trajectories: int = setting(0, low=0)
    """Number of trajectories for a list of prompts, from different noise; 0 is one per prompt."""
    teacher_cache: bool = setting(True)
    """Compute the teacher targets once, before training, and cache them; --no_teacher_cache (images only) runs the
    teacher at every step."""
    teacher_dtype: Literal["", "fp32", "bf16", "fp16"] = setting("")
    """Precision of the teacher's forwards, and of a pipeline's weights; by default --dtype."""
    teacher_placement: TeacherPlacement = free_setting("gpu")
    """Where the teacher runs: replicated on every rank's GPU (gpu), sharded over the ranks (fsdp), split by layers over
    a rank's spare GPUs (layers), or on the CPU (cpu)."""
    teacher_on_cpu: bool = free_setting(False)
    """The same as --teacher_placement cpu."""
    teacher_batch_size: int = free_setting(0, low=0)
    """Rows in one forward of the teacher; 0 uses the student's batch, for cached targets at least 8 on a GPU, 8 on a
    CPU, and 1 if only the teacher is on the CPU."""
    teacher_samples: bool = free_setting(True)
    """Sample the teacher once for each prompt, to show next to the student's samples."""

    # -- optimisation
    n_steps: int = setting(20_000, change="grows", low=1)
    """Total number of optimizer steps; it may be raised when a run is resumed."""
    num_epochs: int = setting(0, change="grows", low=0)
    """Passes over the data, instead of --n_steps; each has whole steps, at least one. With dmd, steps of the second
    network count too."""
    # -- sampling
    sample_interval: int = free_setting(1, low=1)
    """Epochs between samples and checkpoints, with --num_epochs or --sample_names rank."""
    # -- optimisation
    warmup_steps: int = setting(20, low=0)
    """Steps over which the learning rate rises from zero; it protects weights that start as the teacher's."""
    caption_dropout: float = setting(0.0, low=0, high=1)
    """Share of rows trained without their caption; needed only for a student that is sampled with guidance. For cached
    targets it is decided once per item, so prompts need several --trajectories each."""

    # -- settings of `halation train` that distill does not use
    data: UnusedText = setting("")
    """Filled from --data_path."""
    model: UnusedText = setting("")
    """The student comes from the teacher."""
    vae: UnusedText = setting("")
    """The teacher's."""
    patch_size: UnusedNumber = setting(0, low=0)
    """In --student_config."""
    num_register_tokens: UnusedNumber = setting(0, low=0)
    """The teacher's."""
    validation_images: UnusedNumber = setting(0, low=0)
    """A student is compared with its teacher."""

    CONFLICTS = (
        Conflict("", "a teacher model", "give the folder of a pipeline or of a run", without="teacher_path model_path"),
        Conflict(
            "model_path teacher_path",
            "one of the two: both name the teacher",
            when=lambda config: bool(config.model_path) and config.teacher_path not in ("", config.model_path),
        ),
        Conflict(
            "",
            "prompts or captioned images",
            "give a text file with one prompt per line, or `streets`",
            without="data_path",
        ),
        *(Conflict(name, f"none with distill: {why}") for name, why in NOT_FOR_STUDENTS.items()),
        SIZE_CONFLICT,
        *TRACKER_CONFLICTS,
        Conflict(
            "student_steps objective",
            "an objective for few steps",
            "add --objective trajectory (or dmd); with velocity a student needs as many steps as its teacher",
            when=lambda config: config.objective == "velocity" and config.student_steps is not None,
        ),
        Conflict("n_steps num_epochs", "one of them: both set the length of the run", "leave one out"),
        Conflict("feature_weight objective", "--objective velocity", "leave one of them out"),
        Conflict(
            "guidance_scale objective",
            "none: the teacher's guidance is distilled into the student, which is sampled without it",
            "leave it out; --teacher_guidance sets the teacher's",
            when=lambda config: config.objective != "velocity" and config.guidance_scale not in (None, 1.0),
        ),
        Conflict(
            "feature_weight teacher_batch_size",
            "features of a whole batch at once",
            "use a smaller --batch_size with --accumulate instead",
        ),
        Conflict(
            "eval_steps student_steps",
            "the number of steps that the student is trained for",
            when=lambda config: config.objective != "velocity" and config.eval_steps not in (0, config.student_steps),
        ),
        Conflict(
            "objective engine",
            "an engine that steps two networks in one process",
            "use --engine ddp or fsdp",
            when=lambda config: config.engine == "deepspeed" and config.objective == "dmd",
        ),
        Conflict(
            "feature_weight engine",
            "an engine that steps two networks in one process",
            "use --engine ddp or fsdp",
            when=lambda config: config.engine == "deepspeed" and config.feature_weight > 0,
        ),
        Conflict(
            "teacher_cache objective",
            "a cache of teacher targets: each trajectory needs many teacher steps",
            "leave --no_teacher_cache out",
            when=lambda config: config.objective == "trajectory" and not config.teacher_cache,
        ),
        Conflict(
            "teacher_states student_steps",
            "at least one state for each of the student's steps",
            lambda config: f"use --teacher_states {2 * config.student_steps}",
            when=lambda config: config.objective == "trajectory" and config.teacher_states < config.student_steps,
        ),
        Conflict(
            "teacher_steps student_steps",
            "at least as many teacher steps as student steps",
            lambda config: f"use --teacher_steps {8 * config.student_steps} or more",
            when=lambda config: config.objective == "trajectory" and config.teacher_steps < config.student_steps,
        ),
    )
