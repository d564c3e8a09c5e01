"""The cap on the slow tests: green or red by what failed until then, and no process is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SLOW = Path(__file__).parent.parent / ".ci" / "slow.py"
FAST = SLOW.with_name("fast.py")
PASSES = "def test_a():\n    pass\n"
FAILS = "def test_b():\n    assert False\n"
HANGS = "def test_z():\n    import time\n    time.sleep(60)\n"
PAUSES = """
import pathlib, pytest

@pytest.mark.ranks
def test_c():
    been = pathlib.Path("been")
    before = been.exists()
    been.touch()
    assert before
"""
ORDERLY = """
import pathlib, pytest, time

@pytest.fixture
def tidied():
    yield
    time.sleep(1)
    pathlib.Path("tidied").touch()

def test_z(tidied):
    time.sleep(60)
"""
STUBBORN = """
def test_z():
    import signal, subprocess, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open("child", "w").write(str(child.pid))
    time.sleep(60)
"""


def capped(
    folder: Path, source: str, cap_s: float, *, by: str = "-m pytest", grace_s: float = 1, reserve_s: float = 0
) -> subprocess.CompletedProcess[str]:
    (folder / "test_laws.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers =\n    ranks:\n")
    pytest_run = f'"{sys.executable}" {by} -p no:cacheprovider $PYTEST_ARGS'
    command = [
        sys.executable,
        str(SLOW),
        "--cap_s",
        str(cap_s),
        "--grace_s",
        str(grace_s),
        "--reserve_s",
        str(reserve_s),
        "--",
        "sh",
        "-c",
        pytest_run,
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a start in a fifth of the time
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(("source", "status"), [(PASSES, 0), (PASSES + FAILS, 1), ("import nowhere\n", 1)])
def test_within_the_cap_the_verdict_is_that_of_pytest(tmp_path: Path, source: str, status: int) -> None:
    result = capped(tmp_path, source, cap_s=50)
    assert result.returncode == status, result.stdout
    assert "The cap" not in result.stdout


def test_at_the_cap_it_is_green_if_nothing_failed_and_says_so(tmp_path: Path) -> None:
    result = capped(tmp_path, PASSES + HANGS, cap_s=3)
    assert result.returncode == 0, result.stdout
    assert "test_a PASSED" in result.stdout
    assert "The cap of 3 s is reached; failures until then: 0" in result.stdout


def test_at_the_cap_it_is_red_if_something_failed_and_names_it(tmp_path: Path) -> None:
    result = capped(tmp_path, FAILS + HANGS, cap_s=3)
    assert result.returncode == 1
    assert "test_laws.py::test_b (call)" in result.stdout


def test_a_failure_that_may_be_a_pause_of_the_machine_has_its_second_run_within_the_cap(tmp_path: Path) -> None:
    result = capped(tmp_path, PASSES + PAUSES, cap_s=50, by=f"'{FAST}'")
    assert result.returncode == 0, result.stdout
    assert "RACY: test_laws.py::test_c failed, then passed alone" in result.stdout


def test_where_something_failed_the_run_ends_before_the_cap_and_it_has_its_second_run(tmp_path: Path) -> None:
    result = capped(tmp_path, PAUSES + HANGS, cap_s=50, by=f"'{FAST}'", reserve_s=60)
    assert result.returncode == 0, result.stdout
    assert "stopped before the cap" in result.stdout
    assert "RACY: test_laws.py::test_c failed, then passed alone" in result.stdout
    assert "test_z" not in result.stdout


@pytest.mark.slow
def test_a_failure_that_the_cap_left_without_a_second_run_counts(tmp_path: Path) -> None:
    result = capped(tmp_path, PAUSES + HANGS, cap_s=4, by=f"'{FAST}'")
    assert result.returncode == 1
    assert "test_laws.py::test_c (call)" in result.stdout


@pytest.mark.slow
def test_at_the_cap_what_a_test_began_is_still_tidied_up(tmp_path: Path) -> None:
    result = capped(tmp_path, ORDERLY, cap_s=3, by=f"'{FAST}'", grace_s=20)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "tidied").exists()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="children in other sessions are found by /proc")
def test_a_test_that_ignores_the_interrupt_is_killed_with_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    result = capped(tmp_path, STUBBORN, cap_s=3)
    assert time.monotonic() - started < 20
    assert result.returncode == 0
    assert "killed" in result.stdout
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not _alive(child):
            break
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
