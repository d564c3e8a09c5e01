"""Duel 7: images to disk, end to end, from a pipeline of the size of HunyuanDiT.

The images have 1024 px, 20 steps and guidance. Ours is the runner of a `halation generate` worker: text, denoising,
decoding, PNG and publishing, the last two during the next batch. The peers are the usual loop,
`pipe(prompt).images[0].save(...)`, eager and with a compiled transformer. At the end the shipped command is run too, and
measured by its ledger and the GPU utilization that the driver reports.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import hunyuan, measure, shipped

PROMPTS = ("a big red bear of the night", "the woman the table", "a dog of the house", "rain the street of a bear")
GUIDANCE = 5.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the duel."""

    shape: hunyuan.Shape
    pixels: int
    steps: int
    dtype: str
    rounds: int
    ours: int
    """Images per turn of ours; several, because the overlap is between batches."""
    peers: int
    shipped: int
    compiled: bool


REAL = Setting(
    shape=hunyuan.REAL, pixels=1024, steps=20, dtype="bf16", rounds=5, ours=4, peers=1, shipped=12, compiled=True
)
TINY = Setting(
    shape=hunyuan.TINY, pixels=64, steps=3, dtype="fp32", rounds=3, ours=4, peers=4, shipped=8, compiled=False
)


class Ours:
    """A worker's runner on the pipeline folder, with the threads of a worker."""

    def __init__(self, setting: Setting, model: Path, work: Path, device: str, *, batch: int, **options: Any) -> None:
        from halation.generation.workers.image_runner import ImageRunner

        work.mkdir(parents=True)
        self.setting, self.batch, self.work = setting, batch, work
        order: dict[str, Any] = {
            "folder": str(work),
            "label": "0",
            "device": device,
            "model": {"kind": "pipeline", "path": str(model)},
            "style": {"model": "random", "sampler": "", "coder": _coder(), "fps": 16},
            "dtype": setting.dtype,
            "scheduler": "",
            "offload": "none",
            "compile": False,
            "arguments": {},
            "cfg_truncation_step": None,
            "half_frame": False,
            "threads": 1,
            "raw": False,
        }
        self.runner = ImageRunner(order | options)
        self.runner.prepare()
        self.numbers = itertools.count()

    def draw(self, num: int) -> list[Any]:
        from halation.generation.workers.local_pool import QUEUE_DEPTH

        with ThreadPoolExecutor(QUEUE_DEPTH) as threads:
            drawn = list(threads.map(lambda _: self._batch(), range(num // self.batch)))
        failures = [outcome.reason for each in drawn for outcome in each.outcomes if outcome.state != "done"]
        if failures:
            raise SystemExit(f"an image could not be generated: {failures[0]}")
        return drawn

    def _batch(self) -> Any:
        from halation.generation.image_requests import BatchTask, ImageRequest
        from halation.sample_specs import SampleSpec

        number = next(self.numbers)
        setting = self.setting
        specs = [
            SampleSpec(
                index=number * self.batch + row, id=f"{number}_{row}", prompt=PROMPTS[row % len(PROMPTS)], seed=row, height=setting.pixels,
                width=setting.pixels, steps=setting.steps, guidance_scale=GUIDANCE,
            )
            for row in range(self.batch)
        ]  # fmt: skip
        requests = tuple(ImageRequest(spec=spec, name=f"{spec.id}_seed{spec.seed}") for spec in specs)
        task = BatchTask(
            number=number, requests=requests, batch_size=self.batch, micro_batch=self.batch, wanted=frozenset(spec.index for spec in specs)
        )  # fmt: skip
        return self.runner.run_task(task, lambda: None, lambda: None)


def _coder() -> str:
    from halation.images.png_codec import fastest_coder

    return fastest_coder()


def peer(pipe: Any, setting: Setting, folder: Path) -> Callable[[int], None]:
    """Return the peer: `pipe(prompt).images[0].save(...)` in a loop."""
    folder.mkdir(parents=True)
    numbers = itertools.count()

    def draw(num: int) -> None:
        for _ in range(num):
            number = next(numbers)
            image = pipe(
                PROMPTS[0], negative_prompt="", height=setting.pixels, width=setting.pixels, num_inference_steps=setting.steps,
                guidance_scale=GUIDANCE, generator=torch.Generator("cpu").manual_seed(0), use_resolution_binning=False,
            ).images[0]  # fmt: skip
            image.save(folder / f"{number}.png")

    return draw


def duel(setting: Setting, work: Path) -> measure.Report:
    import diffusers

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    began = time.perf_counter()
    model = hunyuan.build(work / "model", setting.shape, dtype, device.partition(":")[0])
    measure.say(f"built the pipeline in {time.perf_counter() - began:.0f} s")
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(str(model), dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    flops = _flops(pipe, setting, device)
    sides: dict[str, tuple[Callable[[int], Any], int]] = {
        "eager loop": (peer(pipe, setting, work / "eager"), setting.peers)
    }
    ours = {"ours": Ours(setting, model, work / "ours", device, batch=1)}
    if setting.compiled:
        compiled: Any = diffusers.HunyuanDiTPipeline(**pipe.components, requires_safety_checker=False)
        compiled.transformer = torch.compile(pipe.transformer, dynamic=False)
        compiled.set_progress_bar_config(disable=True)
        sides["compiled loop"] = (peer(compiled, setting, work / "compiled"), setting.peers)
        ours["ours compiled"] = Ours(setting, model, work / "ours_c", device, batch=1, compile=True)
        ours["ours compiled, 4 in a batch"] = Ours(setting, model, work / "ours_c4", device, batch=4, compile=True)
        ours["ours compiled, truncated at half"] = Ours(
            setting, model, work / "ours_ct", device, batch=1, compile=True, cfg_truncation_step=setting.steps // 2
        )
    else:
        ours["ours, truncated at half"] = Ours(
            setting, model, work / "ours_t", device, batch=1, cfg_truncation_step=max(1, setting.steps // 2)
        )
    # An eager turn of one image is enough: nothing is launched ahead that could overlap with a second one.
    slow = {"ours"} if setting.compiled else set()
    sides |= {name: (side.draw, 1 if name in slow else setting.ours) for name, side in ours.items()}
    for name, (draw, num) in sides.items():
        warm_up = 4 if "batch" in name else 1
        took = measure.seconds(lambda draw=draw, num=warm_up: draw(num))  # type: ignore[misc]
        measure.say(f"{name}: {took:.1f} s for the first {warm_up}")
    found = _measured(sides, setting.rounds)
    measure.say(", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.items()))
    peak = measure.matrix_peak()
    limit = setting.steps * flops / peak
    rows = _rows(found, limit, _check(work, setting))
    rows.append(_shipped(setting, model, work, found, limit))
    facts = measure.machine() | {
        "matrix_tflops": round(peak / 1e12, 1),
        "steps": setting.steps,
        "pixels": setting.pixels,
    }
    return measure.Report(name="duel_07_generate", rows=tuple(rows), facts=facts)


def _measured(sides: dict[str, tuple[Callable[[int], Any], int]], rounds: int) -> dict[str, float]:
    """Return the seconds per image of each side, as the median of interleaved turns."""

    def turn(draw: Callable[[int], Any], num: int) -> Callable[[], float]:
        return lambda: measure.seconds(lambda: draw(num)) / num

    turns = {name: turn(draw, num) for name, (draw, num) in sides.items()}
    return measure.medians(measure.interleaved(turns, rounds))


def _flops(pipe: Any, setting: Setting, device: str) -> float:
    """Return the FLOPs of one guided forward (two rows) of one image, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        pipe(
            PROMPTS[0], negative_prompt="", height=setting.pixels, width=setting.pixels, num_inference_steps=1, guidance_scale=GUIDANCE,
            use_resolution_binning=False, output_type="latent",
        )  # fmt: skip
    return float(counter.get_total_flops())


def _rows(found: dict[str, float], limit: float, check: str) -> list[measure.Row]:
    rows = []
    for name, seconds in found.items():
        if not name.startswith("ours"):
            continue
        for against in ("eager loop", "compiled loop"):
            if against in found:
                equality = "E2" if "truncated" in name else "E1" if "compiled" in name or "batch" in name else "E0"
                rows.append(
                    measure.Row(
                        case=f"{name} / {against}", ours=seconds, peer=found[against], unit="s", limit=limit, check=check, equality=equality
                    )
                )  # fmt: skip
    return rows


def _check(work: Path, setting: Setting) -> str:
    """Compare the peer's first image with ours of the same prompt, seed and batch."""
    from PIL import Image

    with Image.open(work / "eager" / "0.png") as one, Image.open(work / "ours" / "0_0_seed0.png") as other:
        difference = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).max()
    return f"eager pixels differ by at most {difference}"


def _shipped(setting: Setting, model: Path, work: Path, found: dict[str, float], limit: float) -> measure.Row:
    """Run the command; measure its steady rate by file times, and the GPU utilization."""
    prompts = work / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[number % len(PROMPTS)] for number in range(setting.shipped)) + "\n")
    folder = work / "shipped"
    words = [
        "generate",
        "--prompts",
        str(prompts),
        "--model_path",
        str(model),
        "--output_dir",
        str(folder),
        "--height",
        str(setting.pixels),
    ]
    words += [
        "--width",
        str(setting.pixels),
        "--num_inference_steps",
        str(setting.steps),
        "--guidance_scale",
        str(GUIDANCE),
    ]
    words += [
        "--batch_size",
        "1",
        "--dtype",
        setting.dtype,
        "--progress",
        "plain",
        *(["--compile"] if setting.compiled else []),
    ]
    samples: list[tuple[float, float]] = []
    ended = threading.Event()
    watcher = threading.Thread(target=_watch_gpu, args=(samples, ended))
    watcher.start()
    total = shipped.halation(words, work / "shipped.log")
    ended.set()
    watcher.join()
    times = sorted(path.stat().st_mtime for path in folder.glob("*.png"))
    first = len(times) // 4
    seconds = (times[-1] - times[first]) / (len(times) - 1 - first)
    busy = [share for when, share in samples if times[first] <= when <= times[-1]]
    words_busy = f"GPU busy {np.mean(busy):.1%}" if busy else "no GPU to watch"
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        done = ledger.execute("SELECT COUNT(*) FROM pictures WHERE state = 1").fetchone()[0]
    summary = json.loads((folder / "summary.json").read_text())
    note = (
        f"{done} images in {total:.0f} s with loading; {words_busy}; busy share {summary['workers']['0']['busy_share']}"
    )
    against = "eager loop"
    return measure.Row(
        case=f"the command{' --compile' if setting.compiled else ''} / {against}", ours=seconds, peer=found[against], unit="s", limit=limit,
        check=words_busy, equality="E1" if setting.compiled else "E0", note=note,
    )  # fmt: skip


def _watch_gpu(samples: list[tuple[float, float]], ended: threading.Event) -> None:
    if not torch.cuda.is_available():
        return
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or 0))
    while not ended.wait(0.2):
        samples.append((time.time(), pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100))


def main(arguments: list[str] | None = None) -> measure.Report:
    return measure.play(__doc__ or "", REAL, TINY, duel, arguments)


if __name__ == "__main__":
    main()
