"""`halation train`: the only place that sees a whole training config; it builds the parts and runs the loop over them."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halation.config import ABOVE_0, AT_LEAST_0, SEEDS, as_json, check_ranges, fixed
from halation.distributed import launcher
from halation.distributed.engines import deepspeed_config
from halation.errors import InputError
from halation.evaluation.config import Metric
from halation.models.fingerprint import fingerprint
from halation.prompts import from_flags
from halation.runs import folder as runs
from halation.runs import lock
from halation.runs.folder import Run
from halation.training import finetune
from halation.training.config import TrainConfig
from halation.training.trackers import check as check_trackers

if TYPE_CHECKING:
    from halation.training.session import Session
    from halation.training.task import NewTask

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=TrainConfig)
Begin = Callable[[Any, str], bool]


def run(config: TrainConfig) -> int:
    """Train, on ranks that are already there or on ranks started here. Exit code 0 when the last step is saved."""
    return start(resolved(config), "train", begin, run_rank)


def start(config: TrainConfig, job: str, begin: Begin, run_rank: Callable[..., None]) -> int:
    """Run a job whose ranks hold sessions; `begin` opens its record, `run_rank` is one of its ranks."""
    if launcher.launched():
        run_rank(config)
        return 0
    places = launcher.devices(config.nproc, config.gpu_ids, config.oversubscribe)
    folder = Run(config.output_dir)
    runs.make_folder(folder.folder)
    with lock.held(folder.folder, job), runs.recorded_once_used(folder, config.accept_changes):
        runs.remove_temporaries(folder.folder)
        begin(config, places[0])
        if len(places) == 1:
            os.environ[launcher.DEVICE] = places[0]
            run_rank(config, held=True)
        else:
            launcher.Launcher(run_rank.__module__, as_json(config), places, config.max_restarts, folder.folder).run()
    return 0


def read_config(path: Path, kind: type[Config] = TrainConfig) -> Config:  # type: ignore[assignment]
    """The config the launcher left for its ranks."""
    values = json.loads(path.read_text())
    for field in dataclasses.fields(kind):
        if isinstance(values[field.name], list):
            values[field.name] = tuple(values[field.name])
    return kind(**values | {"output_dir": Path(values["output_dir"])})


def resolved(config: TrainConfig) -> TrainConfig:
    """The config with its short forms written out, or an error for what can be refused without looking at the data."""
    config = written_out(finetune.resolved(config), (64, 64))
    size = config.image_size
    if config.patch_size and (size[0] % config.patch_size or size[1] % config.patch_size) and not config.vae:
        raise InputError(
            f"--image_size {size[0]} {size[1]} with --patch_size {config.patch_size}",
            "a size that the patch divides",
            f"use --image_size {_rounded(size[0], config.patch_size)} {_rounded(size[1], config.patch_size)} or another --patch_size",
        )
    _refuse_no_data(config)
    if not config.model_path:
        config = dataclasses.replace(
            config, time_sampling=config.time_sampling or "logit_normal", time_shift=config.time_shift or 1.0
        )
    return config


def written_out(config: Config, default_size: tuple[int, int]) -> Config:
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
    check_trackers(config.report_to, asked=config.report_to != TrainConfig.report_to)
    if config.eval_every:
        config = with_evaluation(config)
    prompts = tuple(from_flags(config.sample_prompts, config.sample_prompts_file or None))
    return dataclasses.replace(config, image_size=size, sample_prompts=prompts, sample_prompts_file="")


def _refuse_no_data(config: TrainConfig) -> None:
    table = Path(config.data).suffix.lower() == ".csv" and Path(config.data).is_file()
    if config.data != "streets" and not table and not Path(config.data).is_dir():
        what = "is a file" if Path(config.data).exists() else "does not exist"
        expected = "`streets`, a folder of pictures or a CSV file of pictures and captions"
        raise InputError(f"--data {config.data} {what}", expected, "check the path")


def with_evaluation(config: Config) -> Config:
    """Extractor and metrics of evaluations written out, and what does not go together refused."""
    from halation.evaluation.command import refuse_mismatch

    streets = config.data == "streets"
    extractor = config.eval_extractor or ("streets" if streets else "inception")
    usual: tuple[Metric, ...] = ("fd", "kid", "prdc", "agreement") if streets else ("fd", "kid", "prdc")
    metrics = tuple(dict.fromkeys(config.eval_metrics or usual))
    refuse_mismatch(metrics, extractor, prefix="eval_")
    return dataclasses.replace(config, eval_extractor=extractor, eval_metrics=metrics)


# Lowest and highest value, both allowed; seeds end where torch would wrap them, less the room for sample_seed + k.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("batch_size", "accumulate", "log_every", "threads", "n_steps"), (1, math.inf)),
    **dict.fromkeys(("sample_steps", "sample_batch_size", "eval_batch_size"), (1, math.inf)),
    **dict.fromkeys(("eval_every", "eval_steps"), (0, math.inf)),
    **dict.fromkeys(("eval_pictures", "eval_reference"), (16, 10**6)),
    **dict.fromkeys(
        ("ckpt_every", "ckpt_latest_every", "keep_last", "num_register_tokens", "patch_size"), (0, math.inf)
    ),
    **dict.fromkeys(("heldout_pictures", "warmup_steps", "decay_steps", "num_workers", "max_restarts"), (0, math.inf)),
    **dict.fromkeys(("weight_decay", "grad_clip", "guidance_scale", "sample_timeout_s"), AT_LEAST_0),
    **dict.fromkeys(("lr", "time_shift", "dist_timeout_s"), ABOVE_0),
    **dict.fromkeys(("seed", "sample_seed"), SEEDS),
    "caption_dropout": (0, 1),
    "ema_decay": (0, math.nextafter(1, 0)),
    "betas": (0, math.nextafter(1, 0)),
}


def _rounded(size: int, patch: int) -> int:
    return max(patch, round(size / patch) * patch)


def begin(config: TrainConfig, place: str) -> bool:
    """Open the run's record before anything heavy happens, so that changed settings are refused at once."""
    facts: dict[str, Any] = {
        f"{name} version": version(name) for name in ("torch", "numpy", "diffusers" if config.vae else "safetensors")
    }
    if config.engine == "deepspeed":
        facts["deepspeed config"] = deepspeed_config.read(config.deepspeed_config)
    if config.model_path:
        facts |= {f"{name} version": version(name) for name in ("diffusers", "transformers")}
        facts["model of --model_path"] = fingerprint(Path(config.model_path))
    finetune.refuse_other_base(config, Run(config.output_dir), facts.get("model of --model_path", ""))
    refuse_other_engine(config, Run(config.output_dir))
    return runs.begin(
        Run(config.output_dir),
        "train",
        as_json(config),
        fixed(config) | facts | {"device": place.split(":")[0]},
        config.accept_changes,
    )


