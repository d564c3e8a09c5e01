"""Starts ranks on this machine: devices, rendezvous, errors, restarts.

The parent does not import torch and opens no port: rank 0 lets the system choose one and writes it to a private folder,
so that two jobs never connect to each other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from halation.config import as_json
from halation.distributed.child_process import describe_exit, start_child, tie_to_parent, wait_or_kill
from halation.distributed.stop_signals import STOP_SIGNALS, exit_code
from halation.errors import HalationError, InputError, Interrupted, RankFailure, format_count, os_error_message
from halation.input_files import RefusedFileError
from halation.progress import release_terminal
from halation.runs.lock import FolderMonitor
from halation.runs.run_folder import write_atomic

log = logging.getLogger(__name__)

RENDEZVOUS_ENV = "HALATION_RENDEZVOUS"
DEVICE_ENV = "HALATION_DEVICE"
SCRATCH_PREFIX = ".halation_ranks_"
GRACE_S = 5.0
EXPECTED_ERRORS = (
    "Interrupted",
    "HalationError",
    "InputError",
    "RankFailure",
    "OSError",
)  # errors that ranks raise on purpose


def is_launched() -> bool:
    """Return True if this process is already a rank of this launcher, torchrun or srun."""
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or slurm_world_size() > 1


def slurm_world_size() -> int:
    """Return the number of tasks of the srun step; 1 in a batch script or interactive shell."""
    if "SLURM_PROCID" not in os.environ or "SLURM_STEP_ID" not in os.environ:
        return 1
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1")))


def has_restarts_left() -> bool:
    """Return True if torchrun restarts failed ranks; a stopped rank must then exit with 0."""
    counts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT")]
    return all(count.isdigit() for count in counts) and int(counts[0]) > int(counts[1])


def num_gpus() -> int:
    """Return the number of GPUs that torch sees; imports torch only if NVML cannot answer."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")):
        return 0
    # Detect a torch build without GPU support by its files: importing it takes seconds.
    torch_spec = importlib.util.find_spec("torch")
    folders = (torch_spec.submodule_search_locations if torch_spec else None) or []
    names = ("libtorch_cuda*", "libtorch_hip*")
    if not any(list((Path(folder) / "lib").glob(name)) for folder in folders for name in names):
        return 0
    num_found = _count_gpus_by_nvml()
    if num_found is not None:
        return num_found
    import torch

    return torch.cuda.device_count()


def _count_gpus_by_nvml() -> int | None:
    """Count GPUs with NVML within a numeric CUDA_VISIBLE_DEVICES; None if unknown.

    As in CUDA, the list ends at the first GPU that does not exist.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        num_present = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - without NVML, torch has other ways
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_present
    ids = [word.strip() for word in visible.split(",")] if visible.strip() else []
    if not all(word.lstrip("-").isdigit() for word in ids) or len(set(ids)) != len(ids):
        return None
    return next((place for place, word in enumerate(ids) if not 0 <= int(word) < num_present), len(ids))


def describe_device(device: str) -> str:
    """Return the device name that a run records, because devices round differently."""
    import torch

    if torch.device(device).type == "cpu":
        return "cpu"
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda or torch.version.hip}"


def select_devices(nproc: int, gpu_ids: Sequence[int], oversubscribe: bool) -> tuple[str, ...]:
    """Return one device per rank of this machine, or raise InputError with the available ones."""
    num_present = num_gpus()
    available = (
        f"GPUs 0 to {num_present - 1}"
        if num_present > 1
        else ("GPU 0" if num_present else "no GPU (ranks run on the CPU)")
    )
    if nproc < 0:
        raise InputError(f"--nproc {nproc}", "a number of ranks, or 0 for all GPUs", "give a positive number")
    bad = [gpu for gpu in gpu_ids if not 0 <= gpu < num_present]
    if bad or len(set(gpu_ids)) != len(gpu_ids):
        what = (
            f"no such GPU: {', '.join(map(str, bad))}"
            if bad
            else f"duplicate GPU in --gpu_ids {' '.join(map(str, gpu_ids))}"
        )
        raise InputError(
            what, f"each of --gpu_ids once; this machine has {available}", "choose among these, or leave --gpu_ids out"
        )
    gpus = list(gpu_ids) or list(range(num_present))
    count = nproc or len(gpus) or 1
    if not gpus:
        return ("cpu",) * count
    if count > len(gpus) and not oversubscribe:
        raise InputError(
            f"--nproc {count} on {format_count(len(gpus), 'GPU')}",
            f"at most one rank per GPU; this machine has {available}",
            f"use --nproc {len(gpus)}, or --oversubscribe to share GPUs (for tests, slow)",
        )
    return tuple(f"cuda:{gpus[rank % len(gpus)]}" for rank in range(count))


def tie_rank_to_launcher() -> None:
    """Tie a rank to this launcher or torchrun, which leave orphans when killed; srun does not."""
    if RENDEZVOUS_ENV in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        tie_to_parent()


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The error that a rank reported when it ended."""

    rank: int
    kind: str
    message: str
    exit_code: int
    time: float

    @property
    def is_lost_peer(self) -> bool:
        """True if the error only reports another lost rank.

        Only the last line of a traceback is checked: others may contain the word timeout.
        """
        kinds = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
        return self.kind in kinds and is_lost_peer_message(self.message.rstrip().rpartition("\n")[2])


