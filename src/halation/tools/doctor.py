"""`halation doctor`: report what is installed or missing; test whether ranks communicate."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from halation import __version__
from halation.config import check_settings
from halation.distributed.child_process import wait_or_kill
from halation.distributed.launcher import DEVICE_ENV, RENDEZVOUS_ENV, start_ranks
from halation.errors import HalationError, InputError, format_count, install_command, read_extras
from halation.fault_injection import fault_point
from halation.models.model_folder import bundled_folder, bundled_names
from halation.runs.run_folder import scratch_folder
from halation.tools.config import DoctorConfig

# Only these are shown with their values; of other relevant variables only the name, because a value may be a secret.
SHOWN_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE", "NCCL_DEBUG", "NCCL_IB_DISABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "RANK", "WANDB_MODE"),
    "WORLD_SIZE",
)
VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "SLURM_JOB", "MASTER_", "HF_", "WANDB_", "RAY_", "PYTORCH_")
START_TIMEOUT_S = 120.0
NUM_REPEATS = 5


def run(config: DoctorConfig) -> int:
    """Collect and print the report; return 0, or 1 if ranks cannot communicate."""
    check_settings(config)
    try:
        devices = _devices()
    except ImportError as error:
        action = "create a new environment: `make test` in a clone, or `pip install torch`"
        raise InputError(f"torch cannot be imported: {error}", "a working torch", action) from error
    num_gpus = len(devices["gpus"])
    if num_gpus and config.nproc is not None and config.nproc > num_gpus:
        found = f"--nproc {config.nproc} on a machine with {num_gpus} usable GPUs"
        raise InputError(found, "one GPU per rank", f"use --nproc {num_gpus} or less")
    report: dict[str, Any] = {
        "halation": {"version": __version__, "python": platform.python_version(), "platform": platform.platform()},
        "torch": _torch(),
        "devices": devices,
        "machine": _machine(config.output_dir),
        "backends": _backends("cuda" if num_gpus else "cpu"),
        "compile": _compiler_info(bool(num_gpus)),
        "versions": _versions(_requirements()),
        "extras": {name: _extra_info(name, requirements) for name, requirements in read_extras().items()},
        "models": {name: str(bundled_folder(name)) for name in bundled_names()},
        "environment": _environment(os.environ),
        "communication": probe_communication(
            config.nproc or num_gpus or 2, "nccl" if num_gpus else "gloo", config.timeout_s
        ),
    }
    if config.json:
        print(json.dumps(report))
    else:
        _print_report(report)
    return 0 if report["communication"]["state"] == "ok" else 1


# --- Collecting ---------------------------------------------------------------------------------------------


def _torch() -> dict[str, Any]:
    import torch

    nccl = None
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"version": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": nccl}


def _devices() -> dict[str, Any]:
    """The GPUs that torch can use, and a hint if the driver has more of them."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        memory = {"memory_free": _gib(free), "memory_total": _gib(total)}
        gpus.append({"index": index, "name": properties.name, "capability": capability, **memory})
    num_seen, driver = 0, None
    try:
        import pynvml

        pynvml.nvmlInit()
        num_seen, driver = int(pynvml.nvmlDeviceGetCount()), str(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - no library or no driver: nothing to compare with
        pass
    hint = f"the driver has {format_count(num_seen, 'GPU')}, torch can use {len(gpus)}: check CUDA_VISIBLE_DEVICES and "
    hint += "torch's build"
    return {"gpus": gpus, "driver": driver, "hint": hint if num_seen > len(gpus) else None}


def _machine(output_dir: Path) -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    return {
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_free": _gib(memory.available),
        "memory_total": _gib(memory.total),
        "disk_free": _gib(disk.free),
        "disk_total": _gib(disk.total),
        "disk_folder": str(folder),
        "disk_writable": os.access(folder, os.W_OK),
    }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _backends(device: str) -> dict[str, Any]:
    """Communication backends, and attention kernels, each tested on a small tensor."""
    import torch
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = []
    query = torch.ones(1, 2, 16, 64, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for kind in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel that cannot run emits several warnings
            try:
                with sdpa_kernel(getattr(SDPBackend, kind)):
                    torch.nn.functional.scaled_dot_product_attention(query, query, query)
            except RuntimeError:
                continue
        kernels.append(kind.removesuffix("_ATTENTION").lower())
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "attention": kernels}


def _compiler_info(on_gpu: bool) -> dict[str, Any]:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++", "cc", "gcc"]
    compiler = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    missing = [] if compiler else ["a C++ compiler (Debian and Ubuntu: apt install g++)"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("the Python headers (Debian and Ubuntu: apt install python3-dev)")
    if on_gpu and importlib.util.find_spec("triton") is None:
        missing.append("triton (comes with the CUDA build of torch)")
    return {"available": not missing, "compiler": compiler, "missing": missing}


def _requirements() -> list[str]:
    """Dependencies of the package, without extras."""
    try:
        return [entry for entry in importlib.metadata.requires("halation") or [] if "extra ==" not in entry]
    except importlib.metadata.PackageNotFoundError:  # run from its source folder
        return ["torch", "numpy", "pillow", "safetensors", "tyro", "pydantic", "psutil"]


def _versions(requirements: Sequence[str]) -> dict[str, str | None]:
    """Installed version of each required package, by name; None if it is missing."""
    versions: dict[str, str | None] = {}
    for entry in requirements:
        name = re.split(r"[^\w.-]", entry, maxsplit=1)[0]
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _extra_info(extra: str, requirements: Sequence[str]) -> dict[str, Any]:
    versions = _versions(requirements)
    missing = [name for name, version in versions.items() if version is None]
    command = install_command(extra, *missing) if missing else None
    return {"installed": {name: version for name, version in versions.items() if version}, "install": command}


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    matters = (name for name in sorted(variables) if name in SHOWN_VARIABLES or name.startswith(VARIABLE_PREFIXES))
    return {name: variables[name] if name in SHOWN_VARIABLES else "(set)" for name in matters}


# --- Communication test -------------------------------------------------------------------------------------


def probe_communication(world_size: int, backend: str, timeout_s: float) -> dict[str, Any]:
    """All-reduce on `world_size` processes.

    Returns state `ok` with the bandwidth, or `failed` with the error of each failed rank.
    """
    result: dict[str, Any] = {"ranks": world_size, "backend": backend}
    with scratch_folder("halation_doctor_") as folder:
        devices = [f"cuda:{rank}" if backend == "nccl" else "cpu" for rank in range(world_size)]
        ranks = start_ranks(run_rank, DoctorConfig(timeout_s=timeout_s), devices, folder, capture=True)
        try:
            _wait_for_ranks(folder, ranks, timeout_s)
            codes = [process.poll() for process in ranks]
        finally:
            wait_or_kill(ranks)
        if all(code == 0 for code in codes):
            return {**result, "state": "ok", **json.loads((folder / "figures_0.json").read_text())}
        errors = {f"rank {rank}": _rank_error(folder, rank, code) for rank, code in enumerate(codes) if code != 0}
    return {**result, "state": "failed", "errors": errors}


def _wait_for_ranks(folder: Path, ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all ranks have ended, one has failed, or a timeout.

    After a failure, the other ranks have one second to report theirs.
    """
    # The time to import torch is unknown; the short limit starts when all ranks have started.
    deadline = time.monotonic() + START_TIMEOUT_S
    all_started = failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if None not in codes:
            return
        if not all_started and all((folder / f"phase_{rank}").exists() for rank in range(len(ranks))):
            all_started = True
            deadline = time.monotonic() + 3 * timeout_s
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + 1.0)
        time.sleep(0.05)


def _rank_error(folder: Path, rank: int, code: int | None) -> str:
    phase_file, report = folder / f"phase_{rank}", folder / f"error_{rank}.json"
    phase = phase_file.read_text() if phase_file.exists() else "starting"
    if code is None:
        return f"no answer while {phase}"
    text = json.loads(report.read_text())["message"] if report.exists() else ""
    lines = (text or (folder / f"stderr_{rank}").read_text(errors="replace")).strip().splitlines()
    return f"ended with {code} while {phase}: {lines[-1] if lines else 'no message'}"


def run_rank(config: DoctorConfig) -> None:
    """One rank: join the group, all-reduce, check the sum, measure, write the figures.

    It is a separate process, so that a rank that hangs or crashes inside a library does not affect the doctor.
    """
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    folder, device = Path(os.environ[RENDEZVOUS_ENV]), torch.device(os.environ[DEVICE_ENV])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    phase_file = folder / f"phase_{rank}"
    phase_file.write_text("joining the group")
    # The timeout of the group is for communication only: on a busy machine ranks finish importing torch seconds apart.
    # The parent ends this process if a rank never starts.
    while not all((folder / f"phase_{other}").exists() for other in range(world_size)):
        time.sleep(0.02)
    store = dist.FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=config.timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    phase_file.write_text("reducing")
    num_values = (64 if device.type == "cuda" else 4) * 1024 * 1024
    values = torch.full((num_values,), float(rank + 1), device=device)
    fault_point("doctor.all_reduce")
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    if not bool((values == expected).all()):
        raise HalationError(f"the sum over {format_count(world_size, 'rank')} is {values[0].item()}, not {expected}")
    seconds = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    num_bytes = num_values * values.element_size()
    median_s = sorted(seconds)[NUM_REPEATS // 2]
    # Each byte crosses a link 2 (n - 1) / n times in a ring: comparable with the bandwidth of the link.
    bus_gb_per_s = num_bytes * 2 * (world_size - 1) / world_size / median_s / 1e9
    figures = {"megabytes": num_bytes / 1e6, "median_s": median_s, "bus_gb_per_s": bus_gb_per_s}
    (folder / f"figures_{rank}.json").write_text(json.dumps(figures))


# --- Printing -----------------------------------------------------------------------------------------------


def _report_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for section, content in report.items():
        for item, value in content.items():
            if item == "gpus":
                if not value:
                    yield section, "GPUs", "none"
                for gpu in value:
                    memory = f"{gpu['memory_free']} of {gpu['memory_total']} free"
                    yield section, f"GPU {gpu['index']}", f"{gpu['name']} (sm {gpu['capability']}), {memory}"
            elif section == "extras":
                installed = ", ".join(f"{name} {version}" for name, version in value["installed"].items())
                missing = f"missing: {value['install']}" if value["install"] else ""
                yield section, item, "; ".join(filter(None, [installed, missing]))
            elif isinstance(value, dict):
                for name, text in value.items():
                    yield section, name, str(text)
            else:
                yield (
                    section,
                    item if section in ("versions", "environment") else item.replace("_", " "),
                    _format_value(value),
                )


def _format_value(value: object) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_report(report: Mapping[str, Any]) -> None:
    if not sys.stdout.isatty():
        for section, item, value in _report_rows(report):
            print(f"{section}: {item}: {value}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    last = ""
    for section, item, value in _report_rows(report):
        if last and section != last:
            table.add_row()
        is_problem = value.startswith(("missing", "failed", "no answer", "ended with"))
        heading = Text("" if section == last else section, style="bold")
        table.add_row(heading, Text(item), Text(value, style="yellow" if is_problem else ""))
        last = section
    Console().print(table)
