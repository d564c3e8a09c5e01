"""`halation distill`: a session like training's, whose task is to learn from a teacher."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halation.config import RENAMED_SETTINGS, as_json, check_ranges, fixed_settings
from halation.data.prompt_dataset import PromptDataset, has_images
from halation.distillation.config import DistillConfig
from halation.distributed.engines import deepspeed_config
from halation.errors import InputError
from halation.models.bundled_models import portable_name, resolve_model_path
from halation.models.fingerprint import fingerprint
from halation.models.model_path_resolver import (
    distillation_settings,
    find_fine_tuned_run,
    fine_tuned_error,
    read_export_settings,
    resolve_pipeline_folder,
)
from halation.models.students.config import StudentConfig
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.runs.run_folder import RunFolder
from halation.training import command as train
from halation.training import pipeline_finetuning

RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("teacher_steps", "teacher_states", "sample_interval"), (1, math.inf)),
    **dict.fromkeys(("trajectories", "teacher_batch_size", "num_epochs", "max_images"), (0, math.inf)),
    **dict.fromkeys(("feature_weight", "fake_lr", "teacher_guidance"), (0, sys.float_info.max)),
    "fake_updates": (1, math.inf),
    "student_steps": (1, 64),
}
DEFAULT_STUDENT_STEPS = 4
UNSUPPORTED_FLAGS = {
    "model": "the student comes from the teacher: --student_config and --student_init",
    "vae": "the teacher brings its own",
    "patch_size": "it is in --student_config",
    "num_register_tokens": "the teacher's are kept",
    "aspect_buckets": "a teacher's states have one shape",
    "validation_images": "a student is measured against its teacher, not against images it never learned from",
}


def run(config: DistillConfig) -> int:
    """Distil, on ranks that are already there or on ranks started here. Exit code 0 when the last step is saved."""
    return train.launch(resolve_config(config), "distill", open_record, run_rank)


def read_config(path: Path) -> DistillConfig:
    """The config the launcher left for its ranks."""
    return train.read_config(path, DistillConfig)


def run_rank(config: DistillConfig, monitor: FolderMonitor | None = None) -> None:
    """One rank of the distillation; `monitor` is of a folder that is held already."""
    from halation.distillation.distillation_task import DistillationTask

    train.run_rank(config, monitor, "distill", open_record, DistillationTask)


def resolve_config(config: DistillConfig) -> DistillConfig:
    """The config with its short forms written out, or an error for what can be refused without opening teacher and data."""
    config = _resolve_teacher_path(config)
    _check_required(config)
    check_ranges(config, RANGES)
    if config.objective != "velocity" and config.student_steps is None:
        config = dataclasses.replace(config, student_steps=DEFAULT_STUDENT_STEPS)
    _check_combinations(config)
    StudentConfig.read(config.student_config)
    if config.eval_every and not has_images(config.data_path):
        raise InputError(
            f"--eval_every with the prompts of {config.data_path}",
            "images to compare with",
            "give images as --data_path, or score the export with `halation evaluate --reference`",
        )
    if config.objective != "dmd" and not has_images(config.data_path):
        _check_prompt_data(config)
    config = dataclasses.replace(
        config,
        data=config.data_path,
        teacher_placement="cpu" if config.teacher_on_cpu else config.teacher_placement,
        teacher_on_cpu=False,
        teacher_dtype=config.teacher_dtype or config.dtype,
    )
    folder = resolve_model_path(config.teacher_path)
    run = find_fine_tuned_run(folder) if folder.is_dir() and not (folder / "model_index.json").is_file() else None
    if run is not None:
        raise fine_tuned_error("teacher_path", folder, run)
    if (folder / "model_index.json").is_file() or not folder.is_dir():
        return _resolve_for_pipeline(config)
    return _resolve_for_dit(config, folder)


def _resolve_teacher_path(config: DistillConfig) -> DistillConfig:
    """The teacher by the flag of its own; from here on `model_path` is the folder of its pipeline, if it is one."""
    if config.model_path and config.teacher_path not in ("", config.model_path):
        raise InputError(
            f"--model_path {config.model_path} with --teacher_path {config.teacher_path}",
            "one of the two: both name the teacher",
            "leave --model_path out",
        )
    return dataclasses.replace(config, teacher_path=config.teacher_path or config.model_path, model_path="")


def _check_required(config: DistillConfig) -> None:
    if not config.teacher_path:
        raise InputError("no --teacher_path", "a model to learn from", "give the folder of a pipeline or of a run")
    if not config.data_path:
        raise InputError(
            "no --data_path", "prompts or captioned images", "give a text file with one prompt a line, or `streets`"
        )
    path = Path(config.data_path)
    if config.data_path != "streets" and not path.exists():
        raise InputError(f"--data_path {path} does not exist", "a file of prompts or a folder of images", "check it")
    usual = DistillConfig()
    for name, why in UNSUPPORTED_FLAGS.items():
        if getattr(config, name) != getattr(usual, name):
            raise InputError(f"--{name} with distill", f"none: {why}", f"leave {name} out")


def _check_combinations(config: DistillConfig) -> None:
    if config.objective == "velocity" and config.student_steps is not None:
        raise InputError(
            f"--student_steps {config.student_steps} with --objective velocity",
            "an objective of few steps",
            "add --objective trajectory (or dmd); by velocity a student draws in as many steps as its teacher",
        )
    if config.num_epochs and config.n_steps != DistillConfig.n_steps:
        raise InputError(
            f"--n_steps {config.n_steps} with --num_epochs {config.num_epochs}",
            "one of them: each says when it ends",
            "leave one out",
        )
    if config.feature_weight and config.objective != "velocity":
        raise InputError(
            f"--feature_weight with --objective {config.objective}", "--objective velocity", "leave one of them out"
        )
    if config.objective != "velocity" and config.guidance_scale not in (None, 1.0):
        raise InputError(
            f"--guidance_scale {config.guidance_scale:g} with --objective {config.objective}",
            "none: the teacher's guidance is in the student, which is drawn as it was trained",
            "leave it out; --teacher_guidance is the teacher's",
        )
    if config.feature_weight and config.teacher_batch_size:
        raise InputError(
            "--feature_weight with --teacher_batch_size",
            "features of a whole batch at once",
            "use a smaller --batch_size with --accumulate instead",
        )
    if config.eval_steps and config.objective != "velocity" and config.eval_steps != config.student_steps:
        raise InputError(
            f"--eval_steps {config.eval_steps} with --student_steps {config.student_steps}",
            "the steps that the student learns to draw in",
            "leave --eval_steps out",
        )
    if config.engine == "deepspeed" and (config.objective == "dmd" or config.feature_weight):
        what = "--objective dmd" if config.objective == "dmd" else "--feature_weight"
        raise InputError(
            f"{what} with --engine deepspeed",
            "an engine that steps two networks in one process",
            "use --engine ddp or fsdp",
        )
    if config.objective == "trajectory" and not config.teacher_cache:
        raise InputError(
            "--no_teacher_cache with --objective trajectory",
            "teacher targets that are kept: the end of a trajectory takes the teacher many steps",
            "leave --no_teacher_cache out",
        )
    steps = config.student_steps or DEFAULT_STUDENT_STEPS
    if config.objective == "trajectory" and config.teacher_states < steps:
        raise InputError(
            f"--teacher_states {config.teacher_states} with --student_steps {steps}",
            "at least one state for each of the student's steps",
            f"use --teacher_states {2 * steps}",
        )
    if config.objective == "trajectory" and config.teacher_steps < steps:
        raise InputError(
            f"--teacher_steps {config.teacher_steps} with --student_steps {steps}",
            "a teacher that takes at least as many steps as its student",
            f"use --teacher_steps {8 * steps} or more",
        )


def _check_prompt_data(config: DistillConfig) -> None:
    """Of prompts the teacher's own trajectories are learned from, and kept."""
    if config.objective == "velocity" and config.teacher_steps < 2:
        raise InputError(
            f"--teacher_steps {config.teacher_steps} with a list of prompts",
            "a trajectory of 2 steps at least: with fewer nothing but pure noise is on it",
            f"use --teacher_steps {DistillConfig().teacher_steps}",
        )
    if not config.teacher_cache:
        raise InputError(
            "--no_teacher_cache with a list of prompts",
            "teacher targets that are kept: asked again at the same states the teacher says the same",
            "leave --no_teacher_cache out",
        )
    if config.caption_dropout:
        num = len(PromptDataset(config.data_path, 1, 1, max_prompts=config.max_images).texts)
        if config.trajectories < 2 * num:
            raise InputError(
                f"--caption_dropout {config.caption_dropout:g} with {max(config.trajectories, num)} trajectories of {num} prompts",
                "2 trajectories a prompt at least: a way is learned with its prompt or without, all through the training",
                f"use --trajectories {10 * num}, or leave --caption_dropout out",
            )


