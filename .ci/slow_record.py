"""A pytest plugin that writes down each failure when it is known, so that a run cut short still has its verdict.

Where something failed, it ends the run so long before the deadline that fast.py can give a second run to what failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator

import pytest

AGAIN = "stopped before the cap, so that what failed can run once more"


def _left_s() -> float:
    return float(os.environ["HALATION_SLOW_DEADLINE"]) - time.time()


def _record(name: str) -> None:
    # What fails after the deadline was most likely broken by the interrupt itself.
    if _left_s() > 0:
        with open(os.environ["HALATION_SLOW_RECORD"], "a", encoding="utf-8") as record:
            record.write(name + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _record(f"{report.nodeid} ({report.when})")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(f"{report.nodeid} (collection)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    done = yield
    reserve_s = float(os.environ.get("HALATION_SLOW_RESERVE_S", "0"))
    if item.session.testsfailed and 0 < _left_s() < reserve_s:
        item.session.shouldstop = AGAIN
    return done


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.shouldstop == AGAIN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
