"""`halation generate --cluster ray|auto|ray://HOST:PORT`: starting Ray on this machine or joining one that runs, and leaving it as it was."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.generation.config import GenerateConfig
from halation.generation.workers.ray_pool import RaySlot, RayWorkerPool, assign_slots

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CONNECT_TIMEOUT_S = 10.0
TEMPORARY_PREFIX = "halation_ray_"
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Some of Ray's processes take 127.0.0.1 for a mistake and listen on the machine's public address instead."""


def uses_ray(cluster: str) -> bool:
    return cluster in ("ray", "auto") or cluster.startswith("ray://")


def check_config(config: GenerateConfig) -> None:
    """What can be refused without looking at anything but the flags."""
    if not uses_ray(config.cluster):
        if config.cluster not in ("local", "files"):
            raise InputError(
                f"--cluster {config.cluster}", "local, files, ray, auto or ray://HOST:PORT", "choose one of these"
            )
        return
    if config.gpu_ids:
        raise InputError(
            f"--gpu_ids with --cluster {config.cluster}",
            "no list of GPUs: Ray knows which GPUs every node has and gives each worker one",
            "leave --gpu_ids out; --nproc N takes N of the cluster's GPUs, CUDA_VISIBLE_DEVICES limits a node where Ray is started on it",
        )
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"--cluster {config.cluster}, but Ray is not installed", "Ray", "pip install 'halation[ray]'")


@contextlib.contextmanager
def open_cluster(
    config: GenerateConfig,
) -> Iterator[tuple[list[RaySlot], Callable[[Mapping[str, Any]], RayWorkerPool]]]:
    """While entered, this process is a driver of the cluster; given are the workers' places there, and how to make them a worker pool."""
    from halation.generation.workers.open_model import open_runner

    logs = config.output_dir / "logs"
    with _start_cluster(logs) if config.cluster == "ray" else _join_cluster(config.cluster):
        import ray

        slots = assign_slots(ray.nodes(), config.nproc, config.oversubscribe)
        log.info("%d workers on %d nodes of Ray", len(slots), len({slot.node for slot in slots}))
        yield slots, lambda settings: RayWorkerPool(slots, settings, logs, open_runner)


@contextlib.contextmanager
def _start_cluster(logs: Path) -> Iterator[None]:
    """A Ray of this command's own, behind a secret that nobody else is told, gone with the command."""
    secret = (
        {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    )
    remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
    lock_fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    settings = {"include_dashboard": False, "_node_ip_address": LOOPBACK, "_temp_dir": str(folder)}
    try:
        with _set_environment({**secret, "RAY_USAGE_STATS_ENABLED": "0"}), _init_ray(address="local", **settings):
            yield
    finally:
        _copy_worker_errors(folder, logs / "ray")
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_fd)


def remove_stale_folders() -> None:
    """Remove what killed commands left of theirs in the folder for temporary files: one that lives holds its lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):  # held, somebody else's, or gone already
            lock_fd = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_fd)


@contextlib.contextmanager
def _join_cluster(cluster: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            _check_listening(os.environ.get("RAY_ADDRESS", "") if cluster == "auto" else cluster)
            stack.enter_context(_init_ray(address=cluster))
        except (OSError, RuntimeError, ValueError) as error:
            where = "RAY_ADDRESS or on this machine" if cluster == "auto" else cluster
            raise InputError(
                f"no Ray cluster to join at {where}: {_short_message(error)}",
                "a running cluster of the same Ray and Python versions, and the token it was started with (RAY_AUTH_TOKEN)",
                "start one with `ray start --head` and give RAY_ADDRESS=HOST:6379 with --cluster auto, or use --cluster ray",
            ) from error
        yield


def _short_message(error: BaseException) -> str:
    """The first line of what Ray says and, where a traceback follows it, the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) < 3 else f"{lines[0]} {lines[-1]}"


def _check_listening(address: str) -> None:
    """Whether anything listens there: Ray itself asks for minutes before it says no."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            pass


@contextlib.contextmanager
def _init_ray(**settings: Any) -> Iterator[None]:
    """Connected to Ray; one that was connected before stays so. The answer to Ctrl+C and SIGTERM stays this command's."""
    # Ray tells of every restart on standard output, between our lines; it reads this when it is imported.
    with _set_environment({"RAY_DEDUP_LOGS_SKIP_REGEX": "."}):
        import ray
    if ray.is_initialized():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        try:
            _connect(ray, settings)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        yield
    finally:
        # A Ctrl+C in the middle of this would leave Ray's processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        ray.shutdown()
        signal.signal(signal.SIGINT, before)


def _connect(ray: types.ModuleType, settings: Mapping[str, Any]) -> None:
    """Ray's client server starts a process for each driver and, rarely, does not wait long enough for it: it is asked again."""
    num_tries = 3 if str(settings.get("address", "")).startswith("ray://") else 1
    for left in reversed(range(num_tries)):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
            return
        except (ConnectionError, RuntimeError):
            if not left:
                raise
            time.sleep(2.0)


@contextlib.contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _copy_worker_errors(folder: Path, logs: Path) -> None:
    """What workers wrote outside of any log, for instance a crash in native code, lies in Ray's folder, which does not stay."""
    for path in sorted(folder.glob("session_2*/logs/worker-*.err")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(not line.startswith((":job_id:", ":actor_name:")) for line in lines):
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, logs)
