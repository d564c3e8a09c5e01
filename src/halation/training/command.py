"""`halation train`: resolve the config, lock the folder, start the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halation.config import as_json, check_settings, fixed_settings
from halation.distributed import launcher
from halation.distributed.engines import deepspeed_config
from halation.errors import InputError, install_command
from halation.evaluation.config import Metric, fid_conflict
from halation.models import model_folder
from halation.models.model_folder import HubOptions, find_fine_tuned_run, fine_tuned_error, fingerprint, read_hub_fact
from halation.models.model_path_resolver import resolve_pipeline_folder
from halation.models.pipelines.call_settings import check_size_multiple, read_call_settings, read_downsampling
from halation.prompt_files import collect_prompts
from halation.runs import lock
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.runs.run_folder import RunFolder
from halation.training.config import ConfigT, TrainConfig, fill_dit_defaults, missing_settings
from halation.training.reporting import select_trackers

if TYPE_CHECKING:
    from halation.distributed.world import World
    from halation.training.session import TrainingSession
    from halation.training.training_task import TaskFactory, TrainingTask

log = logging.getLogger(__name__)

OpenRecord = Callable[[Any, str], bool]


def run(config: TrainConfig) -> int:
    """Train, as a rank of another launcher or on ranks started here.

    Returns exit code 0 when the last step is saved.
    """
    return launch(resolve_config(config), "train", run_rank, open_record, new_task)


def launch(
    config: ConfigT, job: str, started_rank: Callable[[ConfigT], None], open_record: OpenRecord, new_task: TaskFactory
) -> int:
    """Run a job on all ranks. Ranks that are started here call `started_rank`."""
    if launcher.is_launched():
        run_rank(config, None, job, open_record, new_task)
        return 0
    devices = launcher.select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    with _open_run(config, job, open_record, devices[0]) as monitor:
        if len(devices) == 1:
            os.environ[launcher.DEVICE_ENV] = devices[0]
            run_rank(config, monitor, job, open_record, new_task)
        else:
            launcher.Launcher(started_rank, config, devices, config.max_restarts, config.output_dir, monitor).run()
    return 0


@contextlib.contextmanager
def _open_run(config: TrainConfig, job: str, open_record: OpenRecord, device: str) -> Iterator[FolderMonitor]:
    """Lock the run folder and open its record."""
    run = RunFolder(config.output_dir)
    runs.make_folder(run.folder)
    with lock.lock_folder(run.folder, job) as monitor, runs.restore_record_on_failure(run, config.accept_changes):
        runs.remove_temporaries(run.folder)
        open_record(config, device)
        yield monitor


def resolve_config(config: TrainConfig) -> TrainConfig:
    """Resolve defaults in the config, and check the settings that do not depend on the data."""
    check_settings(config)
    if config.model_path:
        check_peft_installed(config)
        folder = resolve_pipeline_folder(config.model_path, hub=HubOptions.of(config))
        size = config.image_size or native_size(folder)
        multiple = read_call_settings(folder).size_multiple
        check_size_multiple(folder.name, multiple, size[0], size[-1], flag="image_size")
        config = dataclasses.replace(config, model_path=str(folder.resolve()), image_size=size)
    else:
        _check_not_pipeline(config.model)
    config = resolve_common_settings(config, (64, 64))
    if not config.model_path:
        _check_image_size(config)
    data = Path(config.data)
    if config.data != "streets" and not data.is_dir() and not (data.suffix.lower() == ".csv" and data.is_file()):
        what = "is a file" if data.exists() else "does not exist"
        expected = "`streets`, a folder of images or a CSV file of images and captions"
        raise InputError(f"--data {data} {what}", expected, "check the path")
    if not config.model_path:
        config = dataclasses.replace(
            fill_dit_defaults(config),
            time_sampling=config.time_sampling or "logit_normal",
            time_shift=config.time_shift or 1.0,
        )
    return config


def _check_image_size(config: TrainConfig) -> None:
    """Raise if the patches, and the autoencoder, do not divide the size of a new DiT."""
    height, width = config.image_size
    folder = model_folder.resolve_model_path(config.model)
    if own := model_folder.read_export_size(folder):
        if own != (height, width):
            raise InputError(
                f"--image_size {height} {width} with --model {config.model}",
                f"{own[0]} {own[1]}, the only size of this model",
                f"give --image_size {own[0]} {own[1]}, or the name of a size (such as base) for a new model",
            )
        return
    if folder.is_dir() and not config.patch_size:  # a checkpoint has its own patches
        return
    factor = read_downsampling(Path(config.vae)) if config.vae else 1
    if factor:
        patch = config.patch_size or model_folder.default_patch_size(height, factor)
        needs = f"patches of {patch} {'latents' if config.vae else 'pixels'}"
        check_size_multiple("this model", patch * factor, height, width, flag="image_size", needs=needs)


def check_peft_installed(config: TrainConfig) -> None:
    """Raise if adapters are requested but peft is missing, before a pipeline is opened."""
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise InputError(
            f"--lora_rank {config.lora_rank}, but peft is not installed",
            "the package peft",
            install_command("train", "peft"),
        )


def _check_not_pipeline(model: str) -> None:
    """Raise if `--model` is a pipeline or a run that fine-tuned one, not a DiT of Halation."""
    folder = Path(model)
    is_pipeline = (folder / "model_index.json").is_file()
    run = find_fine_tuned_run(folder) if folder.is_dir() and not is_pipeline else None
    if not is_pipeline and run is None:
        return
    from halation.models.dit.network import SIZES

    if model in SIZES:  # a folder that happens to have this name
        return
    if run is not None:
        raise fine_tuned_error("model", folder, run)
    raise InputError(
        f"--model {model} is a diffusers pipeline", "a DiT of Halation", f"fine-tune it with --model_path {model}"
    )


def check_same_base_model(config: TrainConfig, run: RunFolder, model: str) -> None:
    """Raise if a resumed run has another base model; `model` is the new one's fingerprint."""
    if not (run.config.exists() and run.has_checkpoints()):
        return
    record = runs.read_record(run)
    base, known = record.get("settings", {}).get("model_path"), record["fixed"].get("model of --model_path")
    expected, elsewhere = "the model that this run was started with", "or choose another --output_dir"
    if base and not config.model_path:
        found = f"no --model_path, but {run.folder} was fine-tuned from {base}"
        raise InputError(found, expected, f"give --model_path {base}, {elsewhere}")
    if config.model_path and not base:
        found = f"--model_path {config.model_path}, but {run.folder} trains a DiT of Halation"
        raise InputError(found, expected, f"leave --model_path out, {elsewhere}")
    if base and known and known != model and not config.accept_changes:
        if Path(base) == Path(config.model_path):
            found = f"the files in {base} have changed since {run.folder} was fine-tuned from it"
            raise InputError(found, expected, f"restore them, {elsewhere}")
        found = f"--model_path {config.model_path} is another model than {base}, which {run.folder} was fine-tuned from"
        raise InputError(found, expected, f"give --model_path {base} (or its new location), {elsewhere}")


