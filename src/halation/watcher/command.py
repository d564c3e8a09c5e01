"""`halation watch`: validate the settings, prepare the prompts, lock the folder, watch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from halation.config import as_json, check_settings, fixed_settings
from halation.data.image_annotations import read_folder
from halation.data.streets import caption, scene
from halation.distributed import launcher
from halation.distributed.stop_signals import StopSignals
from halation.errors import InputError, format_count
from halation.evaluation.config import EvaluateConfig, check_reference
from halation.models.model_folder import bundled_folder
from halation.progress import WatchProgress
from halation.prompt_files import PromptFile
from halation.runs import lock
from halation.runs import run_folder as runs
from halation.runs.run_folder import RunFolder
from halation.watcher import checkpoint_scores
from halation.watcher.config import WatchConfig
from halation.watcher.watch_loop import IMAGE_SETTINGS_KEY, CheckpointWatcher

IMAGE_SETTINGS = (
    *("watched", "prompts", "num_samples", "seed_start", "num_inference_steps", "guidance_scale", "height", "width"),
    *("batch_size", "dtype", "raw"),
)
"""Settings that decide the images: after a change, incomplete sets of images are removed."""


def run(config: WatchConfig) -> int:
    """Watch until a signal, or with --once until every checkpoint is scored.

    Returns 0 only if no checkpoint failed.
    """
    config = resolve_config(config)
    prompts = load_prompts(config)
    assert config.output_dir is not None
    runs.make_folder(config.output_dir)
    with (
        lock.lock_folder(config.output_dir, "watch") as monitor,
        WatchProgress(config.progress) as progress,
        StopSignals(exit_on_second=False) as signals,
    ):
        prepare_output_dir(config, config.output_dir, prompts)
        prompts_name = f"prompts.{prompts.format}"
        return CheckpointWatcher(config, config.output_dir, progress, signals, prompts_name, monitor).run()


# -- setup


def resolve_config(config: WatchConfig) -> WatchConfig:
    """Check the settings, and fill in those that the watched folder decides."""
    check_settings(config)
    if launcher.is_launched():
        raise InputError(
            "one of several copies of this command (torchrun or srun)",
            "one command, which starts its own processes on every GPU",
            "start it once",
        )
    launcher.select_devices(config.nproc, config.gpu_ids, oversubscribe=False)
    if not config.run.is_dir():
        what = "is a file" if config.run.exists() else "does not exist"
        action = "check it"
        if bundled_folder(config.run):
            what = "is a bundled model, which never changes"
            action = f"score it once: halation evaluate --model_path {config.run} --prompts FILE"
        raise InputError(f"{config.run} {what}", "a Halation run, or a folder of checkpoints", action)
    watched = config.run.resolve()
    output = config.output_dir or config.run / "watch"
    if output.resolve() in (watched, watched / "checkpoints"):
        raise InputError(
            f"--output_dir {output} is the folder that is watched", "a separate folder", "leave --output_dir out"
        )
    reference = config.reference or _find_training_data(watched)
    check_reference(EvaluateConfig(reference=reference), ())
    return dataclasses.replace(config, output_dir=output, reference=reference)


def _find_training_data(watched: Path) -> tuple[str, ...]:
    """The training data of a Halation run, as the default reference."""
    if (watched / runs.CONFIG_FILE).is_file():
        record = runs.read_json_with_digest(watched / runs.CONFIG_FILE)
        settings = (
            record.get("settings") if isinstance(record, dict) and record.get("job") in ("train", "distill") else None
        )
        if isinstance(settings, dict) and isinstance(settings.get("data"), str):
            return (settings["data"],)
    raise InputError(
        "no --reference",
        "real images to compare with",
        "give --reference FOLDER, streets, or saved statistics; only a Halation run records its training data",
    )


def load_prompts(config: WatchConfig) -> PromptFile:
    """Load the prompts, or the captions of the reference; raise now if they are invalid."""
    prompts = (
        PromptFile.from_values(config.prompts)
        if config.prompts
        else PromptFile.from_rows(_read_captions(config), "captions of the reference")
    )
    num = sum(1 for _row in prompts.rows())
    if config.num_samples > num:
        raise InputError(
            f"--num_samples {config.num_samples}, but {prompts.name} has {format_count(num, 'prompt')}",
            f"at most {num}",
            "leave --num_samples out for all",
        )
    return prompts


def _read_captions(config: WatchConfig) -> list[str]:
    reference = config.reference[0]
    if reference == "streets":
        return [caption(scene("heldout", index)) for index in range(config.num_samples or config.num_reference)]
    why = "it is not a folder"
    if Path(reference).is_dir():
        try:
            listing = read_folder(Path(reference))
            return [entry.caption for entry in listing.validation or listing.train]
        except InputError as error:
            why = error.found
    raise InputError(
        f"no --prompts, and no captions in the reference {reference} ({why})",
        "prompts to generate",
        "give --prompts FILE (csv, txt, jsonl, parquet), or a reference with captions",
    )


def prepare_output_dir(config: WatchConfig, folder: Path, prompts: PromptFile) -> None:
    """Create or resume the folder; scores of other settings must not be mixed."""
    record = RunFolder(folder)
    previous = runs.read_record(record)["fixed"] if record.config.exists() else {}
    # A relative path, so that a run can be moved together with its watch.
    watched = os.path.relpath(config.run.resolve(), folder.resolve())
    settings = {"watched": watched, "prompts": prompts.sha256, **fixed_settings(config)}
    has_scores = bool(checkpoint_scores.read_scores(folder))
    runs.create_or_resume_run(record, "watch", as_json(config), settings, config.accept_changes, has_scores)
    if previous and any(previous.get(name) != settings[name] for name in IMAGE_SETTINGS):
        for images_folder in folder.glob("step_*/pictures"):
            if not (images_folder.parent / checkpoint_scores.EVALUATION_FILE).exists():
                runs.remove_folder(images_folder)
        kept = runs.read_record(record)
        if kept["fixed"].pop(IMAGE_SETTINGS_KEY, None) is not None:  # of the settings before the change
            runs.write_json_with_digest(record.config, kept)
    runs.write_atomic(folder / f"prompts.{prompts.format}", prompts.data)
