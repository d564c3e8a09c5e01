"""`halation doctor`: what this machine has, what is missing for what, and whether ranks can talk to each other."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from halation import __version__
from halation.errors import InputError
from halation.models.bundled_models import bundled_folder, bundled_names
from halation.runs.run_folder import scratch_folder
from halation.tools.config import DoctorConfig

EXTRAS = {
    "train": ("tensorboard>=2.18", "datasets>=4", "peft>=0.17"),
    "wandb": ("wandb>=0.19",),
    "trackio": ("trackio>=0.5",),
    "fast": ("isal>=1.7",),
    "video": ("av>=14",),
    "ray": ("ray>=2.59",),
    "web": ("starlette>=0.49", "uvicorn>=0.35"),
    "deepspeed": ("deepspeed>=0.19",),
}
# Only these are shown with their values; of the others that matter the name alone, for a value may be a secret.
SHOWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "RANK",
    "WANDB_MODE",
    "WORLD_SIZE",
)
VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "SLURM_JOB", "MASTER_", "HF_", "WANDB_", "RAY_", "PYTORCH_")
START_TIMEOUT_S = 120.0


def run(config: DoctorConfig) -> int:
    """Look at everything, print it, and return 0, or 1 where ranks cannot talk to each other."""
    if config.nproc is not None and config.nproc < 1:
        raise InputError(f"--nproc {config.nproc}", "1 or more ranks", "leave --nproc away for the default")
    try:
        devices = _devices()
    except ImportError as error:
        action = "make a fresh environment: `make test` in a clone, or `pip install halation`"
        raise InputError(f"torch cannot be imported: {error}", "a working torch", action) from error
    num_gpus = len(devices["gpus"])
    if num_gpus and config.nproc is not None and config.nproc > num_gpus:
        found = f"--nproc {config.nproc} on a machine with {num_gpus} usable GPUs"
        raise InputError(found, "one GPU a rank", f"use --nproc {num_gpus} or less")
    report: dict[str, Any] = {
        "halation": {"version": __version__, "python": platform.python_version(), "platform": platform.platform()},
        "torch": _torch(),
        "devices": devices,
        "machine": _machine(config.output_dir),
        "backends": _backends(bool(num_gpus)),
        "compile": _compiler_info(bool(num_gpus)),
        "versions": _versions(),
        "extras": {name: _extra_info(requirements) for name, requirements in EXTRAS.items()},
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


# --- What is there ------------------------------------------------------------------------------------------


def _torch() -> dict[str, Any]:
    import torch

    nccl = None
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"version": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": nccl}


def _devices() -> dict[str, Any]:
    """The GPUs that torch can use, and a hint where the driver knows of more of them."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_free": _gib(free),
                "memory_total": _gib(total),
            }
        )
    num_seen, driver = _driver_info()
    hint = None
    if num_seen > len(gpus):
        hint = (
            f"the driver knows {num_seen} GPUs, torch can use {len(gpus)}: see CUDA_VISIBLE_DEVICES and torch's build"
        )
    return {"gpus": gpus, "driver": driver, "hint": hint}


def _driver_info() -> tuple[int, str | None]:
    try:
        import pynvml
    except ImportError:
        return 0, None
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount()), str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0, None


def _machine(output_dir: Path) -> dict[str, Any]:
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    folder = output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    return {
        "cpu_cores": cores,
        "memory_free": _gib(memory.available),
        "memory_total": _gib(memory.total),
        "disk_free": _gib(disk.free),
        "disk_total": _gib(disk.total),
        "disk_folder": str(folder),
        "disk_writable": os.access(folder, os.W_OK),
    }


def _backends(on_gpu: bool) -> dict[str, Any]:
    import torch.distributed as dist

    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "attention": list(_attention_kernels("cuda" if on_gpu else "cpu")),
    }


def _attention_kernels(device: str) -> Iterator[str]:
    """The kinds of scaled dot-product attention that really run here, each tried on a small tensor."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.ones(1, 2, 16, 64, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for kind in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel that cannot run explains itself in several warnings
            try:
                with sdpa_kernel(getattr(SDPBackend, kind)):
                    torch.nn.functional.scaled_dot_product_attention(query, query, query)
            except RuntimeError:
                continue
        yield kind.removesuffix("_ATTENTION").lower()


def _compiler_info(on_gpu: bool) -> dict[str, Any]:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++", "cc", "gcc"]
    compiler = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    missing = [] if compiler else ["a C++ compiler (Debian and Ubuntu: apt install g++)"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("the headers of Python (Debian and Ubuntu: apt install python3-dev)")
    if on_gpu and importlib.util.find_spec("triton") is None:
        missing.append("triton (comes with the CUDA build of torch)")
    return {"available": not missing, "compiler": compiler, "missing": missing}


def _versions() -> dict[str, str | None]:
    """The version of everything the package itself depends on."""
    try:
        requirements = importlib.metadata.requires("halation") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source folder
        requirements = ["torch", "numpy", "pillow", "safetensors", "tyro", "pydantic", "psutil"]
    return {
        _requirement_name(entry): _installed_version(_requirement_name(entry))
        for entry in requirements
        if "extra ==" not in entry
    }


def _extra_info(requirements: tuple[str, ...]) -> dict[str, Any]:
    versions = {_requirement_name(entry): _installed_version(_requirement_name(entry)) for entry in requirements}
    missing = [entry for entry in requirements if versions[_requirement_name(entry)] is None]
    command = "pip install " + " ".join(f"'{entry}'" for entry in missing) if missing else None
    return {"installed": {name: version for name, version in versions.items() if version}, "install": command}


def _requirement_name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    matters = (name for name in sorted(variables) if name in SHOWN_VARIABLES or name.startswith(VARIABLE_PREFIXES))
    return {name: variables[name] if name in SHOWN_VARIABLES else "(set)" for name in matters}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


# --- Can ranks talk -----------------------------------------------------------------------------------------


def probe_communication(world_size: int, backend: str, timeout_s: float) -> dict[str, Any]:
    """Let `world_size` processes do an all-reduce; state `ok` with the bandwidth, or `failed` with what each one said."""
    result: dict[str, Any] = {"ranks": world_size, "backend": backend}
    with scratch_folder("halation_doctor_") as folder:
        ranks = [_start_rank(folder, rank, world_size, backend, timeout_s) for rank in range(world_size)]
        try:
            _wait_for_ranks(folder, ranks, timeout_s)
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if all(code == 0 for code in codes):
            figures = json.loads((folder / "figures_0.json").read_text())
            return {**result, "state": "ok", **figures}
        errors = {f"rank {rank}": _rank_error(folder, rank, code) for rank, code in enumerate(codes) if code != 0}
    return {**result, "state": "failed", "errors": errors}


def _start_rank(folder: Path, rank: int, world_size: int, backend: str, timeout_s: float) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "halation.tools.doctor_rank", str(folder), backend, str(timeout_s)]
    with open(folder / f"errors_{rank}", "wb") as errors:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )


def _wait_for_ranks(folder: Path, ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Until all have ended, or one has failed and the others had a second to say why too, or time is up."""
    # Importing torch takes as long as it takes; the short limit begins when all ranks are there.
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
    phase_file = folder / f"phase_{rank}"
    phase = phase_file.read_text() if phase_file.exists() else "starting"
    if code is None:
        return f"no answer while {phase}"
    lines = (folder / f"errors_{rank}").read_text(errors="replace").strip().splitlines()
    return f"ended with {code} while {phase}: {lines[-1] if lines else 'no message'}"


# --- Showing it ---------------------------------------------------------------------------------------------


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
