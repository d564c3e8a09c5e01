"""Laws of the prefetching loader."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from halation.data.dataset_protocol import JSON, CaptionedImage, load_images
from halation.data.prefetch import Batch, BatchPrefetcher, ShuffledOrder
from halation.data.process_pool import ProcessPool, WorkerDied
from halation.errors import HalationError, InputError


class Counted:
    """Images that show their own index, and count how often they are made."""

    name = "counted"
    fingerprint: dict[str, JSON] = {"kind": "counted"}
    num_train = 37
    num_validation = 3
    height = width = 4
    class_names = ()

    def __init__(self, broken: int = -1, pause_s: float = 0.0) -> None:
        self.broken = broken
        self.pause_s = pause_s
        self.num_made = 0

    def train(self, index: int) -> CaptionedImage:
        if index == self.broken:
            raise OSError(f"image {index} is gone")
        time.sleep(self.pause_s)
        self.num_made += 1
        return CaptionedImage(
            pixels=np.full((4, 4, 3), index, np.uint8),
            caption=f"number {index}",
            label=index % 5,
            original_size=(index, 9),
        )

    def validation(self, index: int) -> CaptionedImage:
        return self.train(index)

    def captions(self) -> Iterable[str]:
        return []

    all_captions = captions


def positions(num_steps: int, batch_size: int = 5) -> Iterator[tuple[int, range]]:
    return ((step, range(step * batch_size, (step + 1) * batch_size)) for step in range(num_steps))


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize(("num_threads", "depth", "memory_bytes"), [(1, 1, 0), (3, 2, 0), (2, 7, 10**6), (4, 4, 500)])
def test_batches_come_in_order_with_what_their_positions_name(num_threads: int, depth: int, memory_bytes: int) -> None:
    order = ShuffledOrder(7, Counted.num_train)
    with BatchPrefetcher(
        Counted(pause_s=0.0003), order, positions(30), num_threads=num_threads, depth=depth, memory_bytes=memory_bytes
    ) as batches:
        seen = list(batches)
    assert [batch["step"] for batch in seen] == list(range(30))
    for batch in seen:
        indices = [order.index_at(int(position)) for position in batch["positions"]]
        assert batch["indices"].tolist() == indices
        assert batch["pixels"].shape == (5, 4, 4, 3)
        assert batch["pixels"].dtype == np.uint8
        assert batch["pixels"][:, 0, 0, 0].tolist() == indices
        assert batch["captions"] == [f"number {index}" for index in indices]
        assert batch["labels"].tolist() == [index % 5 for index in indices]
        assert batch["originals"].tolist() == [[index, 9] for index in indices]
        assert batch["originals"].dtype == np.int64
        assert batch["positions"].dtype == batch["labels"].dtype == np.int64


def test_processes_give_the_same_batches_as_threads() -> None:
    order = ShuffledOrder(7, Counted.num_train)
    with BatchPrefetcher(Counted(), order, positions(4)) as batches:
        plain = list(batches)
    with BatchPrefetcher(Counted(), order, positions(4), num_workers=2) as batches:
        spawned = list(batches)
    for one, other in zip(plain, spawned, strict=True):
        assert one["pixels"].tobytes() == other["pixels"].tobytes()
        assert (one["captions"], one["labels"].tolist()) == (other["captions"], other["labels"].tolist())
        assert one["originals"].tolist() == other["originals"].tolist()


def test_an_error_in_the_background_is_raised_to_the_iterator_and_ends_the_threads() -> None:
    """An error in a background thread is raised to the iterator and ends the threads."""
    order = ShuffledOrder(0, Counted.num_train)
    broken = order.index_at(12)
    batches = BatchPrefetcher(Counted(broken=broken), order, positions(10))
    assert next(batches)["step"] == 0
    assert next(batches)["step"] == 1
    with pytest.raises(OSError, match=f"image {broken} is gone"):
        next(batches)
    assert prefetching_threads() == []
    assert list(batches) == []


def test_an_error_in_a_process_reaches_the_one_who_iterates() -> None:
    source = Counted(broken=ShuffledOrder(0, Counted.num_train).index_at(1))
    with (
        BatchPrefetcher(source, ShuffledOrder(0, Counted.num_train), positions(2), num_workers=1) as batches,
        pytest.raises(OSError, match="is gone"),
    ):
        next(batches)


def test_closing_early_leaves_no_thread_and_may_be_done_twice() -> None:
    batches = BatchPrefetcher(
        Counted(pause_s=0.001), ShuffledOrder(0, Counted.num_train), positions(10**9), num_threads=3
    )
    next(batches)
    batches.close()
    batches.close()
    assert prefetching_threads() == []
    with pytest.raises(StopIteration):
        next(batches)


def test_no_more_batches_than_asked_for_are_fetched_ahead() -> None:
    source = Counted()
    with BatchPrefetcher(
        source, ShuffledOrder(0, Counted.num_train), positions(10**9), num_threads=2, depth=3
    ) as batches:
        next(batches)
        time.sleep(0.2)
        assert source.num_made <= (1 + 3) * 5


def test_kept_images_are_made_once_and_never_more_bytes_than_allowed() -> None:
    everything = Counted()
    with BatchPrefetcher(
        everything, ShuffledOrder(0, 37), positions(3, 37), num_threads=1, memory_bytes=10**6
    ) as batches:
        list(batches)
    assert everything.num_made == 37
    ten = Counted()
    with BatchPrefetcher(
        ten, ShuffledOrder(0, 37), positions(3, 37), num_threads=1, memory_bytes=10 * 48 + 47
    ) as batches:
        list(batches)
    assert ten.num_made == 37 + 2 * 27


def test_what_a_transform_writes_into_a_batch_does_not_change_what_is_kept() -> None:
    def spoil(batch: Batch) -> Batch:
        seen = batch["pixels"].copy()
        batch["pixels"][:] = 255
        return {**batch, "seen": seen}

    order = ShuffledOrder(0, 37)
    with BatchPrefetcher(
        Counted(), order, positions(3, 37), num_threads=1, memory_bytes=10**6, transform=spoil
    ) as batches:
        for batch in batches:
            assert batch["seen"][:, 0, 0, 0].tolist() == order.indices_at(batch["positions"]).tolist()


def test_the_transform_runs_in_a_background_thread() -> None:
    def name_thread(batch: Batch) -> Batch:
        return {**batch, "thread": threading.current_thread().name}

    with BatchPrefetcher(Counted(), ShuffledOrder(0, 37), positions(2), transform=name_thread) as batches:
        assert all(batch["thread"].startswith("prefetch") for batch in batches)


def test_processes_are_gone_after_closing_and_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_prefetch import Counted, positions\n"
        "from halation.data.prefetch import BatchPrefetcher\n"
        "from halation.data.prefetch import ShuffledOrder\n"
        "if __name__ == '__main__':\n"
        "    with BatchPrefetcher(Counted(), ShuffledOrder(0, 37), positions(2), num_workers=1) as batches:\n"
        "        list(batches)\n"
        "    assert not multiprocessing.active_children()\n"
        "    batches = BatchPrefetcher(Counted(), ShuffledOrder(0, 37), positions(10**9), num_workers=2)\n"
        "    next(batches)\n"
        "    print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    assert len(children) == 2
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def test_processes_outlive_the_thread_that_asks_them_first() -> None:
    workers = ProcessPool(partial(load_images, Counted(pause_s=0.002)), 3)
    try:
        started = {child.pid for child in multiprocessing.active_children()}
        assert len(started) == 3
        for _ in range(3):
            asks = threading.Thread(target=lambda: [workers.submit("train", range(9)) for _ in range(6)])
            asks.start()
            asks.join()
            assert workers.submit("train", [4]).result(timeout=20).captions == ["number 4"]
        assert {child.pid for child in multiprocessing.active_children()} == started
    finally:
        workers.close()
    assert not multiprocessing.active_children()


class Dying(Counted):
    """Image 7 ends the process that makes it, as a decoder's crash or the system does."""

    def train(self, index: int) -> CaptionedImage:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(index)


