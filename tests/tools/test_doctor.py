"""The doctor lists what is there and missing, hides secrets, and names a failing rank."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import tyro

from halation.errors import InputError, read_extras
from halation.tools.config import DoctorConfig
from halation.tools.doctor import probe_communication, run

DOCTOR = "import sys, tyro; from halation.tools.doctor import run; from halation.tools.config import DoctorConfig; "
COMMAND = [sys.executable, "-c", DOCTOR + "sys.exit(run(tyro.cli(DoctorConfig)))"]


def test_json_is_one_object_with_every_section_and_no_secret(tmp_path: Path) -> None:
    secrets = {"WANDB_API_KEY": "canary-1", "HF_TOKEN": "canary-2", "NCCL_AUTH": "canary-3", "NCCL_DEBUG": "WARN"}
    folder = tmp_path / "not" / "yet"
    done = subprocess.run(
        [*COMMAND, "--json", "--output_dir", str(folder)],
        env={**os.environ, **secrets, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["environment"]["NCCL_DEBUG"] == "WARN"
    assert report["environment"]["HF_TOKEN"] == report["environment"]["NCCL_AUTH"] == "(set)"
    assert report["machine"]["disk_folder"] == str(tmp_path)
    assert not folder.exists()
    assert report["versions"]["torch"] == report["torch"]["version"]
    assert "math" in report["backends"]["attention"]
    assert report["communication"]["state"] == "ok"
    assert report["communication"]["ranks"] == 2
    assert report["communication"]["bus_gb_per_s"] > 0
    for name, requirements in read_extras().items():
        extra = report["extras"][name]
        for requirement in requirements:
            package = requirement.split(">")[0]
            assert (package in extra["installed"]) != (f'"{requirement}"' in (extra["install"] or "")), package


def test_on_a_terminal_it_is_a_table_and_a_failed_check_ends_with_one() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nosuch0", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300"}
    process = subprocess.Popen(COMMAND, env=environment, stdout=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # a pseudo terminal ends with an error, not with an end of file
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 1
    lines = shown.decode().splitlines()
    assert any("GLOO_SOCKET_IFNAME" in line and "nosuch0" in line for line in lines)
    assert any("rank 0" in line and "nosuch0" in line for line in lines), shown.decode()


@pytest.mark.slow
@pytest.mark.faults
def test_a_rank_that_hangs_is_named_within_the_timeout_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALATION_FAULT", "doctor.all_reduce:1:stop:1")
    monkeypatch.setenv("HALATION_FAULT_LOG", str(tmp_path / "fired"))
    result = probe_communication(3, "gloo", timeout_s=2.0)
    assert (tmp_path / "fired").read_text() == "doctor.all_reduce:1:stop:1\n"
    assert result["state"] == "failed"
    assert result["errors"]["rank 1"] == "no answer while reducing"
    assert not [child for child in psutil.Process().children() if "rank_main" in " ".join(child.cmdline())]


@pytest.mark.faults
def test_a_rank_that_fails_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALATION_FAULT", "doctor.all_reduce:1:raise:1")
    result = probe_communication(2, "gloo", timeout_s=5.0)
    assert result["state"] == "failed"
    assert "fault injected at doctor.all_reduce" in result["errors"]["rank 1"]


def test_off_a_terminal_each_line_names_section_item_and_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(DoctorConfig(nproc=1)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.split(": ", 2)) == 3 for line in lines)
    assert "communication: state: ok" in lines
    assert "environment: OMP_NUM_THREADS: 1" in lines


def test_no_ranks_at_all_is_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)--nproc 0.*from 1 on"):
        run(DoctorConfig(nproc=0))


def test_flags_are_read_with_dashes_and_underscores() -> None:
    config = tyro.cli(DoctorConfig, args=["--nproc", "3", "--output_dir", "runs", "--timeout-s", "2"])
    assert config == DoctorConfig(nproc=3, output_dir=Path("runs"), timeout_s=2.0)


def test_the_module_is_there_without_torch() -> None:
    code = "import sys, halation.tools.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_a_working_torch_it_says_so() -> None:
    code = "import sys; sys.modules['torch'] = None; " + DOCTOR + "run(DoctorConfig())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "InputError: torch cannot be imported" in done.stderr