def _resolve_for_pipeline(config: DistillConfig) -> DistillConfig:
    pipeline_finetuning.check_peft_installed(config)
    folder = resolve_pipeline_folder(config.teacher_path, flag="teacher_path")
    output = config.output_dir.resolve()
    if output == folder.resolve() or folder.resolve() in output.parents:
        raise InputError(
            f"--output_dir {config.output_dir} lies in the teacher's folder {folder}",
            "a folder outside of it, since what lies in it is the teacher",
            "choose another",
        )
    sampling = read_export_settings(folder)
    config = _apply_teacher_guidance(config, folder, sampling)
    size = (sampling.get("height", 1), sampling.get("width", 1))
    if not sampling and not config.image_size:
        size = pipeline_finetuning.native_size(folder)
    config = train.resolve_common_settings(config, size)
    return dataclasses.replace(config, model_path=str(folder.resolve()), teacher_path=str(folder.resolve()))


def _resolve_for_dit(config: DistillConfig, folder: Path) -> DistillConfig:
    """A DiT draws one size, in its own space, at its own times."""
    from halation.models.checkpoint_loading import find_checkpoint, read_sampling_settings, read_space_description

    checkpoint = find_checkpoint(folder)
    sampling, space = read_sampling_settings(checkpoint), read_space_description(checkpoint)
    for name in pipeline_finetuning.ONLY_FOR_PIPELINES:
        if getattr(config, name) != getattr(DistillConfig(), name):
            raise InputError(
                f"--{name} with a DiT of Halation as the teacher", "a diffusers pipeline", f"leave --{name} out"
            )
    size = (int(sampling["height"]), int(sampling["width"]))
    config = _apply_teacher_guidance(
        config, folder, {"guidance_scale": sampling["guidance_scale"], **distillation_settings(sampling)}
    )
    config = train.resolve_common_settings(config, size)
    if config.image_size != size:
        raise InputError(
            f"--image_size {' '.join(map(str, config.image_size))}",
            f"{size[0]} {size[1]}, the size that {folder} draws",
            "leave it out",
        )
    return dataclasses.replace(
        config,
        # The checkpoint itself: a run that trains on would give ranks, and the next call, other teachers.
        teacher_path=portable_name(checkpoint.resolve()),
        vae=str(space.get("path", "")),
        time_sampling=config.time_sampling or "logit_normal",
        time_shift=config.time_shift or float(sampling.get("time_shift", 1.0)),
    )


