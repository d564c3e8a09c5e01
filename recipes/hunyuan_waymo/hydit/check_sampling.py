"""Quick sampling test: four ranks train for two steps and sample at the checkpoint.

The result of each check is printed on a line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from halation.distributed import launcher
from halation.errors import InputError
from halation.images.png_codec import read_png

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hydit.sample_settings import prompts

FOLDER = Path("results/test_sampling")
NUM_RANKS = 4
NUM_STEPS = 2
SIZE = 256
TRAINING = Path(__file__).with_name("training.py")
Check = tuple[bool, str]


def ranks() -> tuple[int, list[str]]:
    """Return the number of ranks and their flags.

    With the tiny model, ranks may share a GPU; a real model gets at most one rank per GPU.
    """
    gpus = launcher.num_gpus()
    num = min(NUM_RANKS, gpus) if gpus and os.environ.get("MODEL_PATH") else NUM_RANKS
    num = min(num, len(prompts))
    return num, ["--nproc", str(num), *(["--oversubscribe"] if 0 < gpus < num else [])]


def train(run: Path, flags: Sequence[str], more: Sequence[str]) -> int:
    words = ["--n_steps", NUM_STEPS, "--batch_size", 1, "--image_size", SIZE, SIZE, "--max_images", 8]
    words += ["--validation_images", 0, "--report_to", "none", "--progress", "none", "--output_dir", run]
    return subprocess.run([sys.executable, str(TRAINING), *map(str, words), *flags, *more]).returncode


def draw_alone(run: Path, folder: Path, texts: Sequence[str]) -> int:
    words = ["sample", "--checkpoint", run, "--output_dir", folder, "--nproc", 1, "--progress", "none"]
    return subprocess.run([sys.executable, "-m", "halation.cli", *map(str, words), "--prompts", *texts]).returncode


def checks(run: Path, alone: Path, num: int) -> Iterator[Check]:
    """Yield the checks one by one, so that those before an error are still printed."""
    samples = run / "samples" / f"step_{NUM_STEPS:07d}"
    rows = json.loads((samples / "samples.json").read_text(encoding="utf-8"))["samples"]
    failed = [f"GPU {row['rank']}: {row['reason']}" for row in rows if row["state"] != "done"]
    yield not failed, f"no rank failed to sample{': ' if failed else ''}{'; '.join(failed)}"
    drew = {row["rank"]: row["index"] for row in rows}
    yield drew == {k: k for k in range(num)}, f"every rank sampled its own prompt (rank: prompt) {drew}"
    wanted = {f"gpu_{k}_{what}" for k in range(num) for what in ("sample.png", "prompt.txt")}
    found = {path.name for path in samples.glob("gpu_*")}
    yield found == wanted, f"{len(wanted)} files, gpu_0_sample.png to gpu_{num - 1}_prompt.txt, in {samples}"
    texts = [(samples / f"gpu_{k}_prompt.txt").read_text(encoding="utf-8") for k in range(num)]
    yield texts == prompts[:num], f"gpu_k_prompt.txt contains driving prompt k for k = 0 to {num - 1}"
    images = [read_png(samples / f"gpu_{k}_sample.png")[0] for k in range(num)]
    shapes = {image.shape for image in images}
    yield shapes == {(SIZE, SIZE, 3)}, f"images are {SIZE} x {SIZE}: {sorted(shapes)}"
    distinct = len({image.tobytes() for image in images if np.ptp(image)})
    yield distinct == num, f"{distinct} of {num} images differ from all others and have more than one colour"
    log = (run / "logs" / "train.log").read_text(encoding="utf-8")
    yield "Generating samples" in log, f'"Generating samples" is in {run / "logs" / "train.log"}'
    again = [read_png(path)[0] for path in sorted(alone.glob("*.png")) if path.name != "grid.png"]
    same = len(again) == num and all(np.array_equal(*pair) for pair in zip(images, again, strict=True))
    yield same, f"one rank alone samples the same {num} images from the checkpoint, pixel for pixel"


def report(found: Iterator[Check]) -> bool:
    good = True
    try:
        for passed, sentence in found:
            print(f"{'ok  ' if passed else 'FAIL'} {sentence}", flush=True)
            good &= passed
    except (OSError, KeyError, ValueError, InputError) as error:
        print(f"FAIL {type(error).__name__}: {error}", flush=True)
        good = False
    return good


def main(more: Sequence[str]) -> int:
    num, flags = ranks()
    print(f"{num} ranks train for {NUM_STEPS} steps and sample one image each", flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    alone = FOLDER / "alone"
    code = train(FOLDER, flags, more)
    if code:
        print(f"FAIL training exited with code {code}")
        return code
    code = draw_alone(FOLDER, alone, prompts[:num])
    if code:
        print(f"FAIL sampling with one rank exited with code {code}")
        return code
    good = report(checks(FOLDER, alone, num))
    print(f"{'all checks passed' if good else 'some checks failed'}; the images are in {FOLDER}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
