"""World: rendezvous of ranks, exchange of values, agreement, and detection of stuck ranks."""

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
"""How long a connection may take to close after a collective failed because of the same end."""


class Peers(Protocol):
    """Which other ranks have left, for ranks that no launcher of ours ends together."""

    def departed(self) -> Container[int]:
        """The ranks that are known to have left."""

    def blame(self, rank: int | None = None, wait_s: float = 0.0) -> str:
        """Why this rank (None: any rank) left, or which one made it leave; empty where none has left."""


@dataclass(kw_only=True)
class World:
    """This process among its peers. `rank` is global; tensors use the default group, other values `control`.

    A single process without a group has no `control` either.
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
        """Every rank's word (plain JSON), in rank order, on every rank."""
        if self.control is None:
            return [json.loads(json.dumps(value))]
        data = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
        # On the CPU by name: a trainer may have set another default device.
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()], device="cpu"), group=self.control)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.control)
        return [json.loads(bytes(row[: int(length)].numpy())) for row, length in zip(rows, lengths, strict=True)]

    def free_memory(self) -> None:
        """Give back the device memory of models that nothing refers to any more."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place, on the default group."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_from_rank_zero(self, value: Any) -> Any:
        """Rank 0's word on every rank."""
        return self.all_gather_object(value if self.is_rank_zero else None)[0]

    @contextlib.contextmanager
    def close_on_success(self) -> Iterator[None]:
        """Destroy the groups at the end, but not after an error.

        That would wait for ranks which wait for this one, and the error would be shown only after their timeout.
        """
        failed = True
        try:
            yield
            failed = False
        except HalationError as error:
            log.info("this rank ends: %s", error)  # to its log alone: the launcher reports it
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
            return init_from_env(torch.device("cuda:0"), timeout_s)  # the scheduler shows each task its own GPU
        count = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "0"))) or local + 1
        devices = launcher.select_devices(max(count, local + 1), gpu_ids, oversubscribe)
        device = devices[local]
    return init_from_env(torch.device(device), timeout_s)


def init_from_env(device: torch.device | None = None, timeout_s: float = 600.0) -> World:
    """Join the world that the environment describes: our launcher's, torchrun's, srun's, or a world of one."""
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
        if rank == 0:  # everybody has read the address
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
    """Make the process groups over a store. Ranks that share a GPU cannot use NCCL, so they speak over gloo."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # torch refuses a GPU without a number here
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
    """Make the GPU this rank's own; a build of torch or a driver that cannot is said so, and not by a traceback."""
    try:
        torch.cuda.set_device(device)
        torch.cuda.init()
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise InputError(
            f"torch {torch.__version__} cannot use {device}: {error}",
            "a CUDA build of torch that fits the driver",
            "install one (`halation doctor` shows what is there), "
            "or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command",
        ) from error


def _fresh_prefix_store(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """A corner of the store that no earlier start of these ranks has written to.

    torchrun keeps its store when it starts ranks again, and gloo would take the addresses of dead ranks for those of
    living ones. Restarts are counted by node and cannot tell starts apart, so each rank asks with a word that was
    never used before.
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
                )  # perhaps to a dead one; the living one asks after it
                if store.check([f"{token}/heard/{peer}"]):
                    missing.discard(peer)
        if missing and time.monotonic() > deadline:
            raise RankFailure(f"rank {min(missing)} did not come within {timeout_s:.0f} s; its log says why")
        time.sleep(POLL_S if missing else 0)
    return dist.PrefixStore(token, store)


def _gather_via_store(store: dist.Store, rank: int, size: int, value: str) -> list[str]:
    store.set(str(rank), value)
    return [store.get(str(peer)).decode() for peer in range(size)]


def _rendezvous_via_folder(folder: Path, rank: int, size: int, host: str, timeout_s: float) -> dist.Store:
    """Rank 0 listens on MASTER_PORT if that is set and free, else on any port, and writes the address to the folder."""
    path = folder / "address"
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = _listen(host, size, timeout)
        write_atomic(path, f"{host} {store.port}".encode(), "rendezvous", durable=False)
        return store
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise RankFailure(f"rank 0 did not open its port within {timeout_s:.0f} s; its log says why")
        time.sleep(POLL_S)
    address, port = path.read_text().split()
    return dist.TCPStore(address, int(port), size, is_master=False, timeout=timeout)


def _listen(host: str, size: int, timeout: timedelta) -> dist.TCPStore:
    port = os.environ.get("MASTER_PORT", "")
    if port.isdigit() and _is_port_free(int(port)):
        with contextlib.suppress(dist.DistNetworkError):  # another process was faster
            return dist.TCPStore(host, int(port), size, is_master=True, wait_for_workers=False, timeout=timeout)
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
    if port not in ("", "0"):
        log.warning("port %s is taken or not a port; ranks meet on port %d", port, store.port)
    return store


def _is_port_free(port: int) -> bool:
    """Asked before, because torch tells of a taken port in several lines of its own."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return True
    except (OSError, OverflowError):
        return False


def checksums(named: Iterable[tuple[str, Tensor]]) -> tuple[list[str], Tensor]:
    """One integer for each tensor that changes when any of its bits does (up to sums that cancel)."""
    names, sums = [], []
    for name, tensor in named:
        words = tensor.detach().contiguous().flatten().view(torch.uint8 if tensor.element_size() < 4 else torch.int32)
        weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
        names.append(name)
        sums.append((words.to(torch.int64) * weights).sum())
    return names, torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def check_ranks_agree(world: World, named: Iterable[tuple[str, Tensor]], when: str) -> None:
    """Raise on all ranks, naming rank and tensor, where replicated tensors are not bit for bit the same everywhere."""
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
                "Run the same command again to go on from the last checkpoint."
            )