def native_size(folder: Path) -> tuple[int, int]:
    """Default image size of a pipeline: that of its call, or of its configs."""
    size = read_call_settings(folder).size
    if size is None:
        raise InputError(
            f"cannot find the native image size of {folder}",
            "a pipeline with model_index.json, transformer/config.json and vae/config.json",
            "give --image_size, or check --model_path",
        )
    return size


def resolve_common_settings(config: ConfigT, default_size: tuple[int, int]) -> ConfigT:
    """Resolve size, prompts and metrics, which `train` and `distill` share."""
    size = config.image_size or default_size
    select_trackers(config.report_to, required=config.report_to != TrainConfig.report_to)
    if config.eval_every:
        streets = config.data == "streets"
        usual: tuple[Metric, ...] = ("fd", "kid", "prdc", "agreement") if streets else ("fd", "kid", "prdc")
        config = dataclasses.replace(
            config,
            eval_extractor=config.eval_extractor or ("streets" if streets else "inception"),
            eval_metrics=tuple(dict.fromkeys(config.eval_metrics or usual)),
        )
        fid_conflict("eval_").check(config)
    prompts, rows = collect_prompts(config.sample_prompts, config.sample_rows, config.sample_prompts_file or None)
    size = tuple(size) * 2 if len(size) == 1 else tuple(size)
    return dataclasses.replace(
        config, image_size=size, sample_prompts=prompts, sample_rows=rows, sample_prompts_file=""
    )


def open_record(config: TrainConfig, device: str) -> bool:
    """Open the run's record before any slow work, so that changed settings fail early."""
    libraries = ["torch", "numpy", "diffusers" if config.vae else "safetensors"]
    facts: dict[str, Any] = {}
    if config.model_path:
        libraries += ["diffusers", "transformers"]
        facts["model of --model_path"] = fingerprint(Path(config.model_path))
    check_same_base_model(config, RunFolder(config.output_dir), facts.get("model of --model_path", ""))
    return open_session_record(config, "train", device, libraries, facts)


