"""Laws of `--cluster ray`: the files of one machine despite lost nodes and processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halation.errors import InputError
from halation.generation.workers.ray_pool import GenerationActor, assign_slots, installed_versions
from support.commands import Started, finish, fired, halation, started, until
from support.ray_nodes import CLIENTS, Nodes, nodes

pytestmark = pytest.mark.ray

pytest.importorskip("ray")

needs_clients = pytest.mark.skipif(not CLIENTS, reason="Ray cannot start its client server below a path with a space")
ROWS = 'prompt,height\n"first, with a comma",16\n' + "".join(f"prompt number {number},\n" for number in range(20))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a local call with two workers leaves."""
    folder = tmp_path_factory.mktemp("local")
    assert finish(generate(folder, nproc=2), folder / "log") == 0, said(folder)
    return files(folder)


def generate(folder: Path, **settings: object) -> list[str]:
    (folder / "prompts.csv").write_text(ROWS)
    flags: dict[str, object] = {
        "prompts": folder / "prompts.csv",
        "model_path": "testcard",
        "output_dir": folder / "out",
        "height": 24,
        "width": 32,
        "num_inference_steps": 2,
        "batch_size": 2,
        "progress": "plain",
    } | settings
    return halation(["generate", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])


def files(folder: Path) -> dict[str, str]:
    """Every file a person asked for, and its bytes."""
    paths = [*(folder / "out").glob("*.png"), folder / "out" / "metadata.jsonl"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def said(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def num_images(folder: Path) -> int:
    return len(list((folder / "out").glob("[!.]*.png")))


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found


def assert_alone(cluster: Nodes) -> None:
    """No worker outlives its command."""
    until(lambda: not cluster.actors(), timeout_s=10)


# -- the same files


def test_two_nodes_leave_the_very_files_that_two_local_workers_leave(
    cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    words = generate(tmp_path, cluster="auto", model_path="testcard:0.5")
    assert finish(words, tmp_path / "log", environment=cluster.environment) == 0, said(tmp_path)
    assert files(tmp_path) == undisturbed
    assert set(summary(tmp_path)["workers"]) == {"0-0", "1-0"}
    assert all(worker["done"] for worker in summary(tmp_path)["workers"].values())
    assert {path.name for path in (tmp_path / "out").glob("failed*")} == {
        f"failed_prompts_gpu{node}-0.txt" for node in (0, 1)
    }
    assert_alone(cluster)


@pytest.mark.slow
@needs_clients
def test_a_client_from_outside_the_cluster_gets_the_same_files(
    cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    assert finish(generate(tmp_path, cluster=cluster.client), tmp_path / "log", environment=cluster.environment) == 0, (
        said(tmp_path)
    )
    assert files(tmp_path) == undisturbed
    assert_alone(cluster)


@pytest.mark.slow
def test_a_real_pipeline_draws_the_same_bits_by_ray_and_locally(cluster: Nodes, tmp_path: Path) -> None:
    from support.tiny_models import built

    found = {}
    for where in ("local", "auto"):
        folder = tmp_path / where
        folder.mkdir()
        settings = {"cluster": where, "model_path": built("hunyuan"), "num_samples": 5, "height": 32, "nproc": 2}
        assert finish(generate(folder, **settings), folder / "log", environment=cluster.environment) == 0, said(folder)
        found[where] = files(folder)
    assert len(found["local"]) == 6
    assert found["local"] == found["auto"]


# -- faults


@pytest.mark.slow
@pytest.mark.faults
def test_a_node_that_is_lost_costs_no_image(cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path) -> None:
    words = generate(tmp_path, cluster="auto", model_path="testcard:0.5")
    try:
        with started(words, tmp_path / "log", environment=cluster.environment) as command:
            until(lambda: num_images(tmp_path) >= 4, command=command)
            cluster.ask("remove")
            assert command.process.wait(60) == 0, said(tmp_path)
    finally:
        cluster.ask("add")
    assert files(tmp_path) == undisturbed
    assert summary(tmp_path)["workers"]["1-0"]["restarts"] >= 1
    assert "is gone with its node" in said(tmp_path)
    assert_alone(cluster)


@pytest.mark.slow
@pytest.mark.faults
def test_a_process_that_dies_is_started_again_by_ray_itself(
    cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    # One worker: a second one might draw everything before the first is back.
    words = generate(tmp_path, cluster="auto", nproc=1)
    assert finish(words, tmp_path / "log", "paint.000007:1:kill:once", cluster.environment) == 0, said(tmp_path)
    assert len(fired(tmp_path / "log")) == 1
    assert "Ray restarted it" in said(tmp_path)
    assert files(tmp_path) == undisturbed
    assert sum(worker["restarts"] for worker in summary(tmp_path)["workers"].values()) == 0


@pytest.mark.faults
def test_a_prompt_that_always_fails_is_tried_twice_and_set_aside(
    cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    words = generate(tmp_path, cluster="auto")
    assert finish(words, tmp_path / "log", "paint.000003:1+:raise", cluster.environment) == 1, said(tmp_path)
    assert Counter(line.split(":")[0] for line in fired(tmp_path / "log")) == {"paint.000003": 2}
    assert {name: undisturbed[name] for name in files(tmp_path) if name.endswith(".png")} == {
        name: value for name, value in undisturbed.items() if name.endswith(".png") and not name.startswith("000003")
    }
    failed = "".join(path.read_text() for path in (tmp_path / "out").glob("failed_prompts_gpu*.txt"))
    assert "prompt number 1" in failed
    assert "fault injected at paint.000003" in failed
    logs = "".join(path.read_text() for path in (tmp_path / "out" / "logs").glob("worker_*.log"))
    assert "InjectedFault" in logs


@pytest.mark.slow
@pytest.mark.faults
def test_a_disk_that_takes_nothing_ends_the_command_with_its_reason(cluster: Nodes, tmp_path: Path) -> None:
    words = generate(tmp_path, cluster="auto")
    assert finish(words, tmp_path / "log", "picture.write:1+:ENOSPC", cluster.environment) == 1
    assert "cannot write" in said(tmp_path)
    assert num_images(tmp_path) == 0
    assert_alone(cluster)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(("first", "second"), [("auto", "local"), ("local", "auto")])
def test_what_one_began_the_other_ends(
    cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path, first: str, second: str
) -> None:
    words = generate(tmp_path, cluster=first, model_path="testcard:0.3")
    with started(words, tmp_path / "log", environment=cluster.environment) as command:
        until(lambda: num_images(tmp_path) >= 4, command=command)
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(20) == 130, said(tmp_path)
    assert "images missing; run the same command" in said(tmp_path)
    assert_alone(cluster)
    before = num_images(tmp_path)
    assert 4 <= before < 21
    words = generate(tmp_path, cluster=second, model_path="testcard:0.3")
    assert finish(words, tmp_path / "log", environment=cluster.environment) == 0, said(tmp_path)
    assert summary(tmp_path)["drawn_now"] == 21 - before
    assert files(tmp_path) == undisturbed


@pytest.mark.slow
@pytest.mark.faults
def test_a_worker_that_hangs_is_replaced(cluster: Nodes, undisturbed: dict[str, str], tmp_path: Path) -> None:
    words = generate(tmp_path, cluster="auto", stall_timeout_s=2, model_path="testcard:0.8")
    assert finish(words, tmp_path / "log", "paint:1:sleep=100:0:once", cluster.environment) == 0, said(tmp_path)
    assert len(fired(tmp_path / "log")) == 1
    assert "no sign of life" in said(tmp_path)
    assert summary(tmp_path)["workers"]["0-0"]["restarts"] == 1
    assert files(tmp_path) == undisturbed
    assert_alone(cluster)


# -- a cluster that is lost

LOST_WITHIN_S = 60.0
STOPPED_WITHIN_S = 10.0


@contextlib.contextmanager
def drawing_on(kind: str, folder: Path) -> Iterator[tuple[Started, Callable[[], int]]]:
    """A command that has drawn a few images on a cluster of its own, and how to kill that cluster's head."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(nodes()) if kind != "ray" else None
        where = cluster.client if cluster and kind == "ray://" else kind
        environment = cluster.environment if cluster else {"TMPDIR": tempfile.gettempdir()}
        words = generate(folder, cluster=where, nproc=2, model_path="testcard:1.0")
        command = stack.enter_context(started(words, folder / "log", environment=environment))
        until(lambda: num_images(folder) >= 2, command=command)

        def kill_own() -> int:
            """GCS and raylet of the command's own Ray, and all that Ray started."""
            ours = ("halation generate", "halation.generation")
            found = [pid for pid, line in command.alive().items() if not any(words in line for words in ours)]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return len(found)

        yield command, cluster.kill_head if cluster else kill_own


def assert_ends_locally(folder: Path, undisturbed: dict[str, str]) -> None:
    assert 2 <= num_images(folder) < 21
    words = generate(folder, cluster="local", model_path="testcard:1.0", nproc=2)
    assert finish(words, folder / "log") == 0, said(folder)
    assert files(folder) == undisturbed


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("kind", ["ray", "auto", pytest.param("ray://", marks=needs_clients)])
def test_a_lost_cluster_ends_the_command_with_one_sentence_and_another_one_goes_on(
    kind: str, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    with drawing_on(kind, tmp_path) as (command, kill_cluster):
        assert kill_cluster() >= 2
        assert command.process.wait(LOST_WITHIN_S) == 1, said(tmp_path)
        command.until_gone(10)
    sentences = [line for line in said(tmp_path).splitlines() if "is lost" in line and line.startswith("halation: ")]
    assert len(sentences) == 1, said(tmp_path)
    assert "run the same command to resume" in sentences[0]
    assert "Traceback" not in said(tmp_path)
    assert_ends_locally(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "wait_s", "number", "code"),
    [
        ("ray", 0, signal.SIGTERM, 143),
        ("auto", 0, signal.SIGTERM, 143),
        pytest.param("ray://", 0, signal.SIGINT, 130, marks=needs_clients),
        pytest.param("ray://", 3, signal.SIGTERM, 143, marks=needs_clients),  # the client tries to reconnect then
    ],
)
def test_a_signal_ends_a_command_whose_cluster_is_lost(
    kind: str, wait_s: float, number: int, code: int, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    with drawing_on(kind, tmp_path) as (command, kill_cluster):
        assert kill_cluster() >= 2
        time.sleep(wait_s)
        command.process.send_signal(number)
        sent_at = time.monotonic()
        assert command.process.wait(STOPPED_WITHIN_S + 10) == code, said(tmp_path)
        took_s = time.monotonic() - sent_at
        assert took_s < STOPPED_WITHIN_S
        command.until_gone(10)
    assert "images missing; run the same command" in said(tmp_path)
    assert_ends_locally(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.faults
@needs_clients
def test_a_cluster_does_not_keep_the_workers_of_a_killed_client_for_long(cluster: Nodes, tmp_path: Path) -> None:
    words = generate(tmp_path, cluster=cluster.client, model_path="testcard:1.0")
    with started(words, tmp_path / "log", environment=cluster.environment) as command:
        until(lambda: num_images(tmp_path) >= 2, command=command)
        command.process.kill()
        command.process.wait()
        command.until_gone(10)
    until(lambda: not cluster.actors(), timeout_s=30)  # by Ray's default, 35 s


# -- a Ray of one's own


@pytest.mark.slow
@pytest.mark.faults
def test_nothing_is_left_of_a_ray_whose_gcs_was_killed(undisturbed: dict[str, str], tmp_path: Path) -> None:
    words = generate(tmp_path, cluster="ray", nproc=2, model_path="testcard:0.3")
    with started(words, tmp_path / "log", environment={"TMPDIR": tempfile.gettempdir()}) as command:
        until(lambda: num_images(tmp_path) >= 8, command=command)
        servers = [pid for pid, line in command.alive().items() if "gcs_server" in line.split(" ")[0]]
        assert len(servers) == 1
        os.kill(servers[0], signal.SIGKILL)
        code = command.process.wait(LOST_WITHIN_S)
        command.until_gone(5)
    if code == 0:  # the last images were drawn before the loss was noticed
        assert files(tmp_path) == undisturbed
    else:
        assert code == 1
        assert "is lost" in said(tmp_path)
        assert_ends_locally(tmp_path, undisturbed)
    assert not list(Path(tempfile.gettempdir()).glob("halation_ray_*"))


@pytest.mark.slow
@pytest.mark.faults
def test_ctrl_c_in_a_terminal_ends_a_ray_of_ones_own_and_all_its_processes(tmp_path: Path) -> None:
    environment = {"TMPDIR": tempfile.gettempdir()}
    words = generate(tmp_path, cluster="ray", nproc=2, model_path="testcard:0.5")
    with started(words, tmp_path / "log", environment=environment) as command:
        until(lambda: num_images(tmp_path) >= 2, command=command)
        assert any("raylet" in line for line in command.alive().values())
        os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
        assert command.process.wait(20) == 130, said(tmp_path)
        command.until_gone(10)
    assert "images missing; run the same command" in said(tmp_path)
    assert not list(Path(tempfile.gettempdir()).glob("halation_ray_*"))


# -- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster": "auto", "gpu_ids": "0"}, "omit --gpu_ids"),
        ({"cluster": "slurm"}, "local, files, ray, auto or ray://HOST:PORT"),
        ({"cluster": "ray://127.0.0.1:9"}, "no Ray cluster to join at ray://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_joined_is_refused_at_once(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    began = time.monotonic()
    assert finish(generate(tmp_path, **settings), tmp_path / "log") == 2
    assert words in said(tmp_path)
    assert time.monotonic() - began < 15


def test_more_workers_than_the_cluster_has_room_for_are_refused(cluster: Nodes, tmp_path: Path) -> None:
    assert finish(generate(tmp_path, cluster="auto", nproc=3), tmp_path / "log", environment=cluster.environment) == 2
    assert "use --nproc 2 or fewer" in said(tmp_path)


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    words = generate(tmp_path, cluster="ray")[1:]
    code = "import sys; sys.modules['ray'] = None; from halation.cli import main;"
    code += f" sys.argv[1:] = {words!r}; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert """pip install "ray>=""" in done.stderr


def order(**changes: Any) -> dict[str, Any]:
    style = {"model": "testcard", "sampler": "", "coder": "zlib", "fps": 16}
    values = {"model": {"kind": "testcard", "seconds": 0.0}, "style": style, "folder": "", "label": "1-0"}
    return {**values, "node": "node 1 GPU 0", "versions": installed_versions(), **changes}


def test_a_node_without_the_model_says_so_and_says_which_node(tmp_path: Path) -> None:
    model = {"kind": "pipeline", "path": str(tmp_path / "nowhere")}
    answer = GenerationActor(order(model=model), {}).open()
    assert answer["kind"] == "refused"
    assert answer["body"]["exit_code"] == 2
    assert "node 1 GPU 0" in answer["body"]["message"]
    assert f"has no folder {tmp_path / 'nowhere'}" in answer["body"]["message"]


def test_a_node_with_other_versions_says_so() -> None:
    answer = GenerationActor(order(versions={**installed_versions(), "torch": "1.0"}), {}).open()
    assert answer["kind"] == "refused"
    assert "instead of 1.0" in answer["body"]["message"]


# -- who draws where


def node(name: str, *, head: bool = False, alive: bool = True, **resources: float) -> dict[str, Any]:
    """As `ray.nodes()` tells of it."""
    marks = {"node:__internal_head__": 1.0} if head else {}
    return {"NodeID": name, "NodeManagerAddress": name, "Alive": alive, "Resources": {**resources, **marks}}


def test_every_gpu_of_every_living_node_gets_a_worker() -> None:
    found = assign_slots(
        [
            node("10.0.0.3", CPU=8, GPU=2),
            node("10.0.0.1", head=True, CPU=4),
            node("10.0.0.2", CPU=8, GPU=1),
            node("10.0.0.9", alive=False, GPU=8),
        ],
        0,
        False,
    )
    assert [(place.node, place.label, place.name) for place in found] == [
        ("10.0.0.2", "0-0", "node 0 GPU 0"),
        ("10.0.0.3", "1-0", "node 1 GPU 0"),
        ("10.0.0.3", "1-1", "node 1 GPU 1"),
    ]
    assert all(place.device == "cuda:0" and place.ray_options == {"num_gpus": 1.0, "num_cpus": 0} for place in found)


def test_without_gpus_every_node_gets_a_worker_or_as_many_as_asked_for_in_turn() -> None:
    two = [node("b", CPU=4), node("a", CPU=2, head=True)]
    assert [place.label for place in assign_slots(two, 0, False)] == ["0-0", "1-0"]
    assert [place.label for place in assign_slots(two, 5, False)] == ["0-0", "0-1", "1-0", "1-1", "1-2"]
    assert {place.device for place in assign_slots(two, 5, False)} == {"cpu"}
    with pytest.raises(InputError, match="use --nproc 6 or fewer"):
        assign_slots(two, 7, False)


def test_workers_that_share_a_gpu_ask_ray_for_a_part_of_it() -> None:
    found = assign_slots([node("a", GPU=1)], 2, True)
    assert [place.share for place in found] == [0.5, 0.5]
