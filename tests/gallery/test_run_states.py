"""How a run ended is told by the run, and believed only as far as its files go."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halation.errors import HalationError, InputError, Interrupted
from halation.gallery.run_file_reader import RunState, read_run_state
from halation.runs import lock
from halation.runs import run_folder as runs


@pytest.fixture
def run(tmp_path: Path) -> runs.RunFolder:
    run = runs.RunFolder(tmp_path / "run")
    run.folder.mkdir()
    runs.create_or_resume_run(run, "train", {"n_steps": 5}, {}, False)
    return run


def word(run: runs.RunFolder) -> tuple[str, str]:
    state = read_run_state(run.folder, run.config.stat().st_mtime)
    return state.status, state.reason


def test_a_run_is_running_while_it_is_held_and_finished_after_it(run: runs.RunFolder) -> None:
    with lock.lock_folder(run.folder, "train"):
        assert word(run) == ("running", "")
    assert word(run) == ("finished", "")
    ended = json.loads((run.folder / "ended.json").read_text())
    assert ended["command"] == "train"
    assert abs(time.time() - time.mktime(time.strptime(ended["time"][:19], "%Y-%m-%dT%H:%M:%S"))) < 60
    with lock.lock_folder(run.folder, "train"):
        assert not (run.folder / "ended.json").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Interrupted("stopped at step 3\nand saved", 130), ("stopped", "stopped at step 3")),
        (KeyboardInterrupt(), ("stopped", "KeyboardInterrupt")),
        (RuntimeError("CUDA out of memory\nmore words"), ("failed", "CUDA out of memory")),
        (ValueError(), ("failed", "ValueError")),
    ],
)
def test_an_error_is_the_state_and_its_first_line_the_reason(
    run: runs.RunFolder, error: BaseException, expected: tuple[str, str]
) -> None:
    with pytest.raises(type(error)), lock.lock_folder(run.folder, "train"):
        raise error
    assert word(run) == expected


def test_a_start_that_was_refused_leaves_the_run_what_it_was(run: runs.RunFolder) -> None:
    with lock.lock_folder(run.folder, "train"):
        runs.MetricsFile(run.metrics).append({"step": 5})
    with pytest.raises(InputError), lock.lock_folder(run.folder, "train"):
        raise InputError("other settings", "the old ones", "use them")
    assert word(run) == ("finished", "")
    with lock.lock_folder(run.folder, "train"), pytest.raises(InputError), lock.lock_folder(run.folder, "sample"):
        pass
    assert word(run) == ("finished", "")


def test_a_start_that_ranks_refused_leaves_the_run_what_it_was(run: runs.RunFolder) -> None:
    """Out of ranks comes the code of a refusal, not its kind."""
    with pytest.raises(Interrupted), lock.lock_folder(run.folder, "train"):
        raise Interrupted("stopped at step 5", 130)
    refusal, failure = HalationError("but the run is at step 5"), HalationError("rank 1 was killed")
    refusal.exit_code = InputError.exit_code
    record = run.config.read_bytes()

    def start() -> None:
        with lock.lock_folder(run.folder, "train"):
            runs.create_or_resume_run(run, "train", {"n_steps": 3}, {}, False)
            raise refusal

    with pytest.raises(HalationError):
        start()
    assert word(run) == ("stopped", "stopped at step 5")
    assert run.config.read_bytes() == record, "it says how many steps there are to be"
    with pytest.raises(HalationError), lock.lock_folder(run.folder, "train"):
        raise failure
    assert word(run) == ("failed", "rank 1 was killed")


def test_bad_input_that_is_found_on_the_way_is_a_failure(run: runs.RunFolder) -> None:
    with lock.lock_folder(run.folder, "train"):
        pass

    def train() -> None:
        with lock.lock_folder(run.folder, "train"):
            runs.MetricsFile(run.metrics).append({"step": 6})
            raise InputError("an image is broken", "a whole one", "mend it")

    with pytest.raises(InputError):
        train()
    assert word(run) == ("failed", "an image is broken")


def test_a_refusal_that_lets_go_of_nothing_but_its_hold_leaves_the_run_what_it_was(run: runs.RunFolder) -> None:
    """Under torchrun the hold is dropped with the last word of it, not by leaving a block."""
    with lock.lock_folder(run.folder, "train"):
        pass
    hold = lock.lock_folder(run.folder, "train")
    hold.__enter__()
    del hold
    assert word(run) == ("finished", "")
    assert not (run.folder / ".owner.json").exists()


def test_a_folder_that_never_became_a_run_keeps_no_word(tmp_path: Path) -> None:
    with pytest.raises(InputError), lock.lock_folder(tmp_path, "train"):
        raise InputError("no data", "data", "give it")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_takes_no_word_of_the_end_hides_no_error(
    run: runs.RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HALATION_FAULT_LOG", str(tmp_path / "faults.log"))
    monkeypatch.setenv("HALATION_FAULT", "ended.write:1+:ENOSPC")
    with pytest.raises(RuntimeError, match="the real one"), lock.lock_folder(run.folder, "train"):
        raise RuntimeError("the real one")
    assert "ended.write" in (tmp_path / "faults.log").read_text()
    assert sorted(os.listdir(run.folder)) == ["config.json"]


def test_a_killed_owner_is_a_stopped_run_and_a_refused_start_after_it_too(run: runs.RunFolder) -> None:
    code = f"""
