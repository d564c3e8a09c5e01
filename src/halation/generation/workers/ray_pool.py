"""The workers of a Ray cluster: one actor per GPU, restarted by Ray.

The actors send their images to this process, which alone writes the folder: nodes need access to the model, but not to
the images. The caller is connected to Ray; this module imports Ray only inside functions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import queue
import signal
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from halation.distributed.child_process import LAUNCHER_ENV_VARS
from halation.errors import HalationError, InputError, format_count
from halation.generation.image_requests import BatchTask
from halation.generation.workers.image_runner import DiskWriteError, EncodedImage, ImageRunner, ImageStore
from halation.generation.workers.local_pool import QUEUE_DEPTH, TaskHandler, WorkerEvent, WorkerSlot
from halation.input_files import LINKS_VARIABLE, SCALE_VARIABLE
from halation.sample_specs import SampleSpec

MAX_CONCURRENT_CALLS = QUEUE_DEPTH + 4
"""Batches, plus short calls that must not wait for them."""
POLL_INTERVAL_S = 0.25
MAX_LOG_LINES = 1000
CHECKED_PACKAGES = ("halation", "torch", "diffusers", "transformers", "numpy", "isal", "av")

log = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
"""Time limit for placing a worker in the cluster, and for the first reply of its process."""
POLL_TIMEOUT_S = 5.0
PLACEMENT_INTERVAL_S = 1.0
FETCH_TIMEOUT_S = 120.0
MAX_ACTOR_RESTARTS = 1
"""How often Ray restarts an actor and repeats its batches; after that, the supervisor replaces the worker."""
NUM_STORE_THREADS = 4
"""Batches that this process holds in memory at a time; others wait in the object stores of their nodes."""
FORWARDED_VARIABLES = (
    *("HALATION_FAULT", "HALATION_FAULT_LOG", "HF_HUB_OFFLINE"),
    *(SCALE_VARIABLE, LINKS_VARIABLE),
    *("ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
)


class GenerationActor(TaskHandler):
    """The actor; its replies have the form of a local worker's messages.

    Its methods are called from several threads at the same time.
    """

    def __init__(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        for name in LAUNCHER_ENV_VARS:
            os.environ.pop(name, None)
        os.environ.update(environment)
        self._settings = settings
        self._process_id = uuid.uuid4().hex
        self._runner: ImageRunner | None = None
        self._open_lock = threading.Lock()
        self._lock = threading.Condition()
        self._steps: dict[int, dict[str, int]] = {}
        self._log_lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._replies: dict[int, dict[str, Any]] = {}
        self._expected_names: Counter[str] = Counter()
        self._encoded_images: dict[str, EncodedImage] = {}
        logger = logging.getLogger("halation")
        logger.setLevel(logging.INFO)
        logger.addHandler(_LogBuffer(self._log_lines))

    def send_event(self, kind: str, task: int = -1, **body: Any) -> None:
        with self._lock:
            if kind == "step":
                self._steps[task] = body
                self._lock.notify_all()
            else:
                self._replies[task] = {"kind": kind, "task": task, "body": body}

    # -- called by the worker pool

    def poll(self, wait_s: float) -> dict[str, Any]:
        """Return steps and log lines; empty after `wait_s`, which still serves as a heartbeat."""
        time.sleep(POLL_INTERVAL_S)
        with self._lock:
            self._lock.wait_for(lambda: self._steps or self._log_lines, wait_s)
            steps, self._steps = self._steps, {}
        return {"who": self._process_id, "host": platform.node(), "steps": steps, "lines": self._take_log_lines()}

    def open(self) -> dict[str, Any]:
        start_time = time.perf_counter()
        try:
            runner = self._get_runner()
        except HalationError as error:
            return _refusal_message(error)
        facts = dict(runner.model.facts)
        return {
            "kind": "ready",
            "task": -1,
            "body": {"facts": facts, "seconds": round(time.perf_counter() - start_time, 2)},
            "who": self._process_id,
        }

    def dry_run_batch(self, examples: Sequence[dict[str, Any]], batch_size: int, micro_batch: int) -> dict[str, Any]:
        settings = {"examples": examples, "batch_size": batch_size, "micro_batch": micro_batch}
        try:
            self.check_plan(self._get_runner(), settings)
        except HalationError as error:
            return _refusal_message(error)
        return self._replies.pop(-1)

    def draw_batch(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[EncodedImage]]:
        """Return the result message of the batch and its images."""
        task = BatchTask.from_json(values)
        names = [request.name for request in task.requests if request.spec.index in task.wanted]
        with self._lock:
            self._expected_names.update(names)
        try:
            self.run_task(self._get_runner(), task)
        except HalationError as error:
            return _refusal_message(error), []
        finally:
            encoded_images = self._take_images(names)
        return {
            **self._replies.pop(task.number),
            "lines": self._take_log_lines(),
            "who": self._process_id,
        }, encoded_images

    def drop(self, number: int | None) -> None:
        if self._runner is not None:
            self._runner.drop(number)

    # -- inside

    def _take_log_lines(self) -> list[str]:
        with self._lock:
            lines = list(self._log_lines)
            self._log_lines.clear()
            return lines

    def _get_runner(self) -> ImageRunner:
        """Return the runner; load it on first use (after a restart by Ray, a repeated batch)."""
        with self._open_lock:
            if self._runner is None:
                self._check_node()
                runner = ImageRunner(self._settings, self._store_image)
                runner.prepare()
                self._runner = runner
        return self._runner

    def _check_node(self) -> None:
        node = f"{self._settings['node']} ({platform.node()})"
        path = self._settings["model"].get("path")
        if path is not None and not Path(path).is_dir():
            raise InputError(
                f"{node} has no folder {path}",
                "the model under the same path on every node of the cluster",
                "put it on a shared file system, or copy it to every node",
            )
        different = [
            f"{name} {here or 'missing'} instead of {there}"
            for name, there in self._settings["versions"].items()
            if (here := installed_versions().get(name)) != there
        ]
        if different:
            raise InputError(
                f"{node} has {', '.join(different)}",
                "the same versions on every node, because they affect the images",
                "install the versions of this machine there",
            )

    def _store_image(self, encoded_image: EncodedImage) -> None:
        with self._lock:
            name = encoded_image.files[-1][0].rpartition(".")[0]
            if self._expected_names[name]:  # its batch may already have failed because of another image
                self._encoded_images[name] = encoded_image

    def _take_images(self, names: Sequence[str]) -> list[EncodedImage]:
        """Remove and return the images of a batch.

        An image that is in two batches (a retry of one image) is kept until the last of them takes it.
        """
        with self._lock:
            encoded_images = [self._encoded_images[name] for name in names if name in self._encoded_images]
            self._expected_names.subtract(names)
            for name in names:
                if not self._expected_names[name]:
                    del self._expected_names[name]
                    self._encoded_images.pop(name, None)
            return encoded_images


def installed_versions() -> dict[str, str]:
    """Return the versions of packages that affect the bytes of images.

    Build suffixes (+cpu, +cu128), which may differ between nodes, are removed.
    """
    found = {}
    for name in CHECKED_PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


class _LogBuffer(logging.Handler):
    """Buffers log lines until the worker pool polls them."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__()
        self.lines = lines
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def _refusal_message(error: HalationError) -> dict[str, Any]:
    return {"kind": "refused", "task": -1, "body": {"message": str(error), "exit_code": error.exit_code}}


