"""`halation generate`: the only place that sees a whole generation config; it makes the plan, holds the folder and runs the supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from halation.config import check_ranges
from halation.distributed import launcher
from halation.distributed.signals import STOPPING, exit_code
from halation.errors import InputError, Interrupted
from halation.generation import results
from halation.generation.config import GenerateConfig
from halation.generation.ledger import LEDGER_FILE, Ledger
from halation.generation.session import Session, sweep
from halation.generation.shared_folder.ledger import SHARED_LEDGER
from halation.generation.workers import ray_cluster
from halation.generation.workers.local import Crew, LocalCrew, Place, places_of
from halation.images import png, video
from halation.logs import logging_to
from halation.models.model_ref import Subject, subject_of
from halation.prompts import PromptFile
from halation.runs import folder as runs
from halation.runs import lock
from halation.runs.folder import CONFIG_FILE

log = logging.getLogger(__name__)
CrewOf = Callable[[Mapping[str, Any]], Crew]
MANY = sys.float_info.max
RESULTS = (CONFIG_FILE, results.METADATA_FILE, results.SUMMARY_FILE)
PICTURE = re.compile(r".*_seed\d+(\.png|\.mp4)?")
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("num_samples", "micro_batch"), (0, 10**12)),
    **dict.fromkeys(("batch_size", "num_inference_steps", "num_frames", "fps", "threads"), (1, 10_000)),
    **dict.fromkeys(("height", "width"), (1, 16_384)),
    **dict.fromkeys(("stall_timeout_s", "lease_s"), (sys.float_info.min, MANY)),
    "seed_start": (0, 2**63 - 1),
    "guidance_scale": (0, MANY),
    "cfg_truncation_step": (0, MANY),
}


def run(config: GenerateConfig) -> int:
    """Draw what is missing; 0 only if every picture is there."""
    with ended_by_signals():
        return _run(config)


def _run(config: GenerateConfig) -> int:
    check(config)
    prompts = PromptFile.open(config.prompts_csv, config.prompts_format or None)
    subject = subject_of(config.model_path, raw=config.raw)
    folder = config.output_dir
    if config.cluster == "files":
        from halation.generation.shared_folder.session import run_shared

        local = places_of(config)
        runs.make_folder(folder)
        return run_shared(resolved(config, subject, local), prompts, subject, local)
    gathering = gathered(config)
    runs.make_folder(folder)
    refuse_shared(folder)
    refuse_foreign(folder)
    # An owner that ended well takes its lock and its card along.
    killed = any((folder / name).exists() for name in (".lock", ".owner.json"))
    with lock.held(folder, "generate"), logging_to(folder / "logs") as echo, gathering as (places, crew_of):
        config = resolved(config, subject, places)
        if killed:
            sweep(folder)
        with Ledger(folder / LEDGER_FILE) as ledger:
            session = Session(config, subject, ledger, echo)
            session.begin(prompts, places)
            return session.run(lambda: crew_of(session.orders()))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Around the drawing nothing is left half done by an end at once: other signals let go of the folder as Ctrl+C does."""

    def end(number: int, _frame: object) -> None:
        raise Interrupted("stopped while nothing was being drawn; the same command goes on", exit_code(number))

    # One that is ignored (nohup) stays ignored; a thread that is not the main one hears no signals.
    here = threading.current_thread() is threading.main_thread()
    numbers = [number for number in STOPPING if here and signal.getsignal(number) == signal.SIG_DFL]
    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def gathered(config: GenerateConfig) -> contextlib.AbstractContextManager[tuple[Sequence[Place], CrewOf]]:
    """Where the workers will be, and how to make a crew of them: GPUs of this machine are looked for at once, a cluster when entered."""
    if ray_cluster.by_ray(config.cluster):
        return ray_cluster.joined(config)
    places = places_of(config)
    return contextlib.nullcontext(
        (places, lambda orders: LocalCrew(places, orders, config.output_dir / "logs", config.threads))
    )


def check(config: GenerateConfig) -> None:
    """What can be refused without looking at anything but the flags."""
    if not config.prompts_csv:
        raise InputError(
            "no --prompts_csv",
            "a list of prompts",
            "give --prompts_csv FILE (csv, txt, jsonl, parquet), or - for standard input",
        )
    given = {name: limits for name, limits in RANGES.items() if getattr(config, name) is not None}
    check_ranges(config, given)
    ray_cluster.check(config)
    if not ray_cluster.by_ray(config.cluster):  # there other machines write what they draw
        if config.png != "auto":
            png.coder(config.png)
        if config.num_frames > 1:
            video.refuse_missing()
    if config.micro_batch > config.batch_size:
        raise InputError(
            f"--micro_batch {config.micro_batch} with --batch_size {config.batch_size}",
            "at most the whole sheet at once",
            "lower --micro_batch",
        )
    if (
        config.cluster == "local"
        and launcher.launched()
        and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != "0"
    ):
        raise InputError(
            "one of several copies of this command (torchrun or srun)",
            "one command, which starts a worker for each GPU itself",
            "start it once; for several machines on one folder see --cluster files and --cluster ray",
        )


def refuse_shared(folder: Path) -> None:
    if (folder / SHARED_LEDGER).is_dir():
        raise InputError(
            f"{folder} was begun with --cluster files",
            "the same way of sharing it as before",
            "give --cluster files (one process is enough), or another --output_dir",
        )


def refuse_foreign(folder: Path) -> None:
    """A folder without a ledger must not hold files that a run would write over as if they were its own."""
    if (folder / LEDGER_FILE).exists():
        return
    names = (name for name in os.listdir(folder) if name in RESULTS or PICTURE.fullmatch(name))
    found = next(names, None)
    if found is not None:
        raise InputError(
            f"{folder} holds {found}, which no run of `halation generate` in this folder knows of",
            "an empty folder, or one with a ledger of its own",
            "choose another --output_dir",
        )


def resolved(config: GenerateConfig, subject: Subject, places: Sequence[Place]) -> GenerateConfig:
    """The config with what the model and the device decide written out."""
    chosen: dict[str, Any] = {
        "height": config.height or subject.height,
        "width": config.width or subject.width,
        "guidance_scale": subject.guidance_scale if config.guidance_scale is None else config.guidance_scale,
        "num_inference_steps": config.num_inference_steps or subject.steps,
        "dtype": config.dtype or ("fp32" if places[0].device == "cpu" else "bf16"),
    }
    return dataclasses.replace(config, **chosen)