def run_with_heartbeat(action: Callable[[], Result], heartbeat: Callable[[], None]) -> Result:
    """The result of something long that cannot beat by itself: it runs on a thread of its own while this one does."""
    with ThreadPoolExecutor(1, thread_name_prefix="long") as thread:
        future = thread.submit(action)
        while not wait([future], HEARTBEAT_S).done:
            heartbeat()
        return future.result()


def run_on_rank_zero(world: World, name: str, action: Callable[[Callable[[], None]], Any], timeout_s: float) -> Any:
    """Run a function on rank 0 while the others wait as long as it makes progress; all get its result or error."""
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
    """Results of an action that ranks run apart; a recoverable error of one rank is raised on all of them."""
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
    """A stretch in which ranks work apart for as long as they like, and are missed only when they stop making progress.

    Each rank calls `heartbeat` as it works; a thread tells the store. No collective is open meanwhile, so no length
    of work can run into a process group's timeout. A rank whose count has not moved for `timeout_s` is named, with
    its stack where its process can still speak.
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
        store: Any = world.store  # a store's stubs lack what these two have
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
        """Raise where another rank has left since this began: its share is missing, whatever this rank still does."""
        if self._departure:
            raise RankFailure(self._departure)

    def publish_result(self, result: Any) -> None:
        """Leave this rank's word for the others without waiting for theirs."""
        if self.world.size > 1:
            self.world.store.set(f"{self.prefix}/word/{self.world.rank}", json.dumps(result))

    def gather_results(self, result: Any) -> list[Any]:
        """Leave this rank's word and wait for everybody's; raise, naming who stopped, when one makes no progress."""
        if self.world.size == 1:
            return [result]
        self.publish_result(result)
        results: dict[int, Any] = {self.world.rank: result}
        seen: dict[int, tuple[Any, float]] = {rank: ("", time.monotonic()) for rank in range(self.world.size)}
        pause_s = MIN_POLL_S
        while len(results) < self.world.size:
            self.heartbeat()
            # Read before the words are looked for: a rank may leave as soon as it has left its word.
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
            pause_s = min(
                2 * pause_s, POLL_S
            )  # ranks that are nearly done wait briefly, those that are not do not crowd the store
        return [results[rank] for rank in range(self.world.size)]

    def report_failure(self, reason: str) -> None:
        """Leave word that this rank cannot go on, for those who will miss it in a collective."""
        with contextlib.suppress(RuntimeError):
            self.world.store.set(f"{self.prefix}/failed/{self.world.rank}", reason)

    def explain_failure(self) -> str:
        """Why a collective was not completed: the rank that failed, fell silent, or is furthest behind."""
        try:
            return self._find_failed_rank()
        except RuntimeError:
            return "rank 0 is gone, and with it the store in which ranks leave word"

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
        for rank in peers:  # a rank that waits for another may end any moment, and is not the cause
            if states[rank] == before[rank] and not store.check([f"{prefix}/missing/{rank}"]):
                what, count = prefix.removeprefix("heartbeat/"), states[rank].get("count") or 0
                return f"rank {rank} fell silent in {what} (beat {count}): it was stopped or killed"
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
            f"\nwhere it stands:\n{stack}"
            if stack
            else "\nits process does not answer (stopped, killed or stuck in the driver)"
        )
        what = self.prefix.removeprefix("heartbeat/")
        beat = f"(beat {state.get('count') or 0})"
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
            except (RuntimeError, ValueError):  # the store went with its rank; the launcher speaks then
                return
            self._log_departure()
            self._closed.wait(HEARTBEAT_S)

    def _log_departure(self) -> None:
        """Log at once that a rank has left: this one may be in a long draw, or in a collective of the trainer."""
        if self.world.peers is not None and not self._departure and not self._closed.is_set():
            self._departure = self.world.peers.blame()
            if self._departure:
                log.error("%s", self._departure)
