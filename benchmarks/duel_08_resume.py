"""Duel 8: finding the 30 % missing images of a million, against checking every file.

Ours is `halation generate` from its flags to the moment at which it would start its first worker: hash the prompt list,
identify the run, read the ledger, scan the folder, assign the batches. The peers are `os.path.exists` for each of a
million given names, and Pillow's `verify` for each existing file. Each side runs in a separate process. The folder's
names are in memory, which favours the peers: on a disk or a network, each single check takes longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from benchmarks import inputs, measure, shipped
from benchmarks.duel_06_png import photograph

SHARE_MISSING = 0.3
NUM_LOST = 100
"""Done images whose files are removed before each round of the second case."""


def names(num: int) -> list[str]:
    return [f"{number:07d}_seed{42 + number}.png" for number in range(num)]


def write_prompts(path: Path, num: int) -> None:
    with path.open("w") as file:
        file.write("image_id,prompt\n")
        file.writelines(f'{number:07d},"a street in the rain, image {number} of many"\n' for number in range(num))


def peak_memory() -> float:
    """Return the peak memory of this process in MiB.

    getrusage could return the parent's, if that was larger before this process started.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# -- the sides, each in its own process


def decide(work: Path, then: str) -> int:
    """Run the command up to its first worker."""
    from halation.generation import command as generate
    from halation.generation.config import GenerateConfig

    began = 0.0

    class Stop:
        """Replaces the worker pool."""

        def __init__(self, places: list[Any], *_: object) -> None:
            self.labels = self.names = [place.label for place in places]

        def drop(self, worker: int, number: int) -> None:
            """Do nothing: no batch has been assigned yet."""

        def start(self, worker: int) -> NoReturn:
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "MiB": peak_memory()}), flush=True)
            # Writing results at the end of a run is not part of the measurement.
            os._exit(0)

    generate.LocalWorkerPool = Stop  # type: ignore[assignment,misc]
    config = GenerateConfig(
        prompts_csv=str(work / "prompts.csv"), model_path="testcard", output_dir=work / "out", progress="none",
        height=64, width=64, nproc=8, oversubscribe=True,
    )  # fmt: skip
    began = time.perf_counter()
    return generate.run(config)


def ask_each(work: Path, num: str) -> int:
    """Run the peer that resumes by file names."""
    folder, wanted = str(work / "out"), names(int(num))
    began = time.perf_counter()
    missing = [number for number, name in enumerate(wanted) if not os.path.exists(os.path.join(folder, name))]
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {"seconds": seconds, "MiB": peak_memory(), "missing": digest(np.array(missing)), "num": len(missing)}
        )
    )
    return 0


def verify_each(work: Path, _: str) -> int:
    """Run the peer that also verifies the files; print the seconds per file.

    Files are read from the disk, since hundreds of gigabytes do not fit into the page cache.
    """
    from PIL import Image

    paths = sorted((work / "real").iterdir())
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    for path in paths:
        with Image.open(path) as image:
            image.verify()
    print(json.dumps({"seconds": (time.perf_counter() - began) / len(paths)}))
    return 0


def least(work: Path, _: str) -> int:
    """Do the minimal work: read the missing rows from the ledger, and scan the folder once."""
    import sqlite3

    began = time.perf_counter()
    # Read-only: otherwise closing it would checkpoint the WAL, which Halation's readers do not do.
    connection = sqlite3.connect(f"file:{work / 'out' / 'ledger.sqlite'}?mode=ro", uri=True)
    num = len(connection.execute("SELECT picture FROM pictures WHERE state != 1").fetchall())
    with os.scandir(work / "out") as entries:
        num += sum(1 for _ in entries)
    print(json.dumps({"seconds": time.perf_counter() - began, "num": num}))
    return 0


SIDES = {"decide": decide, "ask_each": ask_each, "verify_each": verify_each, "least": least}


