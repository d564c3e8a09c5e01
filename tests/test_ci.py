"""The test runner of CI: exit codes of its two groups, the rotation of slow tests, and the list of racy tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parent.parent / ".ci"
MARKS = ("ranks", "faults", "browser", "ray", "slow", "gpu")


def run_tests(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/tests.py in a folder with one test file."""
    (folder / "test_one.py").write_text("import pathlib, pytest, time\n" + source)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -q\nmarkers =\n" + "".join(f"    {mark}:\n" for mark in MARKS)
    )
    command = [sys.executable, str(CI / "tests.py"), "-p", "xdist", "-p", "no:cacheprovider", "-rA", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts five times faster
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)


PASSES = "def test_parallel(): pass\n@pytest.mark.ranks\ndef test_serial(): pass\n"


@pytest.mark.parametrize(
    ("failing", "status"),
    [("", 0), ("def test_bad(): assert False\n", 1), ("@pytest.mark.faults\ndef test_bad(): assert False\n", 1)],
    ids=["none", "parallel", "serial"],
)
def test_a_failure_in_either_group_is_the_exit_code(tmp_path: Path, failing: str, status: int) -> None:
    result = run_tests(tmp_path, PASSES + failing)
    assert result.returncode == status, result.stdout
    assert "PASSED test_one.py::test_parallel" in result.stdout
    assert "PASSED test_one.py::test_serial" in result.stdout


def test_a_file_with_tests_of_one_group_alone_passes(tmp_path: Path) -> None:
    assert run_tests(tmp_path, "@pytest.mark.ranks\ndef test_serial(): pass\n").returncode == 0


def test_after_the_time_limit_no_slow_test_starts_and_the_summary_counts_them(tmp_path: Path) -> None:
    names = [f"@pytest.mark.ranks\n@pytest.mark.slow\ndef test_{k}(): time.sleep(3)\n" for k in range(8)]
    result = run_tests(tmp_path, "".join(names), "--slow", "--cap_s", "4")
    assert result.returncode == 0, result.stdout
    num_passed = result.stdout.count("PASSED")
    assert 1 <= num_passed < 8
    assert f"{8 - num_passed} not started in time" in result.stdout


def test_a_slow_failure_before_the_time_limit_is_red(tmp_path: Path) -> None:
    result = run_tests(tmp_path, "@pytest.mark.slow\ndef test_bad(): assert False\n", "--slow", "--cap_s", "60")
    assert result.returncode == 1


def test_commits_begin_with_different_parts_and_every_test_is_first_for_one_of_five() -> None:
    code = "import slow_rotation as r; print([[r.rotation_key(f'test_{k}', f) for k in range(50)] for f in range(5)])"
    environment = {**os.environ, "PYTHONPATH": str(CI)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    parts = eval(result.stdout)
    assert all(sorted(keys) == [0, 1, 2, 3, 4] for keys in zip(*parts, strict=True))


@pytest.mark.parametrize("text", ["a::b\n", "".join(f"a::t{k} # slow disk\n" for k in range(4))])
def test_the_list_of_racy_tests_is_short_and_has_reasons(pytestconfig: pytest.Config, text: str) -> None:
    racy_tests = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py"))).racy_tests
    with pytest.raises(pytest.UsageError, match="at most 3 tests, each with a reason"):
        racy_tests(text)
    assert racy_tests("# comment\na::b # waits for a port\n") == {"a::b": "waits for a port"}
