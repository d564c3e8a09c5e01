"""Numbers that nothing below could work with, refused by the name of their flag."""

from __future__ import annotations

import math
import sys
from typing import Any

from halation.errors import InputError

AT_LEAST_0 = (0, sys.float_info.max)
ABOVE_0 = (sys.float_info.min, sys.float_info.max)
SEEDS = (0, 2**63 - 2**32)
"""Every image of a run adds its index to the seed."""


def check_ranges(config: Any, ranges: dict[str, tuple[float, float]]) -> None:
    """Refuse numbers that nothing below could work with; one that is not a number is in no range."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        if not all(low <= each <= high for each in values):
            least = "above 0" if low == sys.float_info.min else f"from {low} on"
            most = f", at most {high}" if high < 1e30 else ""
            most = ", below 1" if high == math.nextafter(1, 0) else most
            given = " ".join(map(str, values))
            raise InputError(
                f"--{name} {given}", f"a number {least}{most}", f"change --{name}; --help says what it means"
            )
