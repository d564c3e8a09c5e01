"""The axes of a plot: which round numbers stand on them, how these are written, and where a number lies between the two ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From `low` to `high`, with the ticks and their words in between."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high one."""
        low, high, value = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        return (value - low) / (high - low)


def short_number(value: float) -> str:
    """Three or four figures and no more: 31.2, 0.0123, 1.5k, 2.25M, 3.1e-5."""
    size = abs(value)
    if size and not 1e-4 <= size < 1e15:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size < 999.5:
        if size and size < 1:
            return f"{value:.3g}"
        return _plain(f"{value:.{max(0, 3 - len(str(int(size))))}f}")
    for unit, letter in reversed(THOUSANDS):
        if size < 999.5 * unit or unit == THOUSANDS[0][0]:
            scaled = value / unit
            return _plain(f"{scaled:.{max(0, 4 - len(str(int(abs(scaled)))))}f}") + letter
    raise AssertionError("every size has its unit")


def _plain(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _tick_labels(ticks: tuple[float, ...], unit: float) -> tuple[str, ...]:
    """All ticks written alike, with as many decimals as tell neighbours apart."""
    largest = max(map(abs, ticks))
    scale, letter = next(((size, letter) for size, letter in THOUSANDS if largest >= size), (1.0, ""))
    if largest and largest < 1e-3:
        power = math.floor(math.log10(largest))
        scale, letter = 10.0**power, f"e{power}"
    if largest >= 1e15:
        return tuple(short_number(tick) for tick in ticks)
    decimals = max(0, -math.floor(math.log10(unit / scale) + 1e-9))
    texts = [f"{tick / scale:.{decimals}f}" for tick in ticks]
    return tuple("0" if float(text) == 0 else text + letter for text in texts)


def _unit(span: float, num_most: int, whole: bool = False) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that needs at most `num_most` steps for `span`."""
    power = 10.0 ** math.floor(math.log10(span / num_most))
    units = [power * factor for factor in (1, 2, 5, 10, 20)]
    unit = next(unit for unit in units if span / unit <= num_most + 1e-9)
    return max(1.0, unit) if whole else unit


def linear_axis(low: float, high: float, num_most: int = 5) -> Axis:
    """Round numbers at both ends; numbers that are all equal stand in the middle, zeros at the bottom."""
    size = max(abs(low), abs(high))
    if size == 0:  # a score of nothing at all: most of them have no numbers below
        low, high = 0.0, 1.0
    elif high - low <= size * 1e-9:
        low, high = low - size * 0.1, high + size * 0.1
    unit = _unit(high - low, num_most)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    ticks = tuple(round(number * unit, 15 - math.floor(math.log10(size or 1.0))) for number in range(first, last + 1))
    return Axis(low=first * unit, high=last * unit, ticks=ticks, labels=_tick_labels(ticks, unit))


def log_axis(low: float, high: float) -> Axis:
    """Powers of ten, with 2 and 5 between them where there are few; the ends are the ticks around the numbers."""
    if high / low < 1.0001:
        low, high = low / 1.5, high * 1.5
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    every = max(1, math.ceil(math.log10(high / low) / 6)) if factors == (1,) else 1
    steps = [factor * 10.0**decade for decade in decades for factor in factors if decade % every == 0]
    below = max((step for step in steps if step <= low * 1.0001), default=low)
    above = min((step for step in steps if step >= high / 1.0001), default=high)
    ticks = tuple(float(f"{step:.3g}") for step in steps if below <= step <= above)
    labels = tuple(short_number(tick) for tick in ticks)
    return Axis(low=min(below, low), high=max(above, high), ticks=ticks, labels=labels, log=True)


def step_axis(first: int, last: int, num_most: int = 6) -> Axis:
    """Whole numbers between the first and the last step, with a little room beside them; one step alone stands in the middle."""
    if first == last:
        return Axis(low=first - 1, high=first + 1, ticks=(float(first),), labels=(short_number(first),))
    unit = _unit(last - first, num_most, whole=True)
    ticks = tuple(number * unit for number in range(math.ceil(first / unit), math.floor(last / unit) + 1))
    if not ticks:  # no round number lies between them
        ticks, unit = (float(first), float(last)), 1.0
    room = (last - first) * 0.03
    return Axis(low=first - room, high=last + room, ticks=ticks, labels=_tick_labels(ticks, unit))
