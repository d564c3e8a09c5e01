"""`--cluster ray|auto|ray://HOST:PORT`: starts Ray on this machine or joins a cluster.

Ray runs in a separate driver process, because a Ray call may block for minutes, and Ray's native code ends its process
when the cluster is lost. The command only exchanges JSON messages with the driver process. It can therefore always
handle signals, detect a lost cluster by missing heartbeats, and end the driver process in any state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from halation.distributed.child_process import describe_exit, environment_without_launcher, start_child, tie_to_parent
from halation.distributed.stop_signals import StopSignals, leave_signals_to_parent
from halation.errors import HalationError, InputError, format_count
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import BatchTask
from halation.generation.workers.local_pool import GRACE_S, SendQueue, WorkerEvent
from halation.generation.workers.ray_pool import RaySlot, RayWorkerPool, assign_slots
from halation.runs.run_folder import scratch_folder
from halation.sample_specs import SampleSpec

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 180.0
"""Time limit for starting Ray or joining a cluster."""
HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 30.0
"""A cluster that does not answer for this long counts as lost."""
STOP_TIMEOUT_S = 4.0
"""The same while the command is stopping."""
CLOSE_TIMEOUT_S = 10.0
RECONNECT_GRACE_S = 10
"""How long a ray:// cluster keeps the workers of a disconnected command; Ray's default is 30 s."""
ORDER_INTERVAL_S = 0.05
TEMPORARY_PREFIX = "halation_ray_"
LOG_FILE = "ray_driver.log"
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Some Ray processes replace 127.0.0.1 by the public address of the machine and listen there."""


# -- in the command's process


@contextlib.contextmanager
def open_cluster(
    config: GenerateConfig,
) -> Iterator[tuple[Sequence[RaySlot], Callable[[Mapping[str, Any]], RayDriverProcess]]]:
    """Connect a driver process to the cluster.

    Yields the worker slots and a function that creates the pool.
    """
    logs = config.output_dir / "logs"
    with _make_own_folder(logs) if config.cluster == "ray" else contextlib.nullcontext() as own_folder:
        driver = RayDriverProcess(config.cluster, logs, own_folder)
        try:
            driver.open(config.nproc, config.oversubscribe)
            num_nodes = len({slot.node for slot in driver.slots})
            log.info("%s on %s", format_count(len(driver.slots), "worker"), format_count(num_nodes, "Ray node"))
            yield driver.slots, driver.begin
        finally:
            # An interrupt here would leave Ray processes behind.
            with StopSignals(exit_on_second=False):
                driver.close()


@contextlib.contextmanager
def _make_own_folder(logs: Path) -> Iterator[Path]:
    """Create a temporary folder for a Ray that this command starts; removed at the end."""
    with scratch_folder(TEMPORARY_PREFIX) as folder:
        try:
            yield folder
        finally:
            # Keep stderr that workers wrote outside of the log, such as a crash in native code.
            for path in sorted(folder.glob("session_2*/logs/worker-*.err")):
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                if any(not line.startswith((":job_id:", ":actor_name:")) for line in lines):
                    (logs / "ray").mkdir(exist_ok=True)
                    shutil.copy(path, logs / "ray")


class RayDriverProcess:
    """The command's side of the driver process; a `WorkerPool` after `begin`."""

    def __init__(self, cluster: str, logs: Path, own_folder: Path | None) -> None:
        self.cluster = cluster
        self.logs = logs
        self.slots: Sequence[RaySlot] = ()
        self.labels: Sequence[str] = ()
        self.names: Sequence[str] = ()
        self._own_folder = own_folder
        self._is_open = False
        self._is_stopping = False
        self._loss = ""
        """Why the connection to the cluster is lost; empty while connected."""
        self._silent_s = 0.0
        self._last_poll_at = time.monotonic()
        ours, theirs = socket.socketpair()
        arguments = ["-m", "halation.generation.workers.ray_cluster", str(theirs.fileno())]
        logs.mkdir(parents=True, exist_ok=True)
        with open(logs / LOG_FILE, "ab") as file, theirs:
            self._process = start_child(
                arguments, self._environment(), stdout=file, stderr=file, pass_fds=[theirs.fileno()]
            )
        self._connection = Connection(ours.detach())
        self._send_queue = SendQueue(self._connection)

    def _environment(self) -> dict[str, str]:
        own = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints a line for every restart
            "RAY_ENABLE_AUTO_CONNECT": "0",  # else a call after the loss of a cluster starts or joins another one
        }
        defaults = {"RAY_CLIENT_RECONNECT_GRACE_PERIOD": str(RECONNECT_GRACE_S)}
        if self.cluster == "ray" and "RAY_AUTH_MODE" not in os.environ:
            defaults |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return {**defaults, **environment_without_launcher(), **own}

    # -- the connection to the cluster

    def open(self, nproc: int, oversubscribe: bool) -> None:
        """Wait until the driver process has joined or started a cluster."""
        folder = str(self._own_folder or "")
        self._send(do="open", cluster=self.cluster, folder=folder, nproc=nproc, oversubscribe=oversubscribe)
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while not self._is_open:
            for message in self._receive(0.2):
                if message["kind"] == "refused":
                    error = HalationError(message["message"])
                    error.exit_code = message["exit_code"]
                    raise error
                if message["kind"] == "opened":
                    self.slots = [RaySlot(**slot) for slot in message["slots"]]
                    self._is_open, self._silent_s = True, 0.0
            if not self._is_open and time.monotonic() > deadline:
                self._loss = f"no answer within {OPEN_TIMEOUT_S:.0f} s"
            if self._loss:
                raise HalationError(f"Ray ({self.cluster}) did not start: {self._loss}; see {self.logs / LOG_FILE}")
        self.labels = [slot.label for slot in self.slots]
        self.names = [slot.name for slot in self.slots]

    def begin(self, settings: Mapping[str, Any]) -> RayDriverProcess:
        """Return the worker pool; no worker is started yet."""
        self._send(do="begin", settings=dict(settings), logs=str(self.logs.resolve()))
        self._last_poll_at = time.monotonic()
        return self

    def _send(self, **message: Any) -> None:
        self._send_queue.messages.put(json.dumps(message).encode())

    def _receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return messages of the driver process, except heartbeats and log lines.

        Log lines are logged. If the process has ended, the cluster counts as lost.
        """
        messages: list[dict[str, Any]] = []
        try:
            while not self._loss and self._connection.poll(0 if messages else timeout_s):
                message = json.loads(self._connection.recv_bytes())
                if message["kind"] == "alive":
                    self._silent_s = 0.0
                elif message["kind"] == "log":
                    log.log(message["level"], "%s", message["text"])
                else:
                    messages.append(message)
        except (EOFError, OSError):
            self._loss = f"its driver process {describe_exit(self._wait(GRACE_S))}"
        now = time.monotonic()
        # Capped, because this process may have been suspended or busy itself.
        self._silent_s += min(now - self._last_poll_at, 1.0)
        self._last_poll_at = now
        return messages

    def _wait(self, timeout_s: float) -> int:
        """Return the exit code of the driver process; kill its process group after the timeout.

        Ray's agents outlive a killed Ray by a minute; they are in the group. Workers end with their raylet.
        """
        process = self._process
        deadline = time.monotonic() + timeout_s
        if process.returncode is None:
            # WNOWAIT keeps the zombie, so that its pid cannot be reused before the group is killed.
            while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def close(self) -> None:
        """Disconnect from the cluster, and end Ray if this command started it."""
        is_answering = self._is_open and not self._loss and self._silent_s < STOP_TIMEOUT_S
        if is_answering:
            self._send(do="close")
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            while not self._loss and time.monotonic() < deadline:
                self._receive(0.1)
        self._wait(0.0)
        self._send_queue.close()

    # -- the worker pool

    def start(self, worker: int) -> None:
        self._send(do="start", worker=worker)

    def dry_run(self, worker: int, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> None:
        specs = [spec.as_json() for spec in examples]
        self._send(do="dry_run", worker=worker, examples=specs, batch_size=batch_size, micro_batch=micro_batch)

    def submit(self, worker: int, task: BatchTask) -> None:
        self._send(do="submit", worker=worker, task=task.as_json())

    def drop(self, worker: int, number: int) -> None:
        self._send(do="drop", worker=worker, number=number)

    def stop(self, worker: int) -> None:
        self._is_stopping = True
        self._send(do="stop", worker=worker)

    def kill(self, worker: int) -> None:
        self._send(do="kill", worker=worker)

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        """Return the events of the workers; raise if the cluster is lost, unless stopping anyway."""
        messages = self._receive(timeout_s)
        limit_s = STOP_TIMEOUT_S if self._is_stopping else HEARTBEAT_TIMEOUT_S
        if not self._loss and self._silent_s > limit_s:
            self._loss = f"no answer for {self._silent_s:.0f} s"
        for message in messages:
            if message["kind"] == "lost":
                self._loss = message["reason"]
        events = [WorkerEvent(**message["event"]) for message in messages if message["kind"] == "event"]
        if not self._loss or events:
            return events
        words = f"the Ray cluster ({self.cluster}) is lost: {self._loss}"
        if not self._is_stopping:
            raise HalationError(
                f"{words}; run the same command to resume once the cluster is back, or use --cluster local"
            )
        log.warning("%s", words)
        return [
            WorkerEvent(worker=worker, kind="gone", body={"code": -signal.SIGKILL, "words": "is lost with its cluster"})
            for worker in range(len(self.slots))
        ]

    def shutdown(self, *, at_once: bool) -> None:
        """End the workers; images not reported by now are neither recorded nor written."""
        self._send(do="shutdown")
        deadline = time.monotonic() + GRACE_S
        while not self._loss and self._silent_s < STOP_TIMEOUT_S and time.monotonic() < deadline:
            if any(message["kind"] == "shut" for message in self._receive(0.1)):
                return
        self._loss = self._loss or "its workers did not end in time"
        self._wait(0.0)


# -- in the driver process


class RayDriver:
    """The driver process: calls Ray on the main thread, receives orders on another."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        threading.Thread(target=self._receive_orders, name="orders", daemon=True).start()

    def send(self, **message: Any) -> None:
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(json.dumps(message).encode())

    def _receive_orders(self) -> None:
        try:
            while True:
                self.orders.put(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(1)  # the command is gone

    def serve(self) -> None:
        """Serve orders from `open` to `close`.

        Unexpected errors end the process, which the command detects.
        """
        import ray

        order = self.orders.get()
        try:
            _connect(order["cluster"], order["folder"])
            slots = assign_slots(ray.nodes(), order["nproc"], order["oversubscribe"])
        except HalationError as error:
            self.send(kind="refused", message=str(error), exit_code=error.exit_code)
        else:
            self.send(kind="opened", slots=[dataclasses.asdict(slot) for slot in slots])
            self._work(slots)
        ray.shutdown()

    def _work(self, slots: Sequence[RaySlot]) -> None:
        pool: RayWorkerPool | None = None
        next_heartbeat_at = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    order = self.orders.get(timeout=0 if pool else ORDER_INTERVAL_S)
                    match order.pop("do"):
                        case "begin":
                            pool = RayWorkerPool(slots, order["settings"], Path(order["logs"]))
                        case "close":
                            return
                        case name if pool is not None:
                            self._handle_order(pool, name, order)
            for event in pool.events(ORDER_INTERVAL_S) if pool else []:
                self.send(kind="event", event=dataclasses.asdict(event))
            if time.monotonic() >= next_heartbeat_at:
                self._send_heartbeat()
                next_heartbeat_at = time.monotonic() + HEARTBEAT_INTERVAL_S

    def _handle_order(self, pool: RayWorkerPool, name: str, order: dict[str, Any]) -> None:
        if "task" in order:
            order["task"] = BatchTask.from_json(order["task"])
        if "examples" in order:
            order["examples"] = [SampleSpec(**spec) for spec in order["examples"]]
        if name == "shutdown":
            pool.shutdown(at_once=True)
            self.send(kind="shut")
        else:
            getattr(pool, name)(**order)

    def _send_heartbeat(self) -> None:
        """Query the nodes of the cluster, which requires its head, and report whether it is alive."""
        import ray

        try:
            nodes = ray.nodes()
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            self.send(kind="lost", reason=_short_message(error))
        else:
            if any(node["Alive"] for node in nodes):
                self.send(kind="alive")
            else:
                self.send(kind="lost", reason="none of its nodes is alive")


class _ForwardingHandler(logging.Handler):
    """Forwards Halation's log lines to the command."""

    def __init__(self, driver: RayDriver) -> None:
        super().__init__()
        self.driver = driver

    def emit(self, record: logging.LogRecord) -> None:
        self.driver.send(kind="log", level=record.levelno, text=record.getMessage())


def _connect(cluster: str, folder: str) -> None:
    if cluster == "ray":
        _init_ray(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, _temp_dir=folder)
        return
    address = os.environ.get("RAY_ADDRESS", "") if cluster == "auto" else cluster
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdigit():  # Ray waits for minutes if nothing listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        _init_ray(address=cluster)
    except (OSError, RuntimeError, ValueError) as error:
        where = "RAY_ADDRESS or on this machine" if cluster == "auto" else cluster
        raise InputError(
            f"no Ray cluster to join at {where}: {_short_message(error)}",
            "a running cluster with the same Ray and Python versions, and the token it was started with "
            "(RAY_AUTH_TOKEN)",
            "start one with `ray start --head` and give RAY_ADDRESS=HOST:6379 with --cluster auto, "
            "or use --cluster ray",
        ) from error


def _short_message(error: BaseException) -> str:
    """Return the first line of a Ray error and, if a traceback follows, the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) < 3 else f"{lines[0]} {lines[-1]}"


def _init_ray(**settings: Any) -> None:
    """Call ray.init; retry for ray://, whose server may time out waiting for its own process."""
    import ray

    num_tries = 3 if str(settings["address"]).startswith("ray://") else 1
    for left in reversed(range(num_tries)):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
            break
        except (ConnectionError, RuntimeError):
            if not left:
                raise
            time.sleep(2.0)
    leave_signals_to_parent(_ignore_signal)  # Ray has installed its own handlers


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. A handler is used because child processes of Ray would inherit SIG_IGN."""


def main() -> int:
    tie_to_parent()
    leave_signals_to_parent(_ignore_signal)
    socket_fd = int(sys.argv[1])
    os.set_inheritable(socket_fd, False)  # the command must see it closed when this process ends
    driver = RayDriver(Connection(socket_fd))
    logger = logging.getLogger("halation")
    logger.setLevel(logging.INFO)
    logger.addHandler(_ForwardingHandler(driver))
    driver.serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some of Ray's threads never end


if __name__ == "__main__":
    sys.exit(main())
