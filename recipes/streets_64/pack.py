"""Converts an export of a run to a bundled model: bfloat16 weights, portable settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MOST_BYTES = 16 * 2**20


def pack(export: Path, folder: Path, steps: int) -> None:
    """Write the bundled model; `steps` is its default number of sampling steps."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(export / "model.safetensors")
    save_file({name: value.to(torch.bfloat16) for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    description = json.loads((export / "config.json").read_text())
    description["sampling"] |= {"steps": steps, "dtype": "fp32", "compile": False, "deterministic": False}
    (folder / "config.json").write_text(json.dumps(description, indent=1) + "\n")
    size = (folder / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{folder / 'model.safetensors'} has {size} bytes, more than the limit of {MOST_BYTES}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num_inference_steps", type=int, default=12)
    asked = parser.parse_args()
    pack(asked.export, asked.folder, asked.num_inference_steps)
