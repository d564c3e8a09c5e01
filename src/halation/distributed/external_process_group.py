"""Use the process group and modules of a user's training loop without changing them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import select
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halation.distributed.launcher import is_lost_peer_message
from halation.distributed.world import PEER_WAIT_S, World
from halation.errors import InputError, RankFailure

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 2.0
NETWORK_ERRNOS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
KEEPALIVE_S = (10, 5, 4)
"""A machine that does not respond for 10 + 4 * 5 seconds is gone; one with a stopped process still responds."""
TOKEN_BYTES = 16
SIOCGIFADDR = 0x8915


@contextlib.contextmanager
def external_world(rank: int, size: int, device: torch.device, timeout_s: float) -> Iterator[World]:
    """Yield the user's ranks with a control group of our own, or a world of one."""
    if not dist.is_initialized():
        if size != 1:
            raise InputError(
                f"world_size {size}, but torch.distributed is not initialised",
                "an initialised process group",
                "call torch.distributed.init_process_group first, or pass world_size=1",
            )
        # Never create a default group here: code inside the context may check whether there is one.
        yield World(
            rank=0, size=1, local_rank=0, device=device, store=dist.HashStore(), control=None, timeout_s=timeout_s
        )
        return
    if (rank, size) != (dist.get_rank(), dist.get_world_size()):
        raise InputError(
            f"rank {rank} of {size}",
            f"rank and size of torch.distributed: {dist.get_rank()} of {dist.get_world_size()}",
            "pass dist.get_rank() and dist.get_world_size()",
        )
    store = dist.distributed_c10d._get_default_store()
    world = World(
        rank=rank,
        size=size,
        local_rank=device.index or 0,
        device=device,
        store=store,
        control=None,
        timeout_s=timeout_s,
    )
    scoped_store: _ScopedStore | None = None
    try:
        world = _join_control_group(world)
        # A fresh prefix: keys of earlier calls must not be read, and ranks may have made different numbers of calls.
        scoped_store = _ScopedStore(f"halation/{world.broadcast_from_rank_zero(uuid.uuid4().hex)}", store, set())
        yield replace(world, store=scoped_store)
        world.all_gather_object("")  # all ranks have read the keys of the others
    except BaseException as error:
        failure = _lost_peer_failure(world, error, scoped_store is not None)
        _leave_control_group(world, failure or error)  # so that stale messages are not read by a later call
        if failure is not None:
            raise failure from error
        raise
    scoped_store.clear()


class _ScopedStore(dist.PrefixStore):
    """A prefix of the user's store that is cleared after use: a job may make many calls."""

    def __init__(self, prefix: str, store: dist.Store, keys: set[str]) -> None:
        super().__init__(prefix, store)
        self._scope = (prefix, store, keys)

    def set(self, key: str, value: Any) -> None:
        self._scope[2].add(key)
        super().set(key, value)

    def clone(self) -> _ScopedStore:
        prefix, store, keys = self._scope
        base_store: Any = store  # the type stubs lack `clone`
        return _ScopedStore(prefix, base_store.clone(), keys)

    def clear(self) -> None:
        """Delete the keys of this rank."""
        with contextlib.suppress(dist.DistNetworkError):  # the host of the store may have exited already
            for key in self._scope[2]:
                self.delete_key(key)


@dataclass(frozen=True, kw_only=True)
class Departure:
    """How a rank left; `because_of` is the rank that caused it, or -1."""

    reason: str = ""
    because_of: int = -1


