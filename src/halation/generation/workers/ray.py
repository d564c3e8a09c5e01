"""The workers of a Ray cluster: one actor for each GPU of every node, which Ray starts again where their processes die.

What they draw comes back to this process, which alone writes the folder: nodes need to see the model, not the pictures. The caller
is connected to Ray; this module imports it only where it speaks to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halation.errors import InputError
from halation.generation.image_writer import Parcel, Refused, Store
from halation.generation.workers.local import Place
from halation.generation.workers.messages import Event, Task
from halation.generation.workers.ray_actor import CALLS_AT_ONCE, OpenEasel, PaintingActor, installed
from halation.specs import Spec

log = logging.getLogger(__name__)

ROOM_S = 60.0
"""How long a worker waits for a place in the cluster, and for its process there to speak."""
HEAR_S = 5.0
LOOK_EVERY_S = 1.0
FETCH_S = 120.0
NUM_RESTARTS = 1
"""Times Ray starts one actor again and redoes its sheets; after that the supervisor counts the death and asks for a new one."""
NUM_STORERS = 4
"""Sheets whose bytes this process holds at once; the others wait in the object stores of their nodes."""
HANDED_ON = (
    *("HALATION_FAULT", "HALATION_FAULT_LOG", "HF_HUB_OFFLINE"),
    *("ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
)


@dataclass(frozen=True, kw_only=True)
class Berth(Place):
    """A worker's place in the cluster: a GPU of a node, or one CPU of it."""

    name: str
    node: str
    """Ray's id of the node; a worker whose node is gone may go to another."""
    resource: str
    share: float

    @property
    def needs(self) -> dict[str, float]:
        """As Ray's options: a GPU worker computes there and asks for no CPU of its own."""
        return {"num_gpus": self.share, "num_cpus": 0} if self.resource == "GPU" else {"num_cpus": self.share}


def berths(nodes: Sequence[Mapping[str, Any]], nproc: int, oversubscribe: bool) -> list[Berth]:
    """One worker for each GPU of every node of `ray.nodes()`; without GPUs one for each node, or `nproc` in turn over the nodes."""
    alive = sorted((node for node in nodes if node["Alive"]), key=_node_order)
    resource = "GPU" if any(node["Resources"].get("GPU", 0) >= 1 for node in alive) else "CPU"
    rooms = {node["NodeID"]: int(node["Resources"].get(resource, 0)) for node in alive}
    rooms = {node: room for node, room in rooms.items() if room}
    total = sum(rooms.values())
    count = nproc or (total if resource == "GPU" else len(rooms))
    if not total or (count > total and not oversubscribe):
        raise InputError(
            f"--nproc {count} on a cluster of {len(alive)} node{'s' if len(alive) != 1 else ''} with {total} {resource}s in all",
            f"at most one worker a {resource}",
            f"use --nproc {total} or fewer" if total else "give the cluster's nodes CPUs or GPUs to work with",
        )
    taken = dict.fromkeys(rooms, 0)
    order: list[tuple[str, int]] = []
    while len(order) < count:
        for node, room in rooms.items():
            free = taken[node] < room or sum(taken.values()) >= total
            if free and len(order) < count:
                order.append((node, taken[node]))
                taken[node] += 1
    word = "GPU" if resource == "GPU" else "worker"
    numbers = {node: number for number, node in enumerate(rooms)}
    return [
        Berth(
            label=f"{numbers[node]}-{place}",
            name=f"node {numbers[node]} {word} {place}",
            device="cuda:0" if resource == "GPU" else "cpu",  # Ray shows an actor its own GPUs alone
            node=node,
            resource=resource,
            share=min(1.0, rooms[node] / taken[node]),
        )
        for node, place in sorted(order, key=lambda berth: (numbers[berth[0]], berth[1]))
    ]


def _node_order(node: Mapping[str, Any]) -> tuple[bool, str, str]:
    """The head first, then by address: the same nodes get the same numbers in every call."""
    return ("node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"], node["NodeID"])


@dataclass(kw_only=True)
class Post:
    """A worker that is there or on its way: its actor, and what it was given."""

    number: int
    """Of all that were ever started: words of an earlier one in the same berth are not heard any more."""
    node: str
    actor: Any
    deadline: float
    who: str = ""
    """The process that spoke last."""
    host: str = ""
    tasks: set[int] = field(default_factory=set)
    stopping: bool = False