def side(name: str, work: Path, argument: str = "") -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.duel_08_resume", "--side", name, str(work), argument]
    done = subprocess.run(command, env=shipped.environment(), stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# -- the duel


def digest(indices: np.ndarray) -> str:
    return hashlib.sha256(indices.astype(np.int64).tobytes()).hexdigest()[:12]


def prepare(work: Path, num: int, num_real: int) -> np.ndarray:
    """Create the folder of a stopped run, with its ledger and files; return the done rows."""
    from halation.generation.ledger import ImageOutcome, Ledger
    from halation.images.png_codec import CODERS, encode_png, fastest_coder

    measure.say(f"planning {num} images")
    write_prompts(work / "prompts.csv", num)
    planning = side("decide", work)
    measure.say(f"planned in {planning['seconds']:.1f} s with {planning['MiB']:.0f} MiB; now the images that are done")
    done = np.flatnonzero(np.random.default_rng(0).random(num) >= SHARE_MISSING)
    wanted = names(num)
    with Ledger(work / "out" / "ledger.sqlite") as ledger:
        for part in np.array_split(done, max(1, len(done) // 50_000)):
            ledger.record(
                ImageOutcome(index=int(index), state="done", sha256=f"{index:064x}", num_bytes=1, worker="0")
                for index in part
            )
    for index in done:
        os.close(os.open(work / "out" / wanted[index], os.O_CREAT | os.O_WRONLY))
    (work / "real").mkdir(exist_ok=True)
    images = [
        encode_png(photograph(480, 832, 1.6, 1.0, seed), {}, CODERS[fastest_coder()])
        for seed in range(min(10, num_real))
    ]
    for number in range(num_real):
        (work / "real" / f"{number}.png").write_bytes(images[number % len(images)])
    return done


def decided(work: Path) -> tuple[str, int]:
    from halation.generation.ledger import Ledger

    with Ledger(work / "out" / "ledger.sqlite") as ledger:
        rows = ledger.unfinished_indices()
    return digest(rows), len(rows)


def rounds_of(work: Path, num: int, rounds: int, lost: list[str]) -> dict[str, Any]:
    """Run the sides in turns; before each round, remove some files of `lost`."""
    found: dict[str, list[float]] = {"ours": [], "ours MiB": [], "peer": [], "peer MiB": [], "least": []}
    check = ""
    for number in range(rounds):
        for name in lost[number * NUM_LOST : (number + 1) * NUM_LOST]:
            (work / "out" / name).unlink()
        ours, peer, floor = side("decide", work), side("ask_each", work, str(num)), side("least", work)
        if decided(work) != (peer["missing"], peer["num"]):
            raise SystemExit(f"ours finds {decided(work)} missing, the peer {peer}")
        check = f"the same {peer['num']} rows ({peer['missing']})"
        for key, value in (
            ("ours", ours["seconds"]), ("ours MiB", ours["MiB"]), ("peer", peer["seconds"]), ("peer MiB", peer["MiB"]),
            ("least", floor["seconds"]),
        ):  # fmt: skip
            found[key].append(value)
    return measure.medians(found) | {"check": check, "most MiB": max(found["ours MiB"])}


def duel(num: int, num_real: int, rounds: int, work: Path) -> measure.Report:
    done = prepare(work, num, num_real)
    measure.say("turns A B A B")
    plain = rounds_of(work, num, rounds, [])
    wanted = names(num)
    lost = [wanted[index] for index in np.random.default_rng(1).permutation(done)[: rounds * NUM_LOST]]
    behind = rounds_of(work, num, rounds, lost)
    one = float(np.median([side("verify_each", work)["seconds"] for _ in range(rounds)]))
    verified = plain["peer"] + one * len(done)
    rows = (
        measure.Row(
            case=f"{num} rows : os.path.exists", ours=plain["ours"], peer=plain["peer"], unit="s", limit=plain["least"],
            check=plain["check"], equality="E0", note="the peer is given its names; ours also hashes the list and deals out batches",
        ),
        measure.Row(
            case=f"{num} rows : exists and PIL verify", ours=plain["ours"], peer=verified, unit="s", limit=plain["least"],
            check=plain["check"], equality="E0", note=f"extrapolated from {num_real} real images of 480 x 832, {one * 1e3:.2f} ms each",
        ),
        measure.Row(
            case=f"{NUM_LOST} files gone : os.path.exists", ours=behind["ours"], peer=behind["peer"], unit="s", limit=behind["least"],
            check=behind["check"], equality="E0", note="the ledger and the folder differ, so every name is compared",
        ),
        measure.Row(
            case="peak memory : os.path.exists", ours=behind["most MiB"], peer=behind["peer MiB"], unit="MiB", limit=None,
            check=behind["check"], equality="E0",
        ),
    )  # fmt: skip
    facts = measure.machine() | {"rows": num, "files": len(done)}
    return measure.Report(name="duel_08_resume", rows=rows, facts=facts)


def main(arguments: list[str] | None = None) -> measure.Report | int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--side"]:
        return SIDES[arguments[1]](Path(arguments[2]), arguments[3])
    asked = measure.parser(__doc__ or "").parse_args(arguments)
    small = asked.size == "small"
    with inputs.workplace(asked.work) as work:
        report = duel(*((20_000, 20, 3) if small else (1_000_000, 2_000, 5)), work)
    measure.finish(report, asked.output)
    slowest, largest = max(row.ours for row in report.rows[:3]), report.rows[3].ours
    if slowest > 10 or largest > 1024:
        raise SystemExit(f"decided in {slowest:.1f} s with {largest:.0f} MiB: more than 10 s or 1 GiB")
    return report


if __name__ == "__main__":
    main()