class PeerLinks:
    """TCP connections from this rank to all others, closed by the kernel when a process ends.

    This is exact, while heartbeats would guess: a rank that is busy or stopped keeps its connections, one that was
    killed or has exited does not, and one that leaves with an error sends the reason first.
    """

    def __init__(self, rank: int, links: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._links = links
        self._received = dict.fromkeys(links, b"")
        self._departures: dict[int, Departure] = {}
        self._blamed = -1
        self._lock = threading.Lock()
        for link in links.values():
            link.setblocking(False)
        _open_links.add(self)

    def departed(self) -> set[int]:
        """Return the ranks that are known to have left."""
        self._read_links(0.0)
        return set(self._departures)

    def blame(self, rank: int | None = None, wait_s: float = 0.0) -> str:
        """Return why `rank` (None: any) left, or which rank caused it; empty if none has left."""
        deadline = time.monotonic() + wait_s
        while True:
            self._read_links(max(0.0, deadline - time.monotonic()))
            found = (
                [rank] if rank is not None else sorted(self._departures, key=lambda r: self._departures[r].because_of)
            )
            if any(each in self._departures for each in found) or time.monotonic() >= deadline:
                break
        if not found or found[0] not in self._departures:
            return ""
        culprit = found[0]
        because_of = self._departures[culprit].because_of
        if because_of not in (-1, self.rank):
            culprit = because_of
        self._blamed = culprit
        reason = self._departures.get(culprit, Departure()).reason
        return (
            f"rank {culprit} left: {reason}" if reason else f"rank {culprit} is gone: its process ended or was killed"
        )

    def leave(self, reason: str) -> None:
        """Send the reason why this rank leaves to the others and close the connections."""
        words = {"reason": reason, "because_of": self._blamed}
        with self._lock:
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send(json.dumps(words).encode() + b"\n")
        self.close()

    def close(self) -> None:
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()

    def _read_links(self, wait_s: float) -> None:
        with self._lock:
            poll = select.poll()
            ranks = {link.fileno(): rank for rank, link in self._links.items()}
            for number in ranks:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(int(1000 * wait_s)):
                self._read_link(ranks[number])

    def _read_link(self, rank: int) -> None:
        try:
            data = self._links[rank].recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            data = b""
            if error.errno in NETWORK_ERRNOS:
                log.warning("lost the connection to rank %d: its exit is detected only after the timeout", rank)
                self._links.pop(rank).close()
                return
        self._received[rank] += data
        if data and b"\n" not in data:
            return
        words = self._received[rank].partition(b"\n")
        self._departures[rank] = Departure(**json.loads(words[0])) if words[1] else Departure()
        self._links.pop(rank).close()


_open_links: weakref.WeakSet[PeerLinks] = weakref.WeakSet()


def _close_links_of_parent() -> None:
    """Close connections in a forked process (a data loader worker): it may outlive its rank."""
    for links in list(_open_links):
        links._lock = threading.Lock()  # another thread of the parent may have held it
        links.close()


os.register_at_fork(after_in_child=_close_links_of_parent)


def _connect_peers(world: World) -> PeerLinks:
    """Connect all ranks; the exit of an unreachable one is detected only after the timeout."""
    is_one_machine = len(set(world.all_gather_object(_network_place()))) == 1
    host = "127.0.0.1" if is_one_machine else _own_address()
    token = os.urandom(TOKEN_BYTES)
    links: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener = None
        with contextlib.suppress(OSError):
            if is_one_machine or not host.startswith("127."):  # loopback addresses do not reach other machines
                listener = stack.enter_context(socket.create_server((host, 0), backlog=world.size))
        door = [host, listener.getsockname()[1], token.hex()] if listener is not None else None
        doors = world.all_gather_object(door)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for rank, their_door in enumerate(doors[: world.rank]):
            with contextlib.suppress(OSError):
                if their_door is not None:
                    links[rank] = _connect(their_door, world.rank, deadline)
        if listener is not None:
            links |= _accept_links(listener, token, world.size - 1 - world.rank, deadline)
    # Keep connections that both sides have; one that the other side rejected would look like a lost rank.
    linked_by_rank = world.all_gather_object(sorted(links))
    for rank in [rank for rank in links if world.rank not in linked_by_rank[rank]]:
        links.pop(rank).close()
    missing = [rank for rank in range(world.size) if rank not in links and rank != world.rank]
    if missing:
        names = ", ".join(map(str, missing))
        log.warning("no connection to rank %s: its exit is detected only after timeout_s=%g", names, world.timeout_s)
    return PeerLinks(world.rank, links)


def _connect(door: list[Any], rank: int, deadline: float) -> socket.socket:
    host, port, token = door
    link = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
    link.sendall(bytes.fromhex(token) + struct.pack("!i", rank))
    return _keep_alive(link)


def _accept_links(
    listener: socket.socket, token: bytes, num_expected: int, deadline: float
) -> dict[int, socket.socket]:
    """Accept connections of higher ranks; those without the token are closed."""
    links: dict[int, socket.socket] = {}
    with contextlib.suppress(TimeoutError):
        while len(links) < num_expected:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(HELLO_TIMEOUT_S)
            hello = b""
            with contextlib.suppress(OSError):
                while len(hello) < TOKEN_BYTES + 4 and (data := link.recv(TOKEN_BYTES + 4 - len(hello))):
                    hello += data
            if len(hello) == TOKEN_BYTES + 4 and hello[:TOKEN_BYTES] == token:
                links[struct.unpack("!i", hello[TOKEN_BYTES:])[0]] = _keep_alive(link)
            else:
                link.close()
    return links


def _keep_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEPALIVE_S, strict=True):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return link


