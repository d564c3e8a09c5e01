"""World: rendezvous, exchange of values, checks that ranks agree, and heartbeats."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halation.distributed import launcher
from halation.errors import HalationError, InputError, RankFailure, os_error_message
from halation.input_files import RefusedFileError
from halation.runs.run_folder import write_atomic

log = logging.getLogger(__name__)

Result = TypeVar("Result")
POLL_S = 0.05
MIN_POLL_S = 0.002
HEARTBEAT_S = 0.5
PEER_WAIT_S = 2.0
"""How long the connection to a dead rank may take to close after a collective failed because of it."""


class Peers(Protocol):
    """Which other ranks have left, if Halation's launcher does not stop all ranks together."""

    def departed(self) -> Container[int]:
        """Return the ranks that are known to have left."""

    def blame(self, rank: int | None = None, wait_s: float = 0.0) -> str:
        """Return why `rank` (None: any) left, or which rank caused it; empty if none has left."""


@dataclass(kw_only=True)
class World:
    """This process among all ranks.

    `rank` is global. Tensors use the default group, other values use `control`, which is None for a single process
    without a group.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    control: dist.ProcessGroup | None
    timeout_s: float
    peers: Peers | None = None

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a value (plain JSON) of every rank, in rank order."""
        if self.control is None:
            return [json.loads(json.dumps(value))]
        data = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
        # device="cpu" is explicit: a user's trainer may have set another default device.
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()], device="cpu"), group=self.control)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.control)
        return [json.loads(bytes(row[: int(length)].numpy())) for row, length in zip(rows, lengths, strict=True)]

    def free_memory(self) -> None:
        """Free the device memory of models that are no longer referenced."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place, on the default group."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_from_rank_zero(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        return self.all_gather_object(value if self.is_rank_zero else None)[0]

    @contextlib.contextmanager
    def close_on_success(self) -> Iterator[None]:
        """Destroy the groups at the end, but not after an error.

        After an error that could wait for ranks which wait for this one, and the error would appear only after their
        timeout.
        """
        failed = True
        try:
            yield
            failed = False
        except HalationError as error:
            log.info("this rank ends: %s", error)  # only to its log file: the launcher reports it
            raise
        except Exception:
            log.info("this rank ends with an error", exc_info=True)
            raise
        finally:
            if not failed or self.size == 1:
                self.close()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def init_world(gpu_ids: Sequence[int], oversubscribe: bool, timeout_s: float, num_threads: int) -> World:
    """Join the world on this rank's device, with a fixed number of CPU threads."""
    torch.set_num_threads(num_threads)
    device = os.environ.get(launcher.DEVICE_ENV)
    if device is None:
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
        if not gpu_ids and "LOCAL_RANK" not in os.environ and launcher.num_gpus() == 1:
            return init_from_env(torch.device("cuda:0"), timeout_s)  # the scheduler gives each task its own GPU
        count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "0"))) or local + 1
        devices = launcher.select_devices(max(count, local + 1), gpu_ids, oversubscribe)
        device = devices[local]
    return init_from_env(torch.device(device), timeout_s)


