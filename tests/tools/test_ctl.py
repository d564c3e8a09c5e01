"""`halation ctl`: refusals, waiting, and withdrawal of requests that were not taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halation import cli
from halation.errors import InputError
from halation.runs import control_requests
from halation.runs import run_folder as runs
from halation.tools import ctl
from halation.tools.config import CtlConfig


def record(folder: Path, job: str = "train") -> Path:
    """A folder that says it is a run."""
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_json_atomic(folder / "config.json", {"job": job, "settings": {}, "fixed": {}, "changes": []})
    return folder


def own(folder: Path, **changes: object) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "command": "train", "since": "2026-01-01 00:00:00"}
    runs.write_json_atomic(folder / ".owner.json", owner | changes)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    folder = record(tmp_path / "run")
    own(folder)
    return folder


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_path_without_a_running_training_is_refused_and_left_alone(tmp_path: Path) -> None:
    empty, ended, dead = tmp_path / "empty", record(tmp_path / "ended"), record(tmp_path / "dead")
    empty.mkdir()
    own(dead, pid=dead_process())
    generation = record(tmp_path / "pictures", "generate")
    own(generation)
    for folder, words in (
        (tmp_path / "nowhere", "there is no folder .*nowhere"),
        (empty, "empty is not a run: it has no config.json"),
        (generation, "pictures holds a `generate` run"),
        (ended, "ended is not running"),
        (dead, "dead is not running"),
    ):
        with pytest.raises(InputError, match=words):
            control_requests.send_request(folder, "stop")
        assert not (folder / control_requests.CONTROL_FOLDER).exists()


def test_the_command_line_takes_a_run_and_an_action_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ctl", str(tmp_path / "nowhere"), "save"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.main(["ctl", str(record(tmp_path / "run")), "save", "--wait_s", "-1"]) == 2
    assert "--wait_s -1.0" in capsys.readouterr().err


def test_a_run_that_ended_says_how(tmp_path: Path) -> None:
    finished, failed, saved = (record(tmp_path / name) for name in ("finished", "failed", "saved"))
    runs.write_json_atomic(finished / "ended.json", {"state": "finished", "reason": ""})
    for folder in (failed, saved):
        runs.write_json_atomic(folder / "ended.json", {"state": "failed", "reason": "the loss is not finite"})
    (saved / "checkpoints/step_0000010").mkdir(parents=True)
    for folder, found, action in (
        (finished, "finished is not running: it is finished", "more steps"),
        (failed, "failed is not running: it failed: the loss is not finite", "starts over, as nothing was saved"),
        (saved, "saved is not running: it failed: the loss is not finite", "resumes from its last checkpoint"),
    ):
        with pytest.raises(InputError) as told:
            control_requests.send_request(folder, "save")
        assert told.value.found.endswith(found)
        assert told.value.action.endswith(action)


def test_words_in_the_wrong_order_are_put_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ctl", "sample", "runs/a", "--wait_s", "1"]) == 2
    said = capsys.readouterr().err
    assert "expected: the run first" in said
    assert "halation ctl runs/a sample" in said


def test_a_training_that_holds_its_folder_but_is_no_run_yet_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    own(folder)
    with pytest.raises(InputError, match="run is still starting"):
        ctl.run(CtlConfig(run=folder, action="save", wait_s=0.1))
    inbox = control_requests.ControlInbox(folder, is_enabled=True)
    later(lambda: record(folder))
    later(lambda: (inbox.poll(), inbox.respond(1, {})), 0.5)
    assert ctl.run(CtlConfig(run=folder, action="save", wait_s=20.0)) == 0
    assert capsys.readouterr().out.splitlines()[1] == "accepted at step 1"
    own(folder, command="generate")
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="run is not a run"):
        ctl.run(CtlConfig(run=folder, action="save", wait_s=20.0))


def test_an_owner_on_another_machine_is_believed_and_a_wish_nobody_took_is_withdrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "far")
    own(folder, host="elsewhere", pid=dead_process())
    assert ctl.run(CtlConfig(run=folder, action="save", wait_s=0.1)) == 1
    asked, late = capsys.readouterr().out.splitlines()
    assert asked == f"asked {folder} to save at its next step"
    assert late.startswith("not accepted within 0.1 s, withdrawn")
    assert not (folder / control_requests.CONTROL_FOLDER).exists()


def test_without_waiting_the_wish_stays(running: Path) -> None:
    assert ctl.run(CtlConfig(run=running, action="save", wait_s=0.0)) == 0
    assert len(list((running / control_requests.CONTROL_FOLDER).glob("save-*.json"))) == 1


def later(action: Callable[[], object], after_s: float = 0.2) -> None:
    threading.Timer(after_s, action).start()


def test_a_wish_that_is_refused_or_whose_run_ends_is_told(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inbox = control_requests.ControlInbox(running, is_enabled=True)
    later(lambda: (inbox.poll(), inbox.respond(7, {"sample": "there is no canvas"})))
    assert ctl.run(CtlConfig(run=running, action="sample", wait_s=20.0)) == 1
    assert capsys.readouterr().out.splitlines()[1] == "not done at step 7: there is no canvas"
    later(lambda: inbox.close(9))
    assert ctl.run(CtlConfig(run=running, action="stop", wait_s=20.0)) == 1
    assert capsys.readouterr().out.splitlines()[1] == "not done at step 9: the run has ended"
    assert not (running / control_requests.CONTROL_FOLDER).exists()


def test_a_run_that_dies_with_a_wish_in_hand_is_said_to_have_ended(
    running: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = control_requests.ControlInbox(running, is_enabled=True)
    later(lambda: (inbox.poll(), (running / ".owner.json").unlink()))
    assert ctl.run(CtlConfig(run=running, action="save", wait_s=20.0)) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{running} ended before it accepted the request"


def test_a_run_that_dies_or_starts_anew_before_it_looks_has_ended_whatever_the_time(
    running: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later(lambda: own(running, since="2026-01-01 00:00:09"))
    assert ctl.run(CtlConfig(run=running, action="save", wait_s=20.0)) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{running} ended before it accepted the request"
    pid = dead_process()
    later(lambda: own(running, pid=pid))
    assert ctl.run(CtlConfig(run=running, action="save", wait_s=20.0)) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"{running} ended before it accepted the request"
    assert not (running / control_requests.CONTROL_FOLDER).exists()


def test_ctrl_c_withdraws(running: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert ctl.run(CtlConfig(run=running, action="stop", wait_s=20.0)) == 130
    assert capsys.readouterr().out.splitlines()[1] == "withdrawn"
    assert not (running / control_requests.CONTROL_FOLDER).exists()


def test_all_wishes_of_a_moment_are_taken_once_and_answered_each(running: Path) -> None:
    inbox = control_requests.ControlInbox(running, is_enabled=True, poll_interval_s=0.0)
    requests = [
        control_requests.send_request(running, action, "the gallery") for action in ("stop", "sample", "sample")
    ]
    withdrawn = control_requests.send_request(running, "save")
    assert control_requests.cancel_request(withdrawn)
    assert control_requests.decode_actions(inbox.poll()) == {"sample", "stop"}
    assert not control_requests.cancel_request(requests[0]), "it was taken"
    assert control_requests.read_response(requests[0]) is None, "and is not done"
    inbox.respond(3, {})
    assert inbox.requested_by["stop"] == "the gallery"
    assert inbox.poll() == 0
    assert {control_requests.read_response(request) for request in requests} == {
        control_requests.ControlResponse(action="stop", step=3),
        control_requests.ControlResponse(action="sample", step=3),
    }
    assert control_requests.read_response(withdrawn) is None


def test_a_look_at_a_run_that_nobody_asks_takes_microseconds(running: Path) -> None:
    inbox = control_requests.ControlInbox(running, is_enabled=True, poll_interval_s=0.0)

    def seconds(num_looks: int = 1000) -> float:
        began = time.perf_counter()
        for _ in range(num_looks):
            inbox.poll()
        return (time.perf_counter() - began) / num_looks

    assert min(seconds() for _ in range(5)) < 50e-6


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_real_command_on_two_ranks_is_stopped_and_the_same_command_goes_on(tmp_path: Path, torchrun: bool) -> None:
    run = tmp_path / "run"
    words = "--data streets --model tiny --image_size 32 --patch_size 8 --batch_size 2"
    words += " --validation_images 0 --sample_steps 1 --report_to none"
    flags = [*words.split(), "--log_every", "1", "--progress", "none", "--output_dir", str(run)]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "2", "-m"]
    command = [sys.executable, *(start if torchrun else ["-m"]), "halation.cli", "train", *flags]
    command += [] if torchrun else ["--nproc", "2"]
    with subprocess.Popen([*command, "--n_steps", "100000"], stderr=subprocess.PIPE, text=True) as training:
        while not (run / ".owner.json").exists() and training.poll() is None:
            time.sleep(0.1)
        while not (run / "config.json").exists() and training.poll() is None:
            time.sleep(0.1)
        assert cli.main(["ctl", str(run), "sample", "--wait_s", "60"]) == 0, "asked before its first step"
        assert cli.main(["ctl", str(run), "stop"]) == 0
        assert training.stderr is not None
        told = training.stderr.read()
    step = json.loads((run / control_requests.RESPONSES_FILE).read_text().splitlines()[-1])["step"]
    assert f"asked to stop by `halation ctl`: saved at step {step}" in told
    assert training.returncode == (0 if torchrun else 130), told
    assert (run / f"checkpoints/step_{step:07d}/COMMIT.json").exists()
    done = subprocess.run([*command, "--n_steps", str(step + 2)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (run / f"checkpoints/step_{step + 2:07d}/COMMIT.json").exists()
