"""`halation distill`: a training session whose task is distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import Conflict, check_settings
from halation.data.image_annotations import has_file_column, is_table
from halation.data.prompt_dataset import PromptDataset
from halation.distillation.config import DistillConfig
from halation.errors import InputError
from halation.models import model_folder
from halation.models.model_path_resolver import read_export_settings, resolve_pipeline_folder
from halation.models.pipelines import call_settings
from halation.models.students.config import StudentConfig
from halation.prompt_files import FORMATS
from halation.runs.run_folder import RunFolder
from halation.training import command as train
from halation.training.config import ONLY_FOR_PIPELINES

if TYPE_CHECKING:
    from halation.distillation.distillation_task import DistillationTask
    from halation.distributed.world import World

DEFAULT_STUDENT_STEPS = 4


def run(config: DistillConfig) -> int:
    """Distil, as a rank of another launcher or on ranks started here.

    Returns exit code 0 when the last step is saved.
    """
    return train.launch(resolve_config(config), "distill", run_rank, open_record, new_task)


def new_task(world: World, config: DistillConfig, run: RunFolder) -> DistillationTask:
    """Create the task; imported here because the parent of the ranks must not import torch."""
    from halation.distillation.distillation_task import DistillationTask

    return DistillationTask(world, config, run, has_images=has_images(config.data_path))


def run_rank(config: DistillConfig) -> None:
    """Run one rank that the launcher started."""
    train.run_rank(config, None, "distill", open_record, new_task)


def resolve_config(config: DistillConfig) -> DistillConfig:
    """Resolve short forms and defaults, and check settings before opening teacher and data."""
    if config.objective != "velocity" and config.student_steps is None:
        config = dataclasses.replace(config, student_steps=DEFAULT_STUDENT_STEPS)
    check_settings(config)
    if config.data_path != "streets" and not Path(config.data_path).exists():
        raise InputError(
            f"--data_path {config.data_path} does not exist", "a file of prompts or a folder of images", "check it"
        )
    StudentConfig.read(config.student_config)
    if not has_images(config.data_path):
        _check_prompt_data(config)
    config = dataclasses.replace(
        config,
        # From here on `model_path` is the folder of the teacher's pipeline, if it is one.
        teacher_path=config.teacher_path or config.model_path,
        model_path="",
        data=config.data_path,
        teacher_placement="cpu" if config.teacher_on_cpu else config.teacher_placement,
        teacher_on_cpu=False,
        teacher_dtype=config.teacher_dtype or config.dtype,
    )
    folder = model_folder.resolve_model_path(config.teacher_path)
    run = (
        model_folder.find_fine_tuned_run(folder)
        if folder.is_dir() and not (folder / "model_index.json").is_file()
        else None
    )
    if run is not None:
        raise model_folder.fine_tuned_error("teacher_path", folder, run)
    if (folder / "model_index.json").is_file() or not folder.is_dir():
        return _resolve_for_pipeline(config)
    return _resolve_for_dit(config, folder)


def has_images(data: str) -> bool:
    """Return True if the data are images, not prompts; a CSV file needs a column for them."""
    path = Path(data)
    if data == "streets" or path.is_dir():
        return True
    if is_table(path):
        return path.is_file() and has_file_column(path)
    if path.suffix.lower().removeprefix(".") in FORMATS:
        return False
    if path.is_file():
        raise InputError(
            f"{data} is a file that ends with {path.suffix!r}",
            f"prompts in a file that ends with {', '.join(f'.{name}' for name in FORMATS)}, or a folder of images",
            "rename the file to match its format",
        )
    return True


def _check_prompt_data(config: DistillConfig) -> None:
    """Check the settings for a list of prompts, where the teacher's trajectories are cached."""
    if config.eval_every:
        raise InputError(
            f"--eval_every with the prompts of {config.data_path}",
            "images to compare with",
            "give images as --data_path, or score the export with `halation evaluate --reference`",
        )
    if config.objective == "dmd":
        return
    if config.objective == "velocity" and config.teacher_steps < 2:
        raise InputError(
            f"--teacher_steps {config.teacher_steps} with a list of prompts",
            "a trajectory of at least 2 steps: with one, its only state is pure noise",
            f"use --teacher_steps {DistillConfig().teacher_steps}",
        )
    if not config.teacher_cache:
        raise InputError(
            "--no_teacher_cache with a list of prompts",
            "a cache of teacher targets: at the same states the teacher's predictions do not change",
            "leave --no_teacher_cache out",
        )
    if config.caption_dropout:
        num = len(PromptDataset(config.data_path, 1, 1, max_prompts=config.max_images).texts)
        if config.trajectories < 2 * num:
            raise InputError(
                f"--caption_dropout {config.caption_dropout:g} with {max(config.trajectories, num)} trajectories of "
                f"{num} prompts",
                "at least 2 trajectories per prompt: each is used either with or without its prompt, in every epoch",
                f"use --trajectories {10 * num}, or leave --caption_dropout out",
            )