def test_a_process_that_dies_is_an_error_in_seconds() -> None:
    began = time.monotonic()
    with pytest.raises(HalationError, match=r"killed by signal 9 .*memory ran out.*--num_workers"):  # noqa: SIM117
        with BatchPrefetcher(Dying(pause_s=0.001), ShuffledOrder(0, 37), positions(50), num_workers=2) as batches:
            list(batches)
    assert time.monotonic() - began < 20
    assert not multiprocessing.active_children()


def test_after_a_death_nothing_that_is_asked_for_waits() -> None:
    workers = ProcessPool(partial(load_images, Dying()), 2)
    asked = [workers.submit("train", [index]) for index in (7, 1, 2, 3, 4, 5)]
    with pytest.raises(WorkerDied) as death:
        asked[0].result(timeout=20)
    assert death.value.arguments == ("train", [7])
    assert wait(asked, timeout=20).not_done == set()
    with pytest.raises(WorkerDied):
        workers.submit("train", [1]).result(timeout=20)
    workers.close()
    workers.close()
    assert not multiprocessing.active_children()


def cut_off() -> None:
    """Begin an answer, as the pipe frames it, and die before it is whole."""
    for number in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            if number > 2 and os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.write(number, struct.pack("!i", 1000) + b"begun")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_in_the_middle_of_an_answer_is_noticed_too() -> None:
    workers = ProcessPool(cut_off, 2)
    try:
        with pytest.raises(WorkerDied, match="killed by signal 9"):
            workers.submit().result(timeout=20)
    finally:
        workers.close()