def _apply_teacher_guidance(config: DistillConfig, folder: Path, sampling: Mapping[str, Any]) -> DistillConfig:
    """With the guidance that a teacher of Halation's own is drawn with, which a student has in it already."""
    if sampling.get("distillation_objective"):
        raise InputError(
            f"{folder} was distilled to draw in {sampling['steps']} steps, and between them it has nothing to say",
            "a teacher that answers at every noise level",
            "give its own teacher, or a student of --objective velocity",
        )
    if config.teacher_guidance is None and "guidance_scale" in sampling:
        return dataclasses.replace(config, teacher_guidance=float(sampling["guidance_scale"]))
    return config


def open_record(config: DistillConfig, device: str) -> bool:
    """Open the run's record before anything heavy happens, so that changed settings are refused at once."""
    names = ("torch", "numpy", "diffusers", "transformers") if config.model_path else ("torch", "numpy", "safetensors")
    metadata: dict[str, Any] = {f"{name} version": version(name) for name in names}
    metadata["teacher"] = _teacher_fingerprint(config)
    metadata["student config"] = StudentConfig.read(config.student_config).as_json()
    if config.engine == "deepspeed":
        metadata["deepspeed config"] = deepspeed_config.read_config(config.deepspeed_config)
    run = RunFolder(config.output_dir)
    train.check_same_engine(config, run)
    return runs.create_or_resume_run(
        run,
        "distill",
        as_json(config),
        fixed_settings(config) | metadata | {"device": device.split(":")[0]},
        config.accept_changes,
        flag_names=RENAMED_SETTINGS,
    )


def _teacher_fingerprint(config: DistillConfig) -> str:
    if config.model_path:
        return fingerprint(Path(config.model_path))
    from halation.models.checkpoint_loading import find_checkpoint, weights_digest

    return weights_digest(find_checkpoint(Path(config.teacher_path)), raw=False)