def _network_place() -> str:
    """Return an id shared by all processes that reach each other over the loopback interface."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_address() -> str:
    """Return the address of this machine for other machines, determined like gloo does."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: a host name that is too long
        if not interface:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return "127.0.0.1"


@dataclass(frozen=True)
class _ControlGroup:
    """Our group next to the user's default group (weak references), and the peer links."""

    default: weakref.ref[Any]
    control: weakref.ref[Any]
    peers: PeerLinks | None


_control_groups: dict[float, _ControlGroup] = {}
"""By timeout."""


def _join_control_group(world: World) -> World:
    """Return the world with our control group, cached because creating one connects all ranks."""
    known = _control_groups.get(world.timeout_s)
    if known is not None and known.control() is not None and known.default() is dist.group.WORLD:
        return replace(world, control=known.control(), peers=known.peers)
    if known is not None and known.peers is not None:
        known.peers.close()
    _control_groups.pop(world.timeout_s, None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout_s))
    assert group is not None
    world = replace(world, control=group)
    try:
        peers = _connect_peers(world) if world.size > 1 else None
    except BaseException:
        dist.destroy_process_group(group)
        raise
    _control_groups[world.timeout_s] = _ControlGroup(weakref.ref(dist.group.WORLD), weakref.ref(group), peers)
    return replace(world, peers=peers)


def _leave_control_group(world: World, error: BaseException) -> None:
    """Send the reason why this rank leaves and destroy the group; waiting ranks fail too."""
    known = _control_groups.pop(world.timeout_s, None)
    if known is None:
        return
    if known.peers is not None:
        known.peers.leave(f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": "))
    control = known.control()
    if control is not None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(control)


def _lost_peer_failure(world: World, error: BaseException, has_joined: bool) -> RankFailure | None:
    """Convert an error of the store or a collective to RankFailure if a lost rank caused it."""
    is_store_lost = isinstance(error, dist.DistNetworkError)
    if not is_store_lost and not (isinstance(error, RuntimeError) and is_lost_peer_message(str(error))):
        return None
    known = _control_groups.get(world.timeout_s)
    peers = known.peers if known is not None else None
    sentence = peers.blame(wait_s=PEER_WAIT_S) if peers is not None else ""
    if sentence:
        is_host = is_store_lost and sentence.startswith("rank 0 ")
        return RankFailure(f"{sentence} (the process that hosts the rendezvous store)" if is_host else sentence)
    reason = str(error).partition("\n")[0]
    if is_store_lost:
        return RankFailure(f"the process that hosts the rendezvous store, rank 0 or the launcher, is gone: {reason}")
    if has_joined and not isinstance(error, dist.DistError) and "gloo" not in str(error):
        return None  # an error of the trainer's own collectives
    return RankFailure(f"not every rank called sampler(step) within {world.timeout_s:.0f} s, or one is gone: {reason}")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Remove the wrapper of DDP, DataParallel or DeepSpeed; shard hooks are on inner modules."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_sharded(module: nn.Module) -> bool:
    """Return True for FSDP2 (DTensors) and ZeRO-3 (`ds_id`): every forward is a collective."""
    return any(hasattr(parameter, "ds_id") or hasattr(parameter, "placements") for parameter in module.parameters())


def reshard(module: nn.Module) -> None:
    """Reshard weights that FSDP2 gathered and keeps after a forward without backward."""
    for part in module.modules():
        reshard_part: Any = getattr(part, "reshard", None)
        if reshard_part is not None:
            reshard_part()


@contextlib.contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Use evaluation mode inside; restore all modes and `requires_grad` flags afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    grad_flags = [(weight, weight.requires_grad) for module in modules for weight in module.parameters()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for weight, requires_grad in grad_flags:
            weight.requires_grad_(requires_grad)
