"""A pytest plugin that writes down each failure when it is known, so that a run cut short still has its verdict."""

from __future__ import annotations

import os
import time

import pytest


def _record(name: str) -> None:
    # What fails after the deadline was most likely broken by the interrupt itself.
    if time.time() < float(os.environ["HALATION_SLOW_DEADLINE"]):
        with open(os.environ["HALATION_SLOW_RECORD"], "a", encoding="utf-8") as record:
            record.write(name + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _record(f"{report.nodeid} ({report.when})")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(f"{report.nodeid} (collection)")