def init_from_env(device: torch.device | None = None, timeout_s: float = 600.0) -> World:
    """Join the world of Halation's launcher, torchrun or srun, or create a world of one."""
    environment = os.environ
    if launcher.RENDEZVOUS_ENV in environment:
        rank, size, local = int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"])
        store: dist.Store = _rendezvous_via_folder(
            Path(environment[launcher.RENDEZVOUS_ENV]), rank, size, "127.0.0.1", timeout_s
        )
    elif "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size, local = (
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", "0")),
        )
        store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))
        store = _fresh_prefix_store(store, rank, size, timeout_s)
    elif launcher.slurm_world_size() > 1:
        rank, size, local = (
            int(environment["SLURM_PROCID"]),
            launcher.slurm_world_size(),
            int(environment.get("SLURM_LOCALID", "0")),
        )
        numbers = [environment.get(f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID")]
        job = f"{numbers[0]}.{numbers[1]}.{environment.get('SLURM_RESTART_COUNT', '0')}"
        folder = Path(environment.get("SLURM_SUBMIT_DIR", ".")) / f".halation_rendezvous_{job}"
        folder.mkdir(exist_ok=True)
        store = _rendezvous_via_folder(folder, rank, size, socket.gethostname(), timeout_s)
        _gather_via_store(dist.PrefixStore("met", store), rank, size, "")
        if rank == 0:  # all ranks have read the address
            shutil.rmtree(folder, ignore_errors=True)
    else:
        rank, size, local = 0, 1, 0
        store = dist.HashStore()
    return init_process_groups(
        rank=rank, size=size, local_rank=local, device=device or torch.device("cpu"), store=store, timeout_s=timeout_s
    )


def init_process_groups(
    *, rank: int, size: int, local_rank: int, device: torch.device, store: dist.Store, timeout_s: float
) -> World:
    """Create the process groups over a store; ranks that share a GPU use gloo, as NCCL cannot."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # init_process_group needs an index
        _init_gpu(device)
    device_key = (
        f"{socket.gethostname()}/{rank if device.type == 'cpu' else torch.cuda.get_device_properties(device).uuid}"
    )
    device_keys = _gather_via_store(dist.PrefixStore("places", store), rank, size, device_key)
    has_shared_gpu = len(set(device_keys)) < size
    backend = "nccl" if device.type == "cuda" and not has_shared_gpu and dist.is_nccl_available() else "gloo"
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("default", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device_id,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    return World(
        rank=rank, size=size, local_rank=local_rank, device=device, store=store, control=control, timeout_s=timeout_s
    )


def _init_gpu(device: torch.device) -> None:
    """Select and initialise this rank's GPU; raises InputError if torch or the driver cannot."""
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise InputError(
            f"torch {torch.__version__} cannot use {device}: {error}",
            "a CUDA build of torch that matches the driver",
            "install one (`halation doctor` shows what is installed), "
            "or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command",
        ) from error


def _fresh_prefix_store(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """Return a prefix of the store that no earlier start of these ranks has written to.

    torchrun keeps its store when it restarts ranks, and gloo would use the addresses of dead ranks. The restart count
    is per node and does not identify a start, so each rank sends a fresh random token to rank 0.
    """
    token = os.urandom(8).hex()
    if rank > 0:
        store.set(f"halation/asks/{rank}", token)
        prefix = store.get(f"halation/answer/{rank}/{token}").decode()
        store.set(f"{prefix}/heard/{rank}", "")
        return dist.PrefixStore(prefix, store)
    deadline = time.monotonic() + timeout_s
    missing = set(range(1, size))
    while missing:
        for peer in sorted(missing):
            if store.check([f"halation/asks/{peer}"]):
                peer_token = store.get(f"halation/asks/{peer}").decode()
                store.set(
                    f"halation/answer/{peer}/{peer_token}", token
                )  # the token may be of a dead rank; the live one then replaces it
                if store.check([f"{token}/heard/{peer}"]):
                    missing.discard(peer)
        if missing and time.monotonic() > deadline:
            raise RankFailure(f"rank {min(missing)} did not join within {timeout_s:.0f} s; see its log")
        time.sleep(POLL_S if missing else 0)
    return dist.PrefixStore(token, store)


def _gather_via_store(store: dist.Store, rank: int, size: int, value: str) -> list[str]:
    store.set(str(rank), value)
    return [store.get(str(peer)).decode() for peer in range(size)]


def _rendezvous_via_folder(folder: Path, rank: int, size: int, host: str, timeout_s: float) -> dist.Store:
    """Meet through a folder, in which rank 0 writes its address.

    Rank 0 listens on MASTER_PORT if that is set and free, else on any port.
    """
    path = folder / "address"
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = _listen(host, size, timeout)
        write_atomic(path, f"{host} {store.port}".encode(), "rendezvous", durable=False)
        return store
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise RankFailure(f"rank 0 did not open its port within {timeout_s:.0f} s; see its log")
        time.sleep(POLL_S)
    address, port = path.read_text().split()
    return dist.TCPStore(address, int(port), size, is_master=False, timeout=timeout)


def _listen(host: str, size: int, timeout: timedelta) -> dist.TCPStore:
    port = os.environ.get("MASTER_PORT", "")
    if port.isdigit() and _is_port_free(int(port)):
        with contextlib.suppress(dist.DistNetworkError):  # another process took the port meanwhile
            return dist.TCPStore(host, int(port), size, is_master=True, wait_for_workers=False, timeout=timeout)
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
    if port not in ("", "0"):
        log.warning("MASTER_PORT %s is in use or not a port; using port %d", port, store.port)
    return store


def _is_port_free(port: int) -> bool:
    """Check the port first, because torch logs several lines if it is in use."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return True
    except (OSError, OverflowError):
        return False


def checksums(named: Iterable[tuple[str, Tensor]]) -> tuple[list[str], Tensor]:
    """Return a checksum per tensor that changes with any bit (unless changes cancel)."""
    names, sums = [], []
    for name, tensor in named:
        words = tensor.detach().contiguous().flatten().view(torch.uint8 if tensor.element_size() < 4 else torch.int32)
        weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
        names.append(name)
        sums.append((words.to(torch.int64) * weights).sum())
    return names, torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def check_ranks_agree(world: World, named: Iterable[tuple[str, Tensor]], when: str) -> None:
    """Raise RankFailure on all ranks if replicated tensors are not bit-identical on all ranks."""
    if world.size == 1:
        return
    names, sums = checksums(named)
    rows = world.all_gather_object(sums.tolist())
    for rank, row in enumerate(rows):
        different = [name for name, mine, theirs in zip(names, row, rows[0], strict=True) if mine != theirs]
        if different:
            raise RankFailure(
                f"ranks disagree {when}: rank {rank} differs from rank 0 in {len(different)} of {len(names)} tensors, "
                f"first in {different[0]}; gradients were not synchronised, or a rank's memory is faulty. "
                "Run the same command again to resume from the last checkpoint."
            )


def run_with_heartbeat(action: Callable[[], Result], heartbeat: Callable[[], None]) -> Result:
    """Run a long action in a thread and call `heartbeat` meanwhile; return its result."""
    with ThreadPoolExecutor(1, thread_name_prefix="long") as thread:
        future = thread.submit(action)
        while not wait([future], HEARTBEAT_S).done:
            heartbeat()
        return future.result()


def run_on_rank_zero(world: World, name: str, action: Callable[[Callable[[], None]], Any], timeout_s: float) -> Any:
    """Run a function on rank 0; the others wait for it and get its result or error."""
    outcome: dict[str, Any] = {}
    with HeartbeatMonitor(world, name, timeout_s) as monitor:
        if world.is_rank_zero:
            try:
                outcome = {"value": action(monitor.heartbeat)}
            except (InputError, RefusedFileError) as refusal:
                error = refusal.as_input_error() if isinstance(refusal, RefusedFileError) else refusal
                outcome = {"refusal": [error.found, error.expected, error.action]}
            except HalationError as error:
                outcome = {"error": str(error), "exit_code": error.exit_code}
            except Exception as error:
                log.info("%s failed", name, exc_info=True)
                outcome = {
                    "error": os_error_message(error) or traceback.format_exc(),
                    "exit_code": HalationError.exit_code,
                }
        outcome = monitor.gather_results(outcome)[0]
    if "refusal" in outcome:
        raise InputError(*outcome["refusal"])
    if "error" in outcome:
        failure = HalationError(outcome["error"])
        failure.exit_code = outcome["exit_code"]
        raise failure
    return outcome["value"]


def run_on_all_ranks(
    world: World,
    name: str,
    timeout_s: float,
    action: Callable[[Callable[[], None]], Any],
    recoverable: tuple[type[Exception], ...] = (),
) -> list[Any]:
    """Run an action on all ranks and gather results; raise a recoverable error on all ranks."""
    result, error = None, ""
    with HeartbeatMonitor(world, name, timeout_s) as monitor:
        try:
            result = action(monitor.heartbeat)
        except recoverable as problem:
            log.debug("%s failed", name, exc_info=True)
            error = os_error_message(problem) or f"{type(problem).__name__}: {problem}"
        reports = monitor.gather_results([result, error])
    for rank, (_result, message) in enumerate(reports):
        if message:
            raise HalationError(f"rank {rank}: {message}")
    return [result for result, _message in reports]


class HeartbeatMonitor:
    """Lets ranks work independently for any time and detects those that make no progress.

    Each rank calls `heartbeat` as it works; a thread publishes the count to the store. No collective is open meanwhile,
    so long work cannot hit the timeout of a process group. If the count of a rank does not change for `timeout_s`, the
    error names the rank and shows its stack if its process still responds.
    """

    def __init__(self, world: World, name: str, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.prefix = f"heartbeat/{name}"
        self.num_heartbeats = 0
        self._departure = ""
        self._last_heartbeat = time.monotonic()
        self._thread_id = threading.get_ident()
        self._closed = threading.Event()
        has_clone = isinstance(world.store, dist.TCPStore | dist.PrefixStore)
        store: Any = world.store  # the type stubs lack `clone`
        self._store = store.clone() if has_clone else store
        self._thread = threading.Thread(target=self._publish_heartbeats, name="halation-heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatMonitor:
        if self.world.size > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def heartbeat(self) -> None:
        self.num_heartbeats += 1
        self._last_heartbeat = time.monotonic()

    def check_peers(self) -> None:
        """Raise RankFailure if another rank has left: its share of the work will be missing."""
        if self._departure:
            raise RankFailure(self._departure)

    def publish_result(self, result: Any) -> None:
        """Publish this rank's result without waiting for the others."""
        if self.world.size > 1:
            self.world.store.set(f"{self.prefix}/word/{self.world.rank}", json.dumps(result))

    def gather_results(self, result: Any) -> list[Any]:
        """Publish this rank's result and wait for all; raise if a rank makes no progress."""
        if self.world.size == 1:
            return [result]
        self.publish_result(result)
        results: dict[int, Any] = {self.world.rank: result}
        seen: dict[int, tuple[Any, float]] = {rank: ("", time.monotonic()) for rank in range(self.world.size)}
        pause_s = MIN_POLL_S
        while len(results) < self.world.size:
            self.heartbeat()
            # Read before the results: a rank may exit as soon as it has published its result.
            departed: Container[int] = self.world.peers.departed() if self.world.peers is not None else ()
            for rank in [rank for rank in range(self.world.size) if rank not in results]:
                if self.world.store.check([f"{self.prefix}/word/{rank}"]):
                    results[rank] = json.loads(self.world.store.get(f"{self.prefix}/word/{rank}"))
                    continue
                if self.world.peers is not None and rank in departed:
                    raise RankFailure(self.world.peers.blame(rank))
                state = self._read_heartbeat(rank)
                if state.get("count") != seen[rank][0]:
                    seen[rank] = (state.get("count"), time.monotonic())
                elif time.monotonic() - seen[rank][1] > self.timeout_s:
                    raise RankFailure(self._format_stall(rank, state))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)  # poll fast at first, then rarely, to limit the load on the store
        return [results[rank] for rank in range(self.world.size)]

    def report_failure(self, reason: str) -> None:
        """Publish why this rank fails, for ranks that wait for it in a collective."""
        with contextlib.suppress(RuntimeError):
            self.world.store.set(f"{self.prefix}/failed/{self.world.rank}", reason)

    def explain_failure(self) -> str:
        """Explain an incomplete collective: the rank that failed, died or is furthest behind."""
        try:
            return self._find_failed_rank()
        except RuntimeError:
            return "rank 0 is gone, and with it the store that it hosts"

    def _find_failed_rank(self) -> str:
        store, prefix = self.world.store, self.prefix
        peers = [rank for rank in range(self.world.size) if rank != self.world.rank]
        store.set(f"{prefix}/missing/{self.world.rank}", "")
        for rank in peers:
            if store.check([f"{prefix}/failed/{rank}"]):
                return f"rank {rank} failed: {self._get(f'{prefix}/failed/{rank}').decode()}"
        departed = self.world.peers.blame(wait_s=PEER_WAIT_S) if self.world.peers is not None else ""
        if departed:
            return departed
        before = {rank: self._read_heartbeat(rank) for rank in peers}
        time.sleep(3 * HEARTBEAT_S)
        states = {rank: self._read_heartbeat(rank) for rank in peers}
        for rank in peers:  # a rank that waits for another may exit at any moment and is not the cause
            if states[rank] == before[rank] and not store.check([f"{prefix}/missing/{rank}"]):
                what, count = prefix.removeprefix("heartbeat/"), states[rank].get("count") or 0
                return f"rank {rank} stopped responding in {what} (heartbeat {count}): it was stopped or killed"
        states[self.world.rank] = {"count": self.num_heartbeats}
        last = min(states, key=lambda rank: (states[rank].get("count") or 0, rank))
        return self._format_stall(last, states[last])

    def _read_heartbeat(self, rank: int) -> dict[str, Any]:
        key = f"{self.prefix}/beat/{rank}"
        state: dict[str, Any] = json.loads(self._get(key)) if self.world.store.check([key]) else {}
        return state

    def _get(self, key: str) -> bytes:
        value: bytes = self.world.store.get(key)
        return value

    def _format_stall(self, rank: int, state: dict[str, Any]) -> str:
        stack = state.get("stack")
        where = (
            f"\nits stack:\n{stack}"
            if stack
            else "\nits process does not respond (stopped, killed or stuck in the driver)"
        )
        what = self.prefix.removeprefix("heartbeat/")
        beat = f"(heartbeat {state.get('count') or 0})"
        return f"rank {rank} has made no progress for {self.timeout_s:.0f} s in {what} {beat}{where}"

    def _publish_heartbeats(self) -> None:
        for tick in itertools.count():
            if self._closed.is_set():
                return
            state: dict[str, Any] = {"count": self.num_heartbeats, "tick": tick}
            if time.monotonic() - self._last_heartbeat > max(self.timeout_s - 2 * HEARTBEAT_S, self.timeout_s / 2):
                frame = sys._current_frames().get(self._thread_id)
                state["stack"] = "".join(traceback.format_stack(frame)[-12:]) if frame else ""
            try:
                self._store.set(f"{self.prefix}/beat/{self.world.rank}", json.dumps(state))
            except (RuntimeError, ValueError):  # the store is gone with its rank; the launcher reports that
                return
            self._log_departure()
            self._closed.wait(HEARTBEAT_S)

    def _log_departure(self) -> None:
        """Log a departure immediately: this rank may be busy, or in a collective of the trainer."""
        if self.world.peers is not None and not self._departure and not self._closed.is_set():
            self._departure = self.world.peers.blame()
            if self._departure:
                log.error("%s", self._departure)
