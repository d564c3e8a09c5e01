"""A Ray cluster of several nodes on one machine, in a separate process.

The process takes `add` and `remove` on standard input and ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

NUM_STARTS = 3
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the machine's public address
CLIENTS = " " not in sys.executable
"""Whether clients from outside are served: Ray starts their server by a shell, without quotes around the path."""
# A node that is lost is missed after a second and not, as in a real cluster, after fifteen.
SYSTEM = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The cluster as seen by the process that started it."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    """What a driver needs: address and token."""
    client: str
    """Where Ray's client server listens."""

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def actors(self) -> list[psutil.Process]:
        """The workers' processes that run on any node."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "GenerationActor" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill_head(self) -> int:
        """SIGKILL to every process of the head, as a machine that is switched off loses them; how many there were."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        lines = {process: _command_line(process) for process in processes}
        others = [process for process, line in lines.items() if f"--node_ip_address={OTHER}" in line]
        spared = set(others)
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                spared |= set(process.children(recursive=True))
        killed = [process for process in processes if process not in spared]
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(killed)


def _command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def nodes() -> Iterator[Nodes]:
    """A head and one other node, a CPU each."""
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        variables = {**token, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process, first = _start(Path(folder) / "log", variables)
        try:
            yield Nodes(
                process=process,
                environment={**variables, "RAY_ADDRESS": first["address"]},
                client=f"ray://{HEAD}:{first['client']}",
            )
        finally:
            _stop(process)


def _start(log: Path, variables: dict[str, str]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start this file as a process; try other ports if the ones it found free were taken before Ray used them."""
    for _ in range(NUM_STARTS):
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, __file__],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            return process, json.loads(line)
        _stop(process)
    raise RuntimeError(f"Ray did not start {NUM_STARTS} times:\n{log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    process.kill()
    process.wait()
    process.stdout.close()


def await_listener(port: int) -> None:
    """Ray's client server is started with the head and listens when it is ready, a while later."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((HEAD, port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no process listens on port {port}")


def main() -> None:
    from ray.cluster_utils import Cluster

    with socket.create_server((HEAD, 0)) as free:
        client = free.getsockname()[1]
    common = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**common, "node_ip_address": HEAD, "ray_client_server_port": client, "_system_config": SYSTEM},
    )
    others = [cluster.add_node(**common, node_ip_address=OTHER)]
    if CLIENTS:
        await_listener(client)
    answer: dict[str, Any] = {"address": cluster.address, "client": client}
    stdout = os.fdopen(os.dup(1), "w")
    while True:
        stdout.write(json.dumps(answer) + "\n")
        stdout.flush()
        word = sys.stdin.readline().strip()
        if word == "add":
            others.append(cluster.add_node(**common, node_ip_address=OTHER))
        elif word == "remove":
            cluster.remove_node(others.pop(), allow_graceful=False)
        else:
            break
        answer = {"others": len(others)}
    cluster.shutdown()


if __name__ == "__main__":
    main()
