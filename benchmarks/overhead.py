"""Overhead of `halation generate` with a model of 0.2 s, against a bare loop.

The bare loop sleeps, makes the same test card and saves it with Pillow. Both sides are separate processes that run in
turns; the result is the time from the first image to the last, divided by the images in between. The cost of the ledger
is measured in the same way: the shipped command against one whose ledger records nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import inputs, measure, shipped

PAINT_S = 0.2
HEIGHTS = (64, 512)
MOST = {"bare": 1.03, "unwritten": 1.02}
"""Maximum ratio of ours to a bare loop, and to ours without a ledger."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the benchmark."""

    num_images: int
    """Images per worker."""
    rounds: int


FULL = Setting(num_images=25, rounds=5)
SMALL = Setting(num_images=8, rounds=1)


def write_prompts(path: Path, num: int) -> None:
    path.write_text("".join(f"image {number} of many\n" for number in range(num)))


def seconds_each(folder: Path, num_workers: int) -> float:
    """Return the seconds per image of a worker, from the folder's first image to its last."""
    times = sorted(path.stat().st_mtime for path in folder.glob("*.png"))
    # The clock of each worker starts at its first image.
    return (times[-1] - times[0]) / (len(times) / num_workers - 1)


# -- ours


def generate(folder: Path, size: int, num_workers: int, startups: list[float], *, journal: bool) -> float:
    """Return the command's seconds per image; without `journal`, `Ledger.record` is a no-op."""
    began = time.time()
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        "generate", "--prompts_csv", str(folder.parent / f"prompts_{num_workers}.txt"), "--model_path", f"testcard:{PAINT_S}",
        "--output_dir", str(folder), "--height", str(size), "--width", str(size), "--batch_size", "1", "--micro_batch", "1",
        "--nproc", str(num_workers), "--oversubscribe", "--progress", "none",
    ]  # fmt: skip
    if journal:
        shipped.halation(words, folder.parent / "generate.log", {"CUDA_VISIBLE_DEVICES": ""})
    else:
        command = [sys.executable, "-m", "benchmarks.overhead", "--unwritten", *words]
        subprocess.run(
            command, env=shipped.environment({"CUDA_VISIBLE_DEVICES": ""}), check=False, stderr=subprocess.DEVNULL
        )
    startups.append(min(path.stat().st_mtime for path in folder.glob("*.png")) - began - PAINT_S)
    return seconds_each(folder, num_workers)


def unwritten(words: Sequence[str]) -> int:
    """Run the command with a ledger that records nothing; it exits with 1, as nothing is done."""
    from halation.cli import main as halation
    from halation.generation.ledger import Ledger

    def forget(_self: Ledger, _outcomes: object) -> None: ...

    Ledger.record = forget  # type: ignore[assignment,method-assign]
    sys.argv = ["halation", *words]
    return int(halation() or 0)


# -- the peer


def bare(folder: Path, size: int, num_workers: int, num_images: int) -> float:
    """Return the seconds per image of bare loops, one process per worker."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.overhead", "--bare", str(folder), str(size), str(num_images)]
    loops = [
        subprocess.Popen([*command, str(number), str(num_workers)], env=shipped.environment())
        for number in range(num_workers)
    ]
    codes = [loop.wait() for loop in loops]
    if any(codes):
        raise SystemExit(f"the bare loops exited with {codes}")
    return seconds_each(folder, num_workers)


def bare_loop(folder: Path, size: int, num_images: int, first: int, step: int) -> int:
    from PIL import Image

    from halation.models.test_pattern import render_pattern
    from halation.sample_specs import SampleSpec

    for number in range(first, num_images * step, step):
        spec = SampleSpec(
            index=number, id=f"{number + 1:06d}", prompt=f"image {number} of many", seed=42 + number, height=size, width=size, steps=20,
            guidance_scale=7.5,
        )  # fmt: skip
        time.sleep(PAINT_S)
        Image.fromarray(render_pattern(spec)[0]).save(folder / f"{spec.id}_seed{spec.seed}.png")
    return 0


# -- the comparison


def check(ours: Path, theirs: Path) -> str:
    """Check that both folders have the same pixels under the same names."""
    from PIL import Image

    names = sorted(path.name for path in theirs.glob("*.png"))
    if names != sorted(path.name for path in ours.glob("*.png")):
        raise SystemExit(f"{ours} and {theirs} contain different images")
    for name in names:
        with Image.open(ours / name) as one, Image.open(theirs / name) as other:
            if one.tobytes() != other.tobytes():
                raise SystemExit(f"{name} differs")
    return f"the same {len(names)} images"


def rows_of(setting: Setting, size: int, num_workers: int, work: Path, startups: list[float]) -> list[measure.Row]:
    measure.say(f"{size} x {size}, {num_workers} worker(s): turns A B C A B C")
    folders = {name: work / name for name in ("ours", "bare", "unwritten")}
    figures = measure.interleaved(
        {
            "ours": lambda: generate(folders["ours"], size, num_workers, startups, journal=True),
            "bare": lambda: bare(folders["bare"], size, num_workers, setting.num_images),
            "unwritten": lambda: generate(folders["unwritten"], size, num_workers, startups, journal=False),
        },
        setting.rounds,
    )
    middle = measure.medians(figures)
    spread = measure.spread([1e3 * value for value in figures["ours"]])
    name = f"{size} x {size}, {num_workers} worker{'s' if num_workers > 1 else ''}"
    peers = (("bare", "bare loop" if num_workers == 1 else "bare loops"), ("unwritten", "no journal"))
    return [
        measure.Row(
            case=f"{name} : {peer}", ours=middle["ours"] * 1e3, peer=middle[side] * 1e3, unit="ms", limit=PAINT_S * 1e3,
            check=check(folders["ours"], folders[side]), equality="E0",
            note=f"{middle['ours'] / middle[side] - 1:+.2%} (at most {MOST[side] - 1:.0%}); ours {spread} ms",
        )
        for side, peer in peers
    ]  # fmt: skip


def compare(setting: Setting, work: Path) -> measure.Report:
    rows: list[measure.Row] = []
    startups: list[float] = []
    for num_workers in (1, 2):
        write_prompts(work / f"prompts_{num_workers}.txt", setting.num_images * num_workers)
        for size in HEIGHTS:
            rows += rows_of(setting, size, num_workers, work, startups)
    facts = measure.machine() | {"model s": PAINT_S, "images": setting.num_images}
    facts |= {"load": f"{os.getloadavg()[0]:.1f}", "start-up s": f"{measure.spread(startups)}, apart"}
    return measure.Report(name="overhead", rows=tuple(rows), facts=facts)


def main(arguments: list[str] | None = None) -> measure.Report | int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--unwritten"]:
        return unwritten(arguments[1:])
    if arguments[:1] == ["--bare"]:
        size, num_images, first, step = map(int, arguments[2:])
        return bare_loop(Path(arguments[1]), size, num_images, first, step)
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    with inputs.workplace(asked.work) as work:
        report = compare(SMALL if asked.size == "small" else FULL, work)
    measure.finish(report, asked.output)
    return report


if __name__ == "__main__":
    code = main()
    sys.exit(code if isinstance(code, int) else 0)
