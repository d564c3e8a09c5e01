"""A pool of ranks: processes that import torch once and serve one world after another.

Processes are forked from a server that has imported everything and computed nothing, so a rank that hung or died is
replaced quickly. Each call gets a new FileStore: no port, and no state of the call before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from halation import fault_injection
from halation.distributed.child_process import tie_to_parent
from halation.errors import HalationError
from halation.runs.run_folder import scratch_folder

GRACE_S = 10.0
"""Time for the other ranks to fail after the first failure before they count as hung."""
DUMP = signal.SIGUSR2
PRELOAD = ("torch", "torch.distributed.fsdp", "halation.distributed.world", "support.rank_pool", "pytest")
"""pytest because ranks import the test modules whose functions they run."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """How one rank ended: an exception's type, message and traceback, or that it hung or died."""

    kind: str
    message: str
    trace: str = ""
    exit_code: int | None = None


class RanksFailed(HalationError):
    """Some ranks of a call did not return; `troubles` has the failure of each, by rank."""

    def __init__(self, troubles: Mapping[int, Trouble]) -> None:
        parts = [f"rank {rank}: {t.kind}: {t.message}\n{t.trace}".rstrip() for rank, t in sorted(troubles.items())]
        super().__init__("\n".join(parts))
        self.troubles = dict(troubles)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call for one rank; the function is pickled, as its module needs `path` to be importable."""

    rank: int
    size: int
    pickled: bytes
    path: Sequence[str]
    store: str
    timeout_s: float
    environment: Mapping[str, str]


@dataclass(kw_only=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    stacks: Path
    result: Any = None
    trouble: Trouble | None = None
    done: bool = True


class RankPool:
    """`num` processes that run functions of a world, until the pool is closed or its owner is gone."""

    def __init__(self, num: int, preload: Sequence[str] = ()) -> None:
        self.num = num
        self.num_replaced = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._scratch = contextlib.ExitStack()
        self._folder = self._scratch.enter_context(scratch_folder("halation_ranks_"))
        self._num_calls = 0
        self._num_started = 0
        # A process serves one rank for all its life: torch remembers offsets of shards by mesh, and a mesh has no
        # rank.
        self._ranks: dict[int, _Rank] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        world_timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run `function(world, *args)` on ranks 0 to size - 1; return their results in rank order.

        `world_timeout_s` is the timeout of collectives.

        RanksFailed has the failure of every rank. The ranks of a failed call are replaced, because a failed collective
        leaves state behind in its process.
        """
        if not 1 <= size <= self.num:
            raise ValueError(f"{size} ranks in a pool of {self.num}")
        self._fill()
        ranks = [self._ranks[number] for number in range(size)]
        self._num_calls += 1
        store = str(self._folder / f"store_{self._num_calls}")
        pickled = pickle.dumps((function, args))
        for number, rank in enumerate(ranks):
            rank.result, rank.trouble, rank.done = None, None, False
            call = Call(
                rank=number,
                size=size,
                pickled=pickled,
                path=list(sys.path),
                store=store,
                timeout_s=timeout_s if world_timeout_s is None else world_timeout_s,
                environment=dict(environment or {}),
            )
            rank.connection.send(call)
        try:
            self._collect(ranks, timeout_s)
        except BaseException:  # Ctrl+C, or pytest-timeout
            self._replace(ranks)
            raise
        troubles = {number: rank.trouble for number, rank in enumerate(ranks) if rank.trouble is not None}
        if troubles:
            self._replace(ranks)
            raise RanksFailed(troubles)
        return [rank.result for rank in ranks]

    def close(self) -> None:
        self._replace(list(self._ranks.values()))
        self._scratch.close()

    def _fill(self) -> None:
        for number in range(self.num):
            if number in self._ranks and self._ranks[number].process.is_alive():
                continue
            ours, theirs = self._context.Pipe()
            self._num_started += 1
            stacks = self._folder / f"stacks_{self._num_started}"
            process = self._context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
            process.start()
            theirs.close()
            self._ranks[number] = _Rank(process=process, connection=ours, stacks=stacks)

    def _collect(self, ranks: Sequence[_Rank], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(rank.done for rank in ranks):
            left = deadline - time.monotonic()
            if left <= 0:
                self._give_up(ranks, timeout_s)
                return
            waiting = [rank for rank in ranks if not rank.done]
            ready = wait([item for rank in waiting for item in (rank.connection, rank.process.sentinel)], left)
            for rank in waiting:
                if rank.connection in ready or rank.process.sentinel in ready:
                    self._receive(rank)
                    if rank.trouble is not None:
                        deadline = min(deadline, time.monotonic() + GRACE_S)

    def _receive(self, rank: _Rank) -> None:
        rank.done = True
        try:
            rank.result, rank.trouble = rank.connection.recv()
        except (EOFError, OSError):
            rank.process.join()
            code = rank.process.exitcode
            rank.trouble = Trouble(kind="Died", message=f"ended with exit code {code}", exit_code=code)

    def _give_up(self, ranks: Sequence[_Rank], timeout_s: float) -> None:
        """Mark the hung ranks as failed, with their stacks if they can still dump them."""
        hanging = [rank for rank in ranks if not rank.done]
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(rank.process.pid, DUMP)  # type: ignore[arg-type]
        time.sleep(0.3)
        for rank in hanging:
            stack = rank.stacks.read_text() if rank.stacks.exists() else ""
            rank.trouble = Trouble(kind="Hung", message=f"no result within {timeout_s:g} s", trace=stack)

    def _replace(self, gone: Sequence[_Rank]) -> None:
        self.num_replaced += len(gone)
        for rank in gone:
            rank.process.kill()
        for rank in gone:
            rank.process.join()
            rank.connection.close()
            rank.process.close()
        self._ranks = {number: rank for number, rank in self._ranks.items() if rank not in gone}


def _serve(connection: Connection, stacks: str) -> None:
    """The life of one process of a pool: take a call, make its world, answer, until the pool hangs up."""
    tie_to_parent()  # the fork server ends with its owner, and this process with the fork server
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    environment = dict(os.environ)
    with open(stacks, "w") as file:
        faulthandler.register(DUMP, file=file, all_threads=True)
        while True:
            try:
                call: Call = connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            answer = _answer(call)
            connection.send(answer)
            if answer[1] is not None:  # like a real rank: what it leaves to its peers is a closed connection
                os._exit(1)
            os.environ.clear()
            os.environ.update(environment)


def _answer(call: Call) -> tuple[Any, Trouble | None]:
    fault_injection._counts.clear()
    os.environ.update(
        {
            "RANK": str(call.rank),
            "LOCAL_RANK": str(call.rank),
            "WORLD_SIZE": str(call.size),
            "LOCAL_WORLD_SIZE": str(call.size),
            **call.environment,
        }
    )
    try:
        sys.path[:] = call.path
        importlib.invalidate_caches()
        function, args = pickle.loads(call.pickled)
        result = _in_world(call, function, args)
        pickle.dumps(result)
        return result, None
    except BaseException as error:  # noqa: BLE001 - any failure of a rank must reach the test
        code = getattr(error, "exit_code", None)
        return None, Trouble(
            kind=type(error).__name__, message=str(error), trace=traceback.format_exc(), exit_code=code
        )
    finally:
        for handler in list(logging.getLogger("halation").handlers):
            logging.getLogger("halation").removeHandler(handler)
            handler.close()


def _in_world(call: Call, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch
    import torch.distributed as dist

    from halation.distributed import world as ranks

    world = ranks.init_process_groups(
        rank=call.rank,
        size=call.size,
        local_rank=call.rank,
        device=torch.device("cpu"),
        store=dist.FileStore(call.store, call.size),
        timeout_s=call.timeout_s,
    )
    try:
        return function(world, *args)
    finally:
        world.close()