def report_error(error: BaseException, trace: str) -> None:
    """Write this rank's error to a file for the parent."""
    folder = os.environ.get(RENDEZVOUS_ENV)
    if not folder:
        return
    rank = int(os.environ["RANK"])
    if isinstance(error, RefusedFileError):
        error = error.as_input_error()
    system_message = os_error_message(error)
    row = {
        "rank": rank,
        "kind": "HalationError" if system_message else type(error).__name__,
        "message": system_message or (str(error) if isinstance(error, HalationError) else trace),
        "exit_code": error.exit_code if isinstance(error, HalationError) else 1,
        "time": time.time(),
    }
    with contextlib.suppress(OSError):
        write_atomic(Path(folder) / f"error_{rank}.json", json.dumps(row).encode(), "rank_error", durable=False)


def start_ranks(
    run_rank: Callable[[Any], object], config: Any, devices: Sequence[str], folder: Path, *, capture: bool = False
) -> list[subprocess.Popen[bytes]]:
    """Start a process per device that calls `run_rank(config)`; error reports go to `folder`.

    With `capture`, standard error of the ranks goes to files in `folder` too, and nothing is printed.
    """
    (folder / "config.json").write_text(json.dumps(as_json(config)))
    names = [f"{named.__module__}:{named.__qualname__}" for named in (run_rank, type(config))]
    arguments = ["-m", "halation.distributed.rank_main", *names, str(folder / "config.json")]
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, device in enumerate(devices):
        environment = dict(os.environ) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_WORLD_SIZE": str(len(devices)),
            RENDEZVOUS_ENV: str(folder),
            DEVICE_ENV: device,
        }
        with open(folder / f"stderr_{rank}", "wb") if capture else contextlib.nullcontext() as file:
            stdout = subprocess.DEVNULL if capture else None
            ranks.append(start_child(arguments, environment, stdout=stdout, stderr=file))
    return ranks


