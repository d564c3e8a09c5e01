"""Reading a run's folder without Halation's own readers: what tests compare two runs by."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np


def saved(folder: Path, step: int) -> dict[str, bytes]:
    """Every byte of a checkpoint that training depends on: model, EMA, optimizer and position, file by file."""
    place = folder / "checkpoints" / f"step_{step:07d}"
    files = {path.name: path.read_bytes() for path in sorted(place.glob("*.safetensors"))}
    assert {name.split("-")[0].split(".")[0] for name in files} >= {"model", "ema", "optimizer"}
    state = json.loads((place / "state.json").read_bytes())
    return files | {name: json.dumps(state[name]).encode() for name in ("position", "ema_updates")}


def tensors(folder: Path, step: int, part: str) -> dict[str, np.ndarray]:
    """A part of a checkpoint by tensor name, with the rows of all shards put together."""
    place = folder / "checkpoints" / f"step_{step:07d}"
    pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
    for path in sorted(place.glob(f"{part}*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        layout = json.loads(header.pop("__metadata__")["halation"])
        for name, entry in header.items():
            assert entry["dtype"] == "F32"
            low, high = entry["data_offsets"]
            values = np.frombuffer(data[8 + length + low : 8 + length + high], np.float32).reshape(entry["shape"])
            pieces.setdefault(name, []).append((layout[name]["start"], values))
    whole = {}
    for name, parts in pieces.items():
        rows = [values for _, values in sorted(parts, key=lambda item: item[0])]
        whole[name] = np.concatenate(rows) if rows[0].ndim and len(rows) > 1 else rows[0]
    return whole


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The training loss by step."""
    return {row["step"]: row["loss"] for row in metrics(folder) if "loss" in row}


def validation(folder: Path) -> dict[int, float]:
    return {row["step"]: row["value"] for row in metrics(folder) if row.get("metric") == "heldout_loss"}


def images(folder: Path) -> dict[str, bytes]:
    """Images, their prompts and the grid of a folder of samples, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".png", ".txt")}


def samples(folder: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a step's samples.json."""
    rows: list[dict[str, Any]] = json.loads((folder / f"samples/step_{step:07d}/samples.json").read_text())["samples"]
    return rows


def log_of(folder: Path, rank: int) -> str:
    return (folder / "logs" / ("train.log" if rank == 0 else f"rank_{rank}.log")).read_text()