def refuse(kind: str) -> None:
    if kind == "input":
        raise InputError("found", "expected", "action")
    raise Odd("here", "there")


class Odd(Exception):
    """It cannot be made again from its text, as pickle does it."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def test_errors_come_back_from_processes_as_they_were_or_as_text() -> None:
    workers = ProcessPool(refuse, 1)
    try:
        with pytest.raises(InputError) as error:
            workers.submit("input").result(timeout=20)
        assert (error.value.found, error.value.expected, error.value.action) == ("found", "expected", "action")
        with pytest.raises(RuntimeError, match="Odd: herethere"):
            workers.submit("odd").result(timeout=20)
        with pytest.raises(TypeError, match="refuse"):
            workers.submit().result(timeout=20)
    finally:
        workers.close()


@pytest.mark.parametrize("source", ["a file", "standard input"])
def test_a_script_without_a_main_guard_runs_once_beside_its_processes(tmp_path: Path, source: str) -> None:
    script = "print('once')\nfrom halation.data.process_pool import ProcessPool\n"
    script += "pool = ProcessPool(abs, 2)\nprint(pool.submit(-3).result())\npool.close()\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py"] if source == "a file" else [sys.executable, "-"]
    done = subprocess.run(command, cwd=tmp_path, input=script, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n3\n"


def test_a_parent_that_closes_nothing_ends_and_obeys_sigterm(tmp_path: Path) -> None:
    """Workers ignore signals; their parent's end must not wait for them."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from functools import partial\n"
        "from test_prefetch import Counted\n"
        "from halation.data.dataset_protocol import load_images\n"
        "from halation.data.process_pool import ProcessPool\n"
        "if __name__ == '__main__':\n"
        "    workers = ProcessPool(partial(load_images, Counted(pause_s=60.0)), 2)\n"
        "    workers.submit('train', [1])\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(float(sys.argv[1]))\n"
    )
    for pause_s, code in (("0.5", 0), ("60", -signal.SIGTERM)):
        parent = subprocess.Popen([sys.executable, str(script), pause_s], stdout=subprocess.PIPE, text=True)
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "asked\n"
            if code:
                parent.send_signal(signal.SIGTERM)
            assert parent.wait(20) == code
        finally:
            parent.kill()
            parent.communicate()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
