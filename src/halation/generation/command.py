"""`halation generate`: check the settings, lock the folder, run the session."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from halation.config import check_settings
from halation.distributed import launcher
from halation.distributed.stop_signals import STOP_SIGNALS, exit_code
from halation.errors import InputError, Interrupted, install_command
from halation.generation.config import GenerateConfig
from halation.generation.ledger import LEDGER_FILE, Ledger
from halation.generation.ledger_setup import claim_ledger_kind
from halation.generation.loaded_model import LoadedModel
from halation.generation.session import (
    GenerationSession,
    check_no_foreign_files,
    parse_pipeline_args,
    remove_temporary_files,
)
from halation.generation.shared_folder.shared_ledger import SHARED_LEDGER
from halation.generation.shared_folder.shared_session import run_shared
from halation.generation.workers import ray_cluster
from halation.generation.workers.local_pool import LocalWorkerPool, WorkerPool, WorkerSlot, list_local_slots
from halation.images import mp4_writer, png_codec
from halation.logging_setup import log_to_folder
from halation.models.model_folder import HubOptions
from halation.models.model_path_resolver import resolve_model
from halation.prompt_files import PromptFile
from halation.runs import lock
from halation.runs import run_folder as runs

log = logging.getLogger(__name__)
PoolFactory = Callable[[Mapping[str, Any]], WorkerPool]


def run(config: GenerateConfig) -> int:
    """Generate the missing images; return 0 only if all images are done."""
    return generate(config)


def generate(
    config: GenerateConfig,
    prompts: Sequence[str | Mapping[str, Any]] | None = None,
    model: LoadedModel | None = None,
) -> int:
    """Generate the missing images, for a list of prompts and with a loaded model if these are given."""
    with interrupt_on_signals():
        return _run(config, prompts, model)


def _run(config: GenerateConfig, rows: Sequence[str | Mapping[str, Any]] | None, model: LoadedModel | None) -> int:
    check_config(config)
    prompts = (
        PromptFile.from_values(config.prompts_csv or config.prompts, config.prompts_format or None)
        if rows is None
        else PromptFile.from_rows(rows, "the list of prompts")
    )
    if model is not None:
        config, model_ref = model.resolve(config)
    else:
        model_ref = resolve_model(config.model_path, raw=config.raw, hub=HubOptions.of(config))
    folder = config.output_dir
    if not (folder / runs.CONFIG_FILE).exists():  # a folder that was started with other rules goes on with them
        model_ref.check(config, arguments=parse_pipeline_args(config.pipeline_args))
    if config.cluster == "files":
        local_slots = list_local_slots(config)
        runs.make_folder(folder)
        return run_shared(config, prompts, model_ref, local_slots)
    worker_context = model.open_pool(config) if model else prepare_workers(config)
    runs.make_folder(folder)
    check_not_shared(folder)
    if not (folder / LEDGER_FILE).exists():
        check_no_foreign_files(folder)
    # An owner that exits normally removes its lock and its owner file.
    was_killed = any((folder / name).exists() for name in (".lock", ".owner.json"))
    with claim_ledger_kind(folder, "sqlite") as kind:
        if kind != "sqlite":
            raise begun_with_files_error(folder)
        with (
            lock.lock_folder(folder, "generate") as monitor,
            log_to_folder(folder / "logs") as console_handler,
            worker_context as (slots, make_pool),
        ):
            if was_killed:
                remove_temporary_files(folder)
            with Ledger(folder / LEDGER_FILE) as ledger:
                monitor.watch(folder / LEDGER_FILE)  # SQLite would keep writing to a deleted file
                session = GenerationSession(config, model_ref, ledger, console_handler, monitor)
                session.prepare(prompts, slots)
                return session.run(lambda: make_pool(session.worker_settings()))


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise on signals outside of generation, so that the folder is released as after Ctrl+C."""

    def raise_interrupted(number: int, _frame: object) -> None:
        raise Interrupted("stopped while no image was in progress; run the same command to resume", exit_code(number))

    # Ignored signals (nohup) stay ignored. Only the main thread can install signal handlers.
    is_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in STOP_SIGNALS if is_main_thread and signal.getsignal(number) == signal.SIG_DFL]
    previous = {number: signal.signal(number, raise_interrupted) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def prepare_workers(
    config: GenerateConfig,
) -> contextlib.AbstractContextManager[tuple[Sequence[WorkerSlot], PoolFactory]]:
    """Return a context that yields the worker slots and a function that creates the pool.

    Local GPUs are listed in this call; a cluster is joined when the context is entered.
    """
    if config.uses_ray:
        return ray_cluster.open_cluster(config)
    slots = list_local_slots(config)
    return contextlib.nullcontext(
        (slots, lambda settings: LocalWorkerPool(slots, settings, config.output_dir / "logs", config.threads))
    )


def check_config(config: GenerateConfig) -> None:
    """Check everything that does not depend on the prompts, the model or the folder."""
    check_settings(config)
    if config.uses_ray:
        if importlib.util.find_spec("ray") is None:
            raise InputError(f"--cluster {config.cluster}, but Ray is not installed", "Ray", install_command("ray"))
    else:  # with Ray, other machines encode the images
        if config.png != "auto":
            png_codec.get_coder(config.png)
        if config.num_frames > 1:
            mp4_writer.import_av()
    if (
        config.cluster == "local"
        and launcher.is_launched()
        and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != "0"
    ):
        raise InputError(
            "one of several copies of this command (torchrun or srun)",
            "a single command, which starts one worker per GPU",
            "start it once; to use several machines, see --cluster files and --cluster ray",
        )


def check_not_shared(folder: Path) -> None:
    if (folder / SHARED_LEDGER).is_dir():
        if (folder / LEDGER_FILE).exists():
            raise InputError(
                f"{folder} has two ledgers: it was started by two commands, with and without --cluster files",
                "one ledger",
                f"move {SHARED_LEDGER}/ elsewhere and run this command with --verify: images that do not match "
                f"{LEDGER_FILE} are then generated again",
            )
        raise begun_with_files_error(folder)


def begun_with_files_error(folder: Path) -> InputError:
    return InputError(
        f"{folder} was started with --cluster files",
        "--cluster files in every command on this folder",
        "add --cluster files (one process is enough), or choose another --output_dir",
    )
