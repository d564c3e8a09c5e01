"""`halation train`: the only place that sees a whole training config; it builds the parts and runs the loop over them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halation.config import (
    NON_NEGATIVE,
    POSITIVE,
    RENAMED_SETTINGS,
    SEED_RANGE,
    as_json,
    check_ranges,
    fixed_settings,
    to_current_names,
)
from halation.distributed import launcher
from halation.distributed.engines import deepspeed_config
from halation.errors import InputError
from halation.evaluation.config import Metric
from halation.models.fingerprint import fingerprint
from halation.prompt_files import collect_prompts
from halation.runs import lock
from halation.runs import run_folder as runs
from halation.runs.lock import FolderMonitor
from halation.runs.run_folder import RunFolder
from halation.training import pipeline_finetuning
from halation.training.config import TrainConfig
from halation.training.trackers import select_trackers

if TYPE_CHECKING:
    from halation.training.session import TrainingSession
    from halation.training.training_task import TaskFactory

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=TrainConfig)
OpenRecord = Callable[[Any, str], bool]


def run(config: TrainConfig) -> int:
    """Train, on ranks that are already there or on ranks started here. Exit code 0 when the last step is saved."""
    return launch(resolve_config(config), "train", open_record, run_rank)


def launch(config: TrainConfig, job: str, open_record: OpenRecord, run_rank: Callable[..., None]) -> int:
    """Run a job whose ranks hold sessions; `open_record` opens its record, `run_rank` is one of its ranks."""
    if launcher.is_launched():
        run_rank(config)
        return 0
    devices = launcher.select_devices(config.nproc, config.gpu_ids, config.oversubscribe)
    folder = RunFolder(config.output_dir)
    runs.make_folder(folder.folder)
    with (
        lock.lock_folder(folder.folder, job) as monitor,
        runs.restore_record_on_failure(folder, config.accept_changes),
    ):
        runs.remove_temporaries(folder.folder)
        open_record(config, devices[0])
        if len(devices) == 1:
            os.environ[launcher.DEVICE_ENV] = devices[0]
            run_rank(config, monitor)
        else:
            launcher.Launcher(
                run_rank.__module__, as_json(config), devices, config.max_restarts, folder.folder, monitor
            ).run()
    return 0


def read_config(path: Path, kind: type[ConfigT] = TrainConfig) -> ConfigT:  # type: ignore[assignment]
    """The config the launcher left for its ranks."""
    values = to_current_names(json.loads(path.read_text()))
    for field in dataclasses.fields(kind):
        if isinstance(values[field.name], list):
            values[field.name] = tuple(values[field.name])
    return kind(**values | {"output_dir": Path(values["output_dir"])})


def resolve_config(config: TrainConfig) -> TrainConfig:
    """The config with its short forms written out, or an error for what can be refused without looking at the data."""
    config = resolve_common_settings(pipeline_finetuning.resolve_config(config), (64, 64))
    size = config.image_size
    if config.patch_size and (size[0] % config.patch_size or size[1] % config.patch_size) and not config.vae:
        raise InputError(
            f"--image_size {size[0]} {size[1]} with --patch_size {config.patch_size}",
            "a size that the patch divides",
            f"use --image_size {' '.join(str(_round_to_multiple(side, config.patch_size)) for side in size)} or another --patch_size",
        )
    _check_data_exists(config)
    if not config.model_path:
        config = dataclasses.replace(
            config, time_sampling=config.time_sampling or "logit_normal", time_shift=config.time_shift or 1.0
        )
    return config


def resolve_common_settings(config: ConfigT, default_size: tuple[int, int]) -> ConfigT:
    """Size, prompts and metrics written out, and numbers checked: what every config of a session needs."""
    size = tuple(config.image_size) or default_size
    if len(size) == 1:
        size = size * 2
    if len(size) != 2 or min(size) < 1:
        raise InputError(
            f"--image_size {' '.join(map(str, config.image_size))}",
            "height and width",
            "give one or two positive numbers",
        )
    check_ranges(config, RANGES)
    select_trackers(config.report_to, required=config.report_to != TrainConfig.report_to)
    if config.eval_every:
        config = resolve_evaluation(config)
    prompts = tuple(collect_prompts(config.sample_prompts, config.sample_prompts_file or None))
    return dataclasses.replace(config, image_size=size, sample_prompts=prompts, sample_prompts_file="")


def _check_data_exists(config: TrainConfig) -> None:
    table = Path(config.data).suffix.lower() == ".csv" and Path(config.data).is_file()
    if config.data != "streets" and not table and not Path(config.data).is_dir():
        what = "is a file" if Path(config.data).exists() else "does not exist"
        expected = "`streets`, a folder of images or a CSV file of images and captions"
        raise InputError(f"--data {config.data} {what}", expected, "check the path")


def resolve_evaluation(config: ConfigT) -> ConfigT:
    """Extractor and metrics of evaluations written out, and what does not go together refused."""
    from halation.evaluation.command import check_metrics

    streets = config.data == "streets"
    extractor = config.eval_extractor or ("streets" if streets else "inception")
    usual: tuple[Metric, ...] = ("fd", "kid", "prdc", "agreement") if streets else ("fd", "kid", "prdc")
    metrics = tuple(dict.fromkeys(config.eval_metrics or usual))
    check_metrics(metrics, extractor, prefix="eval_")
    return dataclasses.replace(config, eval_extractor=extractor, eval_metrics=metrics)


# Lowest and highest value, both allowed; seeds end where torch would wrap them, less the room for sample_seed + k.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch_size", "accumulate", "log_every", "threads", "n_steps"), (1, math.inf)),
    **dict.fromkeys(("sample_steps", "sample_batch_size", "eval_batch_size"), (1, math.inf)),
    **dict.fromkeys(("eval_every", "eval_steps"), (0, math.inf)),
    **dict.fromkeys(("eval_images", "eval_reference"), (16, 10**6)),
    **dict.fromkeys(
        ("ckpt_every", "ckpt_latest_every", "keep_last", "num_register_tokens", "patch_size"), (0, math.inf)
    ),
    **dict.fromkeys(("validation_images", "warmup_steps", "decay_steps", "num_workers", "max_restarts"), (0, math.inf)),
    **dict.fromkeys(("weight_decay", "grad_clip", "guidance_scale", "sample_timeout_s"), NON_NEGATIVE),
    **dict.fromkeys(("lr", "time_shift", "dist_timeout_s"), POSITIVE),
    **dict.fromkeys(("seed", "sample_seed"), SEED_RANGE),
    "caption_dropout": (0, 1),
    "ema_decay": (0, math.nextafter(1, 0)),
    "betas": (0, math.nextafter(1, 0)),
}


def _round_to_multiple(size: int, patch: int) -> int:
    return max(patch, round(size / patch) * patch)


def open_record(config: TrainConfig, device: str) -> bool:
    """Open the run's record before anything heavy happens, so that changed settings are refused at once."""
    metadata: dict[str, Any] = {
        f"{name} version": version(name) for name in ("torch", "numpy", "diffusers" if config.vae else "safetensors")
    }
    if config.engine == "deepspeed":
        metadata["deepspeed config"] = deepspeed_config.read_config(config.deepspeed_config)
    if config.model_path:
        metadata |= {f"{name} version": version(name) for name in ("diffusers", "transformers")}
        metadata["model of --model_path"] = fingerprint(Path(config.model_path))
    pipeline_finetuning.check_same_base_model(
        config, RunFolder(config.output_dir), metadata.get("model of --model_path", "")
    )
    check_same_engine(config, RunFolder(config.output_dir))
    return runs.create_or_resume_run(
        RunFolder(config.output_dir),
        "train",
        as_json(config),
        fixed_settings(config) | metadata | {"device": device.split(":")[0]},
        config.accept_changes,
        flag_names=RENAMED_SETTINGS,
    )