@dataclass(frozen=True, kw_only=True)
class RaySlot(WorkerSlot):
    """The place of a worker in the cluster: a GPU or a CPU of a node."""

    name: str
    node: str
    """Ray's id of the node; if the node is lost, the worker may be placed on another one."""
    resource: str
    share: float

    @property
    def ray_options(self) -> dict[str, float]:
        """Resource options for Ray; a GPU worker requests no CPU."""
        return {"num_gpus": self.share, "num_cpus": 0} if self.resource == "GPU" else {"num_cpus": self.share}


def assign_slots(nodes: Sequence[Mapping[str, Any]], nproc: int, oversubscribe: bool) -> list[RaySlot]:
    """Return the worker slots for the nodes of `ray.nodes()`.

    One worker per GPU, or one per node if no node has a GPU. `nproc` workers are assigned to the nodes in turn.
    """
    alive = sorted(
        (node for node in nodes if node["Alive"]),
        # Head first, then by address, so that nodes have the same numbers in every call.
        key=lambda node: (
            "node:__internal_head__" not in node["Resources"],
            node["NodeManagerAddress"],
            node["NodeID"],
        ),
    )
    resource = "GPU" if any(node["Resources"].get("GPU", 0) >= 1 for node in alive) else "CPU"
    capacity = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in alive}
    capacity = {node: room for node, room in capacity.items() if room}
    total = sum(capacity.values())
    count = nproc or (total if resource == "GPU" else len(capacity))
    if not total or (count > total and not oversubscribe):
        raise InputError(
            f"--nproc {count} on a cluster of {format_count(len(alive), 'node')} "
            f"with {format_count(total, resource)} in total",
            f"at most one worker per {resource}",
            f"use --nproc {total} or fewer" if total else "start the cluster's nodes with CPUs or GPUs",
        )
    num_assigned = dict.fromkeys(capacity, 0)
    assignments: list[tuple[str, int]] = []
    while len(assignments) < count:
        for node, node_capacity in capacity.items():
            has_room = num_assigned[node] < node_capacity or sum(num_assigned.values()) >= total
            if has_room and len(assignments) < count:
                assignments.append((node, num_assigned[node]))
                num_assigned[node] += 1
    unit = "GPU" if resource == "GPU" else "worker"
    numbers = {node: number for number, node in enumerate(capacity)}
    return [
        RaySlot(
            label=f"{numbers[node]}-{index}",
            name=f"node {numbers[node]} {unit} {index}",
            device="cuda:0" if resource == "GPU" else "cpu",  # Ray shows an actor only its own GPUs
            node=node,
            resource=resource,
            share=min(1.0, capacity[node] / num_assigned[node]),
        )
        for node, index in sorted(assignments, key=lambda assignment: (numbers[assignment[0]], assignment[1]))
    ]