def refuse_other_engine(config: TrainConfig, run: Run) -> None:
    """An optimizer's state belongs to the engine that laid it out; weights can go anywhere."""
    if not (run.config.exists() and run.has_saved()):
        return
    recorded = runs.read_record(run)["fixed"]
    known = _kind(recorded.get("engine"), recorded.get("zero_stage", 2), recorded.get("deepspeed config") or {})
    asked = _kind(config.engine, config.zero_stage, deepspeed_config.read(config.deepspeed_config))
    if recorded.get("engine") and known != asked:
        flag = "model_path" if config.model_path else "model"
        shown = recorded["engine"] if known == "ddp" else known  # as it was called: auto and single are kinds of ddp
        raise InputError(
            f"--engine {asked}, but {run.folder} was trained with --engine {shown}",
            "the engine that its optimizer state belongs to",
            f"go on with --engine {shown}, or begin a new run with its weights: --output_dir NEW --{flag} {run.export}",
        )


def _kind(engine: Any, zero_stage: int, file: dict[str, Any]) -> str:
    if engine == "deepspeed":
        return f"deepspeed --zero_stage {deepspeed_config.stage(file, zero_stage)}"
    return "fsdp" if engine == "fsdp" else "ddp"


def run_rank(
    config: TrainConfig,
    held: bool = False,
    job: str = "train",
    begin: Begin = begin,
    new_task: NewTask | None = None,
) -> None:
    """One rank of the training; under torchrun or srun, rank 0 also holds the folder."""
    # cuBLAS reads this when it is first used, so it has to be there before torch touches the GPU.
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    launcher.die_with_parent()
    from halation.distributed.world import joined
    from halation.training.session import Session
    from halation.training.task import Task

    world = joined(config.gpu_ids, config.oversubscribe, config.dist_timeout_s, config.threads)
    alone = held or launcher.RENDEZVOUS in os.environ
    task = new_task or Task
    with world.leaving_together(), _hold(config, world, alone, job, begin), Session(world, config, task) as session:
        session.run()
        if world.first:
            _tell(config, session)


def _hold(config: TrainConfig, world: Any, alone: bool, job: str = "train", begin: Begin = begin) -> Any:
    import contextlib

    from halation.distributed.world import on_first

    if alone:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()

    def open_run(_beat: Any) -> None:
        runs.make_folder(config.output_dir)
        stack.enter_context(lock.held(config.output_dir, job))
        stack.enter_context(runs.recorded_once_used(Run(config.output_dir), config.accept_changes))
        runs.remove_temporaries(config.output_dir)
        begin(config, str(world.device))

    on_first(world, "opening the run", open_run, config.dist_timeout_s)
    return stack


def _tell(config: TrainConfig, session: Session) -> None:
    """The last words: where everything is."""
    if config.progress in ("json", "none"):
        return
    folder = config.output_dir
    lines = [f"{'samples':12}{folder / 'samples'}"] if config.sample else []
    lines += [
        f"{'checkpoint':12}{session.newest()}",
        f"{'export':12}{folder / 'export'}",
        f"{'metrics':12}{folder / 'metrics.jsonl'}",
    ]
    again = f"halation sample --checkpoint {shlex.quote(str(folder))} --prompts ..."
    sys.stderr.write("\n".join([*lines, f"{'draw more':12}{again}"]) + "\n")
