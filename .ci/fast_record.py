"""A pytest plugin that writes down how each test ended, by what it is marked, and what it said where it failed."""

from __future__ import annotations

import json
import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed or (report.passed and report.when == "call"):
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "marks": sorted({mark.name for mark in item.iter_markers()}),
            "text": report.longreprtext,
        }
        with open(os.environ["HALATION_FAST_RECORD"], "a", encoding="utf-8") as record:
            record.write(json.dumps(line) + "\n")
    return report