@dataclass(kw_only=True)
class RayWorkerHandle:
    """A running or starting worker: its actor and its tasks."""

    number: int
    """Counts all workers ever started."""
    node: str
    actor: Any
    deadline: float
    process_id: str = ""
    """Id of the process that replied last."""
    host: str = ""
    tasks: set[int] = field(default_factory=set)
    is_stopping: bool = False


class RayWorkerPool:
    """A `WorkerPool` with one Ray actor per slot."""

    def __init__(self, slots: Sequence[RaySlot], settings: Mapping[str, Any], logs: Path) -> None:
        import ray

        self.ray = ray
        self.slots = slots
        self.labels: Sequence[str] = [slot.label for slot in slots]
        self.names: Sequence[str] = [place.name for place in slots]
        self.settings = {**settings, "versions": installed_versions()}
        self.store = ImageStore(Path(settings["folder"]), settings.get("folder_identity"))
        self.logs = logs
        self._handles: dict[int, RayWorkerHandle] = {}
        self._start_deadlines: dict[int, float] = {}
        self._last_placement_at = 0.0
        self._num_started = 0
        self._inbox: queue.SimpleQueue[Callable[[], list[WorkerEvent]]] = queue.SimpleQueue()
        self._store_threads = ThreadPoolExecutor(NUM_STORE_THREADS, thread_name_prefix="storing")
        self._name_locks = [threading.Lock() for _ in range(64)]
        self._shutdown_event = threading.Event()

    # -- placement

    def start(self, worker: int) -> None:
        self._start_deadlines[worker] = time.monotonic() + PLACEMENT_TIMEOUT_S
        self._last_placement_at = 0.0

    def _place_workers(self) -> list[WorkerEvent]:
        """Place waiting workers on nodes with free capacity; report `gone` after the timeout."""
        now = time.monotonic()
        if self._start_deadlines and now - self._last_placement_at >= PLACEMENT_INTERVAL_S:
            self._last_placement_at = now
            capacity = self._free_capacity()
            for worker in list(self._start_deadlines):
                slot = self.slots[worker]
                own_first = [slot.node] if slot.node in capacity else []
                for node in dict.fromkeys([*own_first, *capacity]):
                    if capacity[node] >= slot.share - 1e-6:
                        capacity[node] -= slot.share
                        del self._start_deadlines[worker]
                        self._start_actor(worker, node)
                        break
        late = [worker for worker, deadline in self._start_deadlines.items() if now > deadline]
        late += [worker for worker, handle in self._handles.items() if not handle.process_id and now > handle.deadline]
        return [
            self._remove_worker(worker, f"found no room in the cluster within {PLACEMENT_TIMEOUT_S:.0f} s")
            for worker in late
        ]

    def _free_capacity(self) -> dict[str, float]:
        """Return the capacity of each live node minus the workers of this pool.

        What other programs use there is known only to Ray.
        """
        resource = self.slots[0].resource
        capacity = {
            node["NodeID"]: float(node["Resources"].get(resource, 0)) for node in self.ray.nodes() if node["Alive"]
        }
        for worker, handle in self._handles.items():
            if handle.node in capacity:
                capacity[handle.node] -= self.slots[worker].share
        return capacity

    def _start_actor(self, worker: int, node: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        slot = self.slots[worker]
        environment = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
        environment |= {"RANK": str(worker), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": str(self.settings["threads"])}
        settings = {**self.settings, "device": slot.device, "label": slot.label, "node": slot.name}
        # Pinned to its node: otherwise Ray would let it wait for capacity elsewhere forever, without a message.
        actor: Any = (
            self.ray.remote(GenerationActor)
            .options(
                **slot.ray_options,
                max_restarts=MAX_ACTOR_RESTARTS,
                max_task_retries=-1,
                max_concurrency=MAX_CONCURRENT_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(settings, environment)
        )
        self._num_started += 1
        handle = RayWorkerHandle(
            number=self._num_started, node=node, actor=actor, deadline=time.monotonic() + PLACEMENT_TIMEOUT_S
        )
        self._handles[worker] = handle
        self._poll_actor(worker, handle)
        self._add_callback(worker, handle, actor.open.remote(), self._handle_reply)

    # -- orders

    def dry_run(self, worker: int, examples: Sequence[SampleSpec], batch_size: int, micro_batch: int) -> None:
        handle = self._handles.get(worker)
        if handle:
            specs = [spec.as_json() for spec in examples]
            reply = handle.actor.dry_run_batch.remote(specs, batch_size, micro_batch)
            self._add_callback(worker, handle, reply, self._handle_reply)

    def submit(self, worker: int, task: BatchTask) -> None:
        handle = self._handles.get(worker)
        if handle:
            handle.tasks.add(task.number)
            reply, encoded_images = handle.actor.draw_batch.options(num_returns=2).remote(task.as_json())
            self._add_callback(
                worker,
                handle,
                reply,
                lambda worker, post, message: self._handle_drawn(worker, post, message, encoded_images),
            )

    def drop(self, worker: int, number: int) -> None:
        if worker in self._handles:
            self._handles[worker].actor.drop.remote(number)

    def stop(self, worker: int) -> None:
        handle = self._handles.get(worker)
        if handle:
            handle.is_stopping = True
            handle.actor.drop.remote(None)
            self._inbox.put(lambda: self._end_if_idle(worker, handle))

    def kill(self, worker: int) -> None:
        if worker in self._handles or worker in self._start_deadlines:
            # Reported immediately, whether or not Ray can still reach the process.
            gone = self._remove_worker(worker, "was killed")
            self._inbox.put(lambda: [gone])

    # -- events

    def events(self, timeout_s: float) -> list[WorkerEvent]:
        found = self._place_workers()
        with contextlib.suppress(queue.Empty):
            handle_message = self._inbox.get(timeout=0 if found else timeout_s)
            while True:
                found += handle_message()
                handle_message = self._inbox.get_nowait()
        return found

    def _add_callback(
        self,
        worker: int,
        handle: RayWorkerHandle,
        ref: Any,
        handle_reply: Callable[[int, RayWorkerHandle, Any], list[WorkerEvent]],
    ) -> None:
        """Handle a reply on the thread that calls `events`; Ray calls back on its own thread."""

        def handle_future(future: Future[Any]) -> list[WorkerEvent]:
            if self._handles.get(worker) is not handle:
                return []
            error = future.exception()
            return self._handle_lost_actor(worker, error) if error else handle_reply(worker, handle, future.result())

        ref.future().add_done_callback(lambda future: self._inbox.put(lambda: handle_future(future)))

    def _poll_actor(self, worker: int, handle: RayWorkerHandle) -> None:
        self._add_callback(worker, handle, handle.actor.poll.remote(POLL_TIMEOUT_S), self._handle_poll)

    def _handle_poll(self, worker: int, handle: RayWorkerHandle, reply: dict[str, Any]) -> list[WorkerEvent]:
        self._poll_actor(worker, handle)
        if not handle.host:
            handle.host = reply["host"]
            log.info("%s is on %s (node %s)", self.names[worker], handle.host, handle.node)
        restarted = self._detect_restart(worker, handle, reply["who"])
        self._write_log(worker, reply["lines"])
        # A step may arrive after its batch is finished. A restarted process counts as alive while it loads the model.
        steps = {task: {"done": 0, "total": 1} for task in handle.tasks} if restarted else {}
        steps |= {task: body for task, body in reply["steps"].items() if task in handle.tasks}
        return [WorkerEvent(worker=worker, kind="step", task=task, body=body) for task, body in steps.items()]

    def _detect_restart(self, worker: int, handle: RayWorkerHandle, process_id: str) -> bool:
        """Return True if the reply comes from another process than the last one."""
        restarted = handle.process_id not in ("", process_id)
        handle.process_id = process_id
        if restarted:
            name = self.names[worker]
            log.warning("%s: its process ended; Ray restarted it and it repeats its batches", name)
            if handle.is_stopping:
                handle.actor.drop.remote(None)
        return restarted

    def _write_log(self, worker: int, lines: Sequence[str]) -> None:
        if lines:
            self.logs.mkdir(exist_ok=True)
            with open(self.logs / f"worker_{self.labels[worker]}.log", "a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def _handle_reply(self, worker: int, handle: RayWorkerHandle, message: dict[str, Any]) -> list[WorkerEvent]:
        if process_id := message.pop("who", ""):
            self._detect_restart(worker, handle, process_id)
        handle.tasks.discard(message["task"])
        return [WorkerEvent(worker=worker, **message), *self._end_if_idle(worker, handle)]

    def _handle_drawn(
        self, worker: int, handle: RayWorkerHandle, message: dict[str, Any], encoded_images: Any
    ) -> list[WorkerEvent]:
        self._write_log(worker, message.pop("lines", ()))
        if message["kind"] != "drawn":
            return self._handle_reply(worker, handle, message)
        self._store_threads.submit(self._publish_batch, worker, handle, message, encoded_images)
        return []

    def _end_if_idle(self, worker: int, handle: RayWorkerHandle) -> list[WorkerEvent]:
        if self._handles.get(worker) is not handle or not handle.is_stopping or handle.tasks:
            return []
        return [self._remove_worker(worker, "has ended")]

    def _handle_lost_actor(self, worker: int, error: BaseException) -> list[WorkerEvent]:
        """Handle an actor that died permanently or did not start.

        A node without Halation is not retried.
        """
        from ray.exceptions import ActorUnschedulableError, RayTaskError

        words = str(error).strip()
        log.info("%s is lost: %s", self.names[worker], words)
        if "No module named 'halation" in words:
            refusal = InputError(
                f"{self.names[worker]} has no halation package",
                "the same Python packages on every node of the cluster",
                "install Halation there",
            )
            self._remove_worker(worker, words)
            return [
                WorkerEvent(
                    worker=worker, kind="refused", body={"message": str(refusal), "exit_code": refusal.exit_code}
                )
            ]
        if isinstance(error, RayTaskError):
            return [self._remove_worker(worker, f"failed: {words.splitlines()[-1]}", code=1)]
        if isinstance(error, ActorUnschedulableError):
            return [self._remove_worker(worker, "is gone with its node")]
        # Only the first line: Ray's message is a page long.
        first_line = next((line.strip() for line in words.splitlines() if line.strip()), "no reason given")[:200]
        return [self._remove_worker(worker, f"is lost to the cluster ({first_line})")]

    def _remove_worker(self, worker: int, reason: str, code: int = -signal.SIGKILL) -> WorkerEvent:
        self._start_deadlines.pop(worker, None)
        handle = self._handles.pop(worker, None)
        if handle:
            self._kill_actor(handle)
        return WorkerEvent(worker=worker, kind="gone", body={"code": code, "words": reason})

    def _kill_actor(self, handle: RayWorkerHandle) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, ValueError, ConnectionError):
            self.ray.kill(handle.actor)

    # -- images

    def _publish_batch(self, worker: int, handle: RayWorkerHandle, message: dict[str, Any], ref: Any) -> None:
        """Fetch the images of a batch, write them, then report them; runs on a store thread."""
        from ray.exceptions import RayError

        try:
            for encoded_image in self._fetch_images(ref):
                # A batch may be generated twice at the end of a run; two writers of a name would share a temporary
                # file.
                with self._name_locks[hash(encoded_image.files[-1][0]) % len(self._name_locks)]:
                    self.store(encoded_image)
        except RayError as error:
            lost = error
            self._inbox.put(
                lambda: self._handle_lost_actor(worker, lost) if self._handles.get(worker) is handle else []
            )
            return
        except (DiskWriteError, OSError) as error:
            body = {"reason": str(error), "disk": isinstance(error, DiskWriteError)}
            message = {"kind": "failed", "task": message["task"], "body": body}
        self._inbox.put(
            lambda: self._handle_reply(worker, handle, message) if self._handles.get(worker) is handle else []
        )

    def _fetch_images(self, ref: Any) -> list[EncodedImage]:
        from ray.exceptions import GetTimeoutError

        deadline = time.monotonic() + FETCH_TIMEOUT_S
        while True:
            try:
                encoded_images: list[EncodedImage] = self.ray.get(ref, timeout=1.0)
                return encoded_images
            except GetTimeoutError:
                if self._shutdown_event.is_set() or time.monotonic() > deadline:
                    raise

    def shutdown(self, *, at_once: bool) -> None:
        self._shutdown_event.set()
        for handle in self._handles.values():
            self._kill_actor(handle)
        self._handles.clear()
        self._start_deadlines.clear()
        # Images that were not reported are not recorded, so they need not be written.
        self._store_threads.shutdown(wait=True, cancel_futures=True)
