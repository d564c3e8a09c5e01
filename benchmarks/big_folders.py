"""Creates run folders of any size in seconds.

Ledger, config, metrics and samples.json are real; all image names are links to a few distinct images.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halation.config import as_json, fixed_settings
from halation.generation.config import GenerateConfig
from halation.generation.image_requests import ImageRequest
from halation.generation.ledger import LEDGER_FILE, ImageOutcome, Ledger
from halation.generation.metadata_and_summary import combined_digest
from halation.images.png_codec import encode_png, metadata_texts
from halation.runs import run_folder as runs
from halation.sample_specs import SampleSpec
from halation.training.config import TrainConfig, fill_dit_defaults

NUM_DISTINCT = 32
"""A file has at most 65,000 links on ext4, so 32 are enough for two million images."""
REASONS = ("RuntimeError: CUDA out of memory", "NanError: the image has values that are no numbers")
SUBJECTS = ("street", "harbour", "bridge", "forest", "station", "market", "lighthouse", "kitchen", "desert", "library")
LIGHTS = ("at dawn", "at noon", "in the rain", "under snow", "by night", "in fog", "after a storm")
MANNERS = ("oil on canvas", "35 mm film", "a woodcut", "a watercolour", "a blueprint", "an engraving")


def prompt_of(index: int) -> str:
    """Return a prompt with words that many rows share, and one word unique to this row."""
    subject = SUBJECTS[index % len(SUBJECTS)]
    light, manner = LIGHTS[index // 10 % len(LIGHTS)], MANNERS[index // 70 % len(MANNERS)]
    return f"a {subject} {light}, {manner}, number{index}"


def images(size: int, number: int = NUM_DISTINCT) -> list[bytes]:
    """Return distinct PNGs with a gradient, a disc and grain, of a realistic file size."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:size, 0:size] / max(1, size - 1)
    files = []
    for index in range(number):
        hue = index / number * 2 * math.pi
        colour = np.stack([0.5 + 0.5 * np.cos(hue + shift + 2 * x + y) for shift in (0.0, 2.1, 4.2)], axis=-1)
        disc = ((x - 0.5 - 0.3 * math.cos(hue)) ** 2 + (y - 0.5 - 0.3 * math.sin(hue)) ** 2 < 0.03)[..., None]
        values = np.where(disc, 1.0, 0.7 * colour) * 255 + random.normal(0, 4, (size, size, 3))
        text = metadata_texts(spec_of(index, size, "").as_json())
        files.append(encode_png(values.clip(0, 255).astype(np.uint8), text))
    return files


def spec_of(index: int, size: int, prompt: str) -> SampleSpec:
    return SampleSpec(
        index=index, id=f"{index + 1:06d}", prompt=prompt or prompt_of(index), seed=42 + index, height=size, width=size,
        steps=20, guidance_scale=7.5,
    )  # fmt: skip


def generation_folder(
    folder: Path,
    num_rows: int,
    *,
    num_done: int | None = None,
    failed_every: int = 97,
    workers: Sequence[str] = ("0", "1"),
    size: int = 64,
    prompts: Sequence[str] = (),
) -> Path:
    """Create a folder as `halation generate` writes it.

    `num_done` rows (by default all) have an outcome, and every `failed_every`th of them failed. The first rows use
    `prompts`, the others `prompt_of`. Workers take turns of four images, like batches.
    """
    folder.mkdir(parents=True)
    config = GenerateConfig(
        prompts_csv="prompts.csv", model_path="testcard", output_dir=folder, height=size, width=size, dtype="fp32",
        num_inference_steps=20, guidance_scale=7.5,
    )  # fmt: skip
    settings = fixed_settings(config) | {"model": "testcard 1", "model name": "testcard", "device": "cpu"}
    runs.create_or_resume_run(
        runs.RunFolder(folder), "generate", as_json(config), settings | {"png coder": "zlib"}, False
    )
    files = images(size)
    requests = [
        ImageRequest(spec=spec, name=f"{spec.id}_seed{spec.seed}")
        for spec in (spec_of(index, size, prompts[index] if index < len(prompts) else "") for index in range(num_rows))
    ]
    with Ledger(folder / LEDGER_FILE) as ledger:
        ledger.add_plan(requests, {"prompts": "0" * 64})
        settled = requests[: num_rows if num_done is None else num_done]
        settle(folder, ledger, settled, failed_every, workers, files)
    (folder / "logs" / "generate.log").write_text("2026-01-02 03:04:05,678 INFO all images match the ledger\n")
    return folder