import pathlib, time
from halation.runs import lock as holds
with holds.lock_folder(pathlib.Path({str(run.folder)!r}), "train"):
    print("held", flush=True)
    time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        owner.stdout.readline()
        assert word(run) == ("running", "")
        owner.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert word(run) == ("stopped", lock.KILLED_REASON), "it is not buried yet, but it is dead"
        owner.wait(10)
    assert word(run) == ("stopped", lock.KILLED_REASON)
    with pytest.raises(InputError), lock.lock_folder(run.folder, "train"):
        raise InputError("other settings", "the old ones", "use them")
    assert word(run) == ("stopped", lock.KILLED_REASON)


def test_a_number_that_another_process_has_by_now_is_no_owner(run: runs.RunFolder) -> None:
    with lock.lock_folder(run.folder, "train"):
        owner = json.loads((run.folder / ".owner.json").read_text())
        assert word(run) == ("running", "")
    other = {**owner, "start": owner["start"] - 1}
    (run.folder / "ended.json").unlink()
    (run.folder / ".owner.json").write_text(json.dumps(other))
    assert word(run) == ("stopped", lock.KILLED_REASON), "a process of this number is alive, but began later"
    (run.folder / ".owner.json").write_text(json.dumps(owner | {"start": None}))
    assert word(run) == ("running", ""), "where nobody told when, the number is all there is"
    (run.folder / ".owner.json").write_text(json.dumps(owner | {"pid": 10**20}))
    assert word(run) == ("stopped", lock.KILLED_REASON)


def test_an_owner_on_another_machine_runs_as_long_as_its_files_change(run: runs.RunFolder) -> None:
    owner = {"pid": 1, "host": f"not-{socket.gethostname()}", "command": "train", "since": "2026-01-02 03:04:05"}
    (run.folder / ".owner.json").write_text(json.dumps(owner))
    assert read_run_state(run.folder, time.time() - 200).status == "running"
    silent = read_run_state(run.folder, time.time() - 400)
    assert silent.status == "stopped"
    assert silent.reason.startswith("silent since 20")


def test_processes_that_hold_nothing_run_while_a_lease_is_touched(run: runs.RunFolder) -> None:
    lease = run.folder / "lease"
    lease.touch()
    assert read_run_state(run.folder, 0.0, [lease, run.folder / "gone"]).status == "running"
    os.utime(lease, (time.time() - 400,) * 2)
    assert read_run_state(run.folder, 0.0, [lease], is_complete=True).status == "finished"
    assert read_run_state(run.folder, 0.0, [lease], is_complete=False) == RunState(
        status="stopped", reason="not all of it is there"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"state": "flying"}', '{"state": ["failed"]}'])
def test_a_damaged_word_of_the_end_is_no_word(run: runs.RunFolder, text: str) -> None:
    (run.folder / "ended.json").write_text(text)
    assert word(run) == ("stopped", "")


# -- how long it took


def recorded(run: runs.RunFolder) -> dict[str, float]:
    ended = json.loads((run.folder / "ended.json").read_text())
    return {name: ended[name] for name in ("seconds", "time_s")}


def test_the_times_of_all_commands_on_a_folder_add_up(run: runs.RunFolder) -> None:
    with lock.lock_folder(run.folder, "train"):
        time.sleep(0.3)
        runs.MetricsFile(run.metrics).append({"step": 2})
    first = recorded(run)
    assert first["time_s"] == first["seconds"] >= 0.3
    with pytest.raises(Interrupted), lock.lock_folder(run.folder, "train"):
        raise Interrupted(f"stopped after {time.sleep(0.2)}", 130)
    second = recorded(run)
    assert second["time_s"] == pytest.approx(first["time_s"] + second["seconds"], abs=0.002)
    with pytest.raises(InputError), lock.lock_folder(run.folder, "train"):
        raise InputError("other settings", "the old ones", "use them")
    assert recorded(run) == second, "a refused start took no time"


def test_a_killed_command_counts_up_to_its_last_output(run: runs.RunFolder) -> None:
    """Its owner file has its start and the time of the commands before it."""
    since = time.time() - 1000
    owner = {"pid": 10**20, "host": socket.gethostname(), "command": "train", "time_s": 50.0}
    owner["since"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    (run.folder / ".owner.json").write_text(json.dumps(owner))
    runs.MetricsFile(run.metrics).append({"step": 2})
    os.utime(run.metrics, (since + 300,) * 2)
    with lock.lock_folder(run.folder, "train"):
        runs.MetricsFile(run.metrics).append({"step": 3})
    assert recorded(run)["time_s"] == pytest.approx(350, abs=30)


def test_a_run_of_a_version_without_times_has_no_sum(run: runs.RunFolder) -> None:
    (run.folder / "ended.json").write_text('{"state": "stopped", "reason": "", "command": "train"}')
    with lock.lock_folder(run.folder, "train"):
        runs.MetricsFile(run.metrics).append({"step": 2})
    assert recorded(run)["time_s"] is None
    assert recorded(run)["seconds"] >= 0
