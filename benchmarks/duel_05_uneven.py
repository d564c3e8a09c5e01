"""Duel 5: 400 batches of mixed sizes on four workers, one of them slower.

`halation generate` is compared with a barrier and with a contiguous split. The model sleeps for the cost of a batch, as
if each worker had its own device; all sides encode and write the images. The peers are edm2's method (one batch per
worker, then a barrier) and that of accelerate's `split_between_processes` (the first quarter to the first worker, and
so on). The limit is the time that the same workers would need if work could be divided at any point.
"""

from __future__ import annotations

import contextlib
import csv
import json
import multiprocessing
import os
import random
import shutil
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from benchmarks import inputs, measure, shipped
from halation.models.test_pattern import PatternTiming, parse_timing, render_pattern
from halation.sample_specs import SampleSpec

SIDES = (32, 48, 64, 96)
STEPS = (4, 8, 16)
NUM_WORKERS = 4
LOOK_EVERY_S = 0.01
Way = Literal["barrier", "split"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the duel."""

    num_batches: int
    mean_s: float
    """Mean seconds per batch on a worker that is not slow."""
    slower: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One run: seconds from the first batch to the last image, and the ideal time."""

    seconds: float
    ideal: float
    startup: float = 0.0
    pixels: str = ""


FULL = Setting(num_batches=400, mean_s=0.12, slower=3.0, rounds=5)
SMALL = Setting(num_batches=40, mean_s=0.05, slower=3.0, rounds=2)


def mixed(num: int) -> list[SampleSpec]:
    """Return specs with sizes and steps in random order."""
    chance = random.Random(5)
    return [
        SampleSpec(
            index=number, id=f"{number:06d}", prompt=f"batch {number}", seed=42 + number, height=chance.choice(SIDES),
            width=chance.choice(SIDES), steps=chance.choice(STEPS), guidance_scale=1.0,
        )
        for number in range(num)
    ]  # fmt: skip


def write_prompts(path: Path, specs: list[SampleSpec]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image_id", "prompt", "seed", "height", "width", "steps", "guidance_scale"])
        for spec in specs:
            writer.writerow([spec.id, spec.prompt, spec.seed, spec.height, spec.width, spec.steps, spec.guidance_scale])


def pace_for(specs: list[SampleSpec], mean_s: float, slower: float) -> str:
    """Return the test card's model path with this timing."""
    work = sum(spec.height * spec.width * spec.steps for spec in specs) / len(specs)
    return f"testcard:{mean_s * 64 * 64 * 8 / work:.9f}@64x64x8" + (f",1={slower:g}" if slower != 1 else "")


def costs_of(specs: list[SampleSpec], words: str) -> list[float]:
    """Return the seconds of each batch on a worker that is not slow."""
    pace = parse_timing(words)
    assert pace is not None
    plain = PatternTiming(seconds=pace.seconds, work=pace.work)
    return [plain.batch_time_s(spec) for spec in specs]


def ideal(costs: list[float], slower: float, begun: list[float]) -> float:
    """Return seconds from the first start to the end if work could be divided anywhere.

    A worker that starts later does less.
    """
    speeds = [1 / slower if worker == 1 else 1.0 for worker in range(NUM_WORKERS)]
    late = sum(speed * (moment - min(begun)) for speed, moment in zip(speeds, begun, strict=True))
    return (sum(costs) + late) / sum(speeds)


# -- ours


def by_command(specs: list[SampleSpec], words: str, setting: Setting, work: Path) -> Turn:
    folder = work / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    flags = [
        "generate", "--prompts_csv", str(work / "prompts.csv"), "--model_path", words, "--output_dir", str(folder),
        "--batch_size", "1", "--micro_batch", "1", "--nproc", str(NUM_WORKERS), "--oversubscribe", "--progress", "none",
    ]  # fmt: skip
    started = time.time()
    with ThreadPoolExecutor(1) as thread:
        command = thread.submit(shipped.halation, flags, work / "generate.log", {"CUDA_VISIBLE_DEVICES": ""})
        last = complete(folder, len(specs), command)
        command.result()
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        rows = connection.execute("SELECT name, worker, seconds FROM pictures").fetchall()
    written = {name: (folder / f"{name}.png").stat().st_mtime for name, _, _ in rows}
    begun = [
        min((written[name] - seconds for name, worker, seconds in rows if worker == str(number)), default=0.0)
        for number in range(NUM_WORKERS)
    ]
    if not all(begun):
        raise SystemExit("a worker generated nothing")
    return Turn(
        seconds=last - min(begun),
        ideal=ideal(costs_of(specs, words), setting.slower, begun),
        startup=min(begun) - started,
        pixels=digest(folder),
    )


def complete(folder: Path, num: int, command: Future[float]) -> float:
    """Return the time at which the last image existed.

    It cannot be read from the files later: an image that two workers generated has the later worker's time.
    """
    while not command.done():
        if folder.is_dir() and sum(name.endswith(".png") for name in os.listdir(folder)) == num:
            return time.time()
        time.sleep(LOOK_EVERY_S)
    raise SystemExit(f"the command ended with fewer than {num} images: {command.result()}")


# -- the peers


def as_peer(
    way: Way, number: int, specs: list[SampleSpec], words: str, folder: Path, barrier: Barrier, told: Any
) -> None:
    """Run one process of the peer: its batches one after the other, with Pillow."""
    os.environ["RANK"] = str(number)
    pace = parse_timing(words)
    assert pace is not None
    share = -(-len(specs) // NUM_WORKERS)
    mine = specs[number::NUM_WORKERS] if way == "barrier" else specs[number * share : (number + 1) * share]
    barrier.wait()
    began = time.time()
    for turn in range(share):
        if turn < len(mine):
            time.sleep(pace.batch_time_s(mine[turn]))
            Image.fromarray(render_pattern(mine[turn])[0]).save(folder / f"{mine[turn].id}_seed{mine[turn].seed}.png")
        if way == "barrier":
            barrier.wait()
    told.put((began, time.time()))


def by_peer(way: Way, specs: list[SampleSpec], words: str, setting: Setting, work: Path) -> Turn:
    folder = work / way
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    barrier, told = context.Barrier(NUM_WORKERS), context.Queue()
    workers = [
        context.Process(target=as_peer, args=(way, number, specs, words, folder, barrier, told))
        for number in range(NUM_WORKERS)
    ]
    for worker in workers:
        worker.start()
    times = [told.get() for _ in workers]
    for worker in workers:
        worker.join()
    begun = [began for began, _ in times]
    return Turn(
        seconds=max(ended for _, ended in times) - min(begun),
        ideal=ideal(costs_of(specs, words), setting.slower, begun),
        pixels=digest(folder),
    )


def digest(folder: Path) -> str:
    """Hash names and pixels: both sides must have generated the same images."""
    import hashlib

    result = hashlib.sha256()
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            result.update(path.name.encode() + image.tobytes())
    return result.hexdigest()[:12]


# -- the duel


def rows_of(name: str, setting: Setting, specs: list[SampleSpec], work: Path) -> list[measure.Row]:
    words = pace_for(specs, setting.mean_s, setting.slower)
    costs = costs_of(specs, words)
    measure.say(
        f"{name}: batches of {min(costs):.3f} to {max(costs):.3f} s, {words}; ideal {ideal(costs, setting.slower, [0.0] * 4):.2f} s"
    )
    turns: dict[str, list[Turn]] = {"ours": [], "barrier": [], "split": []}
    for _ in range(setting.rounds):
        turns["ours"].append(by_command(specs, words, setting, work))
        turns["barrier"].append(by_peer("barrier", specs, words, setting, work))
        turns["split"].append(by_peer("split", specs, words, setting, work))
        last = {side: f"{found[-1].seconds:.2f} s" for side, found in turns.items()}
        ours = turns["ours"][-1]
        measure.say(f"{json.dumps(last)}; ours {ours.seconds / ours.ideal:.4f} x ideal, start-up {ours.startup:.1f} s")
    drawn = {turn.pixels for found in turns.values() for turn in found}
    if len(drawn) > 1:
        raise SystemExit(f"the sides generated different images: {drawn}")
    middle = measure.medians({side: [turn.seconds for turn in found] for side, found in turns.items()})
    shares = [turn.seconds / turn.ideal for turn in turns["ours"]]
    share = measure.medians({"share": shares})["share"]
    startup = measure.medians({"s": [turn.startup for turn in turns["ours"]]})["s"]
    return [
        measure.Row(
            case=f"{name} : {peer}", ours=middle["ours"], peer=middle[side], unit="s", limit=middle["ours"] / share,
            check=f"the same {len(specs)} images ({drawn.copy().pop()})", equality="E0",
            note=f"{share:.4f} x ideal ({measure.spread(shares)}), start-up of {startup:.1f} s apart",
        )
        for side, peer in (("barrier", "a barrier each batch"), ("split", "contiguous split"))
    ]  # fmt: skip


def duel(setting: Setting, work: Path) -> measure.Report:
    specs = mixed(setting.num_batches)
    write_prompts(work / "prompts.csv", specs)
    rows = rows_of(f"worker 1 {setting.slower:g} x slower", setting, specs, work)
    even = Setting(
        num_batches=setting.num_batches, mean_s=setting.mean_s, slower=1.0, rounds=max(1, setting.rounds // 2)
    )
    rows += rows_of("workers alike", even, specs, work)
    facts = measure.machine() | {"batches": setting.num_batches, "workers": NUM_WORKERS, "mean batch s": setting.mean_s}
    return measure.Report(name="duel_05_uneven", rows=tuple(rows), facts=facts)


def main(arguments: list[str] | None = None) -> measure.Report:
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    with inputs.workplace(asked.work) as work:
        report = duel(SMALL if asked.size == "small" else FULL, work)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    main()