def check_same_engine(config: TrainConfig, run: RunFolder) -> None:
    """An optimizer's state belongs to the engine that laid it out; weights can go anywhere."""
    if not (run.config.exists() and run.has_checkpoints()):
        return
    recorded = runs.read_record(run)["fixed"]
    known = _engine_name(recorded.get("engine"), recorded.get("zero_stage", 2), recorded.get("deepspeed config") or {})
    asked = _engine_name(config.engine, config.zero_stage, deepspeed_config.read_config(config.deepspeed_config))
    if recorded.get("engine") and known != asked:
        flag = "model_path" if config.model_path else "model"
        shown = recorded["engine"] if known == "ddp" else known  # as it was called: auto and single are kinds of ddp
        raise InputError(
            f"--engine {asked}, but {run.folder} was trained with --engine {shown}",
            "the engine that its optimizer state belongs to",
            f"go on with --engine {shown}, or begin a new run with its weights: --output_dir NEW --{flag} {run.export}",
        )


def _engine_name(engine: Any, zero_stage: int, file: dict[str, Any]) -> str:
    if engine == "deepspeed":
        return f"deepspeed --zero_stage {deepspeed_config.resolve_zero_stage(file, zero_stage)}"
    return "fsdp" if engine == "fsdp" else "ddp"


def run_rank(
    config: TrainConfig,
    monitor: FolderMonitor | None = None,
    job: str = "train",
    open_record: OpenRecord = open_record,
    new_task: TaskFactory | None = None,
) -> None:
    """One rank of the training; under torchrun or srun, rank 0 also holds the folder. `monitor` is of one that is held already."""
    # cuBLAS reads this when it is first used, so it has to be there before torch touches the GPU.
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    launcher.tie_rank_to_launcher()
    from halation.distributed.world import init_world
    from halation.training.session import TrainingSession
    from halation.training.training_task import TrainingTask

    world = init_world(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, config.threads)
    has_lock = monitor is not None or launcher.RENDEZVOUS_ENV in os.environ
    task = new_task or TrainingTask
    with (
        world.close_on_success(),
        _lock_run_folder(config, world, has_lock, job, open_record) as own_monitor,
        TrainingSession(world, config, task, monitor or own_monitor) as session,
    ):
        session.run()
        if world.is_rank_zero:
            _print_summary(config, session)


@contextlib.contextmanager
def _lock_run_folder(
    config: TrainConfig, world: Any, has_lock: bool, job: str = "train", open_record: OpenRecord = open_record
) -> Iterator[FolderMonitor | None]:
    """Hold the folder, on rank 0 of ranks that nobody of ours started; only there is a monitor of it."""
    from halation.distributed.world import run_on_rank_zero

    monitors: list[FolderMonitor] = []
    with contextlib.ExitStack() as stack:

        def open_run(_heartbeat: Any) -> None:
            runs.make_folder(config.output_dir)
            monitors.append(stack.enter_context(lock.lock_folder(config.output_dir, job)))
            stack.enter_context(runs.restore_record_on_failure(RunFolder(config.output_dir), config.accept_changes))
            runs.remove_temporaries(config.output_dir)
            open_record(config, str(world.device))

        if not has_lock:
            run_on_rank_zero(world, "opening the run", open_run, config.dist_timeout_s)
        yield monitors[0] if monitors else None


def _print_summary(config: TrainConfig, session: TrainingSession) -> None:
    """The last words: where everything is."""
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
    sys.stderr.write("\n".join([*lines, f"{'draw more':12}{again}"]) + "\n")
