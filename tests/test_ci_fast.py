"""The second chance of the fast tests: noise of a busy machine passes and is named, a broken law fails, others get none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAST = Path(__file__).parent.parent / ".ci" / "fast.py"
INI = "[pytest]\naddopts = -q --strict-markers\nmarkers =\n    ranks:\n    faults:\n    browser:\n    slow:\n"
HEAD = "import pathlib, pytest\n"
PASSES = "def test_a():\n    print('ran a')\n"
PAUSES = """
@pytest.mark.{mark}
@pytest.mark.parametrize("word", ["one two"])
def test_b(word):
    count = pathlib.Path("count")
    before = int(count.read_text()) if count.exists() else 0
    count.write_text(str(before + 1))
    assert before {passes}, f"time {{before}}"
"""
SKIPS = """
@pytest.mark.faults
def test_c():
    if pathlib.Path("been").exists():
        pytest.skip("no machine")
    pathlib.Path("been").touch()
    assert False
"""
MANY = """
@pytest.mark.ranks
@pytest.mark.parametrize("number", range({number}))
def test_d(number):
    been = pathlib.Path(f"been{{number}}")
    before = been.exists()
    been.touch()
    assert before
"""


def fast(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_laws.py").write_text(HEAD + source)
    (folder / "pytest.ini").write_text(INI)
    command = [sys.executable, str(FAST), "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a start in a fifth of the time
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env=environment)


def test_what_passes_the_second_time_is_green_and_named_with_what_it_said(tmp_path: Path) -> None:
    done = fast(tmp_path, PASSES + PAUSES.format(mark="faults", passes=">= 1"), "-m", "not slow", "-s")
    assert done.returncode == 0, done.stdout
    racy = done.stdout.partition("RACY: ")[2]
    assert racy.startswith("test_laws.py::test_b[one two] failed, then passed alone")
    assert "AssertionError: time 0" in racy
    assert done.stdout.count("ran a") == 1, "only what failed runs again"


def test_what_fails_twice_is_red_and_there_is_no_third_time(tmp_path: Path) -> None:
    done = fast(tmp_path, PASSES + PAUSES.format(mark="browser", passes=">= 2"))
    assert done.returncode == 1
    assert "RACY" not in done.stdout
    assert (tmp_path / "count").read_text() == "2"


def test_what_depends_on_no_clock_gets_no_second_run(tmp_path: Path) -> None:
    unmarked = PAUSES.format(mark="slow", passes=">= 1")
    done = fast(tmp_path, MANY.format(number=1) + unmarked)
    assert done.returncode == 1
    assert "No second run: test_laws.py::test_b[one two] depends on no clock" in done.stdout
    assert (tmp_path / "count").read_text() == "1"


@pytest.mark.parametrize(("number", "status"), [(5, 0), (6, 1)])
def test_more_than_five_failures_are_no_noise(tmp_path: Path, number: int, status: int) -> None:
    done = fast(tmp_path, MANY.format(number=number))
    assert done.returncode == status, done.stdout
    assert done.stdout.count("RACY: ") == (5 if status == 0 else 0)
    assert ("No second run: 6 failed" in done.stdout) == (status == 1)


def test_being_skipped_the_second_time_clears_nobody(tmp_path: Path) -> None:
    assert fast(tmp_path, SKIPS).returncode == 1


@pytest.mark.parametrize(
    ("source", "arguments", "status"), [(PASSES, (), 0), ("import nowhere", (), 2), (PASSES, ("-k", "none"), 5)]
)
def test_otherwise_the_verdict_is_that_of_pytest(
    tmp_path: Path, source: str, arguments: tuple[str, ...], status: int
) -> None:
    done = fast(tmp_path, source, *arguments)
    assert done.returncode == status
    assert "second run" not in done.stdout
