"""Shared parts of all benchmarks: clock, device limits, interleaved turns, result table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

Setting = TypeVar("Setting")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    A `unit` that ends in /s is a rate (more is better); anything else is a time or a size (less is better).
    """

    case: str
    ours: float
    peer: float
    unit: str
    limit: float | None
    """The limit of the hardware, in the same unit; None if there is no meaningful limit."""
    check: str
    """Evidence that both sides did the same work."""
    equality: str
    """E0: bit-identical, E1: the same maths with other rounding, E2: another distribution."""
    note: str = ""

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.is_rate else self.peer / self.ours

    @property
    def limit_share(self) -> float | None:
        if self.limit is None:
            return None
        return self.ours / self.limit if self.is_rate else self.limit / self.ours


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of one benchmark, with facts about the machine."""

    name: str
    rows: tuple[Row, ...]
    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"ratio": row.ratio, "limit_share": row.limit_share} for row in self.rows]
        return {"name": self.name, "facts": self.facts, "rows": rows}


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def parser(sentence: str) -> argparse.ArgumentParser:
    """Create a parser with the flags of every benchmark."""
    result = argparse.ArgumentParser(description=sentence)
    result.add_argument("--size", choices=["small", "full"], default="full", help="small: a minute on two CPU cores")
    result.add_argument("--output", type=Path, help="also write the table as JSON to this file")
    result.add_argument("--work", type=Path, help="folder for inputs and runs (default: a temporary one, removed)")
    return result


def play(
    sentence: str, full: Setting, small: Setting, duel: Callable[[Setting, Path], Report], arguments: list[str] | None
) -> Report:
    """Run a duel from its flags to its table; the full size needs a GPU."""
    import torch

    from benchmarks import inputs

    asked = parser(sentence).parse_args(arguments)
    setting = full if asked.size == "full" and torch.cuda.is_available() else small
    if asked.size == "full" and setting is small:
        say("no GPU: running the small size instead")
    with inputs.workplace(asked.work) as work:
        report = duel(setting, work)
    finish(report, asked.output)
    return report


def finish(report: Report, output: Path | None) -> None:
    """Print the table and one RATIO line per case; write JSON if `output` is given."""
    print(f"\n{report.name}: {describe_facts(report.facts)}")
    header = ("case", "ours", "peer", "unit", "ratio", "of limit", "equality", "check")
    lines = [header] + [
        (
            row.case,
            f"{row.ours:.4g}",
            f"{row.peer:.4g}",
            row.unit,
            f"{row.ratio:.2f}x",
            "-" if row.limit_share is None else f"{row.limit_share:.1%}",
            row.equality,
            row.check,
        )
        for row in report.rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print("  " + "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    for row in report.rows:
        print(f"RATIO {report.name} | {row.case} | {row.ratio:.3f}x" + (f" | {row.note}" if row.note else ""))
    sys.stdout.flush()
    write(report, output)


def write(report: Report, output: Path | None) -> None:
    """Write JSON if `output` is given.

    A long benchmark writes after each round, so that an interrupted one has results too.
    """
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report.as_json(), indent=2) + "\n")


def describe_facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def machine() -> dict[str, Any]:
    """Return device, cores and versions, without which results are meaningless."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {"device": device, "cores": num_cores(), "torch": torch.__version__, "python": platform.python_version()}


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def seconds(action: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of one call; the device is synchronized before and after."""
    synchronise()
    began = time.perf_counter()
    action()
    synchronise()
    return time.perf_counter() - began


def synchronise() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(turns: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every side once per round (A B A B), so that a slow machine affects all of them."""
    figures: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            figures[name].append(turn())
    return figures


def medians(figures: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in figures.items()}


def matrix_peak() -> float:
    """Return the operations per second of a matrix product of random numbers.

    bf16 with 8192^3 on a GPU, float32 with 1024^3 on one CPU thread.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    size, repeats = (8192, 20) if on_gpu else (1024, 3)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(size, size, device=device, generator=generator).to(dtype)
    other = torch.randn(size, size, device=device, generator=generator).to(dtype)
    result = torch.empty_like(matrix)

    def product() -> None:
        for _ in range(repeats):
            torch.mm(matrix, other, out=result)

    product()
    return 2 * size**3 * repeats / statistics.median([seconds(product) for _ in range(5)])


def spread(values: Sequence[float]) -> str:
    """Format the lowest and highest of repeated values, to show the noise beside the ratio."""
    return f"{min(values):.4g}-{max(values):.4g}"
