"""Settings of `halation distill`: those of a training, with a teacher instead of a model to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from halation.config import free_setting, setting
from halation.training.config import TrainConfig

ObjectiveName = Literal["velocity", "trajectory", "dmd"]
TeacherPlacement = Literal["gpu", "fsdp", "layers", "cpu"]
UnusedText = Annotated[str, tyro.conf.Suppress]
UnusedNumber = Annotated[int, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TrainConfig):
    """Distil a teacher into a smaller student, or into one that draws in few steps, on every rank.

    The same command again goes on where the last one stopped.
    """

    # -- teacher and student
    output_dir: Path = free_setting(Path("runs/distill"))
    """Folder of the run: config, metrics, checkpoints, samples, logs, export."""
    teacher_path: str = free_setting("")
    """Who is learned from: folder or hub name of a diffusers pipeline (Wan, HunyuanDiT, PixArt, SD3, FLUX), a run, checkpoint or
    export of a DiT of Halation, or one of the package, such as `streets-64`."""
    model_path: str = free_setting("")
    """The same as --teacher_path."""
    student_config: str = free_setting("")
    """JSON file of the student's shape: family, width, depth, heads, ...; null or left out means "as the teacher's". Without a file the
    student has the teacher's shape."""
    student_init: Literal["teacher", "random"] = setting("teacher")
    """First weights: the teacher's, with layers left out and widths cut where the student is smaller, or random ones."""
    data_path: Annotated[str, tyro.conf.arg(aliases=["--data"])] = setting("")
    """Prompts (a TXT file with one a line, CSV, JSONL, Parquet), or captioned images: `streets`, a folder, or a CSV with a column of images."""
    objective: ObjectiveName = setting("velocity")
    """velocity: the teacher's prediction at every noise level. trajectory: the end points of the teacher's trajectory, in --student_steps steps.
    dmd: the teacher's distribution, in --student_steps steps, with a second network that learns the student's."""
    student_steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = setting(None)
    """Steps the student draws in, for trajectory and dmd; by default 4."""
    teacher_guidance: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = setting(None)
    """Guidance of the teacher, which the student learns to do without; 1 is none. By default what the teacher is drawn with: by its run, or its
    family."""
    feature_weight: float = setting(0.0)
    """Weight of matching the teacher's features in the middle of the network, through a learned projection; for velocity."""
    fake_updates: int = setting(5)
    """dmd: steps of the second network for each step of the student; --n_steps counts both."""
    fake_lr: float = setting(0.0)
    """dmd: learning rate of the second network; 0 is --lr."""

    # -- what the teacher does
    teacher_steps: int = setting(50)
    """Steps of the teacher's trajectory from noise to an image, for its states and for its samples."""
    teacher_states: int = setting(8)
    """States kept of each trajectory, or drawn for each image, for velocity and trajectory."""
    trajectories: int = setting(0)
    """Ways drawn for a list of prompts, from different noise; 0 is one a prompt."""
    teacher_cache: bool = setting(True)
    """Ask the teacher once, before training, and keep what it says; --no_teacher_cache asks it at every step, about images."""
    teacher_dtype: Literal["", "fp32", "bf16", "fp16"] = setting("")
    """Precision of the teacher's forwards, and of a pipeline's weights; by default --dtype."""
    teacher_placement: TeacherPlacement = free_setting("gpu")
    """Where the teacher is: whole on every rank's GPU, in shards over the ranks (fsdp), layer by layer over a rank's spare GPUs
    (layers), or in host memory, computed there (cpu)."""
    teacher_on_cpu: bool = free_setting(False)
    """The same as --teacher_placement cpu."""
    teacher_batch_size: int = free_setting(0)
    """Rows of one forward of the teacher; 0 takes the student's batch at once, and of what it is asked once on a CPU 8."""
    teacher_samples: bool = free_setting(True)
    """Draw the teacher's image for each prompt once, to stand beside the student's."""

    # -- what is written when
    num_epochs: int = setting(0, change="grows")
    """Passes over the data, each of whole steps and one at least; instead of --n_steps. Of dmd the second network's steps count too."""
    sample_interval: int = free_setting(1)
    """Epochs between samples and checkpoints, with --num_epochs or --sample_names rank."""
    warmup_steps: int = setting(20)
    """Steps over which the learning rate rises from zero: a student that begins as its teacher has something to lose."""
    caption_dropout: float = setting(0.0)
    """Share of rows that are learned without their caption; only a student that is to be drawn with guidance needs it. Of what is kept
    of a teacher it is drawn by item, once for the whole training: prompts need --trajectories."""

    # -- of a training that has no teacher
    data: UnusedText = setting("")
    """Filled from --data_path."""
    model: UnusedText = setting("")
    """The student comes from the teacher."""
    vae: UnusedText = setting("")
    """The teacher's."""
    patch_size: UnusedNumber = setting(0)
    """In --student_config."""
    num_register_tokens: UnusedNumber = setting(0)
    """The teacher's."""
    validation_images: UnusedNumber = setting(0)
    """A student is measured against its teacher."""