class RayCrew:
    """One actor a berth; see `Crew`."""

    def __init__(self, places: Sequence[Berth], settings: Mapping[str, Any], logs: Path, open_easel: OpenEasel) -> None:
        import ray

        self.ray = ray
        self.places = places
        self.labels: Sequence[str] = [place.label for place in places]
        self.names: Sequence[str] = [place.name for place in places]
        self.settings = {**settings, "versions": installed()}
        self.store = Store(Path(settings["folder"]))
        self.logs = logs
        self.open_easel = open_easel
        self._posts: dict[int, Post] = {}
        self._waiting: dict[int, float] = {}
        self._looked = 0.0
        self._num_posts = 0
        self._inbox: queue.SimpleQueue[Callable[[], list[Event]]] = queue.SimpleQueue()
        self._storers = ThreadPoolExecutor(NUM_STORERS, thread_name_prefix="storing")
        self._by_name = [threading.Lock() for _ in range(64)]
        self._ended = threading.Event()

    # -- places

    def start(self, worker: int) -> None:
        self._waiting[worker] = time.monotonic() + ROOM_S
        self._looked = 0.0

    def _find_places(self) -> list[Event]:
        """Put those that wait for a place on nodes with room; say of those that waited too long that they are gone."""
        now = time.monotonic()
        if self._waiting and now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            rooms = self._rooms()
            for worker in list(self._waiting):
                place = self.places[worker]
                for node in sorted(rooms, key=lambda node, home=place.node: node != home):  # type: ignore[misc]
                    if rooms[node] >= place.share - 1e-6:
                        rooms[node] -= place.share
                        del self._waiting[worker]
                        self._post(worker, node)
                        break
        late = [worker for worker, until in self._waiting.items() if now > until]
        late += [worker for worker, post in self._posts.items() if not post.who and now > post.deadline]
        return [self._leave(worker, f"found no room in the cluster within {ROOM_S:.0f} s") for worker in late]

    def _rooms(self) -> dict[str, float]:
        """What each living node has beside this crew's own workers; what others use there Ray alone knows."""
        resource = self.places[0].resource
        rooms = {
            node["NodeID"]: float(node["Resources"].get(resource, 0)) for node in self.ray.nodes() if node["Alive"]
        }
        for worker, post in self._posts.items():
            if post.node in rooms:
                rooms[post.node] -= self.places[worker].share
        return rooms

    def _post(self, worker: int, node: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = self.places[worker]
        environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        environment |= {"RANK": str(worker), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": str(self.settings["threads"])}
        order = {**self.settings, "device": place.device, "label": place.label, "node": place.name}
        # Tied to its node: were it free to go, Ray would let it wait for room elsewhere without an end and without a word.
        actor: Any = (
            self.ray.remote(PaintingActor)
            .options(
                **place.needs,
                max_restarts=NUM_RESTARTS,
                max_task_retries=-1,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(order, self.open_easel, environment)
        )
        self._num_posts += 1
        post = Post(number=self._num_posts, node=node, actor=actor, deadline=time.monotonic() + ROOM_S)
        self._posts[worker] = post
        self._listen(worker, post)
        self._when_done(worker, post, actor.open.remote(), self._answered)

    # -- orders

    def rehearse(self, worker: int, examples: Sequence[Spec], sheet_size: int, micro_batch: int) -> None:
        post = self._posts.get(worker)
        if post:
            specs = [spec.as_json() for spec in examples]
            answer = post.actor.rehearse_sheet.remote(specs, sheet_size, micro_batch)
            self._when_done(worker, post, answer, self._answered)

    def give(self, worker: int, task: Task) -> None:
        post = self._posts.get(worker)
        if post:
            post.tasks.add(task.number)
            answer, parcels = post.actor.draw_sheet.options(num_returns=2).remote(task.as_json())
            self._when_done(
                worker, post, answer, lambda worker, post, message: self._drawn(worker, post, message, parcels)
            )

    def drop(self, worker: int, number: int) -> None:
        if worker in self._posts:
            self._posts[worker].actor.drop.remote(number)

    def stop(self, worker: int) -> None:
        post = self._posts.get(worker)
        if post:
            post.stopping = True
            post.actor.drop.remote(None)
            self._inbox.put(lambda: self._end_if_idle(worker, post))

    def kill(self, worker: int) -> None:
        if worker in self._posts or worker in self._waiting:
            # Said here and now: whether Ray can still reach the process is of no interest.
            gone = self._leave(worker, "was killed")
            self._inbox.put(lambda: [gone])

    # -- words

    def events(self, timeout_s: float) -> list[Event]:
        found = self._find_places()
        with contextlib.suppress(queue.Empty):
            read = self._inbox.get(timeout=0 if found else timeout_s)
            while True:
                found += read()
                read = self._inbox.get_nowait()
        return found

    def _when_done(self, worker: int, post: Post, ref: Any, then: Callable[[int, Post, Any], list[Event]]) -> None:
        """Ray calls back on a thread of its own; everything is handled on the thread that asks for events."""

        def read(future: Future[Any]) -> list[Event]:
            if self._posts.get(worker) is not post:
                return []
            error = future.exception()
            return self._lost(worker, error) if error else then(worker, post, future.result())

        ref.future().add_done_callback(lambda future: self._inbox.put(lambda: read(future)))

    def _listen(self, worker: int, post: Post) -> None:
        self._when_done(worker, post, post.actor.hear.remote(HEAR_S), self._heard)

    def _heard(self, worker: int, post: Post, news: dict[str, Any]) -> list[Event]:
        self._listen(worker, post)
        if not post.host:
            post.host = news["host"]
            log.info("%s is on %s (node %s)", self.names[worker], post.host, post.node)
        restarted = self._met(worker, post, news["who"])
        self._log(worker, news["lines"])
        # A step's word may come after the sheet's own; and a new process needs as long as it needs to open the model.
        steps = {task: {"done": 0, "total": 1} for task in post.tasks} if restarted else {}
        steps |= {task: body for task, body in news["steps"].items() if task in post.tasks}
        return [Event(worker=worker, kind="step", task=task, body=body) for task, body in steps.items()]

    def _met(self, worker: int, post: Post, who: str) -> bool:
        """Whether the process that speaks is another than the one that spoke before."""
        restarted = post.who not in ("", who)
        post.who = who
        if restarted:
            name = self.names[worker]
            log.warning("%s: its process ended; Ray started it again and it draws its sheets once more", name)
            if post.stopping:
                post.actor.drop.remote(None)
        return restarted

    def _log(self, worker: int, lines: Sequence[str]) -> None:
        if lines:
            self.logs.mkdir(parents=True, exist_ok=True)
            with open(self.logs / f"worker_{self.labels[worker]}.log", "a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def _answered(self, worker: int, post: Post, message: dict[str, Any]) -> list[Event]:
        if who := message.pop("who", ""):
            self._met(worker, post, who)
        post.tasks.discard(message["task"])
        return [Event(worker=worker, **message), *self._end_if_idle(worker, post)]

    def _drawn(self, worker: int, post: Post, message: dict[str, Any], parcels: Any) -> list[Event]:
        self._log(worker, message.pop("lines", ()))
        if message["kind"] != "drawn":
            return self._answered(worker, post, message)
        self._storers.submit(self._publish, worker, post, message, parcels)
        return []

    def _end_if_idle(self, worker: int, post: Post) -> list[Event]:
        if self._posts.get(worker) is not post or not post.stopping or post.tasks:
            return []
        return [self._leave(worker, "has ended")]

    def _lost(self, worker: int, error: BaseException) -> list[Event]:
        """The actor is dead for good, or could not even begin; a node without Halation is nothing that another try mends."""
        from ray.exceptions import ActorUnschedulableError, RayTaskError

        words = str(error).strip()
        log.info("%s is lost: %s", self.names[worker], words)
        if "No module named 'halation" in words:
            refusal = InputError(
                f"{self.names[worker]} has no halation",
                "the same Python packages on every node of the cluster",
                "install Halation there",
            )
            self._leave(worker, words)
            return [
                Event(worker=worker, kind="refused", body={"message": str(refusal), "exit_code": refusal.exit_code})
            ]
        if isinstance(error, RayTaskError):
            return [self._leave(worker, f"failed: {words.splitlines()[-1]}", code=1)]
        if isinstance(error, ActorUnschedulableError):
            return [self._leave(worker, "is gone with its node")]
        return [self._leave(worker, f"is lost to the cluster ({_short(words)})")]

    def _leave(self, worker: int, words: str, code: int = -signal.SIGKILL) -> Event:
        self._waiting.pop(worker, None)
        post = self._posts.pop(worker, None)
        if post:
            self._kill(post)
        return Event(worker=worker, kind="gone", body={"code": code, "words": words})

    def _kill(self, post: Post) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, ValueError, ConnectionError):
            self.ray.kill(post.actor)

    # -- pictures

    def _publish(self, worker: int, post: Post, message: dict[str, Any], ref: Any) -> None:
        """On a storer's thread: fetch the sheet's pictures, write them, and only then let anybody hear of them."""
        from ray.exceptions import RayError

        try:
            for parcel in self._fetched(ref):
                # A sheet may be drawn twice at the end of a run; two writers of one name would share a temporary file.
                with self._by_name[hash(parcel.files[-1][0]) % len(self._by_name)]:
                    self.store(parcel)
        except RayError as error:
            lost = error
            self._inbox.put(lambda: self._lost(worker, lost) if self._posts.get(worker) is post else [])
            return
        except (Refused, OSError) as error:
            body = {"reason": str(error), "disk": isinstance(error, Refused)}
            message = {"kind": "failed", "task": message["task"], "body": body}
        self._inbox.put(lambda: self._answered(worker, post, message) if self._posts.get(worker) is post else [])

    def _fetched(self, ref: Any) -> list[Parcel]:
        from ray.exceptions import GetTimeoutError

        deadline = time.monotonic() + FETCH_S
        while True:
            try:
                parcels: list[Parcel] = self.ray.get(ref, timeout=1.0)
                return parcels
            except GetTimeoutError:
                if self._ended.is_set() or time.monotonic() > deadline:
                    raise

    def end(self, *, at_once: bool) -> None:
        self._ended.set()
        for post in self._posts.values():
            self._kill(post)
        self._posts.clear()
        self._waiting.clear()
        # What nobody has heard of is not drawn, so it need not be written either.
        self._storers.shutdown(wait=True, cancel_futures=True)


def _short(words: str) -> str:
    """The first sentence of what Ray says, which goes on for a page."""
    return next((line.strip() for line in words.splitlines() if line.strip()), "no reason given")[:200]