def _resolve_for_pipeline(config: DistillConfig) -> DistillConfig:
    train.check_peft_installed(config)
    folder = resolve_pipeline_folder(config.teacher_path, flag="teacher_path")
    output = config.output_dir.resolve()
    if output == folder.resolve() or folder.resolve() in output.parents:
        raise InputError(
            f"--output_dir {config.output_dir} is inside the teacher's folder {folder}",
            "a folder outside of it, because its files identify the teacher",
            "choose another folder",
        )
    sampling = read_export_settings(folder)
    config = _apply_teacher_guidance(config, folder, sampling)
    size = (sampling.get("height", 1), sampling.get("width", 1))
    if not sampling and not config.image_size:
        size = train.native_size(folder)
    config = train.resolve_common_settings(config, size)
    multiple = call_settings.read_call_settings(folder).size_multiple
    call_settings.check_size_multiple(
        folder.name, multiple, config.image_size[0], config.image_size[1], flag="image_size"
    )
    return dataclasses.replace(config, model_path=str(folder.resolve()), teacher_path=str(folder.resolve()))


def _resolve_for_dit(config: DistillConfig, folder: Path) -> DistillConfig:
    """Take size, image space and time shift from the DiT, which supports only its own."""
    from halation.models.checkpoint_loading import find_checkpoint, read_sampling_settings, read_space_description

    checkpoint = find_checkpoint(folder)
    sampling, space = read_sampling_settings(checkpoint), read_space_description(checkpoint)
    for name in ONLY_FOR_PIPELINES:
        Conflict(name, "a diffusers pipeline as the teacher, not a DiT of Halation").check(config)
    size = (int(sampling["height"]), int(sampling["width"]))
    config = _apply_teacher_guidance(
        config, folder, {"guidance_scale": sampling["guidance_scale"], **model_folder.distillation_settings(sampling)}
    )
    config = train.resolve_common_settings(config, size)
    if config.image_size != size:
        raise InputError(
            f"--image_size {' '.join(map(str, config.image_size))}",
            f"{size[0]} {size[1]}, the size of {folder}",
            "leave it out",
        )
    return dataclasses.replace(
        config,
        # The checkpoint, not its run: a run that is still training would give other ranks, and a resumed
        # distillation, another teacher.
        teacher_path=model_folder.portable_name(checkpoint.resolve()),
        vae=str(space.get("path", "")),
        time_sampling=config.time_sampling or "logit_normal",
        time_shift=config.time_shift or float(sampling.get("time_shift", 1.0)),
    )


def _apply_teacher_guidance(config: DistillConfig, folder: Path, sampling: Mapping[str, Any]) -> DistillConfig:
    """Default to the guidance scale that the teacher was saved with; reject few-step students."""
    if sampling.get("distillation_objective"):
        raise InputError(
            f"{folder} is a {sampling['steps']}-step student: it is undefined between its steps",
            "a teacher that is defined at every noise level",
            "give its own teacher, or a student of --objective velocity",
        )
    if config.teacher_guidance is None and "guidance_scale" in sampling:
        return dataclasses.replace(config, teacher_guidance=float(sampling["guidance_scale"]))
    return config


def open_record(config: DistillConfig, device: str) -> bool:
    """Open the run's record before any slow work, so that changed settings fail early."""
    if config.model_path:
        libraries: tuple[str, ...] = ("torch", "numpy", "diffusers", "transformers")
        teacher = model_folder.fingerprint(Path(config.model_path))
    else:
        from halation.models.checkpoint_loading import find_checkpoint, weights_digest

        libraries = ("torch", "numpy", "safetensors")
        teacher = weights_digest(find_checkpoint(Path(config.teacher_path)), raw=False)
    facts = {"teacher": teacher, "student config": StudentConfig.read(config.student_config).as_json()}
    return train.open_session_record(config, "distill", device, libraries, facts)
