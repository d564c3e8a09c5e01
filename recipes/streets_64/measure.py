"""Computes the scores of a model card: FD-streets, KID-streets and prompt agreement.

The model is scored beside real and blurred scenes. Every side uses the captions of the same validation scenes and is
compared with other validation scenes: the first ones, which `--reference streets` uses. Existing images and scores are
reused.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageFilter

import halation
from halation.data.streets import caption, draw, scene
from halation.evaluation.config import Metric

NUM_REFERENCE = 5000
BLUR = 2.0
"""Radius of the Gaussian blur; a good model scores far better than blurred scenes."""
METRICS: tuple[Metric, ...] = ("fd", "kid", "agreement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", default="streets-64")
    parser.add_argument("--num_samples", type=int, default=NUM_REFERENCE)
    parser.add_argument("--num_inference_steps", type=int, default=None, help="default: the steps of the model")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--nproc", type=int, default=0)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/streets_64"))
    asked = parser.parse_args()
    folder: Path = asked.output_dir
    prompts = write_prompts(folder / "prompts.csv", asked.num_samples)
    name = Path(asked.model_path).name
    drawn = folder / (name if asked.num_inference_steps is None else f"{name}_{asked.num_inference_steps}_steps")
    halation.generate(
        prompts_csv=prompts,
        model_path=asked.model_path,
        output_dir=drawn,
        num_inference_steps=asked.num_inference_steps,
        dtype=asked.dtype,
        batch_size=16,
        nproc=asked.nproc,
    )
    sides = {
        name: drawn,
        "real scenes": write_scenes(folder / "real", asked.num_samples, asked.size, 0.0),
        f"real scenes, blurred (radius {BLUR:g})": write_scenes(
            folder / "blurred", asked.num_samples, asked.size, BLUR
        ),
    }
    report = {side: scored(place, prompts, asked.nproc) for side, place in sides.items()}
    (folder / f"{drawn.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(table(report))


def image_id(index: int) -> str:
    return f"heldout_{index:06d}"


def held_out(num: int) -> range:
    """Return the indices of the scenes after those of the reference."""
    return range(NUM_REFERENCE, NUM_REFERENCE + num)


def write_prompts(path: Path, num: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("image_id", "caption"))
        rows.writerows((image_id(index), caption(scene("heldout", index))) for index in held_out(num))
    return path


def write_scenes(folder: Path, num: int, size: int, radius: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in held_out(num):
        path = folder / f"{image_id(index)}.png"
        if not path.exists():
            image = Image.fromarray(draw(scene("heldout", index), size))
            image = image.filter(ImageFilter.GaussianBlur(radius)) if radius else image
            image.save(path.with_suffix(".tmp"), format="png")
            path.with_suffix(".tmp").rename(path)
    return folder


def scored(generated: Path, prompts: Path, nproc: int) -> dict[str, Any]:
    """Return the metrics of the report, with their uncertainties if known."""
    report = halation.evaluate(
        generated=str(generated),
        prompts=str(prompts),
        reference="streets",
        num_reference=NUM_REFERENCE,
        metrics=METRICS,
        allow_few=True,
        nproc=nproc,
        progress="none",
    )
    return {name: report["metrics"][name] for name in METRICS}


def table(report: dict[str, dict[str, Any]]) -> str:
    lines = ["| images | FD-streets | KID-streets | prompt agreement |", "|---|---|---|---|"]
    for side, metrics in report.items():
        fd, kid, agreement = (metrics[name]["value"] for name in METRICS)
        lines.append(f"| {side} | {fd:.3g} | {kid:.3g} | {agreement:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
