"""Settings of `halation distill`: those of a training, and a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import Conflict, free_setting, setting
from halation.training.config import SIZE_CONFLICT, TrainConfig

ObjectiveName = Literal["velocity", "trajectory", "dmd"]
TeacherPlacement = Literal["gpu", "fsdp", "layers", "cpu"]
UnusedText = Annotated[str, tyro.conf.Suppress]
UnusedNumber = Annotated[int, tyro.conf.Suppress]
NOT_FOR_STUDENTS = {
    "model": "the student comes from the teacher: --student_config and --student_init",
    "vae": "the teacher brings its own",
    "patch_size": "it is in --student_config",
    "num_register_tokens": "the teacher's are kept",
    "aspect_buckets": "a teacher's states have one shape",
    "validation_images": "a student is measured against its teacher, not against images it never learned from",
}


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Distil a teacher into a smaller student, or into one that draws in few steps, on every rank.

    The same command again goes on where the last one stopped.
    """

    # -- teacher and student
    output_dir: Path = free_setting(Path("runs/distill"))
    """Folder of the run: config, metrics, checkpoints, samples, logs, export."""
    teacher_path: str = free_setting("")
    """Who is learned from: folder or hub name of a diffusers pipeline (Wan, HunyuanDiT, PixArt, SD3, FLUX), a run,
    checkpoint or export of a DiT of Halation, or one of the package, such as `streets-64`."""
    model_path: str = free_setting("")
    """The same as --teacher_path."""
    student_config: str = free_setting("")
    """JSON file of the student's shape: family, width, depth, heads, ...; null or left out means "as the teacher's".
    Without a file the student has the teacher's shape."""
    student_init: Literal["teacher", "random"] = setting("teacher")
    """First weights: the teacher's, with layers left out and widths cut where the student is smaller, or random
    ones."""
    data_path: Annotated[str, tyro.conf.arg(aliases=["--data"])] = setting("")
    """Prompts (a TXT file with one a line, CSV, JSONL, Parquet), or captioned images: `streets`, a folder, or a CSV
    with a column of images."""
    objective: ObjectiveName = setting("velocity")
    """velocity: the teacher's prediction at every noise level. trajectory: the end points of the teacher's trajectory,
    in --student_steps steps. dmd: the teacher's distribution, in --student_steps steps, with a second network that
    learns the student's."""
    student_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = setting(None, low=1, high=64)
    """Steps the student draws in, for trajectory and dmd; by default 4."""
    teacher_guidance: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = setting(None, low=0)
    """Guidance of the teacher, which the student learns to do without; 1 is none. By default what the teacher is drawn
    with: by its run, or its family."""
    feature_weight: float = setting(0.0, low=0)
    """Weight of matching the teacher's features in the middle of the network, through a learned projection; for
    velocity."""
    fake_updates: int = setting(5, low=1)
    """dmd: steps of the second network for each step of the student; --n_steps counts both."""
    fake_lr: float = setting(0.0, low=0)
    """dmd: learning rate of the second network; 0 is --lr."""

    # -- what the teacher does
    teacher_steps: int = setting(50, low=1)
    """Steps of the teacher's trajectory from noise to an image, for its states and for its samples."""
    teacher_states: int = setting(8, low=1)
    """States kept of each trajectory, or drawn for each image, for velocity and trajectory."""
    trajectories: int = setting(0, low=0)
    """Ways drawn for a list of prompts, from different noise; 0 is one a prompt."""
    teacher_cache: bool = setting(True)
    """Ask the teacher once, before training, and keep what it says; --no_teacher_cache asks it at every step, about
    images."""
    teacher_dtype: Literal["", "fp32", "bf16", "fp16"] = setting("")
    """Precision of the teacher's forwards, and of a pipeline's weights; by default --dtype."""
    teacher_placement: TeacherPlacement = free_setting("gpu")
    """Where the teacher is: whole on every rank's GPU, in shards over the ranks (fsdp), layer by layer over a rank's
    spare GPUs (layers), or in host memory, computed there (cpu)."""
    teacher_on_cpu: bool = free_setting(False)
    """The same as --teacher_placement cpu."""
    teacher_batch_size: int = free_setting(0, low=0)
    """Rows of one forward of the teacher; 0 takes the student's batch at once, and of what it is asked once on a CPU
    8."""
    teacher_samples: bool = free_setting(True)
    """Draw the teacher's image for each prompt once, to stand beside the student's."""

    # -- what is written when
    num_epochs: int = setting(0, change="grows", low=0)
    """Passes over the data, each of whole steps and one at least; instead of --n_steps. Of dmd the second network's
    steps count too."""
    sample_interval: int = free_setting(1, low=1)
    """Epochs between samples and checkpoints, with --num_epochs or --sample_names rank."""
    warmup_steps: int = setting(20, low=0)
    """Steps over which the learning rate rises from zero: a student that begins as its teacher has something to
    lose."""
    caption_dropout: float = setting(0.0, low=0, high=1)
    """Share of rows that are learned without their caption; only a student that is to be drawn with guidance needs it.
    Of what is kept of a teacher it is drawn by item, once for the whole training: prompts need --trajectories."""

    # -- of a training that has no teacher
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
    """A student is measured against its teacher."""

    CONFLICTS = (
        Conflict(
            "", "a model to learn from", "give the folder of a pipeline or of a run", without="teacher_path model_path"
        ),
        Conflict(
            "model_path teacher_path",
            "one of the two: both name the teacher",
            when=lambda config: bool(config.model_path) and config.teacher_path not in ("", config.model_path),
        ),
        Conflict(
            "",
            "prompts or captioned images",
            "give a text file with one prompt a line, or `streets`",
            without="data_path",
        ),
        *(Conflict(name, f"none with distill: {why}") for name, why in NOT_FOR_STUDENTS.items()),
        SIZE_CONFLICT,
        Conflict(
            "student_steps objective",
            "an objective of few steps",
            "add --objective trajectory (or dmd); by velocity a student draws in as many steps as its teacher",
            when=lambda config: config.objective == "velocity" and config.student_steps is not None,
        ),
        Conflict("n_steps num_epochs", "one of them: each says when it ends", "leave one out"),
        Conflict("feature_weight objective", "--objective velocity", "leave one of them out"),
        Conflict(
            "guidance_scale objective",
            "none: the teacher's guidance is in the student, which is drawn as it was trained",
            "leave it out; --teacher_guidance is the teacher's",
            when=lambda config: config.objective != "velocity" and config.guidance_scale not in (None, 1.0),
        ),
        Conflict(
            "feature_weight teacher_batch_size",
            "features of a whole batch at once",
            "use a smaller --batch_size with --accumulate instead",
        ),
        Conflict(
            "eval_steps student_steps",
            "the steps that the student learns to draw in",
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
            "teacher targets that are kept: the end of a trajectory takes the teacher many steps",
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
            "a teacher that takes at least as many steps as its student",
            lambda config: f"use --teacher_steps {8 * config.student_steps} or more",
            when=lambda config: config.objective == "trajectory" and config.teacher_steps < config.student_steps,
        ),
    )
