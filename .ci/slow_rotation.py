"""A pytest plugin: run the slow tests in an order that depends on the commit, until a deadline.

The tests are divided into five parts by a hash of their names. The commit's hash decides which part comes first; the
others follow while time is left. Tests that are not started before the deadline are counted in the summary and do not
fail the build. A test that was started is limited by pytest-timeout.
"""

from __future__ import annotations

import os
import subprocess
import time
import zlib
from pathlib import Path

import pytest

NUM_PARTS = 5


def first_part(folder: Path) -> int:
    """The part that the checked-out commit begins with; 0 outside of a git checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(result.stdout.strip() or "0", 16) % NUM_PARTS


def rotation_key(test: str, first: int) -> int:
    """How many parts run before the part of this test."""
    return (zlib.crc32(test.encode()) - first) % NUM_PARTS


class SlowRotation:
    """Orders the tests, and skips those that the deadline leaves no time for."""

    def __init__(self, config: pytest.Config, deadline: float) -> None:
        self.config = config
        self.deadline = deadline
        self.first = first_part(config.rootpath)
        self.num_not_started = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: rotation_key(item.nodeid, self.first))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.time() < self.deadline:
            return None
        self.num_not_started += 1
        return True

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["num_not_started"] = self.num_not_started

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.num_not_started += getattr(node, "workeroutput", {}).get("num_not_started", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"slow tests: started with part {self.first + 1} of {NUM_PARTS}, {self.num_not_started} not started in time"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowRotation(config, float(os.environ["HALATION_SLOW_DEADLINE"])))