class Launcher:
    """Starts the ranks of a job, waits for them, and restarts them up to `max_restarts` times."""

    def __init__(
        self,
        run_rank: Callable[[Any], object],
        config: Any,
        devices: Sequence[str],
        max_restarts: int,
        folder: Path,
        monitor: FolderMonitor,
    ) -> None:
        """Call `run_rank(config)` on every rank; the config is passed as JSON.

        `folder` is locked by this job; files of a killed launcher in it are removed by the next one. `monitor` detects
        that the output folder of the ranks is lost.
        """
        self.run_rank = run_rank
        self.config = config
        self.devices = devices
        self.max_restarts = max_restarts
        self.folder = folder
        self.monitor = monitor
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.signals: list[int] = []

    def run(self) -> None:
        """Return when all ranks have succeeded; otherwise raise the first error."""
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        }
        try:
            for attempt in range(self.max_restarts + 1):
                error = self._run_once()
                if error is None:
                    return
                self.monitor.check_now()
                asked_to_end = self.signals or error.kind == "Interrupted"  # a scheduler may have signalled one rank
                if error.exit_code == InputError.exit_code or asked_to_end or attempt == self.max_restarts:
                    self._raise_error(error)
                log.warning(
                    "%s\nrestarting from the last checkpoint (%d of %d)",
                    _format_error(error),
                    attempt + 1,
                    self.max_restarts,
                )
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_once(self) -> RankError | None:
        for leftover in self.folder.glob(f"{SCRATCH_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=self.folder)).absolute()
        try:
            self.ranks = start_ranks(self.run_rank, self.config, self.devices, folder)
            return self._wait_for_ranks(folder)
        finally:
            wait_or_kill(self.ranks)
            if self.ranks and self.ranks[0].returncode < 0:  # killed, perhaps while it showed a bar
                release_terminal()
            shutil.rmtree(folder, ignore_errors=True)

    def _wait_for_ranks(self, folder: Path) -> RankError | None:
        num_forwarded = 0
        while True:
            self.monitor.check()
            codes = [rank.poll() for rank in self.ranks]
            if all(code == 0 for code in codes):
                return None
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                return self._first_error(folder, failed)
            for number in self.signals[num_forwarded:]:
                num_forwarded += 1
                if num_forwarded > 1 and number in (signal.SIGINT, signal.SIGTERM):
                    raise Interrupted(
                        "stopped immediately; the same command resumes from the last checkpoint", 128 + number
                    )
                for rank in self.ranks:
                    with contextlib.suppress(ProcessLookupError):
                        rank.send_signal(number)
            time.sleep(0.05)

    def _first_error(self, folder: Path, failed: list[int]) -> RankError:
        """Wait up to GRACE_S for errors of other ranks, then return the most likely cause."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(rank.poll() is None for rank in self.ranks):
            time.sleep(0.05)
        errors = []
        for path in folder.glob("error_*.json"):
            with contextlib.suppress(OSError, ValueError):
                errors.append(RankError(**json.loads(path.read_text())))
        expected = [error for error in errors if error.kind in EXPECTED_ERRORS]
        if self.signals and (not expected or any(-code in self.signals for code in self._exit_codes())):
            return self._early_stop_error()
        stopped = [rank for rank in self.ranks if -(rank.returncode or 0) in STOP_SIGNALS]
        if stopped:  # sent by a user or a scheduler; until a rank trains, these kill it
            return self._stopped_rank_error(stopped[0])
        silent = [rank for rank in failed if rank not in {error.rank for error in errors}]
        if silent:
            code = self.ranks[silent[0]].returncode
            message = f"rank {silent[0]} {describe_exit(code)}"
            return RankError(rank=silent[0], kind="Killed", message=message, exit_code=1, time=0.0)
        return min(errors, key=lambda error: (error.is_lost_peer, error.kind == "RankFailure", error.time))

    def _exit_codes(self) -> list[int]:
        return [rank.returncode for rank in self.ranks if rank.returncode is not None]

    def _early_stop_error(self) -> RankError:
        """Return the error for a stop during startup, when ranks have nothing to save."""
        number = self.signals[0]
        message = f"asked to stop (signal {number}) before all ranks had started; run the same command to start again"
        return RankError(rank=0, kind="Interrupted", message=message, exit_code=exit_code(number), time=0.0)

    def _stopped_rank_error(self, process: subprocess.Popen[bytes]) -> RankError:
        rank, number = self.ranks.index(process), -process.returncode
        message = (
            f"rank {rank} was asked to stop (signal {number}) while it was starting or ending; "
            "run the same command to resume"
        )
        return RankError(rank=rank, kind="Interrupted", message=message, exit_code=exit_code(number), time=0.0)

    def _raise_error(self, error: RankError) -> None:
        if error.kind == "Interrupted":
            raise Interrupted(error.message, error.exit_code)
        failure: HalationError = (
            RankFailure(_format_error(error))
            if error.exit_code != InputError.exit_code
            else HalationError(error.message)
        )
        failure.exit_code = error.exit_code
        raise failure

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)


def is_lost_peer_message(message: str) -> bool:
    """Return True if the error of a collective only reports that another rank is gone."""
    text = message.lower()
    words = (
        "timed out",
        "timeout",
        "connection closed",
        "connection reset",
        "connection refused",
        "broken pipe",
        "nccl",
    )
    return any(word in text for word in words)


def _format_error(error: RankError) -> str:
    known = error.kind in ("Killed", "RankFailure", "HalationError", "InputError")
    return error.message if known else f"rank {error.rank} failed:\n{error.message.rstrip()}"
