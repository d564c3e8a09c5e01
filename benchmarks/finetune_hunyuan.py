"""Fine-tuning a full-size HunyuanDiT (1.5 B, random weights) at 512 px.

It measures speed, memory, saves and samples of `halation train --model_path`. Every variant is the shipped command in a
separate process, measured by its metrics.jsonl and its log. A variant that fails is a line in the table, and the next
one runs. The goal: 35 % of the measured matrix peak on one GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import hunyuan, inputs, measure, shipped

GOAL = 0.35
WARM_UP = 3
TELL_S = 15.0
SAVED = re.compile(r"checkpoint (\d+) \((\w+)\): training waited ([\d.]+) s")
DRAWN = re.compile(r"samples of step (\d+)\w*: (\d+) done, (\d+) failed, ([\d.]+) s")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Model and data; text encoders have the real width, but one layer is enough here."""

    shape: hunyuan.Shape
    pixels: int
    num_images: int
    num_workers: int
    dtype: str
    saved_as: torch.dtype


REAL = Size(
    shape=hunyuan.Shape(
        layers=40, heads=16, head_size=88, text_width=1024, text_layers=1, t5_width=2048, t5_layers=1,
        vae_channels=(128, 256, 512, 512), vae_layers=2, mlp_ratio=4.3637, sizes_and_style=False,
    ),
    pixels=512, num_images=720, num_workers=8, dtype="bf16", saved_as=torch.bfloat16,
)  # fmt: skip
TINY = Size(
    shape=hunyuan.Shape(
        layers=4, heads=2, head_size=16, text_width=32, text_layers=1, t5_width=32, t5_layers=1,
        vae_channels=(8, 8, 8, 8), vae_layers=1, sizes_and_style=False,
    ),
    pixels=64, num_images=64, num_workers=0, dtype="fp32", saved_as=torch.float32,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One command.

    A `whole` one runs to its end, with checkpoints, samples and export. Others are stopped after enough steps.
    """

    name: str
    batch: int
    flags: tuple[str, ...] = ()
    whole: bool = False
    passes: int = 3
    """Useful operations per step, in forwards: LoRA needs no gradients of the weights it does not train."""
    plain: bool = False
    """Run `benchmarks.plain_hunyuan`, a plain script, instead of the command."""

    @property
    def num_steps(self) -> int:
        """Fewer images than an epoch, whose end would save during the measurement."""
        return 30 if self.whole else max(10, min(24, 400 // self.batch))


COMPILE, KEEP_NOTHING = "--compile", "--gradient_checkpointing"
FULL = (
    Variant(name="b16", batch=16, flags=(COMPILE,), whole=True),
    Variant(name="b32", batch=32, flags=(COMPILE,)),
    Variant(name="b64", batch=64, flags=(COMPILE,)),
    Variant(name="b16_eager", batch=16),
    Variant(name="b16_recompute", batch=16, flags=(COMPILE, KEEP_NOTHING)),
    Variant(name="b32_recompute", batch=32, flags=(COMPILE, KEEP_NOTHING)),
    Variant(name="b64_recompute", batch=64, flags=(COMPILE, KEEP_NOTHING)),
    Variant(name="b16_fsdp", batch=16, flags=(COMPILE, "--engine", "fsdp")),
    Variant(name="b16_bf16_weights", batch=16, flags=(COMPILE, "--weights_dtype", "bf16")),
    Variant(name="b16_lora", batch=16, flags=(COMPILE, "--lora_rank", "16"), whole=True, passes=2),
    Variant(name="b16_offload", batch=16, flags=(COMPILE, "--sample_offload"), whole=True),
    Variant(name="b8", batch=8, flags=(COMPILE,)),
    Variant(name="plain_b16", batch=16, flags=(COMPILE,), plain=True),
    Variant(name="plain_b32_recompute", batch=32, flags=(COMPILE, KEEP_NOTHING), plain=True),
)
SMALL = (
    Variant(name="b2", batch=2, whole=True),
    Variant(name="b2_recompute", batch=2, flags=(KEEP_NOTHING,)),
    Variant(name="b2_fsdp", batch=2, flags=("--engine", "fsdp")),
    Variant(name="b2_bf16_weights", batch=2, flags=("--weights_dtype", "bf16")),
    Variant(name="b2_lora", batch=2, flags=("--lora_rank", "4"), whole=True, passes=2),
    Variant(name="b2_offload", batch=2, flags=("--sample_offload",), whole=True),
    Variant(name="plain_b2", batch=2, flags=(KEEP_NOTHING,), plain=True),
)


def make_model(folder: Path, size: Size) -> Path:
    """Create the pipeline folder unless it already exists."""
    done = folder.with_name(f"{folder.name}_is_whole")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        hunyuan.build(folder, size.shape, size.saved_as, device)
        done.touch()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        gigabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9
        measure.say(f"created a pipeline of {gigabytes:.2f} GB in {time.perf_counter() - began:.1f} s")
    return folder


def forward_flops(model: Path, size: Size) -> float:
    """Return the FLOPs of one forward of one image, counted by torch on the meta device."""
    import diffusers
    from torch.utils.flop_counter import FlopCounterMode

    config = json.loads((model / "transformer" / "config.json").read_text())
    shape, side = size.shape, size.pixels // 8
    with torch.device("meta"):
        transformer: Any = diffusers.HunyuanDiT2DModel.from_config(config)
        rotary = torch.zeros((side // 2) ** 2, shape.head_size)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            transformer(
                torch.zeros(1, 4, side, side),
                torch.zeros(1),
                encoder_hidden_states=torch.zeros(1, 77, shape.text_width),
                text_embedding_mask=torch.ones(1, 77),
                encoder_hidden_states_t5=torch.zeros(1, 256, shape.t5_width),
                text_embedding_mask_t5=torch.ones(1, 256),
                image_rotary_emb=(rotary, rotary),
            )
    return float(counter.get_total_flops())


def words_of(variant: Variant, size: Size, model: Path, work: Path, run: Path) -> list[str]:
    dates = ["--ckpt_every", str(variant.num_steps // 2)] if variant.whole else ["--ckpt_every", "0", "--no_sample"]
    steps = variant.num_steps if variant.whole else 100_000
    if variant.plain:
        return [
            "benchmarks.plain_hunyuan", "--model", str(model), "--output_dir", str(run), "--pixels", str(size.pixels), "--dtype", size.dtype,
            "--batch_size", str(variant.batch), "--n_steps", str(steps), *variant.flags,
        ]  # fmt: skip
    return [
        "halation.cli", "train", "--output_dir", str(run), "--model_path", str(model), "--data", "streets", "--max_images", str(size.num_images),
        "--image_size", str(size.pixels), str(size.pixels), "--dtype", size.dtype, "--batch_size", str(variant.batch),
        "--n_steps", str(steps), *dates, "--keep_last", "1", "--log_every", "1", "--validation_images", "0", "--report_to", "none",
        "--progress", "plain", "--cache_dir", str(work / "cache"), "--num_workers", str(size.num_workers), "--nproc", "1",
        "--max_restarts", "0", *variant.flags,
    ]  # fmt: skip


def run_variant(variant: Variant, size: Size, model: Path, work: Path, limit_s: float, flops: float) -> dict[str, Any]:
    """Run the command to its end or for enough steps, and read its results.

    The run folder is removed afterwards.
    """
    run, log = work / f"run_{variant.name}", work / f"{variant.name}.log"
    shutil.rmtree(run, ignore_errors=True)
    words = words_of(variant, size, model, work, run)
    measure.say(f"{variant.name}: python -m {' '.join(words)}")
    began = time.monotonic()
    with log.open("wb") as file:
        place = shipped.environment({"TMPDIR": str(work)})
        command = [sys.executable, "-m", *words]
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=place, cwd=Path(__file__).resolve().parents[1]
        )
    try:
        problem, starts_s = _watched(process, variant, run, began, limit_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
    took = time.monotonic() - began
    found: dict[str, Any] = {
        "name": variant.name,
        "batch": variant.batch,
        "flags": list(variant.flags),
        "problem": problem,
    }
    found |= {"total_s": round(took, 1), "starts_s": round(starts_s, 1)} | _figures(variant, run, flops)
    if problem:
        measure.say(f"{variant.name}: {problem}\n{_tail(log)}")
    shutil.rmtree(run, ignore_errors=True)  # a checkpoint has 24 GB: there is no room for two runs
    _await_free_memory()
    return found


def _watched(
    process: subprocess.Popen[bytes], variant: Variant, run: Path, began: float, limit_s: float
) -> tuple[str, float]:
    """Wait until the command ended or has run enough steps.

    Return the problem, or "", and the seconds until its first step was done.
    """
    told, starts_s = began, 0.0
    while True:
        code = process.poll()
        lines = shipped.training_lines(run)
        step, now = lines[-1]["step"] if lines else 0, time.monotonic()
        starts_s = starts_s or (now - began if lines else 0.0)
        if not variant.whole and step >= variant.num_steps:
            return "", starts_s
        if code is not None:
            return (f"ended with {code} at step {step}" if code or not lines else ""), starts_s
        if now - began > limit_s:
            return f"not done within {limit_s:.0f} s, at step {step}", starts_s
        if now - told > TELL_S:
            told = now
            measure.say(f"{variant.name}: step {step} after {now - began:.0f} s")
        time.sleep(shipped.POLL_S)


def _figures(variant: Variant, run: Path, flops: float) -> dict[str, Any]:
    """Read the available numbers from metrics.jsonl and the log."""
    lines = shipped.training_lines(run)
    text = "".join(path.read_text(errors="replace") for path in sorted((run / "logs").glob("*.log")))
    saves = [(int(step), float(seconds)) for step, _, seconds in SAVED.findall(text)]
    drawn = [
        {"step": int(step), "done": int(done), "failed": int(failed), "seconds": float(seconds)}
        for step, done, failed, seconds in DRAWN.findall(text)
    ]
    found: dict[str, Any] = {"saves": saves, "samples": drawn, "exported": (run / "export").is_dir()}
    steps = _step_seconds(lines)
    dates = {step for step, _ in saves}
    # The step after a save includes the validation loss and the samples.
    steady = [seconds for step, seconds in steps.items() if step > WARM_UP and step - 1 not in dates]
    if not steady:
        return found
    middle = statistics.median(steady)
    peak = measure.matrix_peak()
    tflops = variant.passes * flops * variant.batch / middle
    after = [seconds for step, seconds in steps.items() if any(step - date in (2, 3, 4) for date in dates)]
    return found | {
        "step_s": round(middle, 4),
        "step_s_spread": measure.spread(steady),
        "pictures_per_s": round(variant.batch / middle, 2),
        "tflops": float(f"{tflops / 1e12:.4g}"),
        "peak_tflops": float(f"{peak / 1e12:.4g}"),
        "share_of_peak": round(tflops / peak, 4),
        "mfu_of_the_command": lines[-1].get("mfu"),
        "memory_gb": max(line["memory_gb"] for line in lines),
        "data_s": round(statistics.median(line["data_s"] for line in lines[1:] or lines), 4),
        "steps_after_a_save": round(statistics.median(after) / middle, 3) if after else None,
        "losses": [round(lines[0]["loss"], 4), round(lines[-1]["loss"], 4)],
    }


def _step_seconds(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {
        later["step"]: later["time_s"] - sooner["time_s"]
        for sooner, later in itertools.pairwise(lines)
        if later["step"] == sooner["step"] + 1
    }


def _await_free_memory() -> None:
    """Wait until the memory of a killed rank is free."""
    deadline = time.monotonic() + 20
    while torch.cuda.is_available() and time.monotonic() < deadline:
        free, total = torch.cuda.mem_get_info()
        if free > 0.95 * total:
            return
        time.sleep(0.2)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def table(results: Sequence[dict[str, Any]]) -> str:
    header = (
        "variant",
        "images/s",
        "step s",
        "TFLOP/s",
        "of peak",
        "memory GiB",
        "save s",
        "samples s",
        "starts s",
        "remark",
    )
    rows = [header]
    for found in results:
        share = found.get("share_of_peak")
        rows.append(
            (
                found["name"],
                str(found.get("pictures_per_s", "-")),
                str(found.get("step_s", "-")),
                str(found.get("tflops", "-")),
                "-" if share is None else f"{share:.1%}",
                str(found.get("memory_gb", "-")),
                ", ".join(f"{seconds:.2f}" for _, seconds in found.get("saves", [])) or "-",
                ", ".join(f"{drawn['seconds']:.1f}" for drawn in found.get("samples", [])) or "-",
                str(found.get("starts_s", "-")),
                found["problem"].strip().rpartition("\n")[2][:100],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def asked_for(arguments: list[str] | None) -> argparse.Namespace:
    parser = measure.parser(__doc__ or "")
    names = [variant.name for variant in (*FULL, *SMALL)]
    parser.add_argument("--only", nargs="+", choices=names, help="run only these variants, in the order of the list")
    parser.add_argument(
        "--limit_s", type=float, default=560.0, help="start no variant after this many seconds, and stop a running one"
    )
    parser.add_argument("--variant_s", type=float, default=300.0, help="maximum seconds per variant")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    asked = asked_for(arguments)
    deadline = time.monotonic() + asked.limit_s
    full = asked.size == "full" and torch.cuda.is_available()
    if asked.size == "full" and not full:
        measure.say("no GPU: running the small size instead")
    size, variants = (REAL, FULL) if full else (TINY, SMALL)
    results: list[dict[str, Any]] = []
    with inputs.workplace(asked.work) as work:
        work = work.resolve()
        model = make_model(work / "model", size)
        flops = forward_flops(model, size)
        measure.say(f"{measure.machine()}, {flops / 1e12:.4f} TFLOP per forward of one image")
        for variant in variants:
            left = deadline - time.monotonic()
            if (asked.only and variant.name not in asked.only) or left < 20:
                continue
            try:
                found = run_variant(variant, size, model, work, min(asked.variant_s, left), flops)
            except Exception:  # noqa: BLE001 - the next variant runs even if this one fails
                found = {"name": variant.name, "problem": traceback.format_exc(limit=-3)}
            results.append(found)
            measure.say(json.dumps(found))
            if asked.output is not None:
                asked.output.parent.mkdir(parents=True, exist_ok=True)
                with asked.output.open("a") as file:
                    file.write(json.dumps(found | {"machine": measure.machine()}) + "\n")
    print(f"\nfinetune_hunyuan: {size.pixels} px, goal {GOAL:.0%} of the matrix peak\n{table(results)}", flush=True)
    return results


if __name__ == "__main__":
    main()