def settle(
    folder: Path,
    ledger: Ledger,
    requests: Sequence[ImageRequest],
    failed_every: int,
    workers: Sequence[str],
    files: Sequence[bytes],
) -> None:
    """Write the images of these rows, then record their outcomes, as a running command does."""
    digests = [combined_digest([data]) for data in files]
    names = _distinct(folder / "logs" / ".distinct", files)
    outcomes = []
    for request in requests:
        index = request.spec.index
        worker = workers[index // 4 % len(workers)]
        if failed_every and index % failed_every == failed_every - 1:
            reason = REASONS[index // failed_every % len(REASONS)]
            outcomes.append(ImageOutcome(index=index, state="failed", worker=worker, attempts=3, reason=reason))
            continue
        number = index % len(files)
        os.link(names[number], folder / f"{request.name}.png")
        outcomes.append(
            ImageOutcome(
                index=index, state="done", sha256=digests[number], num_bytes=len(files[number]), worker=worker,
                seconds=0.25,
            )
        )  # fmt: skip
    ledger.record(outcomes)


def _distinct(folder: Path, files: Sequence[bytes]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.png" for number in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        if not path.exists():
            path.write_bytes(data)
    return paths


def training_folder(
    folder: Path,
    num_steps: int,
    num_prompts: int,
    *,
    every: int = 100,
    size: int = 64,
    raw: bool = False,
    prompts: Sequence[str] = (),
) -> Path:
    """Create a folder as `halation train` writes it, sampled `num_steps` times.

    There are samples every `every` steps, and a checkpoint at every tenth of them.
    """
    folder.mkdir(parents=True)
    texts = tuple(prompts[index] if index < len(prompts) else prompt_of(index) for index in range(num_prompts))
    config = TrainConfig(
        output_dir=folder, data="streets", image_size=(size, size), model="tiny", n_steps=num_steps * every,
        sample_prompts=texts, sample_raw=raw,
    )  # fmt: skip
    config = fill_dit_defaults(config)
    runs.create_or_resume_run(runs.RunFolder(folder), "train", as_json(config), fixed_settings(config), False)
    names = _distinct(folder / "logs" / ".distinct", images(size))
    for number in range(1, num_steps + 1):
        sample(folder, number * every, texts, names, raw)
        if number % 10 == 0:
            (folder / "checkpoints" / runs.step_name(number * every)).mkdir(parents=True)
    write_metrics(folder, num_steps * every, every)
    (folder / "logs" / "train.log").write_text("2026-01-02 03:04:05,678 INFO [rank 0] trained\n")
    return folder


def sample(folder: Path, step: int, prompts: Sequence[str], names: Sequence[Path], raw: bool = False) -> None:
    """Write the samples of one step: the images first and samples.json last, as in training."""
    place = folder / "samples" / runs.step_name(step)
    place.mkdir(parents=True)
    rows = []
    for suffix in ("", "_raw") if raw else ("",):
        for index, prompt in enumerate(prompts):
            file = f"sample_{index:02d}{suffix}.png"
            os.link(names[(step + 7 * index + 3 * len(suffix)) % len(names)], place / file)
            rows.append(
                {
                    "index": index, "prompt": prompt, "seed": 42 + index, "rank": 0, "seconds": 0.02, "state": "done",
                    "reason": "", "file": file, "raw": bool(suffix),
                }
            )  # fmt: skip
    (place / "samples.json").write_text(json.dumps({"step": step, "loss": loss_at(step), "samples": rows}, indent=2))


def loss_at(step: int) -> float:
    return 0.2 + math.exp(-step / 5000) + 0.02 * math.sin(step * 12.9898)


def write_metrics(folder: Path, num_steps: int, every: int) -> None:
    """Write ten metrics lines between two samples."""
    lines = [json.dumps(metrics_row(step)) + "\n" for step in range(1, num_steps + 1, max(1, every // 10))]
    (folder / runs.METRICS_FILE).write_text("".join(lines))


def metrics_row(step: int) -> dict[str, Any]:
    return {
        "step": step, "time_s": round(0.1 * step, 3), "loss": loss_at(step), "lr": 0.0001, "grad_norm": 0.3,
        "pictures_per_s": 41.5, "mfu": 0.31, "memory_gb": 0.45, "data_s": 0.0002, "epoch": round(step / 8000, 4),
    }  # fmt: skip


def distinct(folder: Path) -> list[Path]:
    """Return the images that the folders link to, to add more with `sample`."""
    return sorted((folder / "logs" / ".distinct").iterdir(), key=lambda path: int(path.stem))
