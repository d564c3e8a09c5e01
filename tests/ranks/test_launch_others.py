"""`halation train` under torchrun and srun joins existing ranks and resumes after kills."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import commands, run_readers
from support.commands import TORCHRUN, finish, fired, halation, last_step, started, train, until

pytestmark = pytest.mark.ranks

SLOWLY = "train.step:1+:sleep=0.15"


def torchrun(*flags: str) -> list[str]:
    return [TORCHRUN, *flags, "-m", "halation.cli"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("flags", [["--n_step", "3"], ["--n_steps", "three"], ["--data", "nowhere_at_all"]])
def test_a_wrong_flag_is_printed_once_for_all_ranks_of_torchrun(tmp_path: Path, flags: list[str]) -> None:
    words = [*train(tmp_path / "run", nproc=None), *flags]
    assert finish(halation(words), tmp_path / "alone") == 2
    with started([*torchrun("--standalone", "--nproc_per_node", "3"), *words], tmp_path / "log") as command:
        assert command.process.wait(240) == 1, "torchrun's own code for ranks that ended with 2"
        said = command.said()
    assert re.search(r"exitcode *: 2\b", said), said
    alone = [line for line in (tmp_path / "alone").read_text().splitlines() if re.search(r"\w", line)]
    assert alone
    assert [said.count(line) for line in alone] == ["\n".join(alone).count(line) for line in alone], said


def test_an_error_of_one_rank_alone_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "from halation.cli import main\n"
        "sys.exit(main(['train', '--of_rank_2', '1'])) if os.environ['RANK'] == '2' else signal.pause()\n"
    )
    with started([TORCHRUN, "--standalone", "--nproc_per_node", "3", str(script)], tmp_path / "log") as command:
        assert command.process.wait(240) == 1
        assert "--of_rank_2" in command.said()


@pytest.mark.slow
def test_two_torchrun_agents_on_two_nodes_train_one_run_to_the_launchers_bits(tmp_path: Path) -> None:
    run = tmp_path / "run"
    port = str(free_port())
    with ExitStack() as stack:
        agents = []
        for node in ("0", "1"):
            flags = ("--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "static", "--master_addr", "127.0.0.1")
            words = torchrun(*flags, "--master_port", port, "--node_rank", node) + train(run, nproc=None)
            agents.append(stack.enter_context(started(words, tmp_path / f"log_{node}")))
        for agent in agents:
            assert agent.process.wait(120) == 0, agent.said()
            agent.until_gone(5.0)
    assert commands.last_bits(run) == commands.undisturbed_training()
    assert (run / "logs" / "rank_1.log").exists()


@pytest.mark.slow
@pytest.mark.faults
def test_torchrun_starts_a_killed_rank_again_and_it_resumes_by_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = torchrun("--standalone", "--nproc_per_node", "2", "--max_restarts", "1") + train(run, nproc=None)
    assert finish(words, tmp_path / "log", "train.step:3:kill:1:once") == 0, (tmp_path / "log").read_text()
    assert fired(tmp_path / "log") == ["train.step:3:kill:1"]
    assert "resuming from step 2" in (run / "logs" / "train.log").read_text()
    assert commands.last_bits(run) == commands.undisturbed_training()


@pytest.mark.slow
def test_a_killed_torchrun_leaves_no_rank_behind(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = torchrun("--standalone", "--nproc_per_node", "2") + train(run, nproc=None)
    with started(words, tmp_path / "log", SLOWLY) as command:
        until(lambda: last_step(run) >= 1, command=command)
        assert sorted(command.rank_pids()) == [0, 1]
        command.process.kill()
        command.until_gone(5.0)


@pytest.mark.slow
def test_torchrun_told_to_end_saves_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = torchrun("--standalone", "--nproc_per_node", "2") + train(run, nproc=None, ckpt_every=0)
    with started(words, tmp_path / "log", SLOWLY) as command:
        until(lambda: last_step(run) >= 1, command=command)
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) != 0
        command.until_gone(5.0)
    assert len(run_readers.valid_checkpoints(run / "checkpoints")) == 1
    assert run_readers.leftovers(run) == []


def catches_sigterm(pid: int) -> bool:
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.faults
def test_a_signal_to_a_loading_torchrun_rank_stops_all_at_one_saved_step(tmp_path: Path) -> None:
    """A signal to one rank of torchrun while it loads stops all ranks at one saved step."""
    run = tmp_path / "run"
    words = torchrun("--standalone", "--nproc_per_node", "2") + train(run, nproc=None)
    with started(words, tmp_path / "log", "train.step:3+:sleep=1") as command:
        until(lambda: 1 in command.rank_pids(), command=command)
        pid = command.rank_pids()[1]
        until(lambda: catches_sigterm(pid) or "libtorch" in Path(f"/proc/{pid}/maps").read_text(), command=command)
        os.kill(pid, signal.SIGTERM)
        assert command.process.wait(120) == 1, "torchrun's own code for ranks that ended with 143"
        command.until_gone(5.0)
        assert "asked to stop (signal 15): saved at step" in command.said()
        assert "exitcode  : 143" in command.said()
    assert 0 < max(run_readers.valid_checkpoints(run / "checkpoints")) < 6


@pytest.mark.slow
@pytest.mark.faults
def test_a_signal_ends_a_rank_that_waits_for_others_which_never_come(tmp_path: Path) -> None:
    place = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    words = halation(train(tmp_path / "run", nproc=None))
    with started(words, tmp_path / "log", environment=place) as command:
        until(lambda: catches_sigterm(command.process.pid), command=command)
        until(lambda: "libtorch" in Path(f"/proc/{command.process.pid}/maps").read_text(), command=command)
        time.sleep(5)  # it is in the rendezvous now, or soon
        command.process.terminate()
        assert command.process.wait(60) == 143, command.said()


def slurm(job: str, rank: int, folder: Path) -> dict[str, str]:
    """What srun tells each task of a step of two."""
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_SUBMIT_DIR": str(folder),
    }


@pytest.mark.slow
def test_tasks_of_srun_join_one_world_and_its_signal_saves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = halation(train(run, nproc=None))
    for attempt, signalled in enumerate((True, False)):
        with ExitStack() as stack:
            tasks = [
                stack.enter_context(
                    started(
                        words,
                        tmp_path / f"log_{rank}",
                        SLOWLY if signalled else "",
                        slurm(f"17{attempt}", rank, tmp_path),
                    )
                )
                for rank in (0, 1)
            ]
            if signalled:
                until(lambda: last_step(run) >= 3, command=tasks[0])
                for task in tasks:
                    os.kill(task.process.pid, signal.SIGUSR1)
            codes = [task.process.wait(60) for task in tasks]
        assert codes == ([143, 143] if signalled else [0, 0]), (tmp_path / "log_0").read_text()
        assert list(tmp_path.glob(".halation_rendezvous*")) == []
        if signalled:
            assert max(run_readers.valid_checkpoints(run / "checkpoints")) >= 3
    assert commands.last_bits(run) == commands.undisturbed_training()


def test_a_batch_script_is_no_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside sbatch, before srun, the variables speak of the whole job: one command is still one process."""
    from halation.distributed import launcher

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert not launcher.is_launched()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert launcher.is_launched()
    assert launcher.slurm_world_size() == 8
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert not launcher.is_launched()