def open_session_record(
    config: TrainConfig, job: str, device: str, libraries: Sequence[str], facts: dict[str, Any]
) -> bool:
    """Create or resume the record of a run. Like its fixed settings, `facts` must not change."""
    run = RunFolder(config.output_dir)
    check_same_engine(config, run)
    facts = {f"{name} version": version(name) for name in libraries} | facts
    if config.engine == "deepspeed":
        facts["deepspeed config"] = deepspeed_config.read_config(config.deepspeed_config)
    missing = missing_settings(config)  # recorded by the ranks, which know model, data and memory
    fixed = {name: value for name, value in fixed_settings(config).items() if name not in missing}
    fixed |= facts | {"device": device.split(":")[0]}
    settings = as_json(config)
    if settings.get("num_epochs"):
        settings["n_steps"] = None  # the task records it once the data is open
    is_new = runs.create_or_resume_run(run, job, settings, fixed, config.accept_changes, missing=missing)
    if hub_fact := read_hub_fact(config.model_path):
        runs.record_facts(run, hub_fact, config.accept_changes)
    return is_new


def check_same_engine(config: TrainConfig, run: RunFolder) -> None:
    """Raise if a resumed run uses another engine, whose optimizer state has another layout."""
    if not (run.config.exists() and run.has_checkpoints()):
        return
    recorded = runs.read_record(run)["fixed"]
    known = _engine_name(recorded.get("engine"), recorded.get("zero_stage", 2), recorded.get("deepspeed config") or {})
    asked = _engine_name(config.engine, config.zero_stage, deepspeed_config.read_config(config.deepspeed_config))
    if recorded.get("engine") and known != asked:
        flag = "model_path" if config.model_path else "model"
        shown = recorded["engine"] if known == "ddp" else known  # as given: auto and single count as ddp
        raise InputError(
            f"--engine {asked}, but {run.folder} was trained with --engine {shown}",
            "the engine that its optimizer state was saved with",
            f"use --engine {shown}, or start a new run from its weights: --output_dir NEW --{flag} {run.export}",
        )


def _engine_name(engine: Any, zero_stage: int, file: dict[str, Any]) -> str:
    if engine == "deepspeed":
        return f"deepspeed --zero_stage {deepspeed_config.resolve_zero_stage(file, zero_stage)}"
    return "fsdp" if engine == "fsdp" else "ddp"


def new_task(world: World, config: TrainConfig, run: RunFolder) -> TrainingTask:
    """Create the task; imported here because the parent of the ranks must not import torch."""
    from halation.training.training_task import TrainingTask

    return TrainingTask(world, config, run)


def run_rank(
    config: TrainConfig,
    monitor: FolderMonitor | None = None,
    job: str = "train",
    open_record: OpenRecord = open_record,
    new_task: TaskFactory = new_task,
) -> None:
    """Run one rank of the training; under torchrun or srun, rank 0 also locks the folder.

    `monitor` is given if the folder is already locked.
    """
    # cuBLAS reads this on first use, so it must be set before torch touches the GPU.
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    launcher.tie_rank_to_launcher()
    from halation.distributed.world import init_world
    from halation.training.session import TrainingSession

    world = init_world(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, config.threads)
    with world.close_on_success(), contextlib.ExitStack() as stack:
        if monitor is None and launcher.RENDEZVOUS_ENV not in os.environ:
            monitor = stack.enter_context(open_run_on_rank_zero(config, world, job, open_record))
        session = stack.enter_context(TrainingSession(world, config, new_task, monitor))
        session.prepare()
        session.run()
        if world.is_rank_zero:
            _print_summary(config, session)


@contextlib.contextmanager
def open_run_on_rank_zero(
    config: TrainConfig, world: World, job: str = "train", open_record: OpenRecord = open_record
) -> Iterator[FolderMonitor | None]:
    """Lock the folder and open its record on rank 0; other ranks get None.

    For ranks that another launcher started.
    """
    from halation.distributed.world import run_on_rank_zero

    monitor: FolderMonitor | None = None
    with contextlib.ExitStack() as stack:

        def open_run(_heartbeat: Any) -> None:
            nonlocal monitor
            monitor = stack.enter_context(_open_run(config, job, open_record, str(world.device)))

        run_on_rank_zero(world, "opening the run", open_run, config.dist_timeout_s)
        yield monitor


def _print_summary(config: TrainConfig, session: TrainingSession) -> None:
    """Print the paths of the results."""
    if config.progress in ("json", "none"):
        return
    folder = config.output_dir
    lines = [f"{'samples':12}{folder / 'samples'}"] if config.sample else []
    lines += [
        f"{'checkpoint':12}{session.newest_checkpoint()}",
        f"{'export':12}{folder / 'export'}",
        f"{'metrics':12}{folder / 'metrics.jsonl'}",
    ]
    again = f"halation sample --checkpoint {shlex.quote(str(folder))} --prompts ..."
    sys.stderr.write("\n".join([*lines, f"{'sample more':12}{again}"]) + "\n")
